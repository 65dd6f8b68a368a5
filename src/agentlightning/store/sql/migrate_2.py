"""Version 1 to 2: queues and priorities, leases of workers, and spans in packs instead of one row for each."""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterator
from itertools import groupby
from struct import Struct
from typing import Any, Final

import orjson
from sqlalchemy import Table
from sqlalchemy.dialects import sqlite
from sqlalchemy.schema import CreateIndex, CreateTable

from agentlightning.span import LOGPROBS, TOKEN_ATTRIBUTES, Span, SpanEvent
from agentlightning.store.sql import packs
from agentlightning.store.sql.schema import (
    attempts,
    pack_blocks,
    queues,
    rollouts,
    span_packs,
    token_blocks,
    workers,
)

SPANS_IN_PACK: Final = 64
_dialect = sqlite.dialect()
_counts = Struct("<3i")


def migrate(connection: sqlite3.Connection) -> None:
    """Every row is kept. Spans are read one by one, so that memory stays bounded."""
    for name in (
        "attempts_of_rollout",
        "attempts_of_worker",
        "attempts_silent",
        "attempts_timeout",
        "rollouts_waiting",
    ):
        connection.execute(f"DROP INDEX IF EXISTS {name}")
    connection.execute("DROP INDEX IF EXISTS spans_of_attempt")
    connection.execute("CREATE INDEX spans_in_order ON spans (attempt_key, sequence_id, key)")
    _remake(connection, rollouts, {"queue": "coalesce(mode, 'default')", "priority": "0"})
    _remake(connection, attempts, {"spans": "0", "bytes": "0"})
    _remake(connection, workers, {"lease_seconds": "NULL", "lost_at": "NULL", "lost": "0", "last_error": "NULL"})
    for table in (span_packs, token_blocks, pack_blocks, queues):
        _make(connection, table)
    connection.execute(
        "INSERT INTO queues (name) SELECT queue FROM (SELECT DISTINCT queue FROM rollouts) ORDER BY queue"
    )
    _pack_spans(connection)
    connection.execute("DROP TABLE spans")


def _make(connection: sqlite3.Connection, table: Table) -> None:
    connection.execute(str(CreateTable(table).compile(dialect=_dialect)))
    for index in sorted(table.indexes, key=lambda index: str(index.name)):
        connection.execute(str(CreateIndex(index).compile(dialect=_dialect)))


def _remake(connection: sqlite3.Connection, table: Table, new: dict[str, str]) -> None:
    """A table with new columns, each filled by an expression."""
    connection.execute(f"ALTER TABLE {table.name} RENAME TO old_{table.name}")
    _make(connection, table)
    names = [column.name for column in table.columns]
    columns = ", ".join(f'"{name}"' for name in names)
    values = ", ".join(new.get(name, f'"{name}"') for name in names)
    connection.execute(f"INSERT INTO {table.name} ({columns}) SELECT {values} FROM old_{table.name} ORDER BY key")
    connection.execute(f"DROP TABLE old_{table.name}")


def _pack_spans(connection: sqlite3.Connection) -> None:
    rows = connection.execute(
        "SELECT attempt_key, superseded, sequence_id, span_id, trace_id, parent_id, name, start_time, end_time, "
        "status_code, status_message, attributes, events, resource, tokens FROM spans "
        "ORDER BY attempt_key, sequence_id, key"
    )
    for (attempt_key, superseded), group in groupby(rows, key=lambda row: (row[0], row[1])):
        for chunk in _chunks(group):
            _write_pack(connection, attempt_key, superseded, [_span(row) for row in chunk])


def _chunks(rows: Iterator[Any]) -> Iterator[list[Any]]:
    chunk: list[Any] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == SPANS_IN_PACK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _write_pack(connection: sqlite3.Connection, attempt_key: int, superseded: int, spans: list[Span]) -> None:
    pack = packs.pack(spans)
    numbers = list(pack.sequence_ids)
    consecutive = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    body = pack.body
    cursor = connection.execute(
        "INSERT INTO span_packs (attempt_key, first_sequence, count, superseded, sequences, ids, body) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            *(attempt_key, min(numbers), len(numbers), superseded),
            *(None if consecutive else orjson.dumps(numbers).decode(), pack.ids, body),
        ),
    )
    connection.executemany(
        "INSERT OR IGNORE INTO token_blocks (digest, parent, ids) VALUES (?, ?, ?)",
        [(block.digest, block.parent, block.ids) for block in pack.blocks()],
    )
    connection.executemany(
        "INSERT OR IGNORE INTO pack_blocks (pack_key, digest) VALUES (?, ?)",
        [(cursor.lastrowid, chain.head) for chain in pack.chains],
    )
    connection.execute(
        "UPDATE attempts SET spans = spans + ?, bytes = bytes + ? WHERE key = ?",
        (len(numbers), len(body) + 9 * len(numbers), attempt_key),
    )


def _span(row: Any) -> Span:
    (_, _, sequence_id, span_id, trace_id, parent_id, name, start_time, end_time, code, message, text, events, resource,
     tokens) = row  # fmt: skip
    attributes: dict[str, Any] = orjson.loads(text)
    if tokens is not None:
        attributes |= _tokens(tokens)
    return Span(
        rollout_id="",
        attempt_id="",
        name=name,
        start_time=start_time,
        end_time=end_time,
        sequence_id=sequence_id,
        trace_id=trace_id,
        span_id=span_id,
        parent_id=parent_id,
        status_code=code,
        status_message=message,
        attributes=attributes,
        events=() if events is None else tuple(SpanEvent(*event) for event in orjson.loads(events)),
        resource={} if resource is None else orjson.loads(resource),
    )


def _tokens(data: bytes) -> dict[str, list[Any]]:
    """Version 1: three counts (-1: absent), then int32, int32 and float32, little endian."""
    attributes: dict[str, list[Any]] = {}
    start = _counts.size
    for name, count in zip(TOKEN_ATTRIBUTES, _counts.unpack_from(data), strict=True):
        if count >= 0:
            numbers: array[Any] = array("f" if name == LOGPROBS else "i")
            numbers.frombytes(data[start : start + 4 * count])
            attributes[name] = numbers.tolist()
            start += 4 * count
    return attributes
