"""How PostgreSQL says what the store asks: types, tables, and statements of many rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

from sqlalchemy import Table
from sqlalchemy.dialects.postgresql import psycopg as dialects
from sqlalchemy.dialects.postgresql.base import PGDDLCompiler, PGTypeCompiler

from agentlightning.store import schema
from agentlightning.store.database import Insert, Update

_SERVERS: Final = (
    "CREATE TABLE servers (server TEXT PRIMARY KEY, number BIGINT NOT NULL, "
    "seen TIMESTAMPTZ NOT NULL DEFAULT now()) WITH (fillfactor = 50)"
)


class _Types(PGTypeCompiler):
    def visit_INTEGER(self, type_: Any, **kw: Any) -> str:  # noqa: N802
        """SQLite's integers have 64 bits, so these have."""
        return "BIGINT"


class _Queries(dialects.dialect.statement_compiler):
    def visit_sum_func(self, fn: Any, **kw: Any) -> str:
        """A sum of BIGINT would be a NUMERIC, and come back as a Decimal."""
        return f"sum({fn.clause_expr.element._compiler_dispatch(self, **kw)})::BIGINT"


class _Tables(PGDDLCompiler):
    def get_column_specification(self, column: Any, **kwargs: Any) -> str:
        """Texts are ordered by their bytes, as everywhere else, whatever the language of the database."""
        text = super().get_column_specification(column, **kwargs)
        return text.replace(" SERIAL", " BIGSERIAL").replace(" TEXT", ' TEXT COLLATE "C"')


class _Dialect(dialects.dialect):
    type_compiler_cls = _Types
    statement_compiler = _Queries
    ddl_compiler = _Tables
    supports_statement_cache = True


DIALECT: Final = _Dialect(paramstyle="format")

STEPS: Mapping[int, Sequence[str]] = {}
"""version -> what makes a database of the version before into one of it. PostgreSQL came with version 2."""


def ddl() -> list[str]:
    """The statements that make an empty schema into a store of SCHEMA_VERSION."""
    return [*schema.ddl(DIALECT), _SERVERS]


TABLES: Final = (*schema.metadata.tables, "servers")


@cache
def insert_sql(insert: Insert) -> bytes:
    values = ", ".join(_cast(insert.table, name) for name in insert.columns)
    text = f"INSERT INTO {insert.table.name} ({', '.join(map(_quoted, insert.columns))}) VALUES ({values})"
    if insert.unique:
        text += f" ON CONFLICT ({', '.join(map(_quoted, insert.unique))}) DO "
        text += f"UPDATE SET {_assigned(insert.replace)}" if insert.replace else "NOTHING"
    return text.encode()


def _assigned(names: Sequence[str]) -> str:
    return ", ".join(f"{_quoted(name)} = excluded.{_quoted(name)}" for name in names)


@cache
def update_sql(update: Update) -> bytes:
    key, *names = update.columns
    values = ", ".join(f"{_quoted(name)} = {_cast(update.table, name)}" for name in names)
    where = f"{_quoted(key)} = {_cast(update.table, key)}"
    return f"UPDATE {update.table.name} SET {values} WHERE {where}".encode()


def _cast(table: Table, name: str) -> str:
    return f"%s::{table.c[name].type.compile(dialect=DIALECT)}"


def _quoted(name: str) -> str:
    return f'"{name}"'
