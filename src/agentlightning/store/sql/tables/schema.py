"""The tables of a store and their DDL, with the SQL functions that differ between dialects.

Rows refer to one another by an integer `key`, which is also the order of creation; callers see only text ids. JSON is
stored as text. Spans are rows of `span_packs` (see spans/codec.py), long prompts are rows of `token_blocks`.
"""

from __future__ import annotations

import functools
from typing import Any

from sqlalchemy import (
    BigInteger,
    BindParameter,
    Column,
    ColumnElement,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    bindparam,
    text,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import Dialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import CreateIndex, CreateTable

SCHEMA_VERSION = 1
"""Incremented by each migration; see migrations.py."""

WAITING = text("status IN ('queuing', 'requeuing')")
OPEN = text("status IN ('preparing', 'running')")

_Key = BigInteger().with_variant(Integer, "sqlite")
_Number = Float().with_variant(postgresql.DOUBLE_PRECISION(), "postgresql")
_Count = BigInteger().with_variant(Integer, "sqlite")

metadata = MetaData()

about = Table(
    "about",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),
)

rollouts = Table(
    "rollouts",
    metadata,
    Column("key", _Key, primary_key=True),
    Column("rollout_id", Text, nullable=False, unique=True),
    Column("input", Text, nullable=False),
    Column("mode", Text),
    Column("resources_id", Text),
    Column("status", Text, nullable=False),
    Column("start_time", _Number, nullable=False),
    Column("end_time", _Number),
    Column("config", Text),
    Column("metadata", Text, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("queue", Text, nullable=False),
    Column("priority", Integer, nullable=False),
    Index("rollouts_waiting", "queue", text("priority DESC"), "key", sqlite_where=WAITING, postgresql_where=WAITING),
    Index("rollouts_open", "queue", sqlite_where=OPEN, postgresql_where=OPEN),
    Index(
        "rollouts_finished",
        "end_time",
        "status",
        sqlite_where=text("end_time IS NOT NULL"),
        postgresql_where=text("end_time IS NOT NULL"),
    ),
)

attempts = Table(
    "attempts",
    metadata,
    Column("key", _Key, primary_key=True),
    Column("rollout_key", _Key, nullable=False),
    Column("sequence_id", Integer, nullable=False),
    Column("attempt_id", Text, nullable=False, unique=True),
    Column("status", Text, nullable=False),
    Column("start_time", _Number, nullable=False),
    Column("end_time", _Number),
    Column("worker_id", Text),
    Column("last_heartbeat_time", _Number),
    Column("metadata", Text, nullable=False),
    Column("superseded", Integer, nullable=False),
    Column("last_span", _Count, nullable=False),
    Column("spans", Integer, nullable=False),
    Column("bytes", _Count, nullable=False),
    Column("timeout_at", _Number),
    Column("silence", _Number),
    Column("silent_at", _Number),
    Column("claims", Integer, nullable=False, server_default="1"),
    Index("attempts_of_rollout", "rollout_key", "sequence_id", unique=True),
    Index(
        "attempts_timeout",
        "timeout_at",
        sqlite_where=text("timeout_at IS NOT NULL"),
        postgresql_where=text("timeout_at IS NOT NULL"),
    ),
    Index(
        "attempts_silent",
        "silent_at",
        sqlite_where=text("silent_at IS NOT NULL"),
        postgresql_where=text("silent_at IS NOT NULL"),
    ),
    Index("attempts_of_worker", "worker_id", sqlite_where=OPEN, postgresql_where=OPEN),
)
"""`last_span` is the highest sequence number assigned, `spans` and `bytes` are the totals of its packs. `silence` is
how long it may send no heartbeat, `silent_at` the deadline that follows from it, `timeout_at` the deadline of the
attempt; both on the steady clock. `claims` is how often its claim was answered: more than once if it was repeated."""

span_packs = Table(
    "span_packs",
    metadata,
    Column("key", _Key, primary_key=True),
    Column("attempt_key", _Key, nullable=False),
    Column("first_sequence", _Count, nullable=False),
    Column("count", Integer, nullable=False),
    Column("superseded", Integer, nullable=False),
    Column("ids", LargeBinary, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Index("span_packs_of_attempt", "attempt_key", "first_sequence"),
)
"""`count` spans, MAX_PACK at most, whose sequence numbers are consecutive and begin with `first_sequence`."""

MAX_PACK = 128

span_places = Table(
    "span_places",
    metadata,
    Column("attempt_key", _Key, primary_key=True),
    Column("span_id", Text, primary_key=True),
    Column("pack_key", _Key, nullable=False),
    sqlite_with_rowid=False,
)
"""Which pack has a span, so that a list continues after it at once."""

token_blocks = Table(
    "token_blocks",
    metadata,
    Column("digest", LargeBinary, primary_key=True),
    Column("parent", LargeBinary, nullable=False),
    Column("ids", LargeBinary, nullable=False),
    Index("token_blocks_of_parent", "parent"),
)

pack_blocks = Table(
    "pack_blocks",
    metadata,
    Column("pack_key", _Key, primary_key=True),
    Column("digest", LargeBinary, primary_key=True),
    Index("pack_blocks_of_digest", "digest"),
)
"""The chains of blocks that a pack refers to, by the digest of their last block."""

resources = Table(
    "resources",
    metadata,
    Column("key", _Key, primary_key=True),
    Column("resources_id", Text, nullable=False, unique=True),
    Column("version", Integer, nullable=False, unique=True),
    Column("create_time", _Number, nullable=False),
    Column("body", Text, nullable=False),
    Column("update_time", _Number),
)
"""`update_time` is when the body was last replaced, NULL if never."""

workers = Table(
    "workers",
    metadata,
    Column("key", _Key, primary_key=True),
    Column("worker_id", Text, nullable=False, unique=True),
    Column("last_heartbeat_time", _Number),
    Column("stats", Text, nullable=False),
    Column("lease_seconds", _Number),
    Column("lost_at", _Number),
    Column("lost", Integer, nullable=False),
    Column("last_error", Text),
    Index(
        "workers_lease",
        "lost_at",
        sqlite_where=text("lost_at IS NOT NULL"),
        postgresql_where=text("lost_at IS NOT NULL"),
    ),
)
"""`lost_at` is when its lease expires, on the steady clock."""

queues = Table(
    "queues",
    metadata,
    Column("key", _Key, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("max_open", Integer),
)

counts = Table(
    "counts",
    metadata,
    Column("shard", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("queue", Text, primary_key=True),
    Column("number", _Count, nullable=False),
    sqlite_with_rowid=False,
    postgresql_with={"fillfactor": 50},
)
"""`name` is a status of the rollouts of `queue`, or something counted in total. `shard` is the server that counts. See
session/counters.py."""

answered_calls = Table(
    "answered_calls",
    metadata,
    Column("key", Text, primary_key=True),
    Column("digest", LargeBinary, nullable=False),
    Column("answered_at", _Number, nullable=False),
    Column("answer", LargeBinary),
    Index("answered_calls_in_order", "answered_at"),
)
"""Calls with an idempotency key: a digest of their arguments, and their result (NULL if it was too large to store)."""

clocks = Table(
    "clocks",
    metadata,
    Column("name", Text, primary_key=True),
    Column("reading", _Number, nullable=False),
    Column("steady", _Number, nullable=False),
)
"""When a server was last alive: `steady` is the steady time at that moment (see clock.py), `reading` that of the
machine's monotonic clock (SQLite) or of the database's own clock (PostgreSQL). One row, whose name is empty."""


def columns(table: Table, *without: str) -> tuple[str, ...]:
    """The names of the columns of a table."""
    return tuple(name for name in table.columns.keys() if name not in without)  # noqa: SIM118


@functools.cache
def ddl(dialect: Dialect) -> tuple[str, ...]:
    """The statements that create a store of SCHEMA_VERSION in an empty database."""
    statements: list[str] = []
    for table in metadata.sorted_tables:
        statements.append(str(CreateTable(table).compile(dialect=dialect)))
        indexes = sorted(table.indexes, key=lambda index: str(index.name))
        statements.extend(str(CreateIndex(index).compile(dialect=dialect)) for index in indexes)
    return tuple(statements)


# -- functions that differ between dialects --------------------------------------------------------------------------


class _Fragment(ColumnElement[Any]):
    """The text of its dialect, around its parts."""

    inherit_cache = False

    def __init__(self, sqlite: str, postgresql: str, *parts: ColumnElement[Any]) -> None:
        self.texts = {"sqlite": sqlite, "postgresql": postgresql}
        self.parts = parts


@compiles(_Fragment)
def _compile(element: _Fragment, compiler: Any, **options: Any) -> str:
    parts = [compiler.process(part, **options) for part in element.parts]
    return element.texts[compiler.dialect.name].format(*parts)


def in_list(column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
    """`column` is in the list that is parameter `name`: one statement for lists of every length."""
    return _Fragment("{} IN (SELECT value FROM json_each({}))", "{} = ANY ({})", column, bindparam(name))


def contains_text(column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
    """The text that is parameter `name` is a substring of `column`, case-sensitively."""
    return _Fragment("instr({}, {}) > 0", "position({1} IN {0}) > 0", column, bindparam(name))


def position() -> ColumnElement[int]:
    """The place of a rollout in order of creation."""
    return _Fragment('rollouts."key"', "coalesce(rollouts.position, rollouts.key)")


def param(name: str) -> BindParameter[Any]:
    """A parameter that may have the name of a column."""
    return bindparam(f"the_{name}")
