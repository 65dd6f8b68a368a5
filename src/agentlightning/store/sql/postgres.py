"""The PostgreSQL backend: any number of servers, on any number of machines, share one database.

The writer of each server locks the rows it works with in the order of their keys, and claims waiting rollouts with
SKIP LOCKED. Servers notify one another of what they wait for with NOTIFY. Writes wait until the next query or the
commit, and go to the server together (libpq's pipeline mode).

A lost connection is reopened, for up to RECONNECT_SECONDS. The running transaction is not lost with it: if it was not
committed, it runs again, and if the answer to its commit was lost, its outcome is looked up. For that, each transaction
that writes stores its number in the row of its server in the table `servers`.

Deadlines are kept on a clock of the database that passes while any of its servers is alive (see store/clock.py). Each
server synchronises with it once a second, so that machines whose clocks differ agree on when an attempt times out, to
within the duration of one message, and setting the clock of a machine ends nothing that is alive.

An error of a statement has a code (https://www.postgresql.org/docs/current/errcodes-appendix.html), an error of
connecting has only a text. No text contains a password.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from functools import cache
from itertools import count
from typing import Any, ClassVar, Final
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from agentlightning.errors import ConfigError, MissingExtraError, StoreError, StoreFullError
from agentlightning.store.clock import OUTAGE_SECONDS, Clock
from agentlightning.store.ids import new_hex
from agentlightning.store.sql import schema
from agentlightning.store.sql.rollouts import NEXT_WAITING
from agentlightning.store.sql.schema import FIND_VERSION, check_version, migrate
from agentlightning.store.sql.tx import Connection, Database, Statement, Wake, chunks, explained

try:
    import psycopg
    from psycopg import generators, pq, sql, waiting
    from psycopg.adapt import PyFormat, Transformer
    from psycopg.conninfo import conninfo_to_dict
except ImportError as error:
    raise MissingExtraError("psycopg", "postgres") from error

logger = logging.getLogger(__name__)

RECONNECT_SECONDS: Final = 60.0
"""How long a call waits for a lost server to come back."""
CLOSE_SECONDS: Final = 5.0
"""How long all calls together wait for it once the store is being closed."""
SUSPENDED_SECONDS: Final = 30
"""A server that is silent for this long within a transaction (suspended, say) loses it, so that others can go on."""
MAX_NAME_BYTES: Final = 63
"""Of a schema or a channel."""
_SETTINGS: Final = (
    "SET statement_timeout = 0; SET lock_timeout = '120s'; SET client_min_messages = warning; "
    f"SET idle_in_transaction_session_timeout = '{SUSPENDED_SECONDS}s'; "
    # A stronger setting than "on" is the administrator's choice, a weaker one would lose what was acknowledged.
    "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') IN "
    "('off', 'local'); "
)
_LIBPQ_DEFAULTS: Final = {
    "application_name": "agentlightning",
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}
"""Parameters of libpq that the URL may override. A server that vanished is noticed within half a minute."""


PAYLOAD_BYTES: Final = 7_900
"""PostgreSQL accepts payloads of less than 8,000 bytes."""
CLOSING_SECONDS: Final = 0.5
"""An idle listener looks this often whether it was closed. Keepalives of TCP test its connection."""
FIRST_RETRY_SECONDS: Final = 0.05
MAX_RETRY_SECONDS: Final = 2.0
"""Between these, the pauses between attempts to reconnect double."""
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
WAIT_SECONDS: Final = 1.0
"""How long to wait for a part of the results before waiting again."""

# -- errors ------------------------------------------------------------------------------------------------------------

RETRY: Final = frozenset({"40001", "40P01"})
"""Serialization failure, deadlock: PostgreSQL rolled back the transaction so that another could go on."""
DUPLICATE_KEY: Final = "23505"
"""Another server has just inserted the same id: a retry of the command finds it."""
LOST: Final = frozenset({"25P03", "57P01", "57P02", "57P03", "57P05"})
"""The server ended the connection: it is shutting down or starting, has crashed, or an administrator ended it."""
DISK_FULL: Final = "53100"

_ADVICE: Final = {
    "25006": "the server takes no writes: it is a standby or set to read only; give the address of the primary",
    "28000": "the server does not let this user in from here; see CREATE ROLE and pg_hba.conf",
    "28P01": "the password is wrong; give the right one in the URL, in PGPASSWORD or in ~/.pgpass",
    "3D000": "make the database first: createdb",
    "3F000": "make the schema first, or leave ?schema= out",
    "42501": "grant this user the right to create and change tables in this schema",
    "53200": "the server is out of memory; nothing of this call was stored",
    "53300": "every connection of the server is taken (a store needs three); close some or raise max_connections",
    "55P03": "another transaction held a row for too long; look into pg_stat_activity for it",
    "57014": "someone cancelled the statement, or the server limits how long one may take",
    "57P03": "it is just starting or stopping; try again in a moment",
    "58030": "the server's disk refused",
    "XX001": "the server's data is damaged",
}

_CONNECTING: Final = (
    ("password authentication failed", "28P01"),
    ("no password supplied", "28P01"),
    ("no pg_hba.conf entry", "28000"),
    ("too many clients", "53300"),
    ("remaining connection slots", "53300"),
    ("too many connections", "53300"),
    ('role "', "28000"),
    ("does not exist", "3D000"),
    ("permission denied", "42501"),
    ("starting up", "57P03"),
    ("shutting down", "57P03"),
    ("recovery mode", "57P03"),
    ("not yet accepting connections", "57P03"),
)
"""(part of the message with which the server refuses a connection, code of such an error)"""
_HOPELESS: Final = frozenset({"28P01", "28000", "3D000", "42501"})
"""Reasons for a refused connection that do not pass."""


class ConnectError(Exception):
    """No connection could be made. `hopeless`: waiting would not help."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error).strip())
        code: str | None = getattr(error, "sqlstate", None)
        self.sqlstate = code or next((code for part, code in _CONNECTING if part in str(error)), None)
        self.hopeless = self.sqlstate in _HOPELESS or not isinstance(error, psycopg.OperationalError)


