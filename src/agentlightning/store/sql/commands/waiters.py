"""Registry of commands that wait for a rollout: to be claimed, or to finish.

Finds the commands that a transaction affects without running every one of them again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import count
from typing import Final, Generic, Protocol, TypeVar


class Wait:
    """The type of WAIT."""


WAIT: Final = Wait()
"""What a command returns when it has to wait."""

QueueNames = tuple[str, ...] | None
"""The queues that a claim takes from; None for every one."""


class Waiter(Protocol):
    """What can wait. Compared by identity."""

    deadline: float
    """On time.monotonic."""


W = TypeVar("W", bound=Waiter)


class _RolloutWait:
    """How many of which rollouts one command waits for."""

    __slots__ = ("finished", "missing", "pending")

    def __init__(self, pending: set[str], missing: int) -> None:
        self.pending = pending
        self.missing = missing
        self.finished: set[str] = set()


class Waiters(Generic[W]):
    """Used by the writer's thread alone."""

    def __init__(self) -> None:
        self.claims: dict[W, QueueNames] = {}
        """In order of arrival."""
        self._waits: dict[W, _RolloutWait] = {}
        self._by_rollout: dict[str, dict[W, None]] = {}
        self._deadlines: list[tuple[float, int, W]] = []
        self._numbers = count()

    def all(self) -> list[W]:
        return [*self.claims, *self._waits]

    # -- adding and removing ---------------------------------------------------------------------------------------

    def add_claim(self, waiter: W, queues: QueueNames) -> None:
        if waiter not in self.claims:
            self.claims[waiter] = queues
            self._add_deadline(waiter)

    def add_wait(self, waiter: W, pending: set[str], missing: int) -> None:
        """Wait until `missing` of the rollouts `pending` have finished."""
        if waiter in self._waits:
            self._remove_wait(waiter)
        else:
            self._add_deadline(waiter)
        self._waits[waiter] = _RolloutWait(pending, missing)
        for rollout_id in pending:
            self._by_rollout.setdefault(rollout_id, {})[waiter] = None

    def _add_deadline(self, waiter: W) -> None:
        if waiter.deadline < math.inf:
            heappush(self._deadlines, (waiter.deadline, next(self._numbers), waiter))

    def remove(self, waiter: W) -> None:
        """Does nothing for one that does not wait."""
        if waiter in self.claims:
            del self.claims[waiter]
        elif waiter in self._waits:
            self._remove_wait(waiter)

    def _remove_wait(self, waiter: W) -> None:
        for rollout_id in self._waits.pop(waiter).pending:
            members = self._by_rollout[rollout_id]
            del members[waiter]
            if not members:
                del self._by_rollout[rollout_id]

    # -- finding ---------------------------------------------------------------------------------------------------

    def affected(self, finished: Iterable[str]) -> list[W]:
        """The waits that may be over now that these rollouts have finished. Running them tells whether one of the
        rollouts was queued again meanwhile."""
        found: dict[W, None] = {}
        for rollout_id in finished:
            for waiter in self._by_rollout.get(rollout_id, ()):
                wait = self._waits[waiter]
                wait.finished.add(rollout_id)
                if len(wait.finished) >= wait.missing:
                    found[waiter] = None
        return list(found)

    def rollout_waits(self) -> list[W]:
        """Every command that waits for rollouts to finish."""
        return list(self._waits)

    @property
    def deadline(self) -> float:
        """The earliest deadline, on time.monotonic."""
        while self._deadlines:
            deadline, _, waiter = self._deadlines[0]
            if waiter in self.claims or waiter in self._waits:
                return deadline
            heappop(self._deadlines)
        return math.inf

    def expired(self) -> list[W]:
        """Those whose deadline has passed. They stay until they are removed: the transaction that answers them may be
        rolled back."""
        now = time.monotonic()
        found: list[tuple[float, int, W]] = []
        while self.deadline <= now:
            found.append(heappop(self._deadlines))
        for each in found:
            heappush(self._deadlines, each)
        return [waiter for _, _, waiter in found]
