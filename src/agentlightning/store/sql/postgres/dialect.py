"""The PostgreSQL dialect: types, DDL, statements of many rows, and the encoding of values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, Final, cast

import psycopg
from sqlalchemy import LargeBinary, Table
from sqlalchemy.dialects.postgresql import psycopg as dialects
from sqlalchemy.dialects.postgresql.base import PGDDLCompiler, PGTypeCompiler

from agentlightning.store.sql.tables import schema
from agentlightning.store.sql.tables.backend import Insert, Update

_SERVERS: Final = (
    "CREATE TABLE servers (server TEXT PRIMARY KEY, number BIGINT NOT NULL, "
    "seen TIMESTAMPTZ NOT NULL DEFAULT now()) WITH (fillfactor = 50)"
)


class _Types(PGTypeCompiler):
    def visit_INTEGER(self, type_: Any, **kw: Any) -> str:  # noqa: N802
        """64 bits, like those of SQLite."""
        return "BIGINT"


class _Queries(dialects.dialect.statement_compiler):
    def visit_sum_func(self, fn: Any, **kw: Any) -> str:
        """A sum of BIGINT is a NUMERIC, which would be returned as a Decimal."""
        return f"sum({fn.clause_expr.element._compiler_dispatch(self, **kw)})::BIGINT"


class _Tables(PGDDLCompiler):
    def get_column_specification(self, column: Any, **kwargs: Any) -> str:
        """Text is ordered by its bytes, as in SQLite, whatever the locale of the database."""
        text = super().get_column_specification(column, **kwargs)
        return text.replace(" SERIAL", " BIGSERIAL").replace(" TEXT", ' TEXT COLLATE "C"')


class _Dialect(dialects.dialect):
    type_compiler_cls = _Types
    statement_compiler = _Queries
    ddl_compiler = _Tables
    supports_statement_cache = True


DIALECT: Final = _Dialect(paramstyle="numeric_dollar")

MERGE_COUNTERS: Final = (
    "WITH gone AS (DELETE FROM counts WHERE shard <> '' AND shard NOT IN (SELECT server FROM servers) RETURNING *) "
    "INSERT INTO counts SELECT '', name, queue, sum(number) FROM gone GROUP BY name, queue ORDER BY name, queue "
    "ON CONFLICT (shard, name, queue) DO UPDATE SET number = counts.number + excluded.number"
)
"""Merge the counter rows of servers that are gone into the shared rows. A server that comes back starts from zero."""


POSITION: Final = "coalesce(position, key)"
"""Rollouts in order of creation: that of their keys, except for those that were committed late (see connection.py)."""
_POSITIONS: Final = (
    "ALTER TABLE rollouts ADD COLUMN position BIGINT",
    f"CREATE INDEX rollouts_position ON rollouts (({POSITION}))",
    f"CREATE INDEX rollouts_status ON rollouts (status, ({POSITION}))",
    "CREATE SEQUENCE rollouts_shown MINVALUE 0",
)


def ddl() -> list[str]:
    """The statements that create a store of SCHEMA_VERSION in an empty schema."""
    return [*schema.ddl(DIALECT), _SERVERS, *_POSITIONS]


TABLES: Final = (*schema.metadata.tables, "servers")


def bulk_values(statement: Insert | Update, rows: int) -> str:
    """($1::BIGINT, $2::TEXT), ($3::BIGINT, ...): the parameters of so many rows, with the types of their columns."""
    types = [f"::{statement.table.c[name].type.compile(dialect=DIALECT)}" for name in statement.columns]
    numbers = count(1)
    lines = [", ".join(f"${next(numbers)}{kind}" for kind in types) for _ in range(rows)]
    return ", ".join(f"({line})" for line in lines)


# -- values ----------------------------------------------------------------------------------------------------------


def encode(value: Any) -> bytes | None:
    """A value as a parameter of libpq: bytes unchanged, everything else as text."""
    if value is None or type(value) is bytes:
        return value
    if isinstance(value, str):
        text = str.encode(value)
        if b"\0" in text:  # libpq would truncate it there
            raise psycopg.DataError(f"PostgreSQL keeps no text with a NUL in it: {value[:80]!r}")
        return text
    if isinstance(value, list):
        return b"{" + b",".join([_element(each) for each in cast("list[Any]", value)]) + b"}"
    return _number(value) if isinstance(value, (int, float)) else bytes(value)


def _element(value: Any) -> bytes:
    if not isinstance(value, str):
        return _number(value)
    text = encode(value)
    assert text is not None
    return b'"' + text.replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"'


def _number(value: int | float) -> bytes:
    """Uses the repr of int and float even for a subclass, as that of an enumeration differs."""
    return (int.__repr__(int(value)) if isinstance(value, int) else float.__repr__(value)).encode()


def formats(columns: Sequence[str], table: Table) -> list[int]:
    """For each column, libpq's format: 1 (binary) for bytes, 0 (text) for everything else."""
    return [int(isinstance(table.c[name].type, LargeBinary)) for name in columns]
