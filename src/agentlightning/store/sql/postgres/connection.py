"""A connection to PostgreSQL that reconnects, and finds out whether a commit in doubt succeeded.

Writes wait until the next query or the commit, and go to the server together (libpq's pipeline mode).
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cache
from itertools import count
from typing import Any, Final, NamedTuple, cast

import psycopg
from psycopg import pq, sql
from psycopg.adapt import Transformer

from agentlightning.errors import StoreError
from agentlightning.store.clock import OUTAGE_SECONDS, Clock
from agentlightning.store.sql import schema
from agentlightning.store.sql.postgres.server import (
    ConnectError,
    PostgresListener,
    PostgresServer,
    UnknownOutcomeError,
    is_fatal,
    is_lost,
    may_retry,
    payload,
)
from agentlightning.store.sql.rollouts import NEXT_WAITING
from agentlightning.store.sql.schema import FIND_VERSION, check_version, migrate
from agentlightning.store.sql.tx import Connection, Statement, Wake, chunks, explained

MIN_VERSION: Final = 130_000
"""PostgreSQL 13."""
REPLAN_TRANSACTIONS: Final = 500
"""Plans of prepared statements are discarded at least this often."""
SERVER_RETENTION_SECONDS: Final = 7 * 86_400
"""The row of a server that was killed is deleted after this time."""
KEY_BLOCK: Final = 64
"""Keys reserved at once where they need not be in the order of transactions."""
PIPELINE: Final = 256
"""Statements sent before their results are read: more could fill the buffers of both sides."""

# -- the schema --------------------------------------------------------------------------------------------------------

_TYPES: Final = {
    "key": "BIGSERIAL PRIMARY KEY",
    "int": "BIGINT",
    "text": 'TEXT COLLATE "C"',
    "float": "DOUBLE PRECISION",
    "blob": "BYTEA",
}
"""Text is ordered by its bytes, as in SQLite, whatever the locale of the database."""
POSITION: Final = "coalesce(position, key)"
"""Rollouts in order of creation: that of their keys, except for those that were committed late (see `_PLACE`)."""
_DDL: Final = (
    *schema.ddl(_TYPES),
    "CREATE TABLE servers (server TEXT PRIMARY KEY, number BIGINT NOT NULL, "
    "seen TIMESTAMPTZ NOT NULL DEFAULT now()) WITH (fillfactor = 50)",
    "ALTER TABLE counts SET (fillfactor = 50)",
    "ALTER TABLE rollouts ADD COLUMN position BIGINT",
    f"CREATE INDEX rollouts_position ON rollouts (({POSITION}))",
    f"CREATE INDEX rollouts_status ON rollouts (status, ({POSITION}))",
    "CREATE SEQUENCE rollouts_shown MINVALUE 0",
)
TABLES: Final = (*schema.TABLES, "servers")

# -- statements --------------------------------------------------------------------------------------------------------

MERGE_COUNTERS: Final = (
    "WITH gone AS (DELETE FROM counts WHERE shard <> '' AND shard NOT IN (SELECT server FROM servers) RETURNING *) "
    "INSERT INTO counts SELECT '', name, queue, sum(number) FROM gone GROUP BY name, queue ORDER BY name, queue "
    "ON CONFLICT (shard, name, queue) DO UPDATE SET number = counts.number + excluded.number"
)
"""Merge the counter rows of servers that are gone into the shared rows. A server that comes back starts from zero."""
_KEYS: Final = "SELECT nextval(?) FROM generate_series(1, CAST(? AS BIGINT))"
_LOCK: Final = 0x61676C6B
"""The upper half of the advisory locks that order rows; the lower half is the oid of the table."""
_TABLE: Final = f"{_LOCK << 32} + CAST(CAST(to_regclass(?) AS oid) AS BIGINT)"
_LOCK_KEYS: Final = f"SELECT pg_advisory_xact_lock({_TABLE})"
_ROLLOUTS: Final = _TABLE.replace("?", "'rollouts'")
_SHOW: Final = (
    f"SELECT pg_advisory_xact_lock({_ROLLOUTS}); "
    "SELECT setval('rollouts_shown', greatest((SELECT last_value FROM rollouts_shown), "
    f"(SELECT max({POSITION}) FROM rollouts)))"
)
"""From now on, no rollout is committed at or before the last position there is."""
_LOCK_POSITIONS: Final = f"SELECT pg_advisory_xact_lock_shared({_ROLLOUTS})"
_PLACE: Final = (
    "UPDATE rollouts SET position = new.position FROM (SELECT key, nextval('rollouts_key_seq') AS position "
    "FROM unnest(CAST(? AS BIGINT[])) AS key ORDER BY key) AS new "
    "WHERE rollouts.key = new.key AND ? <= (SELECT last_value FROM rollouts_shown)"
)
"""With a commit: where pages have shown what comes after the first of some new rollouts, move these to the end."""
_NOTE_NUMBER: Final = (
    "INSERT INTO servers (server, number) VALUES (?, ?) "
    "ON CONFLICT (server) DO UPDATE SET number = excluded.number, seen = now()"
)
_NOW: Final = "extract(epoch FROM clock_timestamp())::float8"
_PASSED: Final = f"({_NOW} - reading)"
_SYNC_CLOCK: Final = (
    f"UPDATE clocks SET steady = steady + CASE WHEN abs({_PASSED}) > CAST(? AS FLOAT8) "
    f"THEN CAST(? AS FLOAT8) ELSE greatest({_PASSED}, 0) END, reading = reading + {_PASSED} "
    "WHERE name = '' RETURNING steady"
)
"""`Clock.advance`, by the database's own clock: those of its servers are never compared. For a server that had to wait
for this row, slightly negative time has passed."""
_START_CLOCK: Final = (
    f"INSERT INTO clocks (name, reading, steady) SELECT '', now.t, now.t FROM (SELECT {_NOW} AS t) AS now "
    "ON CONFLICT DO NOTHING"
)
_WRITE: Final = b"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
_RELAXED: Final = b"; SET LOCAL synchronous_commit = off"
_READ: Final = b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
"""All queries of one transaction see the same snapshot."""
_CHECK: Final = f"; {FIND_VERSION}".encode()
"""It also holds up migrations (`PostgresSchema.exclusive`) until the transaction ends."""


@cache
def _translated(sql_text: str) -> bytes:
    """Of the SQL that is written for every database (tx.py)."""
    first, *parts = sql_text.split("?")
    numbers = count(1)
    return "".join([first, *[f"${next(numbers)}{part}" for part in parts]]).encode()


class _Call(NamedTuple):
    """What is sent: a prepared statement with its parameters, or, with `sql`, the statement to prepare."""

    name: bytes
    values: list[bytes | None]
    formats: list[int]
    sql: str = ""


class PostgresConnection(Connection):
    """One connection, reopened when it is lost. Raises ConnectError if that fails."""

    position = "coalesce(r.position, r.key)"

    def __init__(self, server: PostgresServer, read_only: bool) -> None:
        self._server = server
        self.writer_id = server.id
        self._read_only = read_only
        self._number = 0
        """The number of the last transaction that writes."""
        self._begun = 0
        self._plan_at = 10
        self._wrote = False
        """Whether this transaction has written."""
        self._calls: list[_Call] = []
        """What is sent with the next query."""
        self._payload: str | None = None
        """What the commit notifies other servers of."""
        self._keys: dict[str, list[int]] = {}
        self._new_rollouts: list[int] = []
        """Keys of those that this transaction has made."""
        connection = server.open()
        try:
            self._use(connection)
            if not read_only:
                self._clean_up_servers()
        except BaseException:
            connection.close()
            raise

    def _use(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        connection.pgconn.nonblocking = 1
        self._loader = Transformer(connection)
        self._statements: dict[str, bytes] = {}
        self._names = count()
        self._backend = fetch_row(
            connection, "SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()"
        )

    def _clean_up_servers(self) -> None:
        """Delete the rows of servers that were killed, and merge the counters of servers that are gone."""
        old = f"DELETE FROM servers WHERE seen < now() - interval '{SERVER_RETENTION_SECONDS} seconds'"
        self._connection.execute(old.encode())
        with self._connection.transaction():
            self._connection.execute(b"SELECT pg_advisory_xact_lock(hashtextextended('agentlightning counts', 0))")
            self._connection.execute(MERGE_COUNTERS.encode())

    # -- transactions ------------------------------------------------------------------------------------------------

    def begin(self, write: bool, durable: bool = True) -> None:
        self._wrote = False
        self._forget()
        start = (_WRITE + (b"" if durable else _RELAXED) if write else _READ) + self._discard_plans() + _CHECK
        try:
            if self._connection.closed:
                self._use(self._server.reopen())
            found = self._send(start)
        except psycopg.Error as error:
            if not is_lost(error):
                raise
            self._connection.close()
            self._use(self._server.reopen())
            found = self._send(start)
        check_version(self._server.name, (found.get_value(0, 0) or b"").decode())

    def _forget(self) -> None:
        for call in self._calls:
            self._statements.pop(call.sql, None)
        self._calls.clear()
        self._payload = None
        self._new_rollouts.clear()
        self._keys.pop("rollouts", None)

    def _discard_plans(self) -> bytes:
        """The command that makes PostgreSQL plan prepared statements again, or nothing. Plans are made when the tables
        are small, so they are discarded at growing intervals of up to REPLAN_TRANSACTIONS."""
        self._begun += 1
        if self._begun < self._plan_at:
            return b""
        self._plan_at += min(self._plan_at, REPLAN_TRANSACTIONS)
        return b"; DISCARD PLANS"

    def commit(self) -> None:
        """If the answer of the server is lost, the outcome is looked up over a new connection."""
        if not self._wrote and self._payload is None:
            self._send(b"COMMIT")
            return
        self._number += 1
        self._queue(_NOTE_NUMBER, (self._server.id, self._number))
        if self._payload is not None:
            self._queue("SELECT pg_notify(?, ?)", (self._server.channel, self._payload))
        if self._new_rollouts:
            self._queue(_LOCK_POSITIONS, ())
            self._queue(_PLACE, (self._new_rollouts, min(self._new_rollouts)))
        self._queue("COMMIT", ())
        try:
            self._exchange()
        except psycopg.Error as error:
            if not is_lost(error):
                raise
            self._connection.close()
            if not self._was_committed():
                raise

    def _send(self, command: bytes) -> pq.abc.PGresult:
        """The last result. Bypasses psycopg, which forgets every prepared statement when it sees a ROLLBACK."""
        return _check(self._connection.pgconn.exec_(command))

    def _was_committed(self) -> bool:
        backend = self._backend
        try:
            self._use(self._server.reopen())
            self._end_backend(backend)
            query = "SELECT (SELECT number FROM servers WHERE server = %s)"
            return fetch_value(self._connection, query, self._server.id) == self._number
        except (psycopg.Error, ConnectError) as error:
            raise UnknownOutcomeError(
                f"the connection was lost while this call was committed, and the server did not come back to say "
                f"whether it was ({str(error).strip()}); look before calling again"
            ) from error

    def _end_backend(self, backend: tuple[Any, ...]) -> None:
        """End the server process of the lost connection, and wait until it has ended."""
        end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s AND backend_start = %s"
        while self._connection.execute(end.encode(), backend).fetchall():
            time.sleep(0.01)

    def rollback(self) -> None:
        self._forget()
        if self._connection.closed:
            return
        try:
            self._send(b"ROLLBACK")
        except psycopg.Error:
            self._connection.close()  # the server rolls back

    def close(self) -> None:
        if not self._read_only:
            with contextlib.suppress(psycopg.Error):
                self._connection.execute("DELETE FROM servers WHERE server = %s", [self._server.id])
        self._connection.close()

    # -- statements --------------------------------------------------------------------------------------------------

    def all(self, sql: str, *values: Any) -> list[Any]:
        self._queue(sql, values)
        result = self._exchange()
        self._loader.set_pgresult(result)
        return self._loader.load_rows(0, result.ntuples, tuple)

    def run(self, sql: str, *values: Any) -> int:
        self._wrote = True
        self._queue(sql, values)
        return self._exchange().command_tuples or 0

    def write(self, statement: Statement, rows: Sequence[Sequence[Any]]) -> None:
        for text, values in chunks(statement, rows):
            self._wrote = True
            self._queue(text, values)

    def lock(self, sql: str, *values: Any) -> None:
        self._queue(sql, values)

    def _queue(self, sql: str, values: Sequence[Any]) -> None:
        if len(self._calls) >= PIPELINE:
            self._exchange()
        name = self._statements.get(sql)
        if name is None:
            name = self._statements[sql] = b"agl_%d" % next(self._names)
            self._calls.append(_Call(name, [], [], sql))
        encoded = [_ENCODERS.get(type(value), _encode_subclass)(value) for value in values]
        self._calls.append(_Call(name, encoded, [int(type(value) is bytes) for value in values]))

    def _exchange(self) -> pq.abc.PGresult:
        """Send what is queued; returns the last result. Bypasses psycopg's cursor, which costs more CPU."""
        calls, self._calls = self._calls, []
        pgconn = self._connection.pgconn
        if len(calls) == 1:
            (call,) = calls
            return _check(pgconn.exec_prepared(call.name, cast("Any", call.values), call.formats, 1))
        results: list[pq.abc.PGresult] = []
        try:
            pgconn.enter_pipeline_mode()
            for call in calls:
                if call.sql:
                    pgconn.send_prepare(call.name, _translated(call.sql))
                else:
                    pgconn.send_query_prepared(call.name, cast("Any", call.values), call.formats, 1)
            pgconn.pipeline_sync()
            _read_pipeline(pgconn, results)
            for result in results:
                _check(result)
        except BaseException:
            for call in calls[len([each for each in results if each.status in _DONE]) :]:
                self._statements.pop(call.sql, None)  # it was not prepared
            raise
        finally:
            with contextlib.suppress(psycopg.Error):  # the connection is lost
                pgconn.exit_pipeline_mode()
        return results[-1]

    def new_key(self, table: str, expected: int) -> int:
        keys = self._keys.get(table)
        if not keys:
            found = self.all(_KEYS, f"{table}_key_seq", expected or KEY_BLOCK)
            keys = self._keys[table] = [key for (key,) in reversed(found)]
        key = keys.pop()
        if table == "rollouts":
            self._new_rollouts.append(key)
        return key

    def commit_in_order(self, table: str) -> None:
        self.all(_LOCK_KEYS, table)

    def last_position(self) -> int:
        self.rollback()
        last = self._send(_SHOW.encode()).get_value(0, 0)
        self.begin(False)
        return int(last or 0)

    def sync_clock(self, clock: Clock) -> None:
        """A single statement in a transaction of its own, so that a server that is suspended meanwhile blocks no
        other."""
        self.begin(False)  # checks the version
        self.rollback()
        sent = clock.reading()
        while not (rows := self.all(_SYNC_CLOCK, OUTAGE_SECONDS, clock.certain_seconds())):
            self.run(_START_CLOCK)
        clock.sync((sent + clock.reading()) / 2, rows[0][0])

    def notify(self, queued: bool, finished: Sequence[str]) -> None:
        if queued or finished:
            self._payload = payload(self._server.id, queued, finished)

    # -- the whole database ------------------------------------------------------------------------------------------

    def size(self) -> int:
        """The size of the store's tables with their indexes."""
        query = "SELECT sum(pg_total_relation_size(to_regclass(n))) FROM unnest(%s::text[]) n"
        return int(fetch_value(self._connection, query, list(TABLES)))

    def vacuum(self) -> None:
        """Runs while others read and write. Free space at the end of a table is returned to the file system, the rest
        is reused: rewriting tables locks them, which is for the administrator to decide."""
        for name in TABLES:
            self._connection.execute(sql.SQL("VACUUM (ANALYZE) {}").format(sql.Identifier(name)))


