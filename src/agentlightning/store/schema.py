"""The tables of a store, and the SQL that makes them.

Rows refer to one another by an integer `key`, which is also the order of creation; callers see only text ids. JSON is
text, token ids and log-probabilities are one binary column of a span. Anything that differs between database dialects
is said in this file and nowhere else.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
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
    func,
    literal_column,
    select,
    text,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import Dialect
from sqlalchemy.schema import CreateIndex, CreateTable

SCHEMA_VERSION = 1
"""Raised by one with each migration; see migrations.py."""

DIALECT: Dialect = sqlite.dialect()
insert = sqlite.insert
"""INSERT that knows ON CONFLICT."""

WAITING = text("status IN ('queuing', 'requeuing')")
OPEN = text("status IN ('preparing', 'running')")

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
    Column("key", Integer, primary_key=True),
    Column("rollout_id", Text, nullable=False, unique=True),
    Column("input", Text, nullable=False),
    Column("mode", Text),
    Column("resources_id", Text),
    Column("status", Text, nullable=False),
    Column("start_time", Float, nullable=False),
    Column("end_time", Float),
    Column("config", Text),
    Column("metadata", Text, nullable=False),
    Column("attempts", Integer, nullable=False),
    Index("rollouts_waiting", "key", sqlite_where=WAITING, postgresql_where=WAITING),
)

attempts = Table(
    "attempts",
    metadata,
    Column("key", Integer, primary_key=True),
    Column("rollout_key", Integer, nullable=False),
    Column("sequence_id", Integer, nullable=False),
    Column("attempt_id", Text, nullable=False, unique=True),
    Column("status", Text, nullable=False),
    Column("start_time", Float, nullable=False),
    Column("end_time", Float),
    Column("worker_id", Text),
    Column("last_heartbeat_time", Float),
    Column("metadata", Text, nullable=False),
    Column("superseded", Integer, nullable=False),
    Column("last_span", Integer, nullable=False),
    Column("timeout_at", Float),
    Column("silence", Float),
    Column("silent_at", Float),
    Index("attempts_of_rollout", "rollout_key", "sequence_id", unique=True),
    Index("attempts_timeout", "timeout_at", sqlite_where=text("timeout_at IS NOT NULL")),
    Index("attempts_silent", "silent_at", sqlite_where=text("silent_at IS NOT NULL")),
    Index("attempts_of_worker", "worker_id", sqlite_where=OPEN, postgresql_where=OPEN),
)

spans = Table(
    "spans",
    metadata,
    Column("key", Integer, primary_key=True),
    Column("attempt_key", Integer, nullable=False),
    Column("span_id", Text, nullable=False),
    Column("sequence_id", Integer, nullable=False),
    Column("trace_id", Text, nullable=False),
    Column("parent_id", Text),
    Column("name", Text, nullable=False),
    Column("start_time", Float, nullable=False),
    Column("end_time", Float),
    Column("status_code", Text, nullable=False),
    Column("status_message", Text),
    Column("attributes", Text, nullable=False),
    Column("events", Text),
    Column("resource", Text),
    Column("tokens", LargeBinary),
    Column("superseded", Integer, nullable=False),
    Index("spans_of_attempt", "attempt_key", "span_id", unique=True),
)

resources = Table(
    "resources",
    metadata,
    Column("key", Integer, primary_key=True),
    Column("resources_id", Text, nullable=False, unique=True),
    Column("version", Integer, nullable=False, unique=True),
    Column("create_time", Float, nullable=False),
    Column("body", Text, nullable=False),
)

workers = Table(
    "workers",
    metadata,
    Column("key", Integer, primary_key=True),
    Column("worker_id", Text, nullable=False, unique=True),
    Column("last_heartbeat_time", Float),
    Column("stats", Text, nullable=False),
)


def ddl() -> list[str]:
    """The statements that make an empty database into a store of SCHEMA_VERSION."""
    statements: list[str] = []
    for table in metadata.sorted_tables:
        statements.append(str(CreateTable(table).compile(dialect=DIALECT)))
        indexes = sorted(table.indexes, key=lambda index: str(index.name))
        statements.extend(str(CreateIndex(index).compile(dialect=DIALECT)) for index in indexes)
    return statements


def is_one_of(column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
    """`column` is in a JSON list given as parameter `name`: one statement for lists of every length."""
    values = func.json_each(bindparam(name)).table_valued("value")
    return column.in_(select(values.c.value))


def contains_text(column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
    """The text in parameter `name` is part of `column`, letter for letter."""
    return func.instr(column, bindparam(name)) > literal_column("0")


def given(name: str) -> BindParameter[Any]:
    """A parameter whose name may be that of a column."""
    return bindparam(f"the_{name}")
