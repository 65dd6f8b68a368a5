"""Triggers that keep processes of an older version from writing to a database that was migrated under them.

The triggers name an SQL function that only processes of this version define. SQLite resolves the functions of a table's
triggers when it prepares a statement that writes to the table, so a process without the function cannot prepare any.
The function is never called, and a trigger costs a third of a microsecond per row.
"""

from __future__ import annotations

import re
import sqlite3
from typing import Final

from agentlightning.store.sql.tables.schema import SCHEMA_VERSION

_FUNCTION: Final = "upgrade_agentlightning_for_schema_"
"""The error of an older process shows this name to its user."""
_REFUSED: Final = re.compile(f"no such function: {_FUNCTION}(\\d+)")
_PREFIX: Final = "guard_"
TABLES: Final = ("attempts", "queues", "resources", "rollouts", "workers")
"""Every transaction that changes anything writes to one of them."""


def allow(connection: sqlite3.Connection, version: int = SCHEMA_VERSION) -> None:
    """Let a connection write to a store of this version."""
    connection.create_function(f"{_FUNCTION}{version}", 0, lambda: None)


def install(connection: sqlite3.Connection, version: int) -> None:
    for table in TABLES:
        for event in ("insert", "update", "delete"):
            connection.execute(
                f"CREATE TRIGGER {_PREFIX}{table}_{event} AFTER {event} ON {table} "
                f"BEGIN SELECT {_FUNCTION}{version}() WHERE 0; END"
            )


def remove(connection: sqlite3.Connection) -> None:
    names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall()
    for (name,) in names:
        if name.startswith(_PREFIX):
            connection.execute(f"DROP TRIGGER {name}")


def refused_version(error: BaseException) -> int | None:
    """The schema version for which a connection was refused; None for any other error."""
    found = _REFUSED.search(str(error)) if isinstance(error, sqlite3.OperationalError) else None
    return int(found[1]) if found else None
