"""What of a run's settings may change when it is resumed: the difference of two configurations, judged and recorded.

What a run is made of (its model, its tasks, its seed, how it is measured) stays; how its agent is run, how fast it
learns and how long may change.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import orjson
from pydantic import BaseModel

from agentlightning.errors import ConfigError
from agentlightning.util.settings import NONE, SECRETS

CHANGEABLE = (
    "agent",
    "reward",
    "algorithm.steps",
    "algorithm.temperature",
    "algorithm.credit",
    "algorithm.aggregate",
    "algorithm.loss",
    "algorithm.minibatches",
    "algorithm.reward_weights",
    "algorithm.target_agent",
    "algorithm.optimizer.lr",
    "algorithm.optimizer.muon_lr",
    "algorithm.optimizer.clip_norm",
    "algorithm.optimizer.schedule",
    "algorithm.optimizer.warmup_steps",
    "runner",
    "gateway",
    "evaluation.every",
    "run.checkpoint_every",
    "run.keep_checkpoints",
    "run.max_staleness",
    "run.host",
    "run.port",
    "policy.device",
    "policy.threads",
    "policy.max_batch_size",
    "policy.max_context",
    "policy.tool_calls",
    "policy.token_budget",
    "policy.in_flight",
    "policy.drain_seconds",
    "policy.engine",
    "policy.servers",
)
"""Settings, and sections with all they hold."""

MEASURED = ("agent", "reward", "algorithm.reward_weights")
"""Settings that decide what a reward means: what was measured before such a change cannot be compared with what is
measured after it."""

Changes = Mapping[str, tuple[Any, Any]]
"""By the setting's name: what it was, and what it is."""


def changed_settings(before: BaseModel, after: BaseModel) -> Changes:
    """The settings that differ."""
    old, new = dict(_leaves(before.model_dump(mode="json"))), dict(_leaves(after.model_dump(mode="json")))
    names = dict.fromkeys([*old, *new])
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}


def check_changes(changes: Changes) -> None:
    """Raises ConfigError, with the names, for settings that a run cannot change."""
    fixed = [name for name in changes if not any(name == each or name.startswith(f"{each}.") for each in CHANGEABLE)]
    if fixed:
        raise ConfigError(
            f"{', '.join(fixed)}: a resumed run keeps this, as what it has done would not fit any more; start a new run"
            " for it. These may change: agent, reward, algorithm.steps, algorithm.optimizer.lr,"
            " algorithm.reward_weights, runner.*, gateway.*, evaluation.every, policy.device, policy.max_context ..."
        )


def changes_rewards(changes: Changes) -> bool:
    """Whether rewards after the changes mean something else than those before."""
    return any(name == each or name.startswith(f"{each}.") for name in changes for each in MEASURED)


def overrides(changes: Mapping[str, Any] | Sequence[str]) -> list[str]:
    """Changes by name as the texts of the command line: `section.key=value`."""
    if not isinstance(changes, Mapping):
        return list(changes)
    return [f"{name}={NONE if value is None else orjson.dumps(value).decode()}" for name, value in changes.items()]


def describe_changes(changes: Changes) -> str:
    """`algorithm.steps 100 -> 200, runner.hosts 1 -> 2`, without secrets."""
    return ", ".join(f"{name} {old} -> {new}" for name, (old, new) in _shown(changes).items())


def record_of(changes: Changes, step: int) -> bytes:
    """One line for the run's record of changes, without secrets."""
    return orjson.dumps({"time": time.time(), "step": step, "changes": _shown(changes)}) + b"\n"


def _shown(changes: Changes) -> Changes:
    hidden = ("...", "...")
    return {name: hidden if SECRETS & set(name.split(".")) else values for name, values in changes.items()}


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in cast(dict[str, Any], value).items():
            yield from _leaves(inner, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, value
