"""The SQLite backend: locates, opens and prepares a file, and runs statements.

WAL with synchronous=FULL: a commit is on the disk when it returns, and readers never wait for the writer. There is one
write lock for all processes, so rows read in one transaction are valid in the next, unless `changed`.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, Final

import orjson
from sqlalchemy import Table
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import Dialect

from agentlightning.errors import ConfigError, StoreError
from agentlightning.store.base import DEFAULT_STORE, store_url
from agentlightning.store.clock import SYNC_SECONDS, Clock
from agentlightning.store.sql.migrations import migrate
from agentlightning.store.sql.sqlite.errors import explain, is_fatal
from agentlightning.store.sql.sqlite.open_files import OpenFiles
from agentlightning.store.sql.tables import bulk, statements
from agentlightning.store.sql.tables.backend import Insert, Row, Statement, Update, Wake
from agentlightning.store.sql.tables.bulk import quoted
from agentlightning.store.sql.tables.schema import ddl
from agentlightning.store.validation import NO_LIMIT

BUSY_SECONDS: Final = 30.0
"""How long a write waits for another process."""
CACHE_KIB: Final = 8 * 1024
"""Page cache of each connection."""
_dialect = sqlite.dialect()


def locate(url: str | Path | None) -> Path | None:
    """The file that `url` names; None for a store in memory. In a directory, it is `store.db`."""
    text = str(store_url(url))
    if text in (":memory:", "sqlite://", "sqlite:///:memory:"):
        return None
    if text.startswith("sqlite:///"):
        text = text.removeprefix("sqlite:///")
    elif text.startswith(("http://", "https://")):
        raise ConfigError(f"{text} is a server, not a database; use LightningStoreClient({text!r})")
    elif "://" in text:
        raise ConfigError(f"{text} is not a store; give a path, sqlite:///PATH, postgresql://... or :memory:")
    if not text:
        raise ConfigError("the path of the store is empty; give a path, sqlite:///PATH or :memory:")
    path = Path(text).expanduser().absolute()
    is_directory = text.endswith(("/", os.sep)) or path.name == Path(DEFAULT_STORE).parent.name or path.is_dir()
    return path / Path(DEFAULT_STORE).name if is_directory else path


class SqliteDatabase:
    """A file, or a database in memory that ends with its connection."""

    dialect: Dialect = _dialect
    shared = False
    errors: ClassVar[tuple[type[Exception], ...]] = (sqlite3.Error,)

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.single = path is None
        self.name = "the in-memory store" if path is None else f"the store {path}"

    def prepare(self) -> None:
        if self.path is None:
            return  # its one connection is prepared in `connect`
        _make_folder(self.path)
        connection: sqlite3.Connection | None = None
        try:
            connection = _connect(self.path, create=True)
            _allow_shrinking(connection)
            _use_wal(connection, self.path)
            migrate(SqliteSchema(connection, str(self.path)))
        except sqlite3.Error as error:
            raise self.explain(error) from error
        finally:
            if connection is not None:
                connection.close()

    def connect(self, read_only: bool) -> SqliteConnection:
        try:
            connection = _connect(self.path)
            if self.path is None:
                migrate(SqliteSchema(connection, self.name))
            if read_only:
                connection.execute("PRAGMA query_only = ON")
        except sqlite3.Error as error:
            raise self.explain(error) from error
        return SqliteConnection(connection, self.path)

    def begin_close(self) -> None:
        """A file is not lost."""

    def listen(self, wake: Wake) -> None:
        """Other processes are detected by `SqliteConnection.changed`."""

    def explain(self, error: Exception) -> StoreError:
        if isinstance(error, sqlite3.Error):
            return explain(error, self.path)
        return StoreError(f"{self.name}: {error!r}")

    def is_fatal(self, error: BaseException) -> bool:
        return is_fatal(error)

    def may_retry(self, error: BaseException) -> bool:
        return False


class SqliteConnection:
    """One connection of the driver."""

    writer_id = ""

    def __init__(self, connection: sqlite3.Connection, path: Path | None) -> None:
        self.raw = connection
        self._path = path
        self._cursor = connection.cursor()
        self._shared_file = path is not None
        self._files = None if path is None else OpenFiles(path)
        self._data_version = -1
        self._writing = False
        self._changes_before = 0
        self._keys: dict[str, int] = {}
        self._bulk_sql: dict[tuple[Insert | Update, int], str] = {}

    def begin(self, write: bool) -> None:
        self._cursor.execute("BEGIN IMMEDIATE" if write else "BEGIN")
        self._writing = write
        self._changes_before = self.raw.total_changes

    def check_files(self) -> None:
        if self._files is not None:
            self._files.check()

    def commit(self) -> None:
        wrote = self.raw.total_changes > self._changes_before
        if wrote:
            self.check_files()
        self._cursor.execute("COMMIT")

    def rollback(self) -> None:
        if self._writing:  # the keys reserved last are free again
            self._keys.clear()
        if self.raw.in_transaction:
            self._cursor.execute("ROLLBACK")

    def close(self) -> None:
        self.raw.close()

    def all(self, statement: Statement, *values: Any) -> list[Any]:
        compiled = statement.compiled(_dialect)
        arguments = _adapt(compiled.arrange(values))
        try:
            return self._cursor.execute(compiled.sql, arguments).fetchall()
        except sqlite3.OperationalError as error:
            if "decode" not in str(error):
                raise
        self.raw.text_factory = _text  # the row of a damaged text is named by whoever reads it
        try:
            return self._cursor.execute(compiled.sql, arguments).fetchall()
        finally:
            self.raw.text_factory = str

    def run(self, statement: Statement, *values: Any) -> int:
        compiled = statement.compiled(_dialect)
        return self._cursor.execute(compiled.sql, _adapt(compiled.arrange(values))).rowcount

    def insert(self, insert: Insert, rows: Sequence[Row]) -> int:
        return sum([self._bulk(insert, bulk.insert_sql, chunk) for chunk in bulk.chunks(rows)])

    def update(self, update: Update, rows: Sequence[Row]) -> None:
        for chunk in bulk.chunks(rows):
            self._bulk(update, bulk.update_sql, chunk)

    def _bulk(self, statement: Any, write_sql: Callable[[Any, int, bulk.Values], str], rows: Sequence[Row]) -> int:
        key = (statement, len(rows))
        sql = self._bulk_sql.get(key)
        if sql is None:
            sql = self._bulk_sql[key] = write_sql(statement, len(rows), _values)
        return self._cursor.execute(sql, [value for row in rows for value in row]).rowcount

    def keys(self, table: Table, count: int) -> Sequence[int]:
        last = self._keys.get(table.name)
        if last is None:
            sql = f"SELECT coalesce(max({quoted('key')}), 0) FROM {quoted(table.name)}"
            last = int(self._cursor.execute(sql).fetchone()[0])
        self._keys[table.name] = last + count
        return range(last + 1, last + count + 1)

    def commit_in_order(self, table: Table) -> None:
        """Nothing to do: write transactions are serialised."""

    def last_position(self) -> int:
        """Nothing to do: write transactions are serialised."""
        return NO_LIMIT

    def lock(self, table: Table) -> None:
        """Nothing to do: a write transaction has the whole database to itself."""

    def sync_clock(self, clock: Clock) -> None:
        now = clock.reading()
        rows = self.all(statements.CLOCK)
        if rows:
            reading, steady = rows[0]
            if 0 <= now - reading < SYNC_SECONDS:
                clock.sync(reading, steady)
                return
            steady = clock.advance(reading, steady, now)
        else:
            ((last_event,),) = self.all(statements.LAST_SIGN_OF_LIFE)
            steady = clock.wall() if last_event is None else last_event
        self.insert(statements.WRITE_CLOCK, [("", now, steady)])
        clock.sync(now, steady)

    def changed(self) -> bool:
        if not self._shared_file:
            return False
        version = self._cursor.execute("PRAGMA data_version").fetchone()[0]
        changed = self._data_version not in (-1, version)
        self._data_version = version
        if changed:
            self._keys.clear()
        return changed

    def notify(self, queued: bool, finished: Sequence[str]) -> None:
        """Nothing to do: other processes poll."""

    def size(self) -> int:
        (pages,), (size,) = (self._cursor.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size"))
        return pages * size

    def vacuum(self) -> None:
        if self._path is not None:
            shrink(self._cursor)


# -- values ----------------------------------------------------------------------------------------------------------


def _values(statement: Insert | Update, rows: int) -> str:
    row = "(" + ",".join("?" * len(statement.columns)) + ")"
    return ",".join([row] * rows)


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _adapt(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Encode lists as JSON, which `schema.in_list` reads."""
    for value in values:
        if isinstance(value, list):
            return tuple([orjson.dumps(each).decode() if isinstance(each, list) else each for each in values])
    return values


