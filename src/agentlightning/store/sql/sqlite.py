"""SQLite: locates, opens and prepares a file, runs statements, and explains errors.

WAL with synchronous=FULL: a commit is on the disk when it returns, and readers never wait for the writer. With NORMAL,
it is in the file, which survives the end of the process. There is one write lock for all processes.
"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final

import orjson

from agentlightning.errors import ConfigError, StoreError, StoreFullError, StoreLostError
from agentlightning.store.base import DEFAULT_STORE, store_url
from agentlightning.store.clock import SYNC_SECONDS, Clock
from agentlightning.store.sql.rollouts import NEXT_WAITING
from agentlightning.store.sql.schema import FIND_VERSION, check_version, ddl, migrate
from agentlightning.store.sql.tx import Connection, Database, Statement, chunks, explained
from agentlightning.util.printable import shown_url
from agentlightning.util.random_ids import random_bits

BUSY_SECONDS: Final = 30.0
"""How long a write waits for another process."""
CACHE_KIB: Final = 8 * 1024
"""Page cache of each connection."""
_TYPES: Final = {"key": "INTEGER PRIMARY KEY", "int": "INTEGER", "text": "TEXT", "float": "REAL", "blob": "BLOB"}
_LOCK: Final = re.compile(r" FOR UPDATE( OF \w)?( SKIP LOCKED)?")


def locate(url: str | Path | None) -> Path | None:
    """The file that `url` names; None for a store in memory. In a directory, it is `store.db`."""
    text = str(store_url(url))
    if text in (":memory:", "sqlite://", "sqlite:///:memory:"):
        return None
    if text.startswith("sqlite:///"):
        text = text.removeprefix("sqlite:///")
    elif text.startswith(("http://", "https://")):
        raise ConfigError(f"{shown_url(text)} is a server, not a database; use LightningStoreClient(URL)")
    elif "://" in text:
        raise ConfigError(
            f"{shown_url(text)} is not a store; give a path, sqlite:///PATH, postgresql://... or :memory:"
        )
    if not text:
        raise ConfigError("the path of the store is empty; give a path, sqlite:///PATH or :memory:")
    path = Path(text).expanduser().absolute()
    is_directory = text.endswith(("/", os.sep)) or path.name == Path(DEFAULT_STORE).parent.name or path.is_dir()
    return path / Path(DEFAULT_STORE).name if is_directory else path


class SqliteDatabase(Database):
    """A file, or a database in memory that ends with its connection."""

    shared = False
    next_waiting = (
        f"SELECT r.queue, r.key FROM queues q JOIN rollouts r ON r.key IN {NEXT_WAITING.format('w.key', '')} "
        "WHERE q.name = ANY (?)"
    )
    errors: ClassVar[tuple[type[Exception], ...]] = (sqlite3.Error,)

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.single = path is None
        self.name = "the in-memory store" if path is None else f"the store {path}"

    def prepare(self) -> None:
        if self.path is None:
            return  # its one connection is prepared in `connect`
        _make_folder(self.path)
        with explained(self), closing(_connect(self.path, create=True)) as connection:
            if not _number(connection.cursor(), "page_count"):  # in other files it would wait for the write lock
                connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            _use_wal(connection, self.path)
            migrate(SqliteSchema(connection, str(self.path)))

    def connect(self, read_only: bool) -> SqliteConnection:
        observer: sqlite3.Connection | None = None
        with explained(self):
            connection = _connect(self.path)
            if self.path is None:
                migrate(SqliteSchema(connection, self.name))
            if read_only:
                connection.execute("PRAGMA query_only = ON")
            elif self.path is not None:
                observer = _connect(self.path)
                for each in (connection, observer):  # the one retries faster than SQLite, the other never
                    each.execute("PRAGMA busy_timeout = 0")
        return SqliteConnection(connection, self.path, observer)

    def explain(self, error: Exception) -> StoreError:
        where, code = "the in-memory store" if self.path is None else str(self.path), _code(error)
        if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and _free_bytes(self.path) < SCARCE_BYTES):
            return StoreFullError(
                f"the disk is full: {where} could not be written ({_free_bytes(self.path) / 1e6:.1f} MB free); nothing "
                "of this call was stored; free some space and call again"
            )
        return StoreError(f"{where}: {error}; {_ADVICE.get(code, _UNEXPECTED).format(where)}")

    def is_fatal(self, error: BaseException) -> bool:
        """Whether the database may have rolled back the whole transaction, not only the statement."""
        return isinstance(error, sqlite3.Error) and _code(error) in _FATAL

    def may_retry(self, error: BaseException) -> bool:
        return False


@cache
def _translated(sql: str) -> str:
    """Of the SQL that is written for every database (tx.py)."""
    sql = _LOCK.sub("", sql).replace("= ANY (?)", "IN (SELECT value FROM json_each(?))")
    return sql.replace("strpos(", "instr(")


class SqliteConnection(Connection):
    """One connection of the driver."""

    def __init__(
        self, connection: sqlite3.Connection, path: Path | None, observer: sqlite3.Connection | None = None
    ) -> None:
        """observer: another connection, by which other threads see who has written."""
        self.raw = connection
        self._path = path
        self._observer, self._observing = observer, threading.Lock()
        self._mark, self._marked = random_bits(31), False
        """What SQLite's `user_version` is while no other process has written. Set by the first transaction that changes
        something after one of another process, so that both are committed together."""
        self._cursor = connection.cursor()
        self._files = None if path is None else OpenFiles(path)
        self._data_version = -1
        self._durable = True
        self._writing = False
        self._changes_before = 0
        self._keys: dict[str, int] = {}

    def begin(self, write: bool, durable: bool = True) -> None:
        if durable != self._durable:
            self._cursor.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._durable = durable
        _retry_busy(lambda: self._cursor.execute("BEGIN IMMEDIATE" if write else "BEGIN"))
        self._writing = write
        self._changes_before = self.raw.total_changes
        if not write:  # else `changed` does
            _retry_busy(self._check_version)

    def check_files(self) -> None:
        if self._files is not None:
            self._files.check()

    def commit(self) -> None:
        if self.raw.total_changes > self._changes_before:
            self.check_files()
            if self._observer and not self._marked:
                self._cursor.execute(f"PRAGMA user_version = {self._mark}")
                self._marked = True
        self._cursor.execute("COMMIT")

    def rollback(self) -> None:
        if self._writing:  # the keys reserved last are free again
            self._keys.clear()
            self._marked = False
        if self.raw.in_transaction:
            self._cursor.execute("ROLLBACK")

    def close(self) -> None:
        self.raw.close()
        if self._observer is not None:
            with self._observing:
                self._observer.close()

    def all(self, sql: str, *values: Any) -> list[Any]:
        translated, adapted = _translated(sql), [_adapt(value) for value in values]
        try:
            return self._cursor.execute(translated, adapted).fetchall()
        except sqlite3.OperationalError as error:
            if "decode" not in str(error):
                raise
        self.raw.text_factory = _text  # the row of a damaged text is named by whoever reads it
        try:
            return self._cursor.execute(translated, adapted).fetchall()
        finally:
            self.raw.text_factory = str

    def run(self, sql: str, *values: Any) -> int:
        return self._cursor.execute(_translated(sql), [_adapt(value) for value in values]).rowcount

    def write(self, statement: Statement, rows: Sequence[Sequence[Any]]) -> None:
        """In few statements: the driver gives the interpreter lock away with each, and must wait to get it back."""
        for sql, values in chunks(statement, rows):
            self._cursor.execute(sql, values)

    def new_key(self, table: str, expected: int) -> int:
        last = self._keys.get(table)
        if last is None:
            last = int(self._cursor.execute(f"SELECT coalesce(max(key), 0) FROM {table}").fetchone()[0])
        self._keys[table] = last + 1
        return last + 1

    def sync_clock(self, clock: Clock) -> None:
        now = clock.reading()
        rows = self.all("SELECT reading, steady FROM clocks WHERE name = ''")
        if rows:
            reading, steady = rows[0]
            if 0 <= now - reading < SYNC_SECONDS:
                clock.sync(reading, steady)
                return
            steady = clock.advance(reading, steady, now)
        else:
            steady = clock.wall()
        self.run("INSERT OR REPLACE INTO clocks (name, reading, steady) VALUES ('', ?, ?)", now, steady)
        clock.sync(now, steady)

    def changed(self) -> bool:
        if self._path is None:
            return False
        version = _retry_busy(lambda: _number(self._cursor, "data_version"))
        before = self._data_version
        if version != before:
            _retry_busy(self._check_version)  # where it raises, so it does in the next transaction
            self._data_version, self._marked = version, False
            self._keys.clear()
        return before not in (-1, version)

    def fresh(self) -> bool:
        if self._observer is None:
            return self._path is None
        try:
            with self._observing:
                return self._observer.execute("PRAGMA user_version").fetchone()[0] == self._mark
        except sqlite3.Error:
            return False

    def _check_version(self) -> None:
        check_version(str(self._path), *(self._cursor.execute(FIND_VERSION).fetchone() or ("",)))

    def size(self) -> int:
        return _number(self._cursor, "page_count") * _number(self._cursor, "page_size")

    def vacuum(self) -> None:
        if self._path is not None:
            self._cursor.execute(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000:.0f}")
            shrink(self._cursor)


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _adapt(value: Any) -> Any:
    """Encode a list as JSON, which the translation of `= ANY (?)` reads."""
    return orjson.dumps(value).decode() if isinstance(value, list) else value


# -- opening -----------------------------------------------------------------------------------------------------------


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
        cached_statements=512,
    )
    try:
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    except sqlite3.Error:  # the file is no database, say
        connection.close()
        raise
    return connection


def _use_wal(connection: sqlite3.Connection, path: Path) -> None:
    """SQLite does not wait while another process makes the same change, so this retries."""
    mode = _retry_busy(lambda: connection.execute("PRAGMA journal_mode = WAL").fetchone()[0])
    if mode != "wal":
        raise StoreError(f"{path} is on a file system without shared memory for SQLite's WAL; use a local disk")


def _retry_busy(run: Callable[[], Any]) -> Any:
    """With SQLite's own pauses, of up to 0.1 s, others hardly get a turn while one process writes all the time."""
    started = time.monotonic()
    while True:
        try:
            return run()
        except sqlite3.OperationalError as error:
            waited = time.monotonic() - started
            if _code(error) != sqlite3.SQLITE_BUSY or waited > BUSY_SECONDS:
                raise
            time.sleep(min(0.0005 + waited / 16, 0.02))