def _read_pipeline(pgconn: pq.abc.PGconn, results: list[pq.abc.PGresult]) -> None:
    """Send what is left, and read the results up to the end of the pipeline, without holding the interpreter lock while
    waiting. Raises OperationalError if the connection is lost before."""
    ended, unsent = False, bool(pgconn.flush())
    with selectors.DefaultSelector() as selector:
        selector.register(pgconn.socket, selectors.EVENT_READ)
        while True:
            if unsent or pgconn.is_busy():
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
                selector.modify(pgconn.socket, wanted)
                selector.select()
                pgconn.consume_input()
                unsent = unsent and bool(pgconn.flush())
                continue
            result = pgconn.get_result()
            if result is not None and result.status == pq.ExecStatus.PIPELINE_SYNC:
                return
            if result is not None:
                results.append(result)
            elif ended:  # once after each result; twice, and nothing more will come
                for each in results:
                    _check(each)
                raise psycopg.OperationalError(pgconn.get_error_message())
            ended = result is None


_DONE: Final = (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK)


def _check(result: pq.abc.PGresult) -> pq.abc.PGresult:
    """Raises what psycopg would raise."""
    if result.status in _DONE:
        return result
    code = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
    text = result.get_error_message()
    if not code:  # libpq's own: the connection is gone
        raise psycopg.OperationalError(text)
    try:
        kind = psycopg.errors.lookup(code)
    except KeyError:
        kind = psycopg.DatabaseError
    raise kind(text)