# -- opening ---------------------------------------------------------------------------------------------------------


def _make_folder(path: Path) -> None:
    if path.is_dir():
        raise StoreError(f"{path} is a directory; give the path of a file in it, such as {path / 'store.db'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"the directory of the store cannot be made: {error}; give another path") from error
    with suppress(OSError):  # it exists already, or SQLite reports the error
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))  # for the owner only, and so is its WAL


def _connect(path: Path | None, create: bool = False) -> sqlite3.Connection:
    """create: create a missing file. Later connections must find the file that the store has open."""
    connection = sqlite3.connect(
        ":memory:" if path is None else f"{path.as_uri()}?mode={'rwc' if create else 'rw'}",
        uri=path is not None,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=256,
    )
    try:
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    except sqlite3.Error:  # the file is no database, say
        connection.close()
        raise
    return connection


def _allow_shrinking(connection: sqlite3.Connection) -> None:
    """Has an effect on an empty file only."""
    if connection.execute("PRAGMA page_count").fetchone()[0] == 0:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")


def _use_wal(connection: sqlite3.Connection, path: Path) -> None:
    """SQLite does not wait while another process makes the same change, so this retries."""
    mode = _retry_busy(lambda: connection.execute("PRAGMA journal_mode = WAL").fetchone()[0])
    if mode != "wal":
        raise StoreError(f"{path} is on a file system without shared memory for SQLite's WAL; use a local disk")


