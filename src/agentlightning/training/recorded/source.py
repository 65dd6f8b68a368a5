"""The sessions of a store as a source of batches: groups of one task each, over and over, or as they arrive.

Sessions of tasks that have one session each share a group, whose mean reward is then the baseline of all of them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from agentlightning.algorithms.recorded.sessions import PART, Session, TokenizedSession, Tokenizer, read_sessions
from agentlightning.algorithms.training import Collected, RolloutRequest
from agentlightning.credit.rejection import Rejection
from agentlightning.errors import DatasetError, TrainingStopped
from agentlightning.store.base import LightningStoreBase
from agentlightning.trajectory import Trajectory

SINGLES: Final = "sessions of tasks with one session"
"""The group of such sessions."""
POLL_SECONDS: Final = 0.5

Prepare = Callable[[Sequence[Session]], "tuple[list[Trajectory], list[Rejection]]"]
"""Sessions as trajectories that the algorithm can use, and those that it cannot."""


@dataclass(slots=True)
class SessionSource:
    """Batches of recorded trajectories."""

    trajectories: Sequence[Trajectory]
    seed: int = 0
    pools_singles: bool = True
    """Whether sessions of tasks with one session share groups; else each is a group of its own."""
    resumed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The position that an earlier process has reached."""
    _waiting: list[tuple[Trajectory, ...]] = field(default_factory=list[tuple[Trajectory, ...]])
    _epoch: int = 0

    @property
    def position(self) -> dict[str, Any]:
        """The number of epochs begun, and of groups of the last one that are left."""
        return {"epoch": self._epoch, "left": len(self._waiting)}

    async def next(self, request: RolloutRequest) -> Collected:
        """The next `tasks` groups of at most `group_size` sessions. Each epoch has every session once."""
        if self.resumed:
            self._go_on(request.group_size)
        chosen: list[tuple[Trajectory, ...]] = []
        while len(chosen) < request.tasks:
            if not self._waiting:
                if chosen and self._epoch:  # A small data set: no group is in a batch twice.
                    break
                self._waiting = self._shuffled(request.group_size)
                self._epoch += 1
            take = request.tasks - len(chosen)
            chosen += self._waiting[:take]
            del self._waiting[:take]
        return await _checked([each for group in chosen for each in group], request)

    def _go_on(self, group_size: int) -> None:
        epoch, left = int(self.resumed["epoch"]), int(self.resumed["left"])
        if epoch:
            self._epoch = epoch - 1
            groups = self._shuffled(group_size)
            self._epoch, self._waiting = epoch, groups[len(groups) - left :]
        self.resumed = {}

    def _shuffled(self, group_size: int) -> list[tuple[Trajectory, ...]]:
        rng = random.Random(f"{self.seed}/{self._epoch}")
        groups = chunks(self.trajectories, group_size, rng, pools_singles=self.pools_singles)
        rng.shuffle(groups)
        if not groups:
            raise DatasetError("no session is left to learn from")
        return groups


@dataclass(slots=True)
class ArrivingSource:
    """Batches of sessions that have not been learned from, waiting for those that are still to come."""

    store: LightningStoreBase
    prepare: Prepare
    first: Sequence[Trajectory]
    known: set[str]
    """Rollouts that were read."""
    on_rejected: Callable[[Iterable[Rejection]], None]
    timeout: float | None = None
    """Seconds without a new session after which training ends. None: it waits on."""
    seed: int = 0
    learned: list[str] = field(default_factory=list[str])
    """Rollouts that were given to the algorithm."""
    _waiting: list[Trajectory] = field(default_factory=list[Trajectory])

    @property
    def position(self) -> dict[str, Any]:
        return {"learned": list(self.learned)}

    def __post_init__(self) -> None:
        self._waiting = list(self.first)

    async def next(self, request: RolloutRequest) -> Collected:
        """As many sessions as the request asks for, whatever their tasks. Raises TrainingStopped after `timeout`."""
        wanted = request.tasks * request.group_size
        started = arrived = time.monotonic()
        while len(self._waiting) < wanted:
            if await self._read():
                arrived = time.monotonic()
            elif self.timeout is not None and time.monotonic() - arrived >= self.timeout:
                raise TrainingStopped(
                    f"no session arrived for {self.timeout:g} s; {len(self._waiting)} of {wanted} for the next step"
                )
            else:
                await asyncio.sleep(POLL_SECONDS)
        batch, self._waiting = self._waiting[:wanted], self._waiting[wanted:]
        self.learned += [each.rollout_id.partition(PART)[0] for each in batch]
        groups = chunks(batch, request.group_size, random.Random(self.seed))
        collected = await _checked([each for group in groups for each in group], request)
        return replace(collected, seconds=time.monotonic() - started)

    async def _read(self) -> bool:
        found = await read_sessions(self.store, known=self.known)
        self.known |= {session.rollout.rollout_id for session in found.usable}
        self.known |= {each.rollout_id for each in found.rejected}
        usable, rejected = await asyncio.to_thread(self.prepare, found.usable)
        self.on_rejected([*found.rejected, *rejected])
        self._waiting += usable
        return bool(usable)


async def _checked(batch: Sequence[Trajectory], request: RolloutRequest) -> Collected:
    check = request.check
    rejected = [] if check is None else await asyncio.to_thread(lambda: list(check(batch)))
    refused = {each.rollout_id for each in rejected}
    usable = tuple(each for each in batch if each.rollout_id not in refused)
    return Collected(usable, rejected=tuple(rejected))


def chunks(
    trajectories: Sequence[Trajectory], group_size: int, rng: random.Random, *, pools_singles: bool = True
) -> list[tuple[Trajectory, ...]]:
    """The sessions of each task in groups of at most `group_size`, as equal in size as can be."""
    by_task: dict[str, list[Trajectory]] = {}
    for each in trajectories:
        by_task.setdefault(each.group, []).append(each)
    singles = [group[0] for group in by_task.values() if len(group) == 1] if pools_singles else []
    tasks = [group for group in by_task.values() if len(group) > 1 or not pools_singles]
    if singles:
        tasks.append(singles)
    found: list[tuple[Trajectory, ...]] = []
    for group in tasks:
        own = list(group)
        rng.shuffle(own)
        count = -(-len(own) // group_size)
        name = SINGLES if group is singles else own[0].group
        for number in range(count):
            part = own[number::count]
            found.append(tuple(replace(each, group=f"{name}#{number}" if count > 1 else name) for each in part))
    return found


def tokenized(sessions: Sequence[Session], tokenizer: Tokenizer) -> tuple[list[TokenizedSession], list[Rejection]]:
    """The sessions in the model's tokens, and those that cannot be."""
    found: list[TokenizedSession] = []
    rejected: list[Rejection] = []
    for session in sessions:
        made = tokenizer(session)
        (rejected if isinstance(made, Rejection) else found).append(made)  # pyright: ignore[reportArgumentType]
    return found, rejected


def describe(rejected: Iterable[Rejection]) -> dict[str, int]:
    return dict(Counter(each.reason for each in rejected).most_common())