class SqliteSchema:
    """The schema, for migrations. `connection` is in no transaction."""

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        self.connection = connection
        self.name = name
        self.execute = connection.execute

    @contextmanager
    def exclusive(self) -> Generator[None]:
        with self.connection:  # commits, or rolls back
            self.execute("BEGIN IMMEDIATE")
            yield

    def has(self, table: str) -> bool:
        found = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
        return self.execute(found, (table,)).fetchone() is not None

    def create(self) -> None:
        row = self.execute("SELECT name FROM sqlite_master WHERE type = 'table' LIMIT 1").fetchone()
        if row:
            raise StoreError(f"{self.name} is not a store (it has a table {row[0]!r}); give another path")
        for statement in ddl(_TYPES, " WITHOUT ROWID"):
            self.execute(statement)
        self.execute("CREATE INDEX rollouts_status ON rollouts (status)")  # then by key


# -- files that were deleted or replaced -------------------------------------------------------------------------------


class OpenFiles:
    """The files of a database that was just opened. One that was deleted or replaced lives on for the processes that
    have it open: SQLite goes on writing to it, and what it writes is lost. Used within its transactions, while all of
    the files exist."""

    def __init__(self, path: Path) -> None:
        self._name = str(path)
        place = os.path.realpath(path)
        self._paths = [place + suffix for suffix in ("", "-wal", "-shm")]
        self._known: list[tuple[int, int] | None] = [_identity(place), None, None]

    def check(self) -> None:
        """Raises StoreLostError."""
        for index, path in enumerate(self._paths):
            found, known = _identity(path), self._known[index]
            if known is None:
                self._known[index] = known = found
            if found is None or found != known:
                raise StoreLostError(
                    f"{path} was {'deleted' if found is None else 'replaced'} while {self._name} was open: nothing of "
                    "this call was stored, and nothing more will be; what was stored before can be read until this "
                    "process ends: export it (agl store export FILE --server URL), then open the store again"
                )