class UnknownOutcomeError(Exception):
    """The connection was lost during a commit, and the outcome could not be queried."""


def is_lost(error: BaseException) -> bool:
    """Whether the connection is lost, and with it the transaction."""
    if not isinstance(error, psycopg.Error):
        return isinstance(error, ConnectError)
    code = error.sqlstate
    if code is None:
        return isinstance(error, psycopg.OperationalError)  # an error of libpq: the socket was closed
    return code in LOST or code.startswith("08")


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
        return fetch_value(self.connection, "SELECT to_regclass(%s) IS NOT NULL", table)

    def execute(self, statement: str) -> psycopg.Cursor[Any]:
        return self.connection.execute(statement.encode())


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


class PostgresConnection(Connection):
    """One connection, reopened when it is lost. Raises ConnectError if that fails."""

    position = "coalesce(r.position, r.key)"

    def __init__(self, database: PostgresDatabase, read_only: bool) -> None:
        self._database = database
        self.writer_id = database.id
        self._read_only = read_only
        self._number = 0
        """The number of the last transaction that writes."""
        self._begun = 0
        self._plan_at = 10
        self._wrote = False
        """Whether this transaction has written."""
        self._calls: list[tuple[bytes, Any, Sequence[int]]] = []
        """What is sent with the next query: prepared statements, their parameters, and which of these are binary."""
        self._payload: str | None = None
        """What the commit notifies other servers of."""
        self._keys: dict[str, list[int]] = {}
        self._new_rollouts: list[int] = []
        """Keys of those that this transaction has made."""
        connection = database.open()
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
        self._values = Transformer(connection)
        self._statements: dict[str, bytes] = {}
        """The names of those that are prepared."""
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
                self._use(self._database.reopen())
            found = self._send(start)
        except psycopg.Error as error:
            if not is_lost(error):
                raise
            self._connection.close()
            self._use(self._database.reopen())
            found = self._send(start)
        check_version(self._database.name, (found.get_value(0, 0) or b"").decode())

    def _forget(self) -> None:
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
        self._queue(_NOTE_NUMBER, (self._database.id, self._number))
        if self._payload is not None:
            self._queue("SELECT pg_notify(?, ?)", (self._database.channel, self._payload))
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
            self._use(self._database.reopen())
            self._end_backend(backend)
            query = "SELECT (SELECT number FROM servers WHERE server = %s)"
            return fetch_value(self._connection, query, self._database.id) == self._number
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
                self._connection.execute("DELETE FROM servers WHERE server = %s", [self._database.id])
        self._connection.close()

    # -- statements --------------------------------------------------------------------------------------------------

    def all(self, sql: str, *values: Any) -> list[Any]:
        self._queue(sql, values)
        result = self._exchange()
        self._values.set_pgresult(result)
        return self._values.load_rows(0, result.ntuples, tuple)

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
            name = b"agl_%d" % len(self._statements)
            _check(self._connection.pgconn.prepare(name, _translated(sql)))
            self._statements[sql] = name
        wanted = [PyFormat.BINARY if type(value) is bytes else PyFormat.TEXT for value in values]
        self._calls.append((name, self._values.dump_sequence(values, wanted), self._values.formats or []))

    def _exchange(self) -> pq.abc.PGresult:
        """Send what is queued; returns the last result. Bypasses psycopg's cursor, which costs more CPU."""
        calls, self._calls = self._calls, []
        pgconn = self._connection.pgconn
        if len(calls) == 1:
            return _check(pgconn.exec_prepared(*calls[0], 1))
        try:
            pgconn.enter_pipeline_mode()
            for call in calls:
                pgconn.send_query_prepared(*call, 1)
            pgconn.pipeline_sync()
            return waiting.wait(_read_pipeline(pgconn), pgconn.socket, WAIT_SECONDS)
        finally:
            with contextlib.suppress(psycopg.Error):  # the connection is lost
                pgconn.exit_pipeline_mode()

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
            text = f"{self._database.id} {int(queued)} {','.join(finished)}"
            self._payload = text if len(text) <= PAYLOAD_BYTES else f"{self._database.id} {int(queued)} *"

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


