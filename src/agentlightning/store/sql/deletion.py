"""Keeps a store small: deletes rollouts, prunes the oldest ones, and drops token blocks that nothing refers to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from agentlightning.errors import ConfigError, ConflictError, StoreError
from agentlightning.rollouts import FINISHED
from agentlightning.store.sql.lifecycle import transitions
from agentlightning.store.sql.session.rows import RolloutRow
from agentlightning.store.sql.session.unit_of_work import UnitOfWork
from agentlightning.store.sql.tables import span_statements, statements
from agentlightning.store.sql.tables.backend import Connection
from agentlightning.store.sql.tables.schema import token_blocks
from agentlightning.store.types import Retention

SIZE_BATCH: Final = 2_000
"""Rollouts whose size is read in one transaction."""
DELETE_BATCH: Final = 50
"""Rollouts deleted in one, so that others are not held up."""
BLOCK_SCAN_BATCH: Final = 1_000
"""Token blocks checked in one."""
BLOCK_DELETE_BATCH: Final = 100
"""Token blocks deleted in one."""

# -- removing --------------------------------------------------------------------------------------------------------


def delete(unit: UnitOfWork, rollout_ids: Sequence[str]) -> int:
    """Delete finished and damaged rollouts with their attempts and spans; unknown ids are skipped."""
    found = [rollout for rollout in map(unit.find_rollout, dict.fromkeys(rollout_ids)) if rollout is not None]
    unfinished = [rollout for rollout in found if rollout.status not in FINISHED]
    for rollout in unfinished:
        if not _is_damaged(rollout):
            raise ConflictError(
                f"rollout {rollout.rollout_id!r} is {rollout.status!r}; cancel it, or wait until it has finished"
            )
    for rollout in unfinished:
        transitions.give_up(unit, rollout)
    unit.release_savepoint()
    _delete(unit, found)
    return len(found)


def _is_damaged(rollout: RolloutRow) -> bool:
    """Whether its row cannot be read, so that it can neither be cancelled nor finish."""
    try:
        rollout.to_rollout()
        for attempt in rollout.attempts.values():
            attempt.to_attempt()
    except StoreError:
        return True
    return False


def delete_finished(unit: UnitOfWork, ends: dict[str, float]) -> None:
    """Delete the rollouts, given with their end time, unless they were queued again meanwhile."""
    found = [rollout for rollout in map(unit.find_rollout, ends) if rollout is not None]
    _delete(
        unit,
        [rollout for rollout in found if rollout.status in FINISHED and rollout.end_time == ends[rollout.rollout_id]],
    )


def _delete(unit: UnitOfWork, rollouts: Sequence[RolloutRow]) -> None:
    if not rollouts:
        return
    unit.flush()
    run = unit.connection.run
    attempts = [attempt.key for rollout in rollouts for attempt in rollout.attempts.values()]
    if attempts:
        keys = [row[0] for row in unit.connection.all(span_statements.PACK_KEYS, attempts)]
        if keys:
            run(span_statements.DELETE_PACKS, keys)
            run(span_statements.DELETE_PLACES, attempts)
            _delete_blocks_of(unit, keys)
        run(statements.DELETE_ATTEMPTS, attempts)
    run(statements.DELETE_ROLLOUTS, [rollout.key for rollout in rollouts])
    unit.pending.counters.remove(rollouts)
    for rollout in rollouts:
        unit.rollout_deleted(rollout)


def _delete_blocks_of(unit: UnitOfWork, packs: Sequence[int]) -> None:
    """Delete the token blocks that only these packs needed, which were just deleted."""
    connection = unit.connection
    if not connection.all(span_statements.HAVE_BLOCKS, packs):
        return
    # Another server may be adding a reference to these blocks, or deleting the last other packs that refer to them:
    # with the lock, the second one sees what the first one did.
    connection.lock(token_blocks)
    if connection.run(span_statements.DELETE_BLOCKS_OF, packs):
        unit.pending.stored_blocks.clear()
    connection.run(span_statements.DELETE_PACK_BLOCKS, packs)


@dataclass(frozen=True, slots=True)
class RolloutSize:
    """What one finished rollout takes in the database."""

    key: int
    rollout_id: str
    end_time: float
    spans: int
    bytes: int


def check_retention(retention: Retention) -> None:
    for name, value in (
        ("max_age_seconds", retention.max_age_seconds),
        ("max_rollouts", retention.max_rollouts),
        ("max_bytes", retention.max_bytes),
    ):
        if value is not None and (isinstance(value, bool) or not math.isfinite(value) or value < 0):
            raise ConfigError(f"{name}={value!r} is not a limit; use a number from 0, or None for no limit")


def rollout_sizes(connection: Connection, after: RolloutSize | None) -> list[RolloutSize]:
    """The next finished rollouts, the one that ended first coming first."""
    place = (-1e300, 0) if after is None else (after.end_time, after.key)
    rows = connection.all(statements.ROLLOUT_SIZES, *place, SIZE_BATCH)
    return [RolloutSize(key, name, end, int(count), int(size)) for key, name, end, count, size in rows]


@dataclass(slots=True)
class Excess:
    """Decides which rollouts exceed the limits of a retention policy."""

    retention: Retention
    oldest: float
    """Rollouts that ended before this time are removed."""
    rollouts: int = 0
    bytes: int = 0
    fits: bool = False
    """What is left is within the limits."""

    def count(self, sizes: Sequence[RolloutSize]) -> None:
        self.rollouts += len(sizes)
        self.bytes += sum(size.bytes for size in sizes)

    def take(self, sizes: Sequence[RolloutSize]) -> Iterator[RolloutSize]:
        """Those to remove, until what is left is within the limits."""
        for size in sizes:
            if not self._exceeds(size):
                self.fits = True
                return
            if size.rollout_id.startswith(self.retention.spare):
                continue
            self.rollouts -= 1
            self.bytes -= size.bytes
            yield size

    def _exceeds(self, size: RolloutSize) -> bool:
        limits = self.retention
        return (
            size.end_time < self.oldest
            or (limits.max_rollouts is not None and self.rollouts > limits.max_rollouts)
            or (limits.max_bytes is not None and self.bytes > limits.max_bytes)
        )


def unused_blocks(connection: Connection, after: bytes) -> tuple[bytes | None, list[bytes]]:
    """(the last block checked, None at the end; those among the checked ones that nothing refers to)."""
    rows = connection.all(span_statements.FIND_UNUSED_BLOCKS, after, BLOCK_SCAN_BATCH)
    return (bytes(rows[-1][0]) if rows else None), [bytes(digest) for digest, unused in rows if unused]


def delete_blocks(unit: UnitOfWork, digests: Sequence[bytes]) -> list[bytes]:
    """Delete the blocks that are still unused. Returns their parents, which may be unused now."""
    unit.flush()
    unit.connection.lock(token_blocks)  # or another server could add a reference in this moment
    parents: dict[bytes, None] = {}
    for digest in digests:
        for (parent,) in unit.connection.all(span_statements.PARENT_OF_UNUSED, digest):
            unit.connection.run(span_statements.DELETE_BLOCK, digest)
            parents[bytes(parent)] = None
    unit.pending.stored_blocks.clear()
    parents.pop(b"", None)
    return list(parents)
