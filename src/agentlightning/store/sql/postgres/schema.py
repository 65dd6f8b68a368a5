"""The schema of a PostgreSQL database, for migrations."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg import sql

from agentlightning.errors import StoreError
from agentlightning.store.sql.migrations.base import Kind
from agentlightning.store.sql.postgres.dialect import TABLES, ddl
from agentlightning.store.sql.postgres.errors import OUTDATED
from agentlightning.store.sql.tables.schema import SCHEMA_VERSION

ALLOW: Final = f"SET agentlightning.schema = '{SCHEMA_VERSION}'; "
"""Sent over each connection: the schema version of this process, which the guard compares."""
_NAME: Final = "agentlightning_guard"
_REFUSE: Final = f"""
CREATE OR REPLACE FUNCTION {_NAME}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    RAISE EXCEPTION 'a newer version of agentlightning has brought this store to schema %', tg_argv[0]
    USING ERRCODE = '{OUTDATED}', HINT = 'end this server and run: pip install --upgrade agentlightning';
END $$
"""
_GUARD: Final = (
    "CREATE TRIGGER {name} BEFORE INSERT OR UPDATE ON servers FOR EACH STATEMENT "
    "WHEN (current_setting('agentlightning.schema', true) IS DISTINCT FROM '{version}') "
    "EXECUTE FUNCTION {name}('{version}')"
)
"""Every transaction that writes ends with a write to this table. The condition costs some microseconds."""


class PostgresSchema:
    """`connection` is closed afterwards, which releases the lock for other servers that are starting."""

    kind: Kind = "postgresql"
    elsewhere = "database"

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

    def version(self) -> int:
        if not self._has("about"):
            return 0
        row = self.connection.execute("SELECT value FROM about WHERE name = 'schema_version'").fetchone()
        return int(row[0]) if row else 0

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

    def remove_guard(self) -> None:
        self.execute(f"DROP TRIGGER IF EXISTS {_NAME} ON servers")

    def install_guard(self, version: int) -> None:
        self.execute(_REFUSE)
        self.execute(_GUARD.format(name=_NAME, version=version))
