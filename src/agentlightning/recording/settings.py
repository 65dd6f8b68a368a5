"""`configure_recording`: how this process records its sessions, above all in production; and its redaction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from agentlightning.errors import ConfigError, Failure
from agentlightning.span import EXCEPTION_MESSAGE, EXCEPTION_STACKTRACE, Span
from agentlightning.store.base import LightningStore
from agentlightning.store.types import Retention
from agentlightning.tracing.emit import exception_attributes
from agentlightning.tracing.outbox import counters

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


def check_store(store: object) -> None:
    """Raises ConfigError for what names no store."""
    if store is not None and not isinstance(store, LightningStore | str | Path):
        raise ConfigError(f"store={store!r:.80} is not a store; give LightningStore(...), a path or a URL")


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
    check_store(store)
    if isinstance(sampling_rate, bool) or not isinstance(sampling_rate, int | float) or not 0 <= sampling_rate <= 1:
        raise ConfigError(f"sampling_rate={sampling_rate!r:.80} is no probability; use a number from 0 to 1")
    if redact is not None and not callable(redact):
        raise ConfigError(f"redact={redact!r:.80} cannot be called; give a function of a dict of attributes")
    if retention is not None and not isinstance(retention, Retention):
        raise ConfigError(f"retention={retention!r:.80}: give agl.Retention(max_age_seconds=...)")
    _settings = RecordingSettings(store, float(sampling_rate), redact, retention)


# -- redaction ---------------------------------------------------------------------------------------------------------

# Everything of a session passes through the user's hook before it is written. What the hook raises for, or returns no
# mapping for, is not written: a span is dropped, a task becomes None, a failure loses its message. Each is counted, and
# the first is logged.

STATUS_MESSAGE: Final = "status_message"


def redact_spans(redact: Redact, spans: Sequence[Span]) -> list[Span]:
    """The spans as they may be stored."""
    kept = [allowed for span in spans if (allowed := _redact_span(redact, span)) is not None]
    counters.add("spans_dropped", len(spans) - len(kept))
    return kept


def redact_start(redact: Redact, task: Any, metadata: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The task and metadata of a session as they may be stored."""
    values = _redacted(redact, {"task": task, "metadata": metadata}, "the task of a session")
    values = {} if values is None else values
    allowed = values.get("metadata")
    return values.get("task"), dict(allowed) if isinstance(allowed, Mapping) else {}


def redact_failure(redact: Redact, failure: Failure) -> Failure:
    """A failure as it may be stored; its type stays."""
    values = _redacted(redact, exception_attributes(failure), "the failure of a session") or {}
    message, traceback = values.get(EXCEPTION_MESSAGE, ""), values.get(EXCEPTION_STACKTRACE, "")
    return Failure(failure.type, str(message), str(traceback))


def _redact_span(redact: Redact, span: Span) -> Span | None:
    given = dict(span.attributes)
    if span.status_message is not None:
        given[STATUS_MESSAGE] = span.status_message
    attributes = _redacted(redact, given, f"a span {span.name!r}")
    if attributes is None:
        return None
    message = attributes.pop(STATUS_MESSAGE, None)
    message = None if message is None else str(message)
    of_events = [_redacted(redact, dict(each.attributes), f"an event of a span {span.name!r}") for each in span.events]
    pairs = zip(span.events, of_events, strict=True)
    events = tuple(replace(event, attributes=allowed) for event, allowed in pairs if allowed is not None)
    whole = len(events) == len(of_events)
    return replace(span, attributes=attributes, events=events, status_message=message) if whole else None


def _redacted(redact: Redact, attributes: dict[str, Any], what: str) -> dict[str, Any] | None:
    try:
        allowed = redact(attributes)
        if not isinstance(allowed, Mapping):
            raise ConfigError(f"redact returned {type(allowed).__name__}; return a dict of attributes")
        return dict(allowed)
    except Exception as error:  # noqa: BLE001  the hook is the user's code
        counters.add("redactions_failed")
        counters.warn("redact", f"redact failed for {what}, which is not stored: {type(error).__name__}: {error}")
        return None