def _read_pipeline(pgconn: pq.abc.PGconn) -> Generator[Any, Any, pq.abc.PGresult]:
    """Send what is left, and read the results up to the end of the pipeline; the last one before that. Raises the error
    of the first that failed."""
    yield from generators.send(pgconn)
    results: list[pq.abc.PGresult] = []
    while not results or results[-1].status != pq.ExecStatus.PIPELINE_SYNC:
        found = yield from generators.fetch_many(pgconn)
        if not found:  # and nothing more will come
            for each in results:
                _check(each)
            raise psycopg.OperationalError(pgconn.get_error_message())
        results += found
    return [_check(each) for each in results[:-1]][-1]


def _check(result: pq.abc.PGresult) -> pq.abc.PGresult:
    """Raises what psycopg would raise."""
    if result.status in (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK):
        return result
    error = psycopg.errors.error_from_result(result)
    raise error if error.sqlstate else psycopg.OperationalError(str(error))  # libpq's own: the connection is gone


def fetch_value(connection: psycopg.Connection[Any], query: str, *values: Any) -> Any:
    return fetch_row(connection, query, *values)[0]


def fetch_row(connection: psycopg.Connection[Any], query: str, *values: Any) -> tuple[Any, ...]:
    row = connection.execute(query.encode(), values).fetchone()
    assert row is not None
    return row


# -- the database ------------------------------------------------------------------------------------------------------


