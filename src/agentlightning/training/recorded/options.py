"""How recorded sessions are learned from, and the same for an algorithm's own settings."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.recorded.method import MethodSetting
from agentlightning.errors import ConfigError
from agentlightning.util.settings import settings_from


@dataclass(frozen=True, slots=True)
class OfflineOptions:
    """How recorded sessions are learned from."""

    num_iterations: int | None = None
    """Updates. None: as many as the algorithm says."""
    target_agent: str | None = None
    """Only calls of agents whose whole name matches this regular expression are learned from. None: as the algorithm
    says."""
    method: MethodSetting = "auto"
    """How LightningRL learns from sessions of another policy: importance, awr, rejection; auto: as the data allows."""
    success_threshold: float = 0.5
    """The reward from which on a session is a success, for method "rejection"."""
    follow: bool = False
    """Learn from each session once, as they arrive, and wait for those to come."""
    follow_timeout: float | None = None
    """Seconds without a new session after which following ends. None: it waits on."""
    eval_agent: Any = None
    """The agent whose reward on the held-out tasks is measured before and after. None: nothing is measured."""
    held_out_dataset: Any = None
    """The tasks to measure on: a list, or a file."""

    def as_json(self) -> dict[str, Any]:
        """What a resumed run finds again; an agent that is an object and the tasks are not among it."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        found["eval_agent"] = self.eval_agent if isinstance(self.eval_agent, str) else None
        return found | {"held_out_dataset": None}


MAY_CHANGE: Final = frozenset({"num_iterations", "follow_timeout", "eval_agent"})
"""Options that a resumed run may be given anew."""
CHANGED: Final = {"num_iterations": "steps", "target_agent": "target_agent"}
"""Options -> the fields of an algorithm's settings that they replace."""


def resumed_options(given: OfflineOptions, recorded: Mapping[str, Any], tasks: Any) -> OfflineOptions:
    """The options of a resumed run, with its own held-out tasks. Raises ConfigError for those that it cannot change."""
    before, default = OfflineOptions(**recorded), OfflineOptions()
    new = {
        field.name: getattr(given, field.name)
        for field in fields(given)
        if getattr(given, field.name) != getattr(default, field.name)
    }
    fixed = [name for name, value in new.items() if name not in MAY_CHANGE and value != getattr(before, name)]
    if fixed:
        raise ConfigError(
            f"{', '.join(fixed)}: a resumed run keeps this, as its earlier steps would not fit any more; leave it out,"
            " or start a new run"
        )
    return replace(before, **new, held_out_dataset=tasks)


def with_options(algorithm: Any, options: OfflineOptions) -> Any:
    """The algorithm with the options in its settings. Raises ConfigError where it has no such setting."""
    given = {field: getattr(options, name) for name, field in CHANGED.items() if getattr(options, name) is not None}
    if not given:
        return algorithm
    config: Any = getattr(algorithm, "config", None)
    known: Mapping[str, Any] = getattr(type(config), "model_fields", {})
    for name, field in CHANGED.items():
        if field in given and field not in known:
            raise ConfigError(f"{name}={given[field]!r}: {type(algorithm).__name__} has no setting {field}")
    settings = settings_from(type(config), given, base=config, source="given to train")
    found = copy.copy(algorithm)
    if isinstance(algorithm, LightningRL):
        LightningRL.__init__(found, settings, store=algorithm.store)
    else:
        found.config = settings
    return found
