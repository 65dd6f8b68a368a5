"""The unit of work: loads the rows a batch of commands needs, lets each command decide in memory, writes once.

Before the first change of a row, the unit of work takes a snapshot of it, so that a command that raises is rolled back
alone. Modified rows are flushed with few statements for the whole batch.

Where one process holds the write lock (SQLite), rows stay in memory after the transaction, within a bound, until
another process has written; a command then needs no query at all. On a `shared` database, rows are read in each
transaction and locked until its end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sized
from typing import Any, Final

from agentlightning.errors import NotFoundError
from agentlightning.store.clock import Clock
from agentlightning.store.sql.session.answered_calls import AnsweredCalls
from agentlightning.store.sql.session.claim_queue import ClaimQueue, ClaimQueues
from agentlightning.store.sql.session.pending_writes import PendingWrites
from agentlightning.store.sql.session.rows import (
    OPEN,
    AttemptRow,
    MutableRow,
    PendingPack,
    RolloutRow,
    WorkerRow,
    attempt_snapshot,
    rollout_snapshot,
    worker_snapshot,
)
from agentlightning.store.sql.session.span_ids import SpanIds
from agentlightning.store.sql.tables import statements
from agentlightning.store.sql.tables.backend import Connection
from agentlightning.store.sql.tables.schema import attempts as attempts_table
from agentlightning.store.sql.tables.schema import rollouts as rollouts_table
from agentlightning.store.sql.tables.schema import span_packs

CACHE_BYTES: Final = 6 << 20
"""Estimated size of the rollouts kept between transactions."""
CACHED_WORKERS: Final = 5_000
CACHED_DIGESTS: Final = 20_000
KEY_BLOCK: Final = 64
"""Keys reserved at once on a shared database, where their order does not matter."""


class Prefetch:
    """What the commands of a batch need before they run."""

    __slots__ = ("attempts", "claims", "keys", "new_rollouts", "rollouts", "workers")

    def __init__(self) -> None:
        self.rollouts: set[str] = set()
        self.attempts: set[str] = set()
        """Ids of attempts whose rollout is not known."""
        self.workers: set[str] = set()
        self.keys: set[str] = set()
        """Idempotency keys."""
        self.claims = 0
        """Rollouts to be claimed from queues."""
        self.new_rollouts = 0


class UnitOfWork:
    """Used by the writer's thread alone."""

    def __init__(self, connection: Connection, clock: Clock, shared: bool) -> None:
        self.connection = connection
        self.clock = clock
        self.shared = shared
        self.wall = 0.0
        self.steady = 0.0
        """The times of this transaction."""
        self.changed_elsewhere = False
        """Another process has written: any rollout may have changed."""
        self.number = 0
        """Of this transaction, as this process counts them."""
        self.waiting_ahead: Sized = ()
        """The waiting claims that are served before those of this batch."""
        self.claims_queued = False
        """A claim of this transaction waits behind them."""
        self.finished: set[str] = set()
        """Ids of rollouts that have finished."""
        self.deadline: float | None = None
        """The earliest deadline that was set, on the steady clock."""
        self.pending = PendingWrites(connection, shared)
        self.queues = ClaimQueues(self)
        self.span_ids = SpanIds(connection, self.flush)
        self.answered = AnsweredCalls()
        self.rollouts: OrderedDict[str, RolloutRow] = OrderedDict()
        self.workers: OrderedDict[str, WorkerRow] = OrderedDict()
        self.resources: set[str] = set()
        """Ids of resources known to exist."""
        self.expected_claims = 0
        self._memory = 0
        self._absent: set[str] = set()
        self._savepoint = 1
        self._undo_log: list[tuple[MutableRow, tuple[Any, ...] | None]] = []
        """(row, its snapshot; None for a new row)."""
        self._keys: dict[str, list[int]] = {}

    # -- transactions ----------------------------------------------------------------------------------------------

    def begin(self, changed_elsewhere: bool) -> None:
        """Start over within a transaction that has just begun."""
        if self.shared or changed_elsewhere:
            self.invalidate()
        self.wall, self.steady = self.clock.wall(), self.clock.steady()
        self.number += 1
        self.claims_queued = False
        self.changed_elsewhere = False
        self.queues.claimable = False
        self.finished = set()
        self.deadline = None
        self.answered.clear()
        self._absent.clear()

    def invalidate(self) -> None:
        """Drop every row: what is in memory may be outdated."""
        for rollout in self.rollouts.values():
            rollout.attempts.clear()
        self.rollouts.clear()
        self.workers.clear()
        self.queues.clear()
        self.pending.clear()
        self._undo_log.clear()
        self._memory = 0
        self._keys.pop(rollouts_table.name, None)
        if not self.shared:
            self._keys.clear()

    def rolled_back(self) -> None:
        self.invalidate()
        self.queues.known_names.clear()
        self.span_ids.clear()
        self.resources.clear()
        self._keys.clear()

    def committed(self) -> None:
        """Evict the rows that were not used for the longest time."""
        self._undo_log.clear()
        while self._memory > CACHE_BYTES and len(self.rollouts) > 1:
            _, rollout = self.rollouts.popitem(last=False)
            self._memory -= rollout.memory
            for attempt in rollout.attempts.values():
                self.span_ids.forget(attempt)
            rollout.attempts.clear()
        while len(self.workers) > CACHED_WORKERS:
            self.workers.popitem(last=False)
        if len(self.pending.stored_blocks) > CACHED_DIGESTS:
            self.pending.stored_blocks.clear()

    def release_savepoint(self) -> None:
        """Keep the changes made so far, and start a new savepoint."""
        self._undo_log.clear()
        self._savepoint += 1

    def rollback_to_savepoint(self) -> None:
        """Revert the changes made since the savepoint."""
        for row, snapshot in reversed(self._undo_log):
            if snapshot is not None:
                row.restore(snapshot)
                if isinstance(row, RolloutRow):
                    self.queues.put_back(row)
            elif isinstance(row, RolloutRow):
                self.pending.status_changed.pop(row, None)
                self.pending.fields_changed.pop(row, None)
                self.rollout_deleted(row)
            elif isinstance(row, AttemptRow):
                self.pending.attempts.pop(row, None)
                row.rollout.attempts.pop(row.attempt_id, None)
                row.superseded = 1
            elif isinstance(row, PendingPack):
                self.pending.packs.remove(row)
        for row, _ in self._undo_log:
            if isinstance(row, AttemptRow):
                self._track_open(row)
        self.release_savepoint()

    def note_deadline(self, deadline: float) -> None:
        """Have the deadlines checked at this time, on the steady clock."""
        if self.deadline is None or deadline < self.deadline:
            self.deadline = deadline

    # -- loading ---------------------------------------------------------------------------------------------------

    def prefetch(self, needs: Prefetch) -> None:
        """Load what is needed and not in memory. On a shared database, in the one order in which rows are locked:
        queues, workers, rollouts."""
        self.expected_claims = needs.claims
        if needs.keys:
            self.answered.load(self.connection, needs.keys)
        if needs.claims:
            self.queues.load_limits()
        if needs.workers:
            self.load_workers(needs.workers)
        if needs.attempts:
            needs.rollouts |= set(self.owners(needs.attempts).values())
        if needs.rollouts:
            self.load(needs.rollouts)
        if needs.new_rollouts and self.shared:
            self._keys[rollouts_table.name] = list(reversed(self.connection.keys(rollouts_table, needs.new_rollouts)))

    def load(self, rollout_ids: Iterable[str]) -> None:
        missing = [name for name in rollout_ids if name not in self.rollouts and name not in self._absent]
        if not missing:
            return
        self.flush()
        rows = [RolloutRow(*columns) for columns in self.connection.all(statements.LOCK_ROLLOUTS, missing)]
        by_key = {row.key: row for row in rows}
        if by_key:
            for columns in self.connection.all(statements.ATTEMPTS_AMONG, list(by_key)):
                attempt = AttemptRow(by_key[columns[1]], *columns)
                attempt.stored = True
                attempt.rollout.attempts[attempt.attempt_id] = attempt
        for row in rows:
            row.stored = True
            row.counted = row.status
            self._cache(row)
        self._absent.update(name for name in missing if name not in self.rollouts)

    def load_workers(self, worker_ids: Iterable[str]) -> None:
        missing = [name for name in worker_ids if name not in self.workers]
        if not missing:
            return
        self.flush()
        for columns in self.connection.all(statements.LOCK_WORKERS, missing):
            row = self.workers[columns[0]] = WorkerRow(*columns)
            row.stored = True
        for worker_id, rollout_id, attempt_id in self.connection.all(statements.OPEN_ATTEMPTS_OF_WORKERS, missing):
            if worker_id in self.workers:
                self.workers[worker_id].open_attempts[attempt_id] = rollout_id

    def owners(self, attempt_ids: Iterable[str]) -> dict[str, str]:
        """The rollout id of each attempt that exists."""
        missing = [attempt_id for attempt_id in attempt_ids if attempt_id not in self._absent]
        if not missing:
            return {}
        self.flush()
        found = dict(self.connection.all(statements.OWNERS, missing))
        self._absent.update(attempt_id for attempt_id in missing if attempt_id not in found)
        return found

    def _cache(self, row: RolloutRow) -> None:
        self.rollouts[row.rollout_id] = row
        row.memory = 1000 + len(row.input) + len(row.metadata) + 700 * len(row.attempts)
        self._memory += row.memory

    # -- finding ---------------------------------------------------------------------------------------------------

    def find_rollout(self, rollout_id: str) -> RolloutRow | None:
        row = self.rollouts.get(rollout_id)
        if row is None:
            if rollout_id in self._absent:
                return None
            self.load([rollout_id])
            return self.rollouts.get(rollout_id)
        self.rollouts.move_to_end(rollout_id)
        return row

    def rollout(self, rollout_id: str) -> RolloutRow:
        row = self.find_rollout(rollout_id)
        if row is None:
            raise NotFoundError(f"no rollout {rollout_id!r} in this store")
        return row

    def attempt(self, rollout_id: str, attempt_id: str) -> AttemptRow:
        """An attempt; "latest" is the latest one."""
        rollout = self.rollout(rollout_id)
        row = rollout.latest if attempt_id == "latest" else rollout.attempts.get(attempt_id)
        if row is None:
            raise NotFoundError(f"rollout {rollout_id!r} has no attempt {attempt_id!r}")
        return row

    def attempt_by_id(self, attempt_id: str) -> AttemptRow | None:
        rollout_id = self.owners([attempt_id]).get(attempt_id)
        return None if rollout_id is None else self.rollout(rollout_id).attempts.get(attempt_id)

    def worker(self, worker_id: str) -> WorkerRow:
        """A worker; one that is unknown is created."""
        row = self.workers.get(worker_id)
        if row is None:
            self.load_workers([worker_id])
            row = self.workers.get(worker_id)
        if row is None:
            row = self.workers[worker_id] = WorkerRow(worker_id)
        return row

    def check_resources(self, resources_id: str | None) -> None:
        """Raises NotFoundError for resources that were never published. None stands for the latest."""
        if resources_id is None or resources_id in self.resources:
            return
        if not self.connection.all(statements.RESOURCES_KEY, resources_id):
            raise NotFoundError(f"no resources {resources_id!r} in this store; publish them with add_resources")
        self.resources.add(resources_id)

    # -- changing --------------------------------------------------------------------------------------------------

    def modify_rollout(self, row: RolloutRow, fields_changed: bool = False) -> None:
        """To be called before a change. fields_changed: of more than the status."""
        if row.savepoint != self._savepoint:
            row.savepoint = self._savepoint
            self._undo_log.append((row, rollout_snapshot(row)))
        if fields_changed:
            self.pending.fields_changed[row] = None
        else:
            self.pending.status_changed[row] = None

    def modify_attempt(self, row: AttemptRow) -> None:
        if row.savepoint != self._savepoint:
            row.savepoint = self._savepoint
            self._undo_log.append((row, attempt_snapshot(row)))
        self.pending.attempts[row] = None

    def modify_worker(self, row: WorkerRow) -> None:
        if row.savepoint != self._savepoint:
            row.savepoint = self._savepoint
            self._undo_log.append((row, worker_snapshot(row)))
        self.pending.workers[row] = None

    def modify_queue(self, queue: ClaimQueue) -> None:
        self._undo_log.append((queue, (queue.open,)))

    def add_rollout(self, columns: tuple[Any, ...]) -> RolloutRow:
        """A new rollout, from its columns after `key`."""
        row = RolloutRow(self._next_key(rollouts_table), *columns)
        self._absent.discard(row.rollout_id)
        row.savepoint = self._savepoint
        self._undo_log.append((row, None))
        self.pending.status_changed[row] = None
        self._cache(row)
        self.queues.status_changed(row, None, row.status)
        return row

    def add_attempt(self, rollout: RolloutRow, columns: tuple[Any, ...]) -> AttemptRow:
        """A new attempt, from its columns after `rollout_key`."""
        row = AttemptRow(rollout, self._next_key(attempts_table), rollout.key, *columns)
        self._absent.discard(row.attempt_id)
        row.savepoint = self._savepoint
        self._undo_log.append((row, None))
        self.pending.attempts[row] = None
        rollout.attempts[row.attempt_id] = row
        rollout.memory += 700
        self._memory += 700
        self._track_open(row)
        return row

    def remove_attempt(self, row: AttemptRow) -> None:
        """Remove an attempt that no caller has seen. Cannot be rolled back."""
        row.superseded = 1
        self._track_open(row)
        row.rollout.attempts.pop(row.attempt_id, None)
        self.pending.attempts.pop(row, None)
        if row.stored:
            self.pending.removed_attempts.append(row.key)

    def add_pack(self, pack: PendingPack) -> None:
        pack.key = self._next_key(span_packs)
        self._undo_log.append((pack, None))
        self.pending.packs.append(pack)

    def rollout_deleted(self, row: RolloutRow) -> None:
        """To be called after a rollout was removed from the database, or never came into it."""
        if self.rollouts.pop(row.rollout_id, None) is not None:
            self._memory -= row.memory

    def attempt_changed(self, row: AttemptRow, worker_before: str | None = None) -> None:
        """To be called after a change of who runs an attempt, or of whether it is open."""
        if worker_before is not None and worker_before != row.worker_id and worker_before in self.workers:
            self.workers[worker_before].open_attempts.pop(row.attempt_id, None)
        self._track_open(row)

    def _track_open(self, row: AttemptRow) -> None:
        worker = None if row.worker_id is None else self.workers.get(row.worker_id)
        if worker is None:
            return
        if row.status in OPEN and not row.superseded:
            worker.open_attempts[row.attempt_id] = row.rollout.rollout_id
        else:
            worker.open_attempts.pop(row.attempt_id, None)

    def _next_key(self, table: Any) -> int:
        keys = self._keys.get(table.name)
        if not keys:
            keys = self._keys[table.name] = list(reversed(self.connection.keys(table, KEY_BLOCK)))
        return keys.pop()

    # -- writing ---------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write the pending changes, so that queries see them. Between commands, or before a command changes anything:
        what is flushed cannot be rolled back alone."""
        if self.pending:
            if self._undo_log:
                raise RuntimeError("a command was about to be flushed before it was decided")
            self.pending.write()

    def write_totals(self) -> None:
        """Write the answers of keyed calls, then the counters: last in a transaction."""
        self.answered.write(self.connection, self.pending.counters, self.wall)
        self.pending.counters.write(self.connection)
