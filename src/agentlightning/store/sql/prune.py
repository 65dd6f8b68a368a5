"""Keeping a store small, and moving rollouts between stores: delete, prune, vacuum, records."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from agentlightning.errors import ConfigError, ConflictError, StoreError
from agentlightning.rollouts import (
    ATTEMPT_TRANSITIONS,
    FINISHED,
    ROLLOUT_TRANSITIONS,
    WAITING,
    Attempt,
    EnqueueRolloutRequest,
    Rollout,
)
from agentlightning.span import SUPERSEDED, Span
from agentlightning.store.base import Retention, RolloutRecord
from agentlightning.store.sql import queries
from agentlightning.store.sql.execution.unit_of_work import Unit
from agentlightning.store.sql.lifecycle import transitions
from agentlightning.store.sql.spans import codec, read
from agentlightning.store.sql.spans.codec import Pack
from agentlightning.store.sql.spans.read import SpanQuery
from agentlightning.store.sql.spans.write import WrittenPack
from agentlightning.store.sql.tables import mapping, statements
from agentlightning.store.sql.tables.backend import Connection
from agentlightning.store.sql.tables.mapping import Row
from agentlightning.store.sql.tables.rows import OPEN, RolloutState
from agentlightning.store.sql.tables.schema import token_blocks

WEIGH_AT_ONCE: Final = 2_000
BLOCKS_AT_ONCE: Final = 1_000
"""Looked at in one transaction."""
DROP_AT_ONCE: Final = 100
"""Blocks removed in one."""
REMOVE_AT_ONCE: Final = 50
"""Rollouts removed in one transaction, so that others are not held up."""

# -- removing --------------------------------------------------------------------------------------------------------


def delete(unit: Unit, rollout_ids: Sequence[str]) -> int:
    """Finished and damaged rollouts with all that belongs to them; unknown ids are skipped."""
    found = [state for state in map(unit.find_rollout, dict.fromkeys(rollout_ids)) if state is not None]
    unfinished = [state for state in found if state.status not in FINISHED]
    for state in unfinished:
        if not _is_damaged(state):
            raise ConflictError(
                f"rollout {state.rollout_id!r} is {state.status!r}; cancel it, or wait until it has finished"
            )
    for state in unfinished:
        transitions.fence(unit, state)
        unit.move_rollout(state, "cancelled")
    unit.settle()
    _remove(unit, found)
    return len(found)


def _is_damaged(state: RolloutState) -> bool:
    """It cannot be read, and so neither be cancelled nor finish."""
    try:
        state.to_rollout()
        for attempt in state.tries.values():
            attempt.to_attempt()
    except StoreError:
        return True
    return False


def delete_finished(unit: Unit, ends: dict[str, float]) -> None:
    """Those of some rollouts that are still finished, since the time they are thought to be."""
    found = [state for state in map(unit.find_rollout, ends) if state is not None]
    _remove(unit, [state for state in found if state.status in FINISHED and state.end_time == ends[state.rollout_id]])


def _remove(unit: Unit, states: Sequence[RolloutState]) -> None:
    if not states:
        return
    unit.write_first()
    run = unit.connection.run
    attempts = [attempt.key for state in states for attempt in state.tries.values()]
    if attempts:
        keys = [row[0] for row in unit.connection.all(statements.PACK_KEYS, attempts)]
        if keys:
            run(statements.DELETE_PACKS, keys)
            _drop_blocks_of(unit, keys)
        run(statements.DELETE_ATTEMPTS, attempts)
    run(statements.DELETE_ROLLOUTS, [state.key for state in states])
    unit.pending.counts.removed(states, [attempt for state in states for attempt in state.tries.values()])
    for state in states:
        unit.drop(state)


def _drop_blocks_of(unit: Unit, packs: Sequence[int]) -> None:
    """The tokens that only these packs needed, which were just deleted."""
    connection = unit.connection
    if not connection.all(statements.HAVE_BLOCKS, packs):
        return
    # Other servers may refer to these blocks at this moment, or remove the last other packs that do: whoever comes
    # second sees what the first one did.
    connection.lock(token_blocks)
    if connection.run(statements.DELETE_BLOCKS_OF, packs):
        unit.pending.digests.clear()
    connection.run(statements.DELETE_PACK_BLOCKS, packs)


@dataclass(frozen=True, slots=True)
class Weight:
    """What one finished rollout takes."""

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
            raise ConfigError(f"{name}={value!r} is no limit; use a number from 0, or None for no limit")


def weigh(connection: Connection, after: Weight | None) -> list[Weight]:
    """The next finished rollouts, the one that ended first coming first."""
    place = (-math.inf, 0) if after is None else (after.end_time, after.key)
    if place[0] == -math.inf:
        place = (-1e300, 0)
    rows = connection.all(statements.WEIGHTS, *place, WEIGH_AT_ONCE)
    return [Weight(key, name, end, int(count), int(size)) for key, name, end, count, size in rows]


@dataclass(slots=True)
class Excess:
    """What is left, and whether it is too much."""

    retention: Retention
    oldest: float
    """The end time before which nothing is kept."""
    rollouts: int = 0
    bytes: int = 0
    fits: bool = False
    """What is left is no longer too much."""

    def count(self, weights: Sequence[Weight]) -> None:
        self.rollouts += len(weights)
        self.bytes += sum(weight.bytes for weight in weights)

    def take(self, weights: Sequence[Weight]) -> Iterator[Weight]:
        """Those to remove, as long as there is too much."""
        for weight in weights:
            if not self._too_much(weight):
                self.fits = True
                return
            if weight.rollout_id.startswith(self.retention.spare):
                continue
            self.rollouts -= 1
            self.bytes -= weight.bytes
            yield weight

    def _too_much(self, weight: Weight) -> bool:
        limits = self.retention
        return (
            weight.end_time < self.oldest
            or (limits.max_rollouts is not None and self.rollouts > limits.max_rollouts)
            or (limits.max_bytes is not None and self.bytes > limits.max_bytes)
        )


def look_for_unused_blocks(connection: Connection, after: bytes) -> tuple[bytes | None, list[bytes]]:
    """(the last block that was looked at, None at the end; those among them that nothing refers to)."""
    rows = connection.all(statements.LOOK_FOR_UNUSED, after, BLOCKS_AT_ONCE)
    return (bytes(rows[-1][0]) if rows else None), [bytes(digest) for digest, unused in rows if unused]


def drop_blocks(unit: Unit, digests: Sequence[bytes]) -> list[bytes]:
    """Those of some blocks that are still unused. Returns their parents, which may be unused now."""
    unit.write_first()
    unit.connection.lock(token_blocks)  # or another server could refer to a block in this moment
    parents: dict[bytes, None] = {}
    for digest in digests:
        for (parent,) in unit.connection.all(statements.PARENT_OF_UNUSED, digest):
            unit.connection.run(statements.DELETE_BLOCK, digest)
            parents[bytes(parent)] = None
    unit.pending.digests.clear()
    parents.pop(b"", None)
    return list(parents)


# -- records ---------------------------------------------------------------------------------------------------------


def read_records(connection: Connection, rollout_ids: Sequence[str]) -> list[RolloutRecord]:
    records: list[RolloutRecord] = []
    for rollout_id in rollout_ids:
        attempts = queries.attempts(connection, rollout_id)
        found = read.query(connection, SpanQuery(rollout_id, None, None, -1, 0))
        rollout = queries.rollout(connection, rollout_id)
        assert rollout is not None
        records.append(RolloutRecord(rollout, tuple(attempts), tuple(found)))
    return records


@dataclass(frozen=True, slots=True)
class ReadyRecord:
    """A record checked and packed in the caller's thread."""

    rollout_id: str
    queue: str
    row: Row
    """The columns of the rollout after `key`."""
    attempts: tuple[tuple[Row, tuple[tuple[Pack, bytes, bool], ...]], ...]
    """(columns after `rollout_key`, its packs with their bodies, whether the attempt was superseded then)."""


