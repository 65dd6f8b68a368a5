"""A query for successful rollouts, which an algorithm carries out when it needs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, Final

from agentlightning.errors import ConfigError
from agentlightning.util.event_loop import run_sync

READ_QUERY: Final = "agentlightning.algorithms.recorded.sessions:read_query"


@dataclass(frozen=True, slots=True)
class TrajectoryQuery:
    """Which finished rollouts of a store are demonstrations: `len`, `list` and `for` read what they are now, each
    with its `rollout`, its `calls` (`agent`, `messages`, `answer`) and its `reward()`; an algorithm reads them when it
    learns. Of a rollout with several rewards, each belongs to the calls since the one before it, and the parts that
    earned enough are chosen.

    >>> demonstrations = agl.LightningStore(":memory:").get_successful_trajectories(threshold=0.9)
    >>> len(demonstrations), [call.answer for each in demonstrations for call in each.calls]
    (0, [])
    """

    store: Any = field(repr=False)
    """The `LightningStore` to read."""
    threshold: float = 0.5
    """Rollouts with at least this reward are successful."""
    best_of: int | None = None
    """For each task, at most this number of successful rollouts: those with the highest rewards. None: all."""
    deduplicate: bool = True
    """Leave out rollouts of a task whose calls and answers are those of another one."""
    pass_rate: tuple[float, float] | None = None
    """Only tasks whose share of successful rollouts is within these bounds: (0.1, 0.9) leaves out what is never or
    always solved. None: all tasks."""
    self_verified: bool = False
    """In place of rewards: a rollout is successful whose last answer is that of more than half of its task's rollouts,
    of three or more (self-consistency, Wang et al. 2022, arXiv:2203.11171)."""
    reward_weights: Mapping[str, float] | None = None
    """Weights of the named dimensions of a reward."""

    def __post_init__(self) -> None:
        if self.best_of is not None and self.best_of < 1:
            raise ConfigError(f"best_of={self.best_of} leaves no rollout; use at least 1, or None for all")
        low, high = self.pass_rate or (0.0, 1.0)
        if not 0 <= low <= high <= 1:
            raise ConfigError(f"pass_rate={self.pass_rate} are no bounds of a share; give (low, high) from 0 to 1")
        if self.threshold != self.threshold:
            raise ConfigError("threshold=nan is no reward; give a number")

    def __iter__(self) -> Iterator[Any]:
        return iter(run_sync(resolve_name(READ_QUERY)(self)))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __bool__(self) -> bool:
        return True  # It is a query, whatever it finds.
