"""`configure_recording`: how this process records its sessions, above all in production."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from agentlightning.errors import ConfigError
from agentlightning.store.base import LightningStore
from agentlightning.store.types import Retention

Redact: TypeAlias = Callable[[dict[str, Any]], Mapping[str, Any]]
"""Attributes -> the attributes that may be stored."""

SAMPLING_RATE: Final = "sampling_rate"
"""In the metadata of a session: the probability with which it was kept, where that is below 1."""


@dataclass(frozen=True, slots=True)
class RecordingSettings:
    """What `configure_recording` sets."""

    store: LightningStore | str | Path | None = None
    sampling_rate: float = 1.0
    redact: Redact | None = None
    retention: Retention | None = None


_settings = RecordingSettings()


def current_settings() -> RecordingSettings:
    return _settings


def configure_recording(
    *,
    store: LightningStore | str | Path | None = None,
    sampling_rate: float = 1.0,
    redact: Redact | None = None,
    retention: Retention | None = None,
) -> None:
    """Set how sessions that begin from now on are recorded; what is not given has its default again.

    store: where sessions go that name none; by default that of `LightningStore()`. sampling_rate: the share of sessions
    that is recorded, decided for each as a whole; the metadata of those that are kept holds the rate, so that a sample
    can be weighted by its inverse.

    redact: called in the background with the attributes of each span before anything is stored; returns those that may
    be. It is also given the attributes of events, the task and metadata of a session (`task`, `metadata`), the message
    of a failed span (`status_message`) and the failure of a session. What it raises for is dropped and counted.
    retention: finished rollouts beyond it are removed from the store, all of them and not only sessions.

    Raises ConfigError for values that cannot be.

        >>> def without_names(attributes):
        ...     return {key: value for key, value in attributes.items() if "name" not in key}
        >>> agl.configure_recording(sampling_rate=0.1, redact=without_names)
        >>> agl.configure_recording()
    """
    global _settings
    if store is not None and not isinstance(store, LightningStore | str | Path):
        raise ConfigError(f"store={store!r:.80} is not a store; give LightningStore(...), a path or a URL")
    if isinstance(sampling_rate, bool) or not isinstance(sampling_rate, int | float) or not 0 <= sampling_rate <= 1:
        raise ConfigError(f"sampling_rate={sampling_rate!r:.80} is no probability; use a number from 0 to 1")
    if redact is not None and not callable(redact):
        raise ConfigError(f"redact={redact!r:.80} cannot be called; give a function of a dict of attributes")
    if retention is not None and not isinstance(retention, Retention):
        raise ConfigError(f"retention={retention!r:.80}: give agl.Retention(max_age_seconds=...)")
    _settings = RecordingSettings(store, float(sampling_rate), redact, retention)