def _identity(path: str) -> tuple[int, int] | None:
    """(device, inode); None if there is no file."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


# -- vacuum ------------------------------------------------------------------------------------------------------------

# Returns the free pages of a database file to the file system while others write to it.
#
# A database created with `auto_vacuum = INCREMENTAL` is truncated some pages at a time: pages at its end move into free
# pages further up. Each step holds the write lock for milliseconds, and between steps the lock is free for at least as
# long.

STEP_PAGES: Final = 128
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


# -- errors ------------------------------------------------------------------------------------------------------------

SCARCE_BYTES: Final = 1 << 20
"""With less free space than this, a failed write is attributed to a full disk."""
_FATAL: Final = frozenset(
    {
        *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_FULL),
        *(sqlite3.SQLITE_IOERR, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_NOTADB),
        sqlite3.SQLITE_READONLY,
    }
)
_UNEXPECTED: Final = "this is not expected; the statement was undone"
_BUSY: Final = "another process has held the write lock for too long; end it, or give each run its own store"
_FORBIDDEN: Final = "check that the directory exists and that this user may write there"
_ADVICE: Final = {
    sqlite3.SQLITE_NOTADB: "this file is not a store; give another path, or move it away to start an empty store",
    sqlite3.SQLITE_CORRUPT: "the file is damaged; move it away, or save what can be read with: sqlite3 {} .recover",
    sqlite3.SQLITE_BUSY: _BUSY,
    sqlite3.SQLITE_LOCKED: _BUSY,
    sqlite3.SQLITE_CANTOPEN: _FORBIDDEN,
    sqlite3.SQLITE_READONLY: _FORBIDDEN,
    sqlite3.SQLITE_PERM: _FORBIDDEN,
    sqlite3.SQLITE_IOERR: "the disk refused; check it, and keep the store on a local file system",
}


def _code(error: Exception) -> int:
    """The primary result code: the low byte of the extended one."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _free_bytes(path: Path | None) -> float:
    if path is None:
        return 0.0
    folder = next((parent for parent in path.parents if parent.exists()), Path("/"))
    return float(shutil.disk_usage(folder).free)
