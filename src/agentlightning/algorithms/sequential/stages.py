"""Which algorithms can share a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentlightning.algorithms.base import Algorithm
from agentlightning.errors import ConfigError


def name_of(stage: Algorithm[Any]) -> str:
    """The name of an algorithm; of one without a name of its own, that of its class."""
    return type(stage).__name__ if stage.name == Algorithm.name else stage.name


def described(place: int, stage: Algorithm[Any]) -> str:
    """A stage in words: its number from 1, and its name."""
    return f"stage {place + 1} ({name_of(stage)})"


def check_stages(stages: object) -> tuple[Algorithm[Any], ...]:
    """The stages. Raises ConfigError where there is none, or one that cannot share a run with others."""
    if not isinstance(stages, list | tuple):
        raise ConfigError(
            f"Sequential({stages!r}): the stages are a list of algorithms: Sequential([APO(...), LightningRL(...)])"
        )
    found: list[Algorithm[Any]] = []
    for place, stage in enumerate(stages):
        found.append(_checked(place, stage))
        first = next(other for other, each in enumerate(found) if each is stage)
        if first != place:
            raise ConfigError(
                f"{described(place, stage)} is the same object as stage {first + 1}; give each stage an object of its"
                " own, or use rounds=2 to run the list twice"
            )
    if not found:
        raise ConfigError("Sequential([]) has no stage; give at least one: Sequential([APO(...), LightningRL(...)])")
    return tuple(found)


def _checked(place: int, stage: object) -> Algorithm[Any]:
    if not isinstance(stage, Algorithm):
        shown = stage.__name__ if isinstance(stage, type) else repr(stage)
        raise ConfigError(f"stage {place + 1} of Sequential, {shown}, is no algorithm; give objects: {shown}(...)")
    if stage.name == "sequential":
        raise ConfigError(f"stage {place + 1} of Sequential is a Sequential itself; list its stages in its place")
    if stage.objective != "reinforcement":
        raise ConfigError(
            f"{described(place, stage)} of Sequential learns from recorded data, with a learning rate of its own, and a"
            " run has one; do it before, and start from its checkpoint (policy.model), or set warm_start.dataset"
        )
    return stage


def agreed(setting: str, stages: Sequence[Algorithm[Any]], among: Sequence[Algorithm[Any]]) -> Any:
    """The value of a setting that these stages must have in common; None without a stage. Raises ConfigError where two
    differ, with their place `among` all."""
    for stage in stages[1:]:
        first, other = getattr(stages[0], setting), getattr(stage, setting)
        if first != other:
            names = [described(_place(each, among), each) for each in (stages[0], stage)]
            raise ConfigError(
                f"{names[0]} has {setting}={first!r} and {names[1]} {setting}={other!r}; the stages of a run share its"
                f" policy and its measurements: give both the same {setting}"
            )
    return getattr(stages[0], setting) if stages else None


def _place(stage: Algorithm[Any], among: Sequence[Algorithm[Any]]) -> int:
    return next(place for place, each in enumerate(among) if each is stage)
