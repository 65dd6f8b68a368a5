"""Chooses which rollouts are claimed next: by priority, then by order of creation, among the queues below their limit.

For each queue the unit of work holds a *head*: the first of its waiting rollouts in claiming order, complete up to
`head_end`. What lies beyond is read when the head is empty, so a queue of a million rollouts costs no more than one of
ten.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush, nsmallest
from typing import Any, Final, Protocol

from msgspec import field

from agentlightning.rollouts import WAITING, is_private_queue
from agentlightning.store.sql.session.pending_writes import PendingWrites
from agentlightning.store.sql.session.rows import OPEN, MutableRow, RolloutRow
from agentlightning.store.sql.tables import statements
from agentlightning.store.sql.tables.backend import Connection
from agentlightning.store.validation import NO_LIMIT

HEAD_SIZE: Final = 1024
"""Waiting rollouts read at once."""
LOAD_SIZE: Final = 64
"""Rollouts of a head that are loaded whole when the first of them is needed."""

QueueEntry = tuple[int, int, str]
"""(negated priority, key, rollout_id): sorts in claiming order."""
NOTHING_READ: Final = (-math.inf, 0.0)
READ_TO_END: Final = (math.inf, 0.0)


class ClaimQueue(MutableRow, eq=False):
    """One queue: its limit and its head."""

    mutable = ("open",)

    name: str
    limit: int | None
    open: int | None = None
    """Its rollouts that are claimed and unfinished; None before they are counted."""
    reserved: int = 0
    """Rollouts chosen by the claim that is being decided."""
    head: list[QueueEntry] = field(default_factory=list)
    head_end: tuple[float, float] = NOTHING_READ

    def push(self, entry: QueueEntry) -> None:
        if entry[:2] >= self.head_end:
            return
        if len(self.head) >= 4 * HEAD_SIZE:
            first = nsmallest(2 * HEAD_SIZE + 1, self.head)
            self.head_end = first.pop()[:2]
            self.head = first
            if entry[:2] >= self.head_end:
                return
        heappush(self.head, entry)

    @property
    def full(self) -> bool:
        return self.limit is not None and self.open is not None and self.open + self.reserved >= self.limit


class QueueHost(Protocol):
    """What the queues need of the unit of work they belong to."""

    @property
    def connection(self) -> Connection: ...

    @property
    def shared(self) -> bool: ...

    @property
    def pending(self) -> PendingWrites: ...

    @property
    def rollouts(self) -> Mapping[str, RolloutRow]: ...

    @property
    def expected_claims(self) -> int: ...

    def load(self, rollout_ids: Sequence[str], /) -> None: ...

    def flush(self) -> None: ...

    def modify_queue(self, queue: ClaimQueue, /) -> None: ...


class ClaimQueues:
    """Every queue that the unit of work knows of."""

    def __init__(self, unit: QueueHost) -> None:
        self._unit = unit
        self._queues: dict[str, ClaimQueue] = {}
        self._limits_loaded = False
        self.known_names: set[str] = set()
        """Names that are in the database; none is ever removed."""
        self.claimable = False
        """A rollout may have become claimable in this transaction."""

    def clear(self) -> None:
        self._queues.clear()
        self._limits_loaded = False

    def load_limits(self) -> None:
        """Read the limits. On a shared database, lock the queues that have one."""
        if self._limits_loaded:
            return
        rows = self._unit.connection.all(statements.ALL_QUEUES)
        if any(limit is not None for _, limit in rows):
            locked = dict(self._unit.connection.all(statements.LIMITED_QUEUES))
            rows = [(name, locked.get(name)) for name, _ in rows]
        for name, limit in rows:
            self.known_names.add(name)
            self._queue(name).limit = limit
        self._limits_loaded = True

    def _queue(self, name: str) -> ClaimQueue:
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = ClaimQueue(name, None)
            if self._limits_loaded and name not in self.known_names:
                queue.head_end = READ_TO_END
        return queue

    def limits_changed(self) -> None:
        self._limits_loaded = False
        for queue in self._queues.values():
            queue.limit = queue.open = None
        self.claimable = True

    def status_changed(self, rollout: RolloutRow, old: str | None, new: str) -> None:
        """To be called after every change of status."""
        queue = self._queues.get(rollout.queue) or self._queue(rollout.queue)
        if rollout.queue not in self.known_names:
            self.known_names.add(rollout.queue)
            self._unit.pending.queues.add(rollout.queue)
        if new in WAITING and old not in WAITING:
            self.claimable = True
            queue.push((-rollout.priority, rollout.key, rollout.rollout_id))
        if queue.open is not None:
            change = (new in OPEN) - (old in OPEN)
            if change:
                self._unit.modify_queue(queue)
                queue.open += change
        if old in OPEN and new not in OPEN and (queue.limit is not None or not self._limits_loaded):
            self.claimable = True

    def put_back(self, rollout: RolloutRow) -> None:
        """To be called after a rollback of the rollout. An entry that is there twice does no harm."""
        if rollout.status in WAITING:
            self._queue(rollout.queue).push((-rollout.priority, rollout.key, rollout.rollout_id))

    # -- choosing --------------------------------------------------------------------------------------------------

    def take(self, names: Sequence[str] | None, count: int) -> list[RolloutRow]:
        """Remove up to `count` rollouts from the queues, the next one first; the caller claims them at once. Must
        come before the first change of a command."""
        self.load_limits()
        if names is None:
            candidates = [queue for name, queue in self._queues.items() if not is_private_queue(name)]
        else:
            candidates = [self._queues[name] for name in names if name in self._queues]
        self._count_open(candidates)
        taken: dict[RolloutRow, ClaimQueue] = {}
        while len(taken) < count:
            best: tuple[QueueEntry, RolloutRow, ClaimQueue] | None = None
            for queue in candidates:
                first = None if queue.full else self._first(queue, taken)
                if first is not None and (best is None or first[0] < best[0]):
                    best = (*first, queue)
            if best is None:
                break
            _, rollout, queue = best
            heappop(queue.head)
            queue.reserved += 1
            taken[rollout] = queue
        for queue in taken.values():
            queue.reserved = 0
        return list(taken)

    def _count_open(self, queues: list[ClaimQueue]) -> None:
        for queue in queues:
            if queue.limit is not None and queue.open is None:
                self._unit.flush()
                queue.open = int(self._unit.connection.all(statements.COUNT_OPEN, queue.name)[0][0])

    def _first(self, queue: ClaimQueue, taken: dict[RolloutRow, Any]) -> tuple[QueueEntry, RolloutRow] | None:
        while True:
            while queue.head:
                entry = queue.head[0]
                rollout = self._unit.rollouts.get(entry[2])
                if rollout is None:
                    self._unit.load([each[2] for each in nsmallest(LOAD_SIZE, queue.head)])
                    rollout = self._unit.rollouts.get(entry[2])
                if rollout is not None and rollout.status in WAITING and rollout not in taken:
                    return entry, rollout
                heappop(queue.head)
            if queue.head_end == READ_TO_END:
                return None
            self._refill(queue)

    def _refill(self, queue: ClaimQueue) -> None:
        self._unit.flush()
        count = max(1, self._unit.expected_claims) if self._unit.shared else HEAD_SIZE
        start = (NO_LIMIT, 0) if queue.head_end == NOTHING_READ else (-int(queue.head_end[0]), int(queue.head_end[1]))
        rows = self._unit.connection.all(statements.NEXT_WAITING, queue.name, *start, count)
        # A damaged id names no rollout: whoever lists the rollouts is told of it.
        queue.head = [(-priority, key, rollout_id) for priority, key, rollout_id in rows if type(rollout_id) is str]
        queue.head_end = READ_TO_END if len(rows) < count else (-rows[-1][0], rows[-1][1] + 1)
