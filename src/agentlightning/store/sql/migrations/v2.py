"""Version 1 to 2: queues and priorities, leases of workers, and spans in packs instead of one row each.

SQLite only: PostgreSQL was added with version 2. Packs are encoded by spans/codec.py: there is one format, and a second
one would have to be distinguishable by its bytes, as one database would hold both.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterator
from itertools import groupby
from struct import Struct
from typing import Any, Final, cast

import orjson

from agentlightning.span import LOGPROBS, TOKEN_ATTRIBUTES, Span, SpanEvent
from agentlightning.store.sql.migrations.base import Schema
from agentlightning.store.sql.spans import codec

SPANS_IN_PACK: Final = 64
_counts = Struct("<3i")

_BEFORE: Final = (
    "DROP INDEX IF EXISTS attempts_of_rollout",
    "DROP INDEX IF EXISTS attempts_of_worker",
    "DROP INDEX IF EXISTS attempts_silent",
    "DROP INDEX IF EXISTS attempts_timeout",
    "DROP INDEX IF EXISTS rollouts_waiting",
    "DROP INDEX IF EXISTS spans_of_attempt",
    "CREATE INDEX spans_in_order ON spans (attempt_key, sequence_id, key)",
    "ALTER TABLE rollouts RENAME TO old_rollouts",
    "ALTER TABLE attempts RENAME TO old_attempts",
    "ALTER TABLE workers RENAME TO old_workers",
)

_TABLES: Final = (
    """
    CREATE TABLE rollouts (
        "key" INTEGER NOT NULL,
        rollout_id TEXT NOT NULL,
        input TEXT NOT NULL,
        mode TEXT,
        resources_id TEXT,
        status TEXT NOT NULL,
        start_time FLOAT NOT NULL,
        end_time FLOAT,
        config TEXT,
        metadata TEXT NOT NULL,
        attempts INTEGER NOT NULL,
        queue TEXT NOT NULL,
        priority INTEGER NOT NULL,
        PRIMARY KEY ("key"),
        UNIQUE (rollout_id)
    )
    """,
    """
    CREATE TABLE attempts (
        "key" INTEGER NOT NULL,
        rollout_key INTEGER NOT NULL,
        sequence_id INTEGER NOT NULL,
        attempt_id TEXT NOT NULL,
        status TEXT NOT NULL,
        start_time FLOAT NOT NULL,
        end_time FLOAT,
        worker_id TEXT,
        last_heartbeat_time FLOAT,
        metadata TEXT NOT NULL,
        superseded INTEGER NOT NULL,
        last_span INTEGER NOT NULL,
        spans INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        timeout_at FLOAT,
        silence FLOAT,
        silent_at FLOAT,
        PRIMARY KEY ("key"),
        UNIQUE (attempt_id)
    )
    """,
    """
    CREATE TABLE workers (
        "key" INTEGER NOT NULL,
        worker_id TEXT NOT NULL,
        last_heartbeat_time FLOAT,
        stats TEXT NOT NULL,
        lease_seconds FLOAT,
        lost_at FLOAT,
        lost INTEGER NOT NULL,
        last_error TEXT,
        PRIMARY KEY ("key"),
        UNIQUE (worker_id)
    )
    """,
    """
    CREATE TABLE span_packs (
        "key" INTEGER NOT NULL,
        attempt_key INTEGER NOT NULL,
        first_sequence INTEGER NOT NULL,
        count INTEGER NOT NULL,
        superseded INTEGER NOT NULL,
        sequences TEXT,
        ids BLOB NOT NULL,
        body BLOB NOT NULL,
        PRIMARY KEY ("key")
    )
    """,
    """
    CREATE TABLE token_blocks (
        digest BLOB NOT NULL,
        parent BLOB NOT NULL,
        ids BLOB NOT NULL,
        PRIMARY KEY (digest)
    )
    """,
    """
    CREATE TABLE pack_blocks (
        pack_key INTEGER NOT NULL,
        digest BLOB NOT NULL,
        PRIMARY KEY (pack_key, digest)
    )
    """,
    """
    CREATE TABLE queues (
        "key" INTEGER NOT NULL,
        name TEXT NOT NULL,
        max_open INTEGER,
        PRIMARY KEY ("key"),
        UNIQUE (name)
    )
    """,
)

_ROWS: Final = (
    "INSERT INTO rollouts (key, rollout_id, input, mode, resources_id, status, start_time, end_time, config, metadata, "
    "attempts, queue, priority) SELECT key, rollout_id, input, mode, resources_id, status, start_time, end_time, "
    "config, metadata, attempts, coalesce(mode, 'default'), 0 FROM old_rollouts ORDER BY key",
    "INSERT INTO attempts (key, rollout_key, sequence_id, attempt_id, status, start_time, end_time, worker_id, "
    "last_heartbeat_time, metadata, superseded, last_span, spans, bytes, timeout_at, silence, silent_at) "
    "SELECT key, rollout_key, sequence_id, attempt_id, status, start_time, end_time, worker_id, last_heartbeat_time, "
    "metadata, superseded, last_span, 0, 0, timeout_at, silence, silent_at FROM old_attempts ORDER BY key",
    "INSERT INTO workers (key, worker_id, last_heartbeat_time, stats, lease_seconds, lost_at, lost, last_error) "
    "SELECT key, worker_id, last_heartbeat_time, stats, NULL, NULL, 0, NULL FROM old_workers ORDER BY key",
    "INSERT INTO queues (name) SELECT queue FROM (SELECT DISTINCT queue FROM rollouts) ORDER BY queue",
    "DROP TABLE old_rollouts",
    "DROP TABLE old_attempts",
    "DROP TABLE old_workers",
)

_INDEXES: Final = (
    'CREATE INDEX rollouts_waiting ON rollouts (queue, priority DESC, "key") '
    "WHERE status IN ('queuing', 'requeuing')",
    "CREATE INDEX rollouts_open ON rollouts (queue) WHERE status IN ('preparing', 'running')",
    "CREATE INDEX rollouts_finished ON rollouts (end_time, status) WHERE end_time IS NOT NULL",
    "CREATE UNIQUE INDEX attempts_of_rollout ON attempts (rollout_key, sequence_id)",
    "CREATE INDEX attempts_timeout ON attempts (timeout_at) WHERE timeout_at IS NOT NULL",
    "CREATE INDEX attempts_silent ON attempts (silent_at) WHERE silent_at IS NOT NULL",
    "CREATE INDEX attempts_of_worker ON attempts (worker_id) WHERE status IN ('preparing', 'running')",
    "CREATE INDEX span_packs_of_attempt ON span_packs (attempt_key, first_sequence)",
    "CREATE INDEX token_blocks_of_parent ON token_blocks (parent)",
    "CREATE INDEX pack_blocks_of_digest ON pack_blocks (digest)",
    "CREATE INDEX workers_lease ON workers (lost_at) WHERE lost_at IS NOT NULL",
)


def migrate(schema: Schema) -> None:
    """Keeps every row. Spans are streamed, so that memory stays bounded."""
    for statement in (*_BEFORE, *_TABLES, *_ROWS, *_INDEXES):
        schema.execute(statement)
    _pack_spans(cast("sqlite3.Connection", schema.connection))
    schema.execute("DROP TABLE spans")


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
    pack = codec.pack(spans)
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
