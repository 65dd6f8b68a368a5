"""Which rollout is claimed next: by priority, then by order of creation, among the queues with room.

For each queue the unit holds a *window*: the first of its waiting rollouts in the order of claiming, every one below an
`edge`; what lies beyond it is read when the window is empty. So a queue of a million costs no more than one of ten.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush, nsmallest
from typing import TYPE_CHECKING, Any, Final

from msgspec import field

from agentlightning.rollouts import WAITING, is_private_queue
from agentlightning.store.sql.tables import mapping, statements
from agentlightning.store.sql.tables.rows import OPEN, RolloutState, State

if TYPE_CHECKING:
    from agentlightning.store.sql.execution.unit_of_work import Unit

WINDOW: Final = 1024
"""Waiting rollouts read at once."""
LOAD_AT_ONCE: Final = 64
"""Rollouts of a window that are read whole when the first of them is needed."""

Entry = tuple[int, int, str]
"""(priority, negated; key; rollout_id): in the order of claiming."""
NOTHING: Final = (-math.inf, 0.0)
EVERYTHING: Final = (math.inf, 0.0)


class QueueState(State, eq=False):
    """One queue: its limit, and its window."""

    changing = ("open",)

    name: str
    limit: int | None
    open: int | None = None
    """Rollouts of it that are claimed and unfinished; None where they were not counted."""
    promised: int = 0
    """Taken and not claimed yet."""
    window: list[Entry] = field(default_factory=list)
    edge: tuple[float, float] = NOTHING

    def push(self, entry: Entry) -> None:
        if entry[:2] >= self.edge:
            return
        if len(self.window) >= 4 * WINDOW:
            kept = nsmallest(2 * WINDOW + 1, self.window)
            self.edge = kept.pop()[:2]
            self.window = kept
            if entry[:2] >= self.edge:
                return
        heappush(self.window, entry)

    @property
    def full(self) -> bool:
        return self.limit is not None and self.open is not None and self.open + self.promised >= self.limit


class Queues:
    """Every queue, as far as the unit has to know."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._states: dict[str, QueueState] = {}
        self._loaded = False
        self.known: set[str] = set()
        """Names that are in the database: none is ever removed."""

    def forget(self) -> None:
        self._states.clear()
        self._loaded = False

    def load(self) -> None:
        """Read the limits; on a shared database, the queues that have one are locked."""
        if self._loaded:
            return
        rows = self._unit.connection.all(statements.ALL_QUEUES)
        if any(limit is not None for _, limit in rows):
            locked = dict(self._unit.connection.all(statements.LIMITED_QUEUES))
            rows = [(name, locked.get(name)) for name, _ in rows]
        for name, limit in rows:
            self.known.add(name)
            self._state(name).limit = limit
        self._loaded = True

    def _state(self, name: str) -> QueueState:
        state = self._states.get(name)
        if state is None:
            state = self._states[name] = QueueState(name, None)
            if self._loaded and name not in self.known:
                state.edge = EVERYTHING
        return state

    def moved(self, rollout: RolloutState, old: str | None, new: str) -> None:
        """After a change of status."""
        queue = self._states.get(rollout.queue) or self._state(rollout.queue)
        if rollout.queue not in self.known:
            self.known.add(rollout.queue)
            self._unit.pending.queues.add(rollout.queue)
        if new in WAITING and old not in WAITING:
            self._unit.queued = True
            queue.push((-rollout.priority, rollout.key, rollout.rollout_id))
        if queue.open is not None:
            change = (new in OPEN) - (old in OPEN)
            if change:
                self._unit.touch_queue(queue, (queue.open,))
                queue.open += change
        if old in OPEN and new not in OPEN and (queue.limit is not None or not self._loaded):
            self._unit.queued = True

    def put_back(self, rollout: RolloutState) -> None:
        """After what was decided about it was undone. Being there twice does no harm."""
        if rollout.status in WAITING:
            self._state(rollout.queue).push((-rollout.priority, rollout.key, rollout.rollout_id))

    # -- taking ----------------------------------------------------------------------------------------------------

    def take(self, names: Sequence[str] | None, count: int) -> list[RolloutState]:
        """Up to `count` rollouts that may be claimed now, the next one first. They are to be claimed at once. Before
        the call changes anything."""
        self.load()
        if names is None:
            candidates = [state for name, state in self._states.items() if not is_private_queue(name)]
        else:
            candidates = [self._states[name] for name in names if name in self._states]
        self._count(candidates)
        taken: dict[RolloutState, QueueState] = {}
        while len(taken) < count:
            best: tuple[Entry, RolloutState, QueueState] | None = None
            for queue in candidates:
                head = None if queue.full else self._head(queue, taken)
                if head is not None and (best is None or head[0] < best[0]):
                    best = (*head, queue)
            if best is None:
                break
            _, rollout, queue = best
            heappop(queue.window)
            queue.promised += 1
            taken[rollout] = queue
        for queue in taken.values():
            queue.promised = 0
        return list(taken)

    def _count(self, queues: list[QueueState]) -> None:
        for queue in queues:
            if queue.limit is not None and queue.open is None:
                self._unit.write_first()
                queue.open = int(self._unit.connection.all(statements.COUNT_OPEN, queue.name)[0][0])

    def _head(self, queue: QueueState, taken: dict[RolloutState, Any]) -> tuple[Entry, RolloutState] | None:
        while True:
            while queue.window:
                entry = queue.window[0]
                rollout = self._unit.rollouts.get(entry[2])
                if rollout is None:
                    self._unit.load([each[2] for each in nsmallest(LOAD_AT_ONCE, queue.window)])
                    rollout = self._unit.rollouts.get(entry[2])
                if rollout is not None and rollout.status in WAITING and rollout not in taken:
                    return entry, rollout
                heappop(queue.window)
            if queue.edge == EVERYTHING:
                return None
            self._refill(queue)

    def _refill(self, queue: QueueState) -> None:
        self._unit.write_first()
        many = max(1, self._unit.claims_wanted) if self._unit.shared else WINDOW
        start = (mapping.NO_LIMIT, 0) if queue.edge == NOTHING else (-int(queue.edge[0]), int(queue.edge[1]))
        rows = self._unit.connection.all(statements.NEXT_WAITING, queue.name, *start, many)
        queue.window = [(-priority, key, rollout_id) for priority, key, rollout_id in rows]
        queue.edge = EVERYTHING if len(rows) < many else (queue.window[-1][0], queue.window[-1][1] + 1)

    def forget_limits(self) -> None:
        """After a limit was changed."""
        self._loaded = False
        for state in self._states.values():
            state.limit = state.open = None
        self._unit.queued = True