class PostgresDatabase(Database):
    """The PostgreSQL database at `url`: `postgresql://USER:PASSWORD@HOST:PORT/DATABASE`, with libpq's parameters and
    `schema=NAME` (created if missing). Raises ConfigError for an invalid URL.

    What the URL leaves out comes from libpq's environment (PGUSER, PGPASSWORD, ...) and files. Connect to the server
    itself or to a pooler that pools sessions: LISTEN and prepared statements do not work through any other.
    """

    shared = True
    single = False
    errors: ClassVar[tuple[type[Exception], ...]] = (psycopg.Error, ConnectError, UnknownOutcomeError)
    next_waiting = (
        "SELECT q.name, r.key FROM queues q CROSS JOIN LATERAL "
        f"{NEXT_WAITING.format('w.key', ' FOR UPDATE SKIP LOCKED')} r WHERE q.name = ANY (?)"
    )

    def __init__(self, url: str) -> None:
        self._parameters, self.schema = _read_url(url)
        self.name = _name_of(self._parameters, self.schema)
        self.id = new_hex()
        """The id of this Agent Lightning server among those of the database."""
        self.channel = f"agentlightning_{self.schema}" if self.schema else "agentlightning"
        """On which servers notify one another of what they committed."""
        if len(self.channel.encode()) > MAX_NAME_BYTES:
            self.channel = f"agentlightning_{hashlib.blake2b(self.schema.encode(), digest_size=16).hexdigest()}"
        self._closing = threading.Event()
        """Set when the store is closed: nothing waits for a lost server any more."""
        self._close_deadline = math.inf

    def prepare(self) -> None:
        with explained(self), contextlib.closing(self.open()) as connection:
            version = connection.info.server_version
            if version < MIN_VERSION:
                raise StoreError(f"{self.name} is PostgreSQL {version // 10_000}; use 13 or newer")
            if fetch_value(connection, "SELECT pg_is_in_recovery()"):
                raise StoreError(f"{self.name} is a standby, which takes no writes; give the address of the primary")
            migrate(PostgresSchema(connection, self.name, self.schema))

    def connect(self, read_only: bool) -> PostgresConnection:
        with explained(self):
            return PostgresConnection(self, read_only)

    def open(self) -> psycopg.Connection[Any]:
        """A new connection of the driver, outside of any transaction. Raises ConnectError."""
        try:
            connection = psycopg.connect(**self._parameters, autocommit=True)
        except (psycopg.Error, UnicodeError) as error:
            raise ConnectError(error) from None
        try:
            place = sql.SQL("SET search_path = {}").format(sql.Identifier(self.schema)).as_string(connection)
            connection.execute((_SETTINGS + (place if self.schema else "")).encode())
        except psycopg.Error as error:
            connection.close()
            raise ConnectError(error) from None
        return connection

    def reopen(self) -> psycopg.Connection[Any]:
        """Replace a connection that was lost: tries for as long as a call may wait."""
        deadline, pause = time.monotonic() + RECONNECT_SECONDS, FIRST_RETRY_SECONDS
        while True:
            try:
                return self.open()
            except ConnectError as error:
                late = time.monotonic() + pause > min(deadline, self._close_deadline)
                if error.hopeless or late or self._closing.wait(pause):
                    raise
                pause = min(2 * pause, MAX_RETRY_SECONDS)

    def begin_close(self) -> None:
        self._close_deadline = time.monotonic() + CLOSE_SECONDS

    def close(self) -> None:
        self._closing.set()

    # -- notifications -----------------------------------------------------------------------------------------------

    # A transaction that commits something others may wait for notifies them on the channel. PostgreSQL delivers only to
    # those who listen at that moment, so after a lost connection a server takes it that anything may have happened.

    def listen(self, wake: Wake) -> None:
        with explained(self):
            connection = self._listening()
        threading.Thread(target=self._receive, args=[connection, wake], name="agl-store-listener", daemon=True).start()

    def _listening(self) -> psycopg.Connection[Any]:
        connection = self.open()
        try:
            connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self.channel)))
        except psycopg.Error as error:
            connection.close()
            raise ConnectError(error) from error
        return connection

    def _receive(self, connection: psycopg.Connection[Any], wake: Wake) -> None:
        """Pass on what other servers notify of, until the database is closed."""
        pause = FIRST_RETRY_SECONDS
        while not self._closing.is_set():
            try:
                if connection.closed:
                    connection = self._listening()
                    wake(True, None)
                pause = FIRST_RETRY_SECONDS
                for notice in connection.notifies(timeout=CLOSING_SECONDS, stop_after=1):
                    self._pass_on(notice.payload, wake)
            except (psycopg.Error, ConnectError) as error:
                if pause == FIRST_RETRY_SECONDS and not self._closing.is_set():
                    text = "notifications of other servers cannot be received; retrying: %s"
                    logger.warning(text, str(error).strip())
                connection.close()
                self._closing.wait(pause)
                pause = min(2 * pause, MAX_RETRY_SECONDS)
        connection.close()

    def _pass_on(self, payload: str, wake: Wake) -> None:
        """payload: `SERVER 1 ID,ID`, or `SERVER 1 *` where any rollouts may have finished."""
        try:
            server, queued, ids = payload.split(" ")
        except ValueError:
            logger.warning("unexpected notification on the channel %r: %r", self.channel, payload)
            return
        if server != self.id:
            wake(queued == "1", None if ids == "*" else ids.split(",") if ids else ())

    # -- errors ------------------------------------------------------------------------------------------------------

    def explain(self, error: Exception) -> StoreError:
        where, code = self.name, getattr(error, "sqlstate", None) or ""
        # Without the addresses that libpq repeats.
        text = str(error).strip().replace("\n\t", " ").split("\n")[0]
        text = text.removeprefix("connection failed: ").removeprefix("connection is bad: ")
        if isinstance(error, UnknownOutcomeError):
            return StoreError(f"{where}: {error}")
        if isinstance(error, ConnectError):
            other = _EXAMPLE if error.hopeless else "check that PostgreSQL runs there and that host and port are right"
            return StoreError(f"{where} cannot be reached: {text}; {_ADVICE.get(code, other)}")
        if code == DISK_FULL:
            return StoreFullError(
                f"the disk of {where} is full ({text}); nothing of this call was stored; free some space and call again"
            )
        if is_lost(error):
            return StoreError(f"the connection to {where} was lost ({text}); call again")
        advice = _ADVICE.get(code, "this is not expected; the transaction was undone")
        return StoreError(f"{where}: {text}{f' ({code})' if code else ''}; {advice}")

    def is_fatal(self, error: BaseException) -> bool:
        code = getattr(error, "sqlstate", None) or ""
        if isinstance(error, ConnectError | UnknownOutcomeError) or (self.may_retry(error) and code != DUPLICATE_KEY):
            return True
        return code in _ADVICE or code[:2] in ("53", "57", "58", "XX")

    def may_retry(self, error: BaseException) -> bool:
        if isinstance(error, ConnectError):
            return False  # connecting was retried for as long as a call may wait
        return is_lost(error) or getattr(error, "sqlstate", None) in (*RETRY, DUPLICATE_KEY)


