"""A small SQLite database that outlives nothing: in memory, or in a file that several processes share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3


def open_cache(folder: Path | None, name: str, schema: str) -> sqlite3.Connection:
    """The database `name` in a folder, with the tables of the schema; in memory without a folder. It is not written to
    the disk when a transaction ends, so a loss of power may damage it. Threads may share the connection, which is
    closed once nobody has it."""
    import sqlite3

    class Cache(sqlite3.Connection):
        def __del__(self) -> None:
            self.close()

    where = ":memory:" if folder is None else folder / name
    connection = sqlite3.connect(where, timeout=10, isolation_level=None, check_same_thread=False, factory=Cache)
    connection.executescript(f"PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF; {schema}")
    return connection
