"""Reads and adds whole rollouts with their attempts and spans: what export and import move between stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from agentlightning.errors import ConfigError, ConflictError
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
from agentlightning.store import validation
from agentlightning.store.sql import queries
from agentlightning.store.sql.lifecycle import transitions
from agentlightning.store.sql.session.rows import OPEN, PendingPack
from agentlightning.store.sql.session.unit_of_work import UnitOfWork
from agentlightning.store.sql.spans import codec, read
from agentlightning.store.sql.spans.codec import SpanPack
from agentlightning.store.sql.spans.read import SpanQuery
from agentlightning.store.sql.tables import mapping
from agentlightning.store.sql.tables.backend import Connection
from agentlightning.store.sql.tables.mapping import Row
from agentlightning.store.sql.tables.schema import MAX_PACK
from agentlightning.store.types import RolloutRecord


def read_records(connection: Connection, rollout_ids: Sequence[str]) -> list[RolloutRecord]:
    records: list[RolloutRecord] = []
    for rollout_id in rollout_ids:
        attempts = queries.attempts(connection, rollout_id)
        spans = read.query_spans(connection, SpanQuery(rollout_id, None, None, -1, 0))
        rollout = queries.rollout(connection, rollout_id)
        assert rollout is not None
        records.append(RolloutRecord(rollout, tuple(attempts), tuple(spans)))
    return records


# -- preparing, in the caller's thread -------------------------------------------------------------------------------


class PreparedPack(NamedTuple):
    pack: SpanPack
    body: bytes
    superseded: bool
    """Whether the attempt was superseded when it sent these spans."""


@dataclass(frozen=True, slots=True)
class PreparedRecord:
    """A record that is validated and packed."""

    rollout_id: str
    columns: Row
    """Of the rollout, after `key`."""
    attempts: tuple[tuple[Row, tuple[PreparedPack, ...]], ...]
    """(columns after `rollout_key`, its packs)."""


def prepare(record: RolloutRecord) -> PreparedRecord:
    """Raises ConfigError for what cannot be stored. A rollout that has not finished will wait again."""
    rollout = record.rollout
    waits = rollout.status not in FINISHED
    _check_rollout(rollout)
    request = EnqueueRolloutRequest(
        rollout.input, rollout.mode, rollout.resources_id, rollout.config, rollout.metadata, rollout.rollout_id,
        rollout.queue, rollout.priority,
    )  # fmt: skip
    new, columns = mapping.new_rollout(request, rollout.start_time)
    columns = (
        *columns[:4],
        "requeuing" if rollout.status in OPEN else rollout.status,
        rollout.start_time,
        None if waits else rollout.end_time,
        *columns[7:9],
        len(record.attempts),
        *columns[10:],
    )
    spans_by_attempt: dict[str, list[Span]] = {attempt.attempt_id: [] for attempt in record.attempts}
    for span in record.spans:
        if span.attempt_id not in spans_by_attempt:
            raise ConfigError(f"span {span.span_id!r} is of attempt {span.attempt_id!r}, which the record has not")
        spans_by_attempt[span.attempt_id].append(span)
    attempts: list[tuple[Row, tuple[PreparedPack, ...]]] = []
    for number, attempt in enumerate(record.attempts, start=1):
        if attempt.sequence_id != number:
            raise ConfigError(f"attempt {attempt.attempt_id!r} has sequence_id={attempt.sequence_id}, not {number}")
        superseded = waits or number < len(record.attempts) or rollout.status == "cancelled"
        packs = _pack(spans_by_attempt[attempt.attempt_id])
        attempts.append((_attempt_columns(attempt, superseded, packs), packs))
    return PreparedRecord(new.rollout_id, columns, tuple(attempts))


def _check_rollout(rollout: Rollout) -> None:
    if rollout.status not in ROLLOUT_TRANSITIONS:
        raise ConfigError(f"status={rollout.status!r} of rollout {rollout.rollout_id!r} is not a rollout status")
    validation.check_time(rollout.start_time, "start_time")
    if rollout.status in FINISHED:
        validation.check_time(rollout.end_time, "end_time")


def _pack(spans: Sequence[Span]) -> tuple[PreparedPack, ...]:
    """The spans of one attempt in packs of consecutive numbers, each sent while it was superseded or before."""
    groups: list[tuple[bool, list[Span]]] = []
    for span in spans:
        superseded = span.attributes.get(SUPERSEDED) is True
        if superseded:
            span = replace(span, attributes={k: v for k, v in span.attributes.items() if k != SUPERSEDED})
        last = groups[-1] if groups else (not superseded, [])
        if last[0] != superseded or last[1][-1].sequence_id + 1 != span.sequence_id or len(last[1]) == MAX_PACK:
            last = (superseded, list[Span]())
            groups.append(last)
        last[1].append(span)
    packs = ((codec.pack(group), superseded) for superseded, group in groups)
    return tuple(PreparedPack(pack, pack.body, superseded) for pack, superseded in packs)


def _attempt_columns(attempt: Attempt, superseded: bool, packs: Sequence[PreparedPack]) -> Row:
    """The columns of an attempt after `rollout_key`."""
    validation.check_new_id(attempt.attempt_id, "attempt_id")
    validation.check_time(attempt.start_time, "start_time")
    for name, value in (("end_time", attempt.end_time), ("last_heartbeat_time", attempt.last_heartbeat_time)):
        if value is not None:
            validation.check_time(value, name)
    if attempt.worker_id is not None:
        validation.check_text(attempt.worker_id, "worker_id")
    if attempt.status not in ATTEMPT_TRANSITIONS:
        raise ConfigError(f"status={attempt.status!r} of attempt {attempt.attempt_id!r} is not an attempt status")
    status, metadata, end_time = str(attempt.status), attempt.metadata, attempt.end_time
    if status in OPEN:
        error = transitions.failure("Superseded", "its rollout was taken to another store")
        status, metadata = "unresponsive", {**metadata, "error": error}
        end_time = attempt.start_time if attempt.last_heartbeat_time is None else attempt.last_heartbeat_time
    return (
        attempt.sequence_id,
        attempt.attempt_id,
        status,
        attempt.start_time,
        end_time,
        attempt.worker_id,
        attempt.last_heartbeat_time,
        validation.dict_to_json(metadata, "metadata"),
        int(superseded),
        max((max(each.pack.sequence_ids) for each in packs), default=0),
        sum(each.pack.count for each in packs),
        sum(len(each.body) + 9 * each.pack.count for each in packs),
        None,
        None,
        None,
    )


# -- adding ----------------------------------------------------------------------------------------------------------


def add_records(unit: UnitOfWork, records: Sequence[PreparedRecord]) -> int:
    """Add the records whose id is unknown; returns how many there were."""
    new = [record for record in records if unit.find_rollout(record.rollout_id) is None]
    new = list({record.rollout_id: record for record in reversed(new)}.values())[::-1]
    owners = unit.owners([columns[1] for record in new for columns, _ in record.attempts])
    for record in new:
        for columns, _ in record.attempts:
            attempt_id = columns[1]
            if attempt_id in owners:
                raise ConflictError(f"attempt {attempt_id!r} is one of rollout {owners[attempt_id]!r} already")
            owners[attempt_id] = record.rollout_id
    for record in new:
        rollout = unit.add_rollout(record.columns)
        if rollout.status not in WAITING:
            unit.finished.add(rollout.rollout_id)
        for columns, packs in record.attempts:
            attempt = unit.add_attempt(rollout, columns)
            for pack, body, superseded in packs:
                unit.add_pack(PendingPack(attempt, pack, body, pack.sequence_ids[0], int(superseded)))
    return len(new)
