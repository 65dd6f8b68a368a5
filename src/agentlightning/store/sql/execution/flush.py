"""What a unit has decided and not written yet: each kind of row with one statement for the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agentlightning.store.sql.counters import ATTEMPTS, SPANS, Counts
from agentlightning.store.sql.tables import statements
from agentlightning.store.sql.tables.backend import Connection
from agentlightning.store.sql.tables.rows import (
    AttemptState,
    RolloutState,
    WorkerState,
    attempt_row,
    changed_attempt_row,
    changed_row,
    moved_row,
    rollout_row,
    worker_row,
)
from agentlightning.store.sql.tables.schema import workers as workers_table

if TYPE_CHECKING:
    from agentlightning.store.sql.spans.write import WrittenPack


class Pending:
    """`shared`: rows that several processes may write at once are written in one order everywhere."""

    def __init__(self, connection: Connection, shared: bool) -> None:
        self._connection = connection
        self._shared = shared
        self.moved: dict[RolloutState, None] = {}
        """Rollouts that are new or changed their status."""
        self.described: dict[RolloutState, None] = {}
        """Rollouts of which more has changed."""
        self.attempts: dict[AttemptState, None] = {}
        self.heard: dict[WorkerState, None] = {}
        self.packs: list[WrittenPack] = []
        self.removed: list[int] = []
        """Keys of attempts."""
        self.queues: set[str] = set()
        """Names of new queues."""
        self.digests: set[bytes] = set()
        """Token blocks that are known to be there."""
        self.counts = Counts()

    def __bool__(self) -> bool:
        return bool(
            self.moved or self.described or self.attempts or self.heard or self.packs or self.removed or self.queues
        )

    def clear(self) -> None:
        for kind in (self.moved, self.described, self.attempts, self.heard, self.packs, self.removed, self.queues):
            kind.clear()
        self.digests.clear()
        self.counts.clear()

    def write(self) -> None:
        if self.removed:
            self._connection.run(statements.DELETE_ATTEMPTS, self.removed)
            self.counts.add(ATTEMPTS, -len(self.removed))
            self.removed = []
        if self.queues:
            self._connection.insert(statements.NAME_QUEUES, [(name, None) for name in sorted(self.queues)])
            self.queues.clear()
        self._write_workers()
        self._write_rollouts()
        self._write_attempts()
        self._write_packs()

    def _write_workers(self) -> None:
        if self.heard:
            workers = sorted(self.heard, key=lambda worker: worker.worker_id)
            if not all(worker.stored for worker in workers):
                self._connection.commit_in_order(workers_table)
            self._connection.insert(statements.WRITE_WORKERS, [worker_row(worker) for worker in workers])
            self.heard.clear()

    def _write_rollouts(self) -> None:
        described, self.described = self.described, {}
        moved, self.moved = self.moved, {}
        new = [state for state in (*moved, *described) if not state.stored]
        if new:
            new = list(dict.fromkeys(new))
            self._connection.insert(statements.INSERT_ROLLOUTS, [rollout_row(state) for state in new])
        rows = [moved_row(state) for state in moved if state.stored and state not in described]
        if rows:
            self._connection.update(statements.MOVE_ROLLOUTS, rows)
        rows = [changed_row(state) for state in described if state.stored]
        if rows:
            self._connection.update(statements.CHANGE_ROLLOUTS, rows)
        for state in new:
            state.stored = True
        self.counts.written(moved)
        self.counts.written(described)

    def _write_attempts(self) -> None:
        if not self.attempts:
            return
        attempts, self.attempts = self.attempts, {}
        rows = [changed_attempt_row(state) for state in attempts if state.stored]
        if rows:
            self._connection.update(statements.CHANGE_ATTEMPTS, rows)
        new = [state for state in attempts if not state.stored]
        if new:
            self._connection.insert(statements.INSERT_ATTEMPTS, [attempt_row(state) for state in new])
            self.counts.add(ATTEMPTS, len(new))
            for state in new:
                state.stored = True

    def _write_packs(self) -> None:
        if not self.packs:
            return
        packs, self.packs = self.packs, []
        self._connection.insert(statements.INSERT_PACKS, [pack.row() for pack in packs])
        self.counts.add(SPANS, sum([pack.pack.count for pack in packs]))
        chained = [pack for pack in packs if pack.pack.chains]
        if not chained:
            return
        blocks: dict[bytes, Any] = {}
        heads: dict[tuple[int, bytes], None] = {}
        for pack in chained:
            blocks.update(
                {block.digest: block for block in pack.pack.blocks(self.digests) if block.digest not in blocks}
            )
            heads.update(dict.fromkeys((pack.key, chain.head) for chain in pack.pack.chains))
        new: Sequence[Any] = (
            sorted(blocks.values(), key=lambda block: block.digest) if self._shared else [*blocks.values()]
        )
        if new:
            self._connection.insert(
                statements.INSERT_BLOCKS, [(block.digest, block.parent, block.ids) for block in new]
            )
            self.digests.update(blocks)
        self._connection.insert(statements.INSERT_PACK_BLOCKS, list(heads))
