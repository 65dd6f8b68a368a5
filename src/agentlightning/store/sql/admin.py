"""Publishes resources and limits queues; deletes rollouts and prunes the oldest ones; reads and adds whole rollouts,
which export and import move."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final, NamedTuple

from msgspec import structs

from agentlightning.errors import ConfigError, ConflictError, StoreError
from agentlightning.resources import ResourcesUpdate
from agentlightning.rollouts import ATTEMPT_TRANSITIONS, FINISHED, ROLLOUT_TRANSITIONS, WAITING, Attempt
from agentlightning.span import SUPERSEDED, Span
from agentlightning.store import validation
from agentlightning.store.ids import new_id
from agentlightning.store.sql import mapping, pack, queries, rollouts, spans
from agentlightning.store.sql.pack import SpanPack
from agentlightning.store.sql.schema import MAX_PACK, OPEN, RESOURCES, AttemptRow, RolloutRow
from agentlightning.store.sql.spans import SpanWriter
from agentlightning.store.sql.tx import ATTEMPTS, SPANS, Connection, Tx, insert
from agentlightning.store.types import Retention, RolloutRecord
from agentlightning.util.json_values import loads

# -- resources and queues --------------------------------------------------------------------------------------------


def add_resources(tx: Tx, resources: str, resources_id: str | None = None) -> ResourcesUpdate:
    """Publish a version. resources is JSON."""
    name = new_id("rs") if resources_id is None else resources_id
    tx.flush()
    found = queries.find_resources(tx.connection, name)
    if found is None:
        return _publish(tx, name, resources)
    if loads(found[3]) != loads(resources):
        raise ConflictError(f"resources {name!r} exist already; use update_resources, or another id")
    return mapping.to_resources(found)


def update_resources(tx: Tx, resources_id: str, resources: str) -> ResourcesUpdate:
    """Replace a version, or publish it."""
    tx.flush()
    found = queries.find_resources(tx.connection, resources_id)
    if found is None:
        return _publish(tx, resources_id, resources)
    version, create_time = _next_version(tx), found[2]
    change = "UPDATE resources SET version = ?, body = ?, update_time = ? WHERE resources_id = ?"
    tx.run(change, version, resources, tx.wall, resources_id)
    return mapping.to_resources((resources_id, version, create_time, resources, tx.wall))


def delete_resources(tx: Tx, resources_id: str) -> int:
    tx.known_resources.discard(resources_id)
    return tx.run("DELETE FROM resources WHERE resources_id = ?", resources_id)


def _next_version(tx: Tx) -> int:
    return tx.all("SELECT coalesce(max(version), 0) FROM resources")[0][0] + 1


def _publish(tx: Tx, name: str, body: str) -> ResourcesUpdate:
    row = (name, _next_version(tx), tx.wall, body, None)
    tx.run(insert("resources", RESOURCES)(1), *row)
    return mapping.to_resources(row)


def limit_queue(tx: Tx, name: str, limit: int | None) -> None:
    change = "ON CONFLICT (name) DO UPDATE SET max_open = excluded.max_open"
    tx.run(insert("queues", ("name", "max_open"), change)(1), name, limit)
    tx.queued = True
    tx.generation += 1


# -- deleting --------------------------------------------------------------------------------------------------------

SIZE_BATCH: Final = 2_000
"""Rollouts whose size is read in one transaction."""
DELETE_BATCH: Final = 50
"""Rollouts deleted in one, so that others are not held up."""


def delete(tx: Tx, rollout_ids: Sequence[str]) -> int:
    """Delete finished and damaged rollouts with their attempts and spans; unknown ids are skipped."""
    found = [row for row in map(tx.find_rollout, dict.fromkeys(rollout_ids)) if row is not None]
    unfinished = [row for row in found if row.status not in FINISHED]
    for row in unfinished:
        if not _is_damaged(row):
            raise ConflictError(
                f"rollout {row.rollout_id!r} is {row.status!r}; cancel it, or wait until it has finished"
            )
    for row in unfinished:
        rollouts.give_up(tx, row)
    _delete(tx, found)
    return len(found)


def _is_damaged(row: RolloutRow) -> bool:
    """Whether its row cannot be read, so that it can neither be cancelled nor finish."""
    try:
        mapping.to_rollout(row)
        for attempt in row.attempts.values():
            mapping.to_attempt(attempt, row.rollout_id)
    except StoreError:
        return True
    return False


def delete_finished(tx: Tx, ends: dict[str, float]) -> None:
    """Delete the rollouts, given with their end time, unless they were queued again meanwhile."""
    found = [row for row in map(tx.find_rollout, ends) if row is not None]
    _delete(tx, [row for row in found if row.status in FINISHED and row.end_time == ends[row.rollout_id]])


def _delete(tx: Tx, rows: Sequence[RolloutRow]) -> None:
    if not rows:
        return
    keys = [attempt.key for row in rows for attempt in row.attempts.values()]
    if keys:
        for table in ("span_packs", "span_places", "prompts"):
            tx.run(f"DELETE FROM {table} WHERE attempt_key = ANY (?)", keys)
        tx.run("DELETE FROM attempts WHERE key = ANY (?)", keys)
    tx.run("DELETE FROM rollouts WHERE key = ANY (?)", [row.key for row in rows])
    for row in rows:
        tx.rollouts[row.rollout_id] = None
        tx.deleted.append(row.rollout_id)
        tx.count(row.status, -1, row.queue)
        for attempt in row.attempts.values():
            tx.owners.pop(attempt.attempt_id, None)
            tx.count(ATTEMPTS, -1)
            tx.count(SPANS, -attempt.spans)


# -- retention -------------------------------------------------------------------------------------------------------

_SIZES: Final = (
    "SELECT r.key, r.rollout_id, r.end_time, "
    "(SELECT CAST(coalesce(sum(spans), 0) AS BIGINT) FROM attempts WHERE rollout_key = r.key), "
    "(SELECT CAST(coalesce(sum(bytes), 0) AS BIGINT) FROM attempts WHERE rollout_key = r.key) "
    "+ length(r.input) + length(r.metadata) + 400 "
    "FROM rollouts r WHERE r.end_time IS NOT NULL AND r.end_time >= ? AND (r.end_time > ? OR r.key > ?) "
    "ORDER BY r.end_time, r.key LIMIT ?"
)
"""Of finished rollouts after a position, by end time. 400 is the size of the other columns."""


class RolloutSize(NamedTuple):
    """What one finished rollout takes in the database."""

    key: int
    rollout_id: str
    end_time: float
    spans: int
    bytes: int


def rollout_sizes(connection: Connection, after: RolloutSize | None) -> list[RolloutSize]:
    """The next finished rollouts, the one that ended first coming first."""
    end, key = (-1e300, 0) if after is None else (after.end_time, after.key)
    return [RolloutSize(*row) for row in connection.all(_SIZES, end, end, key, SIZE_BATCH)]


def check_retention(retention: Retention) -> None:
    for name in ("max_age_seconds", "max_rollouts", "max_bytes"):
        value = getattr(retention, name)
        if value is not None and (isinstance(value, bool) or not math.isfinite(value) or value < 0):
            raise ConfigError(f"{name}={value!r} is not a limit; use a number from 0, or None for no limit")


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


# -- records ---------------------------------------------------------------------------------------------------------


def read_records(connection: Connection, rollout_ids: Sequence[str]) -> list[RolloutRecord]:
    records: list[RolloutRecord] = []
    for rollout_id in rollout_ids:
        attempts = queries.attempts(connection, rollout_id)
        found = spans.query(connection, rollout_id)
        rollout = queries.rollout(connection, rollout_id)
        assert rollout is not None
        records.append(RolloutRecord(rollout, tuple(attempts), tuple(found)))
    return records


Packs = list[tuple[SpanPack, bool]]
"""Of one attempt, each with whether the attempt was superseded when it sent these spans."""


class PreparedRecord(NamedTuple):
    """A record that is validated and packed. Its rows are not stored."""

    rollout: RolloutRow
    attempts: list[tuple[AttemptRow, Packs]]


def prepare(record: RolloutRecord) -> PreparedRecord:
    """In the caller's thread. Raises ConfigError for what cannot be stored. A rollout that has not finished will wait
    again."""
    rollout = record.rollout
    waits = rollout.status not in FINISHED
    validation.check_status(rollout.status, ROLLOUT_TRANSITIONS, f" of rollout {rollout.rollout_id!r}")
    validation.check_time(rollout.start_time, "start_time")
    if not waits:
        validation.check_time(rollout.end_time, "end_time")
    _, row = mapping.new_rollout(rollout, rollout.start_time)
    row.status = "requeuing" if rollout.status in OPEN else rollout.status
    row.end_time = None if waits else rollout.end_time
    row.attempt_count = len(record.attempts)
    spans_by_attempt: dict[str, list[Span]] = {attempt.attempt_id: [] for attempt in record.attempts}
    for span in record.spans:
        if span.attempt_id not in spans_by_attempt:
            raise ConfigError(f"span {span.span_id!r} is of attempt {span.attempt_id!r}, which the record has not")
        spans_by_attempt[span.attempt_id].append(span)
    attempts: list[tuple[AttemptRow, Packs]] = []
    for number, attempt in enumerate(record.attempts, start=1):
        if attempt.sequence_id != number:
            raise ConfigError(f"attempt {attempt.attempt_id!r} has sequence_id={attempt.sequence_id}, not {number}")
        superseded = waits or number < len(record.attempts) or rollout.status == "cancelled"
        attempts.append((_attempt_row(row, attempt, superseded), _pack(spans_by_attempt[attempt.attempt_id])))
    return PreparedRecord(row, attempts)


def _pack(some: Sequence[Span]) -> Packs:
    """The spans of one attempt in packs of consecutive numbers, each sent while it was superseded or before."""
    packs: Packs = []
    for (superseded, _), group in groupby(enumerate(some), key=_run_of):
        run = [span for _, span in group]
        if superseded:
            run = [
                replace(span, attributes={k: v for k, v in span.attributes.items() if k != SUPERSEDED}) for span in run
            ]
        packs += [(pack.pack(run[at : at + MAX_PACK]), superseded) for at in range(0, len(run), MAX_PACK)]
    return packs


def _run_of(numbered: tuple[int, Span]) -> tuple[bool, int]:
    """Equal for neighbours that are in one pack."""
    index, span = numbered
    return span.attributes.get(SUPERSEDED) is True, span.sequence_id - index


def _attempt_row(rollout: RolloutRow, attempt: Attempt, superseded: bool) -> AttemptRow:
    validation.check_new_id(attempt.attempt_id, "attempt_id")
    validation.check_time(attempt.start_time, "start_time")
    for name, value in (("end_time", attempt.end_time), ("last_heartbeat_time", attempt.last_heartbeat_time)):
        if value is not None:
            validation.check_time(value, name)
    if attempt.worker_id is not None:
        validation.check_text(attempt.worker_id, "worker_id")
    validation.check_status(attempt.status, ATTEMPT_TRANSITIONS, f" of attempt {attempt.attempt_id!r}")
    status, metadata, end_time = str(attempt.status), attempt.metadata, attempt.end_time
    if status in OPEN:
        error = rollouts.failure("Superseded", "its rollout was taken to another store")
        status, metadata = "unresponsive", {**metadata, "error": error}
        end_time = attempt.start_time if attempt.last_heartbeat_time is None else attempt.last_heartbeat_time
    return AttemptRow(
        *(0, 0, int(attempt.sequence_id), attempt.attempt_id, status, attempt.start_time, end_time, attempt.worker_id),
        *(attempt.last_heartbeat_time, validation.dict_to_json(metadata, "metadata"), int(superseded)),
        rollout=rollout,
        stored=False,
    )


def add_records(tx: Tx, writer: SpanWriter, records: Sequence[PreparedRecord]) -> int:
    """Add the records whose id is unknown; returns how many there were."""
    new: dict[str, PreparedRecord] = {}
    for record in records:
        if tx.find_rollout(record.rollout.rollout_id) is None:
            new.setdefault(record.rollout.rollout_id, record)
    owners: dict[str, str | None] = {}
    tx.load_owners([attempt.attempt_id for record in new.values() for attempt, _ in record.attempts])
    for rollout_id, record in new.items():
        for attempt, _ in record.attempts:
            owner = owners.get(attempt.attempt_id, tx.owners[attempt.attempt_id])
            if owner is not None:
                raise ConflictError(f"attempt {attempt.attempt_id!r} is one of rollout {owner!r} already")
            owners[attempt.attempt_id] = rollout_id
    for record in new.values():
        rollout = rollouts.add(tx, record.rollout)
        if rollout.status not in WAITING:
            tx.finished.add(rollout.rollout_id)
        for prepared, packs in record.attempts:
            attempt = tx.add_attempt(structs.replace(prepared, rollout=rollout))
            for part, superseded in packs:
                writer.add_pack(tx, attempt, part, part.sequence_ids[0], int(superseded))
    return len(new)
