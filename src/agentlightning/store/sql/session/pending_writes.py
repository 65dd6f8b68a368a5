"""The writes that a unit of work has decided on: flushed with one statement for each kind of change."""

from __future__ import annotations

from agentlightning.store.sql.session.counters import ATTEMPTS, SPANS, CounterChanges
from agentlightning.store.sql.session.rows import (
    AttemptRow,
    PendingPack,
    RolloutRow,
    WorkerRow,
    attempt_columns,
    changed_attempt_columns,
    changed_rollout_columns,
    rollout_columns,
    rollout_status_columns,
    worker_columns,
)
from agentlightning.store.sql.spans.token_blocks import TokenBlock
from agentlightning.store.sql.tables import span_statements, statements
from agentlightning.store.sql.tables.backend import Connection
from agentlightning.store.sql.tables.schema import workers as workers_table


class PendingWrites:
    """`shared`: several processes write at once, so rows are written in an order that all of them keep."""

    def __init__(self, connection: Connection, shared: bool) -> None:
        self._connection = connection
        self._shared = shared
        self.status_changed: dict[RolloutRow, None] = {}
        """Rollouts that are new or changed their status."""
        self.fields_changed: dict[RolloutRow, None] = {}
        """Rollouts of which more than the status has changed."""
        self.attempts: dict[AttemptRow, None] = {}
        self.workers: dict[WorkerRow, None] = {}
        self.packs: list[PendingPack] = []
        self.removed_attempts: list[int] = []
        """Their keys."""
        self.queues: set[str] = set()
        """Names of new queues."""
        self.stored_blocks: set[bytes] = set()
        """Digests of token blocks known to be in the database."""
        self.counters = CounterChanges()

    def __bool__(self) -> bool:
        return bool(
            self.status_changed
            or self.fields_changed
            or self.attempts
            or self.workers
            or self.packs
            or self.removed_attempts
            or self.queues
        )

    def clear(self) -> None:
        changes = (self.status_changed, self.fields_changed, self.attempts, self.workers, self.packs, self.queues)
        for each in (*changes, self.removed_attempts, self.stored_blocks):
            each.clear()
        self.counters.clear()

    def write(self) -> None:
        if self.removed_attempts:
            self._connection.run(statements.DELETE_ATTEMPTS, self.removed_attempts)
            self.counters.add(ATTEMPTS, -len(self.removed_attempts))
            self.removed_attempts = []
        if self.queues:
            self._connection.insert(statements.NAME_QUEUES, [(name, None) for name in sorted(self.queues)])
            self.queues.clear()
        self._write_workers()
        self._write_rollouts()
        self._write_attempts()
        self._write_packs()

    def _write_workers(self) -> None:
        if self.workers:
            workers = sorted(self.workers, key=lambda worker: worker.worker_id)
            if not all(worker.stored for worker in workers):
                self._connection.commit_in_order(workers_table)
            self._connection.insert(statements.WRITE_WORKERS, [worker_columns(worker) for worker in workers])
            self.workers.clear()

    def _write_rollouts(self) -> None:
        fields_changed, self.fields_changed = self.fields_changed, {}
        status_changed, self.status_changed = self.status_changed, {}
        new = [row for row in (*status_changed, *fields_changed) if not row.stored]
        if new:
            new = list(dict.fromkeys(new))
            self._connection.insert(statements.INSERT_ROLLOUTS, [rollout_columns(row) for row in new])
        values = [rollout_status_columns(row) for row in status_changed if row.stored and row not in fields_changed]
        if values:
            self._connection.update(statements.UPDATE_ROLLOUT_STATUS, values)
        values = [changed_rollout_columns(row) for row in fields_changed if row.stored]
        if values:
            self._connection.update(statements.UPDATE_ROLLOUTS, values)
        for row in new:
            row.stored = True
        self.counters.count_status(status_changed)
        self.counters.count_status(fields_changed)

    def _write_attempts(self) -> None:
        if not self.attempts:
            return
        attempts, self.attempts = self.attempts, {}
        changed = [changed_attempt_columns(row) for row in attempts if row.stored]
        if changed:
            self._connection.update(statements.UPDATE_ATTEMPTS, changed)
        new = [row for row in attempts if not row.stored]
        if new:
            self._connection.insert(statements.INSERT_ATTEMPTS, [attempt_columns(row) for row in new])
            self.counters.add(ATTEMPTS, len(new))
            for row in new:
                row.stored = True

    def _write_packs(self) -> None:
        if not self.packs:
            return
        packs, self.packs = self.packs, []
        self._connection.insert(span_statements.INSERT_PACKS, [pack.columns() for pack in packs])
        places = [(pack.attempt.key, span_id, pack.key) for pack in packs for span_id in pack.pack.span_ids]
        self._connection.insert(span_statements.INSERT_PLACES, places)
        self.counters.add(SPANS, len(places))
        chained = [pack for pack in packs if pack.pack.chains]
        if chained:
            self._write_token_blocks(chained)

    def _write_token_blocks(self, packs: list[PendingPack]) -> None:
        blocks: dict[bytes, TokenBlock] = {}
        heads: dict[tuple[int, bytes], None] = {}
        for pack in packs:
            for block in pack.pack.blocks(self.stored_blocks):
                blocks.setdefault(block.digest, block)
            heads.update(dict.fromkeys((pack.key, chain.head) for chain in pack.pack.chains))
        if blocks:
            new = sorted(blocks.values(), key=lambda block: block.digest) if self._shared else blocks.values()
            rows = [(block.digest, block.parent, block.ids) for block in new]
            self._connection.insert(span_statements.INSERT_BLOCKS, rows)
            self.stored_blocks.update(blocks)
        self._connection.insert(span_statements.INSERT_PACK_BLOCKS, list(heads))
