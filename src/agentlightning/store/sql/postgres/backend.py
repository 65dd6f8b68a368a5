"""The PostgreSQL backend: prepares a database, connects to it and listens to other servers."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any, Final

import psycopg
from psycopg import sql

from agentlightning.errors import StoreError
from agentlightning.store.sql.migrations import migrate
from agentlightning.store.sql.postgres.connection import PostgresConnection, fetch_value
from agentlightning.store.sql.postgres.dialect import TABLES, ddl
from agentlightning.store.sql.postgres.listener import PostgresListener
from agentlightning.store.sql.postgres.server import PostgresServer
from agentlightning.store.sql.tables.backend import Wake

MIN_VERSION: Final = 130_000
"""PostgreSQL 13."""


class PostgresSchema:
    """The schema, for migrations. `connection` is closed afterwards, which releases the lock for the next server."""

    def __init__(self, connection: psycopg.Connection[Any], name: str, place: str) -> None:
        self.connection = connection
        self.name = name
        self._place = place
        """The name of PostgreSQL's schema; empty for the default one."""

    @contextlib.contextmanager
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


class PostgresDatabase(PostgresServer):
    """See tables/backend.py for each method."""

    def prepare(self) -> None:
        try:
            with contextlib.closing(self.open()) as connection:
                self._check(connection)
                migrate(PostgresSchema(connection, self.name, self.schema))
        except self.errors as error:
            raise self.explain(error) from error

    def _check(self, connection: psycopg.Connection[Any]) -> None:
        if connection.info.server_version < MIN_VERSION:
            raise StoreError(f"{self.name} is PostgreSQL {connection.info.server_version // 10_000}; use 13 or newer")
        if fetch_value(connection, "SELECT pg_is_in_recovery()"):
            raise StoreError(f"{self.name} is a standby, which takes no writes; give the address of the primary")

    def connect(self, read_only: bool) -> PostgresConnection:
        try:
            return PostgresConnection(self, read_only)
        except self.errors as error:
            raise self.explain(error) from error

    def listen(self, wake: Wake) -> PostgresListener:
        try:
            return PostgresListener(self.open, self.channel, self.id, wake, self.closing)
        except self.errors as error:
            raise self.explain(error) from error
