"""Numbered migrations: how an older SQLite database becomes one of today.

A new database is made from schema.py at once. An older one is taken through every step above its version, in one
transaction. One written by a newer release is refused: reading it with older code could lose what it added.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping

from sqlalchemy.dialects import sqlite
from sqlalchemy.schema import CreateTable

from agentlightning.errors import StoreError
from agentlightning.store.sql.schema import FILL_COUNTS, SCHEMA_VERSION, counts, ddl

Step = Callable[[sqlite3.Connection], None]


def _to_2(connection: sqlite3.Connection) -> None:
    from agentlightning.store.sql.migrate_2 import migrate

    migrate(connection)


def _to_3(connection: sqlite3.Connection) -> None:
    """What there is, is counted."""
    connection.execute(str(CreateTable(counts).compile(dialect=sqlite.dialect())))
    for statement in FILL_COUNTS:
        connection.execute(statement)


STEPS: Mapping[int, Step] = {2: _to_2, 3: _to_3}
"""version -> what makes a database of the version before into one of it. The first is 2."""


def migrate(
    connection: sqlite3.Connection, name: str, latest: int = SCHEMA_VERSION, steps: Mapping[int, Step] = STEPS
) -> None:
    """Bring the database to version `latest`. `name` is how errors call it."""
    if version_of(connection) == latest:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        _bring_up(connection, name, latest, steps)
    except BaseException:
        connection.rollback()
        raise
    connection.execute("COMMIT")


def _bring_up(connection: sqlite3.Connection, name: str, latest: int, steps: Mapping[int, Step]) -> None:
    version = version_of(connection)
    if version == 0:
        _refuse_foreign(connection, name)
        for statement in ddl(sqlite.dialect()):
            connection.execute(statement)
    else:
        refuse_newer(version, name, latest)
        for number in range(version + 1, latest + 1):
            steps[number](connection)
    connection.execute("INSERT OR REPLACE INTO about (name, value) VALUES ('schema_version', ?)", (str(latest),))


def refuse_newer(version: int, name: str, latest: int = SCHEMA_VERSION) -> None:
    """Raises StoreError for a database that a newer release wrote."""
    if version > latest:
        raise StoreError(
            f"{name} was written by a newer version of agentlightning (its schema is {version}, this one knows "
            f"{latest}); run: pip install --upgrade agentlightning, or give another path"
        )


def version_of(connection: sqlite3.Connection) -> int:
    """0 where there is no store yet."""
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'about'").fetchone():
        return 0
    row = connection.execute("SELECT value FROM about WHERE name = 'schema_version'").fetchone()
    return int(row[0]) if row else 0


def _refuse_foreign(connection: sqlite3.Connection, name: str) -> None:
    row = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' LIMIT 1").fetchone()
    if row:
        raise StoreError(f"{name} is a database of something else (it has a table {row[0]!r}); give another path")