def ready(record: RolloutRecord) -> ReadyRecord:
    """Raises ConfigError for what cannot be kept."""
    rollout = record.rollout
    waits = rollout.status not in FINISHED
    _check_rollout(rollout)
    request = EnqueueRolloutRequest(
        rollout.input, rollout.mode, rollout.resources_id, rollout.config, rollout.metadata, rollout.rollout_id,
        rollout.queue, rollout.priority,
    )  # fmt: skip
    made, row = mapping.new_rollout(request, rollout.start_time)
    status = rollout.status
    if status in OPEN:
        status = "requeuing"
    row = (
        *row[:4],
        status,
        rollout.start_time,
        None if waits else rollout.end_time,
        *row[7:9],
        len(record.attempts),
        *row[10:],
    )
    known = {attempt.attempt_id for attempt in record.attempts}
    by_attempt: dict[str, list[Span]] = {attempt_id: [] for attempt_id in known}
    for span in record.spans:
        if span.attempt_id not in by_attempt:
            raise ConfigError(f"span {span.span_id!r} is of attempt {span.attempt_id!r}, which the record has not")
        by_attempt[span.attempt_id].append(span)
    attempts: list[tuple[Row, tuple[tuple[Pack, bytes, bool], ...]]] = []
    for number, attempt in enumerate(record.attempts, start=1):
        if attempt.sequence_id != number:
            raise ConfigError(f"attempt {attempt.attempt_id!r} has sequence_id={attempt.sequence_id}, not {number}")
        fenced = waits or number < len(record.attempts) or rollout.status == "cancelled"
        packed = _pack_lots(by_attempt[attempt.attempt_id])
        attempts.append((_attempt_row(attempt, fenced, packed), packed))
    return ReadyRecord(made.rollout_id, made.queue, row, tuple(attempts))


