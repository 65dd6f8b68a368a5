"""How a SQLite file is found, opened and checked.

WAL with synchronous=FULL: a commit is on the disk when it returns, and readers never wait for the writer.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Final

from agentlightning.errors import ConfigError, StoreError
from agentlightning.store.faults import explain
from agentlightning.store.migrations import migrate

DEFAULT_PATH: Final = Path(".agentlightning") / "store.db"
BUSY_SECONDS: Final = 30.0
"""How long a write waits for another process."""
CHECKPOINT_PAGES: Final = 4000
"""The WAL is moved into the database after so many pages of 4 KiB."""


def locate(url: str | Path | None) -> Path | None:
    """The file that `url` means; None for a store in memory."""
    if url is None:
        return Path.cwd() / DEFAULT_PATH
    text = str(url)
    if text in (":memory:", "sqlite://", "sqlite:///:memory:"):
        return None
    if text.startswith("sqlite:///"):
        text = text.removeprefix("sqlite:///")
    elif text.startswith(("postgresql:", "postgres:", "postgresql+")):
        raise ConfigError(
            f"{text.split('://')[0]}:// stores are not available in this version; give the path of a SQLite file"
        )
    elif text.startswith(("http://", "https://")):
        raise ConfigError(f"{text} is a server, not a database; use LightningStoreClient({text!r})")
    elif "://" in text:
        raise ConfigError(f"{text} is no store; give a path, sqlite:///PATH or :memory:")
    if not text:
        raise ConfigError("the path of the store is empty; give a path, sqlite:///PATH or :memory:")
    return Path(text).expanduser().absolute()


def open_pair(path: Path | None) -> tuple[sqlite3.Connection, sqlite3.Connection | None]:
    """(a connection to write, one to read; None where there is only one for both), the database being up to date."""
    if path is not None:
        _make_folder(path)
    opened: list[sqlite3.Connection] = []
    try:
        opened.append(_connect(path))
        if path is not None:
            _use_wal(opened[0], path)
        migrate(opened[0], "the in-memory store" if path is None else str(path))
        if path is not None:
            opened.append(_connect(path))
            opened[1].execute("PRAGMA query_only = ON")
    except BaseException as error:
        for connection in opened:
            connection.close()
        if isinstance(error, sqlite3.Error):
            raise explain(error, path) from error
        raise
    return opened[0], opened[1] if path is not None else None


def _make_folder(path: Path) -> None:
    if path.is_dir():
        raise StoreError(f"{path} is a directory; give the path of a file in it, such as {path / 'store.db'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"the directory of the store cannot be made: {error}; give another path") from error


def _connect(path: Path | None) -> sqlite3.Connection:
    connection = sqlite3.connect(
        ":memory:" if path is None else path,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=256,
    )
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
    connection.execute("PRAGMA cache_size = -65536")
    return connection


def _use_wal(connection: sqlite3.Connection, path: Path) -> None:
    """SQLite does not wait while another process makes the same change, so this does."""
    give_up = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            break
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                raise
            time.sleep(0.02)
    if mode != "wal":
        raise StoreError(f"{path} is on a file system without shared memory for SQLite's WAL; use a local disk")