def fetch_value(connection: psycopg.Connection[Any], query: str, *values: Any) -> Any:
    return fetch_row(connection, query, *values)[0]


def fetch_row(connection: psycopg.Connection[Any], query: str, *values: Any) -> tuple[Any, ...]:
    row = connection.execute(query.encode(), values).fetchone()
    assert row is not None
    return row


# -- values ------------------------------------------------------------------------------------------------------------


def encode(value: Any) -> bytes | None:
    """A value as a parameter of libpq: bytes unchanged, everything else as text."""
    return _ENCODERS.get(type(value), _encode_subclass)(value)


def _encode_subclass(value: Any) -> bytes | None:
    return next((each for kind, each in _ENCODERS.items() if isinstance(value, kind)), bytes)(value)


def _text(value: str) -> bytes:
    text = str.encode(value)
    if b"\0" in text:  # libpq would truncate it there
        raise psycopg.DataError(f"PostgreSQL keeps no text with a NUL in it: {value[:80]!r}")
    return text


def _array(values: list[Any]) -> bytes:
    """Of texts or of numbers."""
    return b"{" + b",".join([_quoted(each) if isinstance(each, str) else encode(each) or b"" for each in values]) + b"}"


def _quoted(value: str) -> bytes:
    return b'"' + _text(value).replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"'