_EXAMPLE: Final = "an address looks like postgresql://USER:PASSWORD@HOST:5432/DATABASE"


def _read_url(url: str) -> tuple[dict[str, Any], str]:
    """(libpq's parameters, the schema; empty for the default one). No error of it shows what may be a password."""
    scheme, rest = url.split("://", 1) if "://" in url else ("", url)
    if scheme.split("+")[0] not in ("postgresql", "postgres"):
        raise ConfigError(f"this is not the address of a PostgreSQL database; {_EXAMPLE}")
    try:
        parts = urlsplit(f"postgresql://{rest}")
    except ValueError as error:  # It names no part of the address.
        raise ConfigError(f"this is not the address of a PostgreSQL database ({error}); {_EXAMPLE}") from None
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    schema = query.pop("schema", "")
    if len(schema.encode()) > MAX_NAME_BYTES:
        raise ConfigError(f"schema={schema!r} is longer than the {MAX_NAME_BYTES} bytes that PostgreSQL's names have")
    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    unknown = sorted(query.keys() - known)
    if unknown and "@" not in unknown[0]:  # else it is part of a password
        raise ConfigError(f"{unknown[0]!r} is neither schema nor a parameter of libpq; leave it out of the address")
    try:
        param = conninfo_to_dict(urlunsplit(parts._replace(query=urlencode(query, quote_via=quote))))
    except psycopg.ProgrammingError:
        param = {"dbname": "@"}
    if "@" in str(param.get("dbname", "")) or not str(param.get("port", "0")).replace(",", "").isdigit():
        raise ConfigError(
            "the address of the PostgreSQL database cannot be read; write @ : / % ? # in a user or password as "
            f"%40 %3A %2F %25 %3F %23; {_EXAMPLE}"
        )
    return {**_LIBPQ_DEFAULTS, **param}, schema


def _name_of(parameters: Mapping[str, Any], schema: str) -> str:
    host = parameters.get("host") or parameters.get("hostaddr") or "localhost"
    port = f":{parameters['port']}" if "port" in parameters else ""
    database = parameters.get("dbname") or parameters.get("user") or ""
    return f"postgresql://{host}{port}/{database}{f'?schema={schema}' if schema else ''}"
