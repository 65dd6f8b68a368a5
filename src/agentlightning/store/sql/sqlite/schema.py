"""The schema of a SQLite database, for migrations."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator
from contextlib import contextmanager

from sqlalchemy.dialects import sqlite

from agentlightning.errors import StoreError
from agentlightning.store.sql.tables.schema import ddl

DIALECT = sqlite.dialect()


class SqliteSchema:
    """`connection` is in no transaction."""

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        self.connection = connection
        self.name = name

    @contextmanager
    def exclusive(self) -> Generator[None]:
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self.connection.rollback()
            raise
        self.connection.execute("COMMIT")

    def about(self) -> dict[str, str]:
        found = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'about'"
        if not self.connection.execute(found).fetchone():
            return {}
        return dict(self.connection.execute("SELECT name, value FROM about").fetchall())

    def create(self) -> None:
        row = self.connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' LIMIT 1").fetchone()
        if row:
            raise StoreError(f"{self.name} is not a store (it has a table {row[0]!r}); "
                             "give another path")  # fmt: skip
        for statement in (*ddl(DIALECT), "CREATE INDEX rollouts_status ON rollouts (status)"):  # then by key
            self.connection.execute(statement)

    def execute(self, statement: str) -> sqlite3.Cursor:
        return self.connection.execute(statement)