def _retry_busy(run: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return run()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


# -- schema ------------------------------------------------------------------------------------------------------------


class SqliteSchema:
    """The schema, for migrations. `connection` is in no transaction."""

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
        for statement in (*ddl(_dialect), "CREATE INDEX rollouts_status ON rollouts (status)"):  # then by key
            self.connection.execute(statement)

    def execute(self, statement: str) -> sqlite3.Cursor:
        return self.connection.execute(statement)


# -- vacuum ------------------------------------------------------------------------------------------------------------

# Returns the free pages of a database file to the file system while others write to it.
#
# A database created with `auto_vacuum = INCREMENTAL` is truncated some pages at a time: pages at its end move into free
# pages further up. Each step holds the write lock for milliseconds, and between steps the lock is free for at least as
# long.

STEP_PAGES: Final = 256
"""1 MiB."""
CHECKPOINT_STEPS: Final = 32
"""The write-ahead log is checkpointed after this many steps, so that it stays small."""
MIN_PAUSE_SECONDS: Final = 0.002


def shrink(cursor: sqlite3.Cursor) -> None:
    """`cursor` is of a connection that nobody else uses, in no transaction."""
    steps = 0
    left = _number(cursor, "freelist_count")
    while left > 0:
        started = time.perf_counter()
        # Not `execute`, which takes a single step of a statement without columns: each step frees one page.
        cursor.executescript(f"PRAGMA incremental_vacuum({STEP_PAGES})")
        steps += 1
        if steps % CHECKPOINT_STEPS == 0:
            _checkpoint(cursor)
        time.sleep(max(MIN_PAUSE_SECONDS, time.perf_counter() - started))
        before, left = left, _number(cursor, "freelist_count")
        if left >= before:  # others free pages as fast as these are returned
            break
    _checkpoint(cursor)


def _checkpoint(cursor: sqlite3.Cursor) -> None:
    """Without waiting for others."""
    cursor.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()


def _number(cursor: sqlite3.Cursor, name: str) -> int:
    return int(cursor.execute(f"PRAGMA {name}").fetchone()[0])
