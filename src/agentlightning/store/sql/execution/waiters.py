"""Calls that wait for something to happen, and how those whom it concerns are found without asking each."""

from __future__ import annotations

import math
import time
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from agentlightning.store.sql.commands.base import Call
    from agentlightning.store.sql.execution.unit_of_work import Unit


class Park:
    """The type of PARK."""


PARK: Final = Park()
"""What a call returns when it has to wait for something to happen."""

Group = tuple[str, ...] | None
"""The queues a claim is for; None for every one."""


class _Wait:
    """What one `wait_for_rollouts` waits for."""

    __slots__ = ("missing", "pending", "seen")

    def __init__(self, pending: set[str], missing: int) -> None:
        self.pending = pending
        self.missing = missing
        self.seen: set[str] = set()


class Parked:
    """Used by the writer's thread alone."""

    def __init__(self) -> None:
        self.claims: dict[Call, Group] = {}
        """In the order of arrival."""
        self._waits: dict[Call, _Wait] = {}
        self._by_rollout: dict[str, dict[Call, None]] = {}
        self._deadlines: list[tuple[float, int, Call]] = []
        self._numbers = count()

    def all(self) -> list[Call]:
        return [*self.claims, *self._waits]

    # -- coming and going ------------------------------------------------------------------------------------------

    def add_claim(self, call: Call, group: Group) -> None:
        if call not in self.claims:
            self.claims[call] = group
            self._add_deadline(call)

    def add_wait(self, call: Call, pending: set[str], missing: int) -> None:
        """For `missing` of the rollouts `pending`."""
        if call in self._waits:
            self._forget_wait(call)
        else:
            self._add_deadline(call)
        self._waits[call] = _Wait(pending, missing)
        for rollout_id in pending:
            self._by_rollout.setdefault(rollout_id, {})[call] = None

    def _add_deadline(self, call: Call) -> None:
        if call.deadline < math.inf:
            heappush(self._deadlines, (call.deadline, next(self._numbers), call))

    def remove(self, call: Call) -> None:
        """Of one that is there or not."""
        if call in self.claims:
            del self.claims[call]
        elif call in self._waits:
            self._forget_wait(call)

    def _forget_wait(self, call: Call) -> None:
        for rollout_id in self._waits.pop(call).pending:
            members = self._by_rollout[rollout_id]
            del members[call]
            if not members:
                del self._by_rollout[rollout_id]

    # -- whom to ask -----------------------------------------------------------------------------------------------

    def concerned(self, unit: Unit) -> list[Call]:
        """The waits that may have an end. A rollout queued again meanwhile is noticed by looking."""
        if unit.foreign:
            return list(self._waits)
        found: dict[Call, None] = {}
        for rollout_id in unit.finished:
            for call in self._by_rollout.get(rollout_id, ()):
                wait = self._waits[call]
                wait.seen.add(rollout_id)
                if len(wait.seen) >= wait.missing:
                    found[call] = None
        return list(found)

    @property
    def deadline(self) -> float:
        """The next one of all that are parked, on time.monotonic."""
        while self._deadlines:
            deadline, _, call = self._deadlines[0]
            if call in self.claims or call in self._waits:
                return deadline
            heappop(self._deadlines)
        return math.inf

    def expired(self) -> list[Call]:
        """Those whose time is up. They stay until they are removed: the transaction that answers them may be undone."""
        now = time.monotonic()
        found: list[tuple[float, int, Call]] = []
        while self.deadline <= now:
            found.append(heappop(self._deadlines))
        for each in found:
            heappush(self._deadlines, each)
        return [call for _, _, call in found]
