"""The unit of work: what a batch of calls needs is loaded at once, decided in memory, and written at once.

A call names the rollouts and workers it needs (`Wants`), then decides with plain objects (lifecycle.py), and marks what
it changed. `flush` writes everything that is marked with few statements for the whole batch. A call that raises is
undone alone: before its first change of an object, the unit keeps what to go back to.

Where one process has the write lock (SQLite), what is in memory outlives the transaction, within a bound, until another
process has written; a call then needs no reading at all. A `shared` database is read anew in each transaction, its rows
locked until the end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sized
from typing import Any, Final

from agentlightning.errors import NotFoundError
from agentlightning.rollouts import FINISHED
from agentlightning.store.clock import Clock
from agentlightning.store.sql.answered_calls import AnsweredCalls
from agentlightning.store.sql.execution.flush import Pending
from agentlightning.store.sql.lifecycle.claim_queue import Queues
from agentlightning.store.sql.spans.write import SpanIds, WrittenPack
from agentlightning.store.sql.tables import statements
from agentlightning.store.sql.tables.backend import Connection
from agentlightning.store.sql.tables.rows import (
    OPEN,
    AttemptState,
    RolloutState,
    State,
    WorkerState,
    keep_attempt,
    keep_rollout,
    keep_worker,
)
from agentlightning.store.sql.tables.schema import attempts as attempts_table
from agentlightning.store.sql.tables.schema import rollouts as rollouts_table
from agentlightning.store.sql.tables.schema import span_packs

KEPT_BYTES: Final = 6 << 20
"""Of rollouts in memory between transactions, about."""
KEPT_WORKERS: Final = 5_000
KEPT_DIGESTS: Final = 20_000
KEYS_AT_ONCE: Final = 64
"""Keys taken from a shared database at a time, where their order does not matter."""


class Wants:
    """What the calls of a batch ask for beforehand."""

    __slots__ = ("attempts", "claims", "keys", "new_rollouts", "rollouts", "workers")

    def __init__(self) -> None:
        self.rollouts: set[str] = set()
        self.attempts: set[str] = set()
        """Attempts whose rollout is not known, by id."""
        self.workers: set[str] = set()
        self.keys: set[str] = set()
        """Idempotency keys."""
        self.claims = 0
        """Rollouts to be claimed from queues."""
        self.new_rollouts = 0


class Unit:
    """Used by one thread, the writer."""

    def __init__(self, connection: Connection, clock: Clock, shared: bool) -> None:
        self.connection = connection
        self.clock = clock
        self.shared = shared
        self.wall = 0.0
        self.steady = 0.0
        """The times of this transaction."""
        self.foreign = False
        """Another process has written: anything may have happened."""
        self.queued = False
        """A rollout may now be waiting to be claimed."""
        self.number = 0
        """Of this transaction, as this process counts."""
        self.line: Sized = ()
        """The claims that came before those that are decided now, and wait."""
        self.lined_up = False
        """A claim of this transaction has got in line."""
        self.finished: set[str] = set()
        """Ids of rollouts that have finished."""
        self.deadline: float | None = None
        """The earliest deadline set, on the steady clock."""
        self.pending = Pending(connection, shared)
        self.queues = Queues(self)
        self.span_ids = SpanIds()
        self.answered = AnsweredCalls()
        self.rollouts: OrderedDict[str, RolloutState] = OrderedDict()
        self.workers: OrderedDict[str, WorkerState] = OrderedDict()
        self.resources: set[str] = set()
        """Ids of resources that are known to be there."""
        self.written: list[WrittenPack] = []
        """The packs of this transaction."""
        self.dropped: list[str] = []
        """Ids of the rollouts that this transaction removed."""
        self.claims_wanted = 0
        self._weight = 0
        self._weights: dict[RolloutState, int] = {}
        self._absent: set[str] = set()
        self._call = 1
        self._journal: list[tuple[State, tuple[Any, ...] | None]] = []
        self._keys: dict[str, list[int]] = {}

    # -- life ------------------------------------------------------------------------------------------------------

    def begin(self, foreign: bool) -> None:
        """Within a transaction that was just begun."""
        if self.shared or foreign:
            self.forget()
        self.wall, self.steady = self.clock.wall(), self.clock.steady()
        self.number += 1
        self.lined_up = False
        self.foreign = False
        self.queued = False
        self.finished = set()
        self.deadline = None
        self.written = []
        self.dropped = []
        self.answered.clear()
        self._absent.clear()

    def forget(self) -> None:
        """Nothing in memory holds any more."""
        for rollout in self.rollouts.values():
            rollout.tries.clear()
        self.rollouts.clear()
        self.workers.clear()
        self.queues.forget()
        self.pending.clear()
        self._journal.clear()
        self._weight = 0
        self._weights.clear()
        self._keys.pop(rollouts_table.name, None)
        if not self.shared:
            self._keys.clear()

    def rolled_back(self) -> None:
        self.forget()
        self.queues.known.clear()
        self.span_ids.clear()
        self.resources.clear()
        self._keys.clear()

    def committed(self) -> None:
        """Let go of what was not needed for the longest time."""
        self._journal.clear()
        for rollout, before in self._weights.items():
            self._weight += rollout.weight - before
        self._weights.clear()
        while self._weight > KEPT_BYTES and len(self.rollouts) > 1:
            _, rollout = self.rollouts.popitem(last=False)
            self._weight -= rollout.weight
            rollout.tries.clear()
        while len(self.workers) > KEPT_WORKERS:
            self.workers.popitem(last=False)
        if len(self.pending.digests) > KEPT_DIGESTS:
            self.pending.digests.clear()

    def settle(self) -> None:
        """What was decided so far stands."""
        self._journal.clear()
        self._call += 1

    def undo(self) -> None:
        """Put back what was changed since `settle`."""
        for state, values in reversed(self._journal):
            if values is not None:
                state.restore(values)
                if isinstance(state, RolloutState):
                    self.queues.put_back(state)
            elif isinstance(state, RolloutState):
                self.pending.moved.pop(state, None)
                self.pending.described.pop(state, None)
                self._weights.pop(state, None)
                self.rollouts.pop(state.rollout_id, None)
            elif isinstance(state, AttemptState):
                self.pending.attempts.pop(state, None)
                state.rollout.tries.pop(state.attempt_id, None)
                state.superseded = 1
            elif isinstance(state, WrittenPack):
                self.pending.packs.remove(state)
                self.written.remove(state)
        for state, _ in self._journal:
            if isinstance(state, AttemptState):
                self._track(state)
        self.settle()

    def remind(self, deadline: float) -> None:
        """Have the clock look again at `deadline`."""
        if self.deadline is None or deadline < self.deadline:
            self.deadline = deadline

    # -- loading ---------------------------------------------------------------------------------------------------

    def prefetch(self, wants: Wants) -> None:
        """Load what is wanted and not here. On a shared database, in the one order in which rows are locked: queues,
        workers, rollouts."""
        self.claims_wanted = wants.claims
        if wants.keys:
            self.answered.load(self, wants.keys)
        if wants.claims:
            self.queues.load()
        if wants.workers:
            self.load_workers(wants.workers)
        if wants.attempts:
            wants.rollouts |= set(self.owners(wants.attempts).values())
        if wants.rollouts:
            self.load(wants.rollouts)
        if wants.new_rollouts and self.shared:
            self._keys[rollouts_table.name] = list(reversed(self.connection.keys(rollouts_table, wants.new_rollouts)))

    def load(self, rollout_ids: Iterable[str]) -> None:
        missing = [name for name in rollout_ids if name not in self.rollouts and name not in self._absent]
        if not missing:
            return
        self.write_first()
        states = [RolloutState(*row) for row in self.connection.all(statements.TAKE_ROLLOUTS, missing)]
        by_key = {state.key: state for state in states}
        if by_key:
            for row in self.connection.all(statements.ATTEMPTS_AMONG, list(by_key)):
                attempt = AttemptState(by_key[row[1]], *row)
                attempt.stored = True
                attempt.rollout.tries[attempt.attempt_id] = attempt
        for state in states:
            state.stored = True
            state.counted = state.status
            self._keep(state)
        self._absent.update(name for name in missing if name not in self.rollouts)

    def load_workers(self, worker_ids: Iterable[str]) -> None:
        missing = [name for name in worker_ids if name not in self.workers]
        if not missing:
            return
        self.write_first()
        for row in self.connection.all(statements.TAKE_WORKERS, missing):
            state = self.workers[row[0]] = WorkerState(*row)
            state.stored = True
        for worker_id, rollout_id, attempt_id in self.connection.all(statements.WORK_IN_HAND, missing):
            if worker_id in self.workers:
                self.workers[worker_id].work[attempt_id] = rollout_id

    def owners(self, attempt_ids: Iterable[str]) -> dict[str, str]:
        """The id of the rollout of each attempt that there is."""
        found: dict[str, str] = {}
        missing: list[str] = []
        for attempt_id in attempt_ids:
            if attempt_id in self._absent:
                continue
            missing.append(attempt_id)
        if missing:
            self.write_first()
            found = dict(self.connection.all(statements.OWNERS, missing))
            self._absent.update(attempt_id for attempt_id in missing if attempt_id not in found)
        return found

    def _keep(self, state: RolloutState) -> None:
        self.rollouts[state.rollout_id] = state
        self._weights[state] = 0

    # -- finding ---------------------------------------------------------------------------------------------------

    def find_rollout(self, rollout_id: str) -> RolloutState | None:
        state = self.rollouts.get(rollout_id)
        if state is None:
            if rollout_id in self._absent:
                return None
            self.load([rollout_id])
            return self.rollouts.get(rollout_id)
        self.rollouts.move_to_end(rollout_id)
        return state

    def rollout(self, rollout_id: str) -> RolloutState:
        state = self.find_rollout(rollout_id)
        if state is None:
            raise NotFoundError(f"no rollout {rollout_id!r} in this store")
        return state

    def attempt(self, rollout_id: str, attempt_id: str) -> AttemptState:
        """An attempt; "latest" is the latest one."""
        rollout = self.rollout(rollout_id)
        state = rollout.latest if attempt_id == "latest" else rollout.tries.get(attempt_id)
        if state is None:
            raise NotFoundError(f"rollout {rollout_id!r} has no attempt {attempt_id!r}")
        return state

    def attempt_by_id(self, attempt_id: str) -> AttemptState | None:
        rollout_id = self.owners([attempt_id]).get(attempt_id)
        return None if rollout_id is None else self.rollout(rollout_id).tries.get(attempt_id)

    def worker(self, worker_id: str) -> WorkerState:
        """A worker, made where it was never heard of."""
        state = self.workers.get(worker_id)
        if state is None:
            self.load_workers([worker_id])
            state = self.workers.get(worker_id)
        if state is None:
            state = self.workers[worker_id] = WorkerState(worker_id)
        return state

    def known_resources(self, resources_id: str | None) -> None:
        """Raises NotFoundError for one that was never published. None stands for the latest."""
        if resources_id is None or resources_id in self.resources:
            return
        if not self.connection.all(statements.RESOURCES_KEY, resources_id):
            raise NotFoundError(f"no resources {resources_id!r} in this store; publish them with add_resources")
        self.resources.add(resources_id)

    # -- changing --------------------------------------------------------------------------------------------------

    def touch_rollout(self, state: RolloutState, described: bool = False) -> None:
        """Before a change. described: of more than its status."""
        if state.touched != self._call:
            state.touched = self._call
            self._journal.append((state, keep_rollout(state)))
        if described:
            self._weights.setdefault(state, state.weight)
            self.pending.described[state] = None
        else:
            self.pending.moved[state] = None

    def touch_attempt(self, state: AttemptState) -> None:
        if state.touched != self._call:
            state.touched = self._call
            self._journal.append((state, keep_attempt(state)))
        self.pending.attempts[state] = None

    def touch_worker(self, state: WorkerState) -> None:
        if state.touched != self._call:
            state.touched = self._call
            self._journal.append((state, keep_worker(state)))
        self.pending.heard[state] = None

    def touch_queue(self, state: State, values: tuple[Any, ...]) -> None:
        self._journal.append((state, values))

    def add_rollout(self, row: tuple[Any, ...]) -> RolloutState:
        """A new one, from its columns after `key`."""
        state = RolloutState(self._key(rollouts_table), *row)
        self._absent.discard(state.rollout_id)
        state.touched = self._call
        self._journal.append((state, None))
        self.pending.moved[state] = None
        self._keep(state)
        self.queues.moved(state, None, state.status)
        return state

    def move_rollout(self, state: RolloutState, status: str) -> None:
        """Change the status of a rollout, and tell who waits."""
        old = state.status
        self.touch_rollout(state)
        state.status = status
        if status in FINISHED:
            state.end_time = self.wall
            self.finished.add(state.rollout_id)
        else:
            state.end_time = None
        self.queues.moved(state, old, status)

    def add_attempt(self, rollout: RolloutState, columns: tuple[Any, ...]) -> AttemptState:
        """A new one, from its columns after `rollout_key`."""
        state = AttemptState(rollout, self._key(attempts_table), rollout.key, *columns)
        self._absent.discard(state.attempt_id)
        state.touched = self._call
        self._journal.append((state, None))
        self.pending.attempts[state] = None
        rollout.tries[state.attempt_id] = state
        self._weights.setdefault(rollout, rollout.weight - 700)
        self.changed_work(state)
        return state

    def remove_attempt(self, state: AttemptState) -> None:
        """Of an attempt that nobody has seen. Cannot be undone."""
        state.superseded = 1
        self.changed_work(state)
        self._weights.setdefault(state.rollout, state.rollout.weight)
        state.rollout.tries.pop(state.attempt_id, None)
        self.pending.attempts.pop(state, None)
        if state.stored:
            self.pending.removed.append(state.key)

    def drop(self, state: RolloutState) -> None:
        """After it was removed from the database."""
        self.rollouts.pop(state.rollout_id, None)
        self._weight -= self._weights.pop(state, state.weight)
        self.dropped.append(state.rollout_id)
        self.written = [pack for pack in self.written if pack.attempt.rollout is not state]

    def changed_work(self, state: AttemptState, worker_before: str | None = None) -> None:
        """After a change of who runs an attempt, or whether it is open."""
        if worker_before is not None and worker_before != state.worker_id and worker_before in self.workers:
            self.workers[worker_before].work.pop(state.attempt_id, None)
        self._track(state)

    def _track(self, state: AttemptState) -> None:
        worker = None if state.worker_id is None else self.workers.get(state.worker_id)
        if worker is None:
            return
        if state.status in OPEN and not state.superseded:
            worker.work[state.attempt_id] = state.rollout.rollout_id
        else:
            worker.work.pop(state.attempt_id, None)

    def add_pack(self, pack: WrittenPack) -> None:
        pack.key = self._key(span_packs)
        self._journal.append((pack, None))
        self.pending.packs.append(pack)
        self.written.append(pack)

    def _key(self, table: Any) -> int:
        keys = self._keys.get(table.name)
        if not keys:
            keys = self._keys[table.name] = list(reversed(self.connection.keys(table, KEYS_AT_ONCE)))
        return keys.pop()

    # -- writing ---------------------------------------------------------------------------------------------------

    def write_first(self) -> None:
        """What is read next must see what was decided."""
        if self.pending:
            self.flush()

    def flush(self) -> None:
        """Write what was changed. Between calls, or before a call changes anything: it cannot be undone alone."""
        if self._journal:
            raise RuntimeError("a call was about to be written before it was decided")
        self.pending.write()

    def write_counts(self) -> None:
        """Last of all in a transaction: once for everything it did."""
        self.answered.write(self)
        self.pending.counts.write(self.connection)