_ENCODERS: Final[Mapping[type, Callable[[Any], bytes | None]]] = {
    type(None): dict[None, bytes]().get,
    bytes: bytes,
    str: _text,
    int: b"%d".__mod__,
    float: lambda value: float.__repr__(value).encode(),
    list: _array,
}
"""By type. Numbers are written as int and float are, as the repr of an enumeration differs."""


# -- the database ------------------------------------------------------------------------------------------------------


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
            if self.has("about"):
                self.execute("LOCK TABLE about")
            yield

    def create(self) -> None:
        if self._place:
            self.connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(self._place)))
        taken = min([name for name in TABLES if self.has(name)], default=None)
        if taken is not None:
            raise StoreError(
                f"{self.name} has a table {taken!r} that is not ours; give another database, or a schema of its own "
                "with ?schema=NAME"
            )
        for statement in _DDL:
            self.execute(statement)

    def has(self, table: str) -> bool:
        row = self.connection.execute("SELECT to_regclass(%s) IS NOT NULL", [table]).fetchone()
        return bool(row and row[0])

    def execute(self, statement: str) -> psycopg.Cursor[Any]:
        return self.connection.execute(statement.encode())


class PostgresDatabase(PostgresServer):
    """See tx.py for each method."""

    is_fatal, may_retry = staticmethod(is_fatal), staticmethod(may_retry)
    next_waiting = (
        "SELECT q.name, r.key FROM queues q CROSS JOIN LATERAL "
        f"{NEXT_WAITING.format('w.key', ' FOR UPDATE SKIP LOCKED')} r WHERE q.name = ANY (?)"
    )

    def prepare(self) -> None:
        with explained(self), contextlib.closing(self.open()) as connection:
            self._check(connection)
            migrate(PostgresSchema(connection, self.name, self.schema))

    def _check(self, connection: psycopg.Connection[Any]) -> None:
        if connection.info.server_version < MIN_VERSION:
            raise StoreError(f"{self.name} is PostgreSQL {connection.info.server_version // 10_000}; use 13 or newer")
        if fetch_value(connection, "SELECT pg_is_in_recovery()"):
            raise StoreError(f"{self.name} is a standby, which takes no writes; give the address of the primary")

    def connect(self, read_only: bool) -> PostgresConnection:
        with explained(self):
            return PostgresConnection(self, read_only)

    def listen(self, wake: Wake) -> PostgresListener:
        with explained(self):
            return PostgresListener(self.open, self.channel, self.id, wake, self.closing)