def _check_rollout(rollout: Rollout) -> None:
    if rollout.status not in ROLLOUT_TRANSITIONS:
        raise ConfigError(f"status={rollout.status!r} of rollout {rollout.rollout_id!r} is none that a rollout has")
    mapping.check_time(rollout.start_time, "start_time")
    if rollout.status in FINISHED:
        mapping.check_time(rollout.end_time, "end_time")


def _pack_lots(found: Sequence[Span]) -> tuple[tuple[Pack, bytes, bool], ...]:
    """The spans of one attempt: those written while it was superseded apart, as the mark is kept beside the pack."""
    lots: dict[bool, list[Span]] = {}
    for span in found:
        marked = span.attributes.get(SUPERSEDED) is True
        if marked:
            span = replace(span, attributes={k: v for k, v in span.attributes.items() if k != SUPERSEDED})
        lots.setdefault(marked, []).append(span)
    packed = ((codec.pack(lot), marked) for marked, lot in lots.items())
    return tuple((pack, pack.body, marked) for pack, marked in packed)


def _attempt_row(attempt: Attempt, fenced: bool, packed: Sequence[tuple[Pack, bytes, bool]]) -> Row:
    """The columns of an attempt after `rollout_key`."""
    mapping.check_new_id(attempt.attempt_id, "attempt_id")
    mapping.check_time(attempt.start_time, "start_time")
    for name, value in (("end_time", attempt.end_time), ("last_heartbeat_time", attempt.last_heartbeat_time)):
        if value is not None:
            mapping.check_time(value, name)
    if attempt.worker_id is not None:
        mapping.check_text(attempt.worker_id, "worker_id")
    if attempt.status not in ATTEMPT_TRANSITIONS:
        raise ConfigError(f"status={attempt.status!r} of attempt {attempt.attempt_id!r} is none that an attempt has")
    status, metadata, end_time = str(attempt.status), attempt.metadata, attempt.end_time
    if status in OPEN:
        error = transitions.failure("Superseded", "its rollout was taken to another store")
        status, metadata = "unresponsive", {**metadata, "error": error}
        end_time = attempt.start_time if attempt.last_heartbeat_time is None else attempt.last_heartbeat_time
    last = max((max(pack.sequence_ids) for pack, _, _ in packed), default=0)
    count = sum(pack.count for pack, _, _ in packed)
    size = sum(len(body) + 9 * pack.count for pack, body, _ in packed)
    return (
        attempt.sequence_id,
        attempt.attempt_id,
        status,
        attempt.start_time,
        end_time,
        attempt.worker_id,
        attempt.last_heartbeat_time,
        mapping.dump_dict(metadata, "metadata"),
        int(fenced),
        last,
        count,
        size,
        None,
        None,
        None,
    )


def add_records(unit: Unit, records: Sequence[ReadyRecord]) -> int:
    """Keep those whose id is not known."""
    new = [record for record in records if unit.find_rollout(record.rollout_id) is None]
    new = list({record.rollout_id: record for record in reversed(new)}.values())[::-1]
    taken = unit.owners([row[1] for record in new for row, _ in record.attempts])
    for attempt_id, rollout_id in taken.items():
        raise ConflictError(f"attempt {attempt_id!r} is one of rollout {rollout_id!r} already")
    for record in new:
        rollout = unit.add_rollout(record.row)
        if rollout.status not in WAITING:
            unit.finished.add(rollout.rollout_id)
        for row, packed in record.attempts:
            attempt = unit.add_attempt(rollout, row)
            for pack, body, marked in packed:
                unit.add_pack(WrittenPack(attempt, pack, body, _numbers(pack), superseded=int(marked)))
    return len(new)


def _numbers(pack: Pack) -> Any:
    """The sequence numbers of a pack, which has none missing."""
    numbers = pack.sequence_ids
    consecutive = range(numbers[0], numbers[0] + len(numbers))
    return consecutive if tuple(consecutive) == numbers else list(numbers)
