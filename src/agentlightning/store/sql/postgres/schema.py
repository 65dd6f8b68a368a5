"""The schema of a PostgreSQL database, for migrations."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql

from agentlightning.errors import StoreError
from agentlightning.store.sql.postgres.dialect import TABLES, ddl


class PostgresSchema:
    """`connection` is closed afterwards, which releases the lock for other servers that are starting."""

    def __init__(self, connection: psycopg.Connection[Any], name: str, place: str) -> None:
        self.connection = connection
        self.name = name
        self._place = place
        """The name of PostgreSQL's schema; empty for the default one."""

    @contextmanager
    def exclusive(self) -> Generator[None]:
        lock = "SELECT pg_advisory_lock(hashtextextended('agentlightning ' || %s, 0))"
        self.connection.execute(lock, [self._place])
        with self.connection.transaction():
            yield

    def about(self) -> dict[str, str]:
        if not self._has("about"):
            return {}
        return dict(self.connection.execute("SELECT name, value FROM about").fetchall())

    def create(self) -> None:
        if self._place:
            self.connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(self._place)))
        taken = min([name for name in TABLES if self._has(name)], default=None)
        if taken is not None:
            raise StoreError(
                f"{self.name} has a table {taken!r} that is not ours; give another database, or a schema of its own "
                "with ?schema=NAME"
            )
        for statement in ddl():
            self.execute(statement)

    def _has(self, table: str) -> bool:
        row = self.connection.execute("SELECT to_regclass(%s) IS NOT NULL", [table]).fetchone()
        return bool(row and row[0])

    def execute(self, statement: str) -> psycopg.Cursor[Any]:
        return self.connection.execute(statement.encode())
