"""A connection to PostgreSQL that survives the loss of the one below it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import psycopg
from psycopg import ClientCursor, pq, sql
from psycopg.adapt import Transformer
from sqlalchemy import Table, text

from agentlightning.errors import StoreError
from agentlightning.store.clock import OUTAGE_SECONDS, Clock
from agentlightning.store.sql.postgres import errors
from agentlightning.store.sql.postgres.dialect import (
    DIALECT,
    FOLD_COUNTS,
    TABLES,
    encode,
    formats,
    insert_sql,
    update_sql,
)
from agentlightning.store.sql.postgres.errors import ConnectError, UnknownOutcomeError
from agentlightning.store.sql.postgres.listener import payloads
from agentlightning.store.sql.postgres.server import PostgresServer
from agentlightning.store.sql.tables import statements
from agentlightning.store.sql.tables.backend import Insert, Row, Statement, Update
from agentlightning.store.sql.tables.schema import rollouts

STEPS: Final = (64, 32, 16, 8)
"""Rows in one statement: few different ones, so that each is prepared once."""
REPLAN: Final = 500
"""Transactions."""
FORGET_SECONDS: Final = 7 * 86_400
"""The row of a server that was killed goes after this."""

_KEYS: Final = Statement(
    text("SELECT nextval(:sequence) FROM generate_series(1, CAST(:many AS BIGINT))"), ("sequence", "many")
)
_LOCK: Final = 0x61676C6B
"""Of the advisory locks that order keys: one for each table, the lower half of whose number is that of the table."""
_TABLE: Final = f"{_LOCK << 32} + CAST(CAST(to_regclass(:table) AS oid) AS BIGINT)"
_TAKE_TURNS: Final = Statement(text(f"SELECT pg_advisory_xact_lock({_TABLE})"), ("table",))
_SHOWN_KEYS: Final = Statement(
    text(
        f"WITH shown AS MATERIALIZED (SELECT pg_advisory_xact_lock_shared({_TABLE})) "
        "SELECT nextval(:sequence) FROM shown, generate_series(1, CAST(:many AS BIGINT))"
    ),
    ("table", "sequence", "many"),
)
"""From before it takes its keys until its end, a transaction can be seen to have some."""
_UNDER_WAY: Final = (
    "SELECT virtualtransaction FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND granted "
    f"AND classid = {_LOCK} AND objid = to_regclass(%s)::oid "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
SETTLE_SECONDS: Final = 35.0
"""PostgreSQL ends a transaction in which its server is silent sooner (SUSPENDED_SECONDS)."""
_POLL_SECONDS: Final = 0.005
_NOW: Final = Statement(text("SELECT extract(epoch FROM clock_timestamp())::float8"))
_PASSED: Final = "(extract(epoch FROM clock_timestamp())::float8 - reading)"
_KEEP_TIME: Final = Statement(
    text(
        f"UPDATE clocks SET steady = steady + CASE WHEN abs({_PASSED}) > CAST(:gap AS FLOAT8) "
        f"THEN CAST(:witnessed AS FLOAT8) ELSE greatest({_PASSED}, 0) END, reading = reading + {_PASSED} "
        "WHERE name = '' RETURNING steady"
    ),
    ("gap", "witnessed"),
)
"""`Clock.advance`, by the database's own clock: those of its servers are never compared. A server that waited for
another here sees a little less than nothing pass."""
_WRITE: Final = b"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
_READ: Final = b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
"""Everything that is read in one transaction is of one moment."""


class PostgresConnection:
    """One connection, made again when it is lost. Raises ConnectError where it cannot be had."""

    def __init__(self, server: PostgresServer, read_only: bool) -> None:
        self._server = server
        self.writer_id = server.id
        self._read_only = read_only
        self._number = 0
        """Of the last transaction that writes."""
        self._begun = 0
        self._plan_at = 10
        self._wrote = False
        """Something, in this transaction."""
        self._notices: list[str] = []
        self._use(server.open())
        if not read_only:
            self._forget_servers()

    def _use(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self._loader = Transformer(connection)
        self._statements: dict[Statement, bytes] = {}
        self._prepared: dict[tuple[Insert | Update, int], tuple[bytes, list[int]]] = {}
        self._backend = fetch_row(
            connection, "SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()"
        )

    def _forget_servers(self) -> None:
        """Of those that were killed, nobody will ask any more. What servers that are gone counted is kept."""
        old = f"DELETE FROM servers WHERE seen < now() - interval '{FORGET_SECONDS} seconds'"
        self._connection.execute(old.encode())
        with self._connection.transaction():
            self._connection.execute(b"SELECT pg_advisory_xact_lock(hashtextextended('agentlightning counts', 0))")
            self._connection.execute(FOLD_COUNTS.encode())

    # -- transactions ------------------------------------------------------------------------------------------------

    def begin(self, write: bool) -> None:
        self._wrote = False
        self._notices.clear()
        start = (_WRITE if write else _READ) + self._plan_anew()
        for again in (True, False):
            try:
                if self._connection.closed:
                    self._use(self._server.reopen())
                self._tell(start)
                return
            except psycopg.Error as error:
                if not errors.is_lost(error) or not again:
                    raise
                self._connection.close()

    def _plan_anew(self) -> bytes:
        """A prepared statement keeps the plan it was given when the tables were small: more and more rarely, but at
        least every REPLAN transactions, PostgreSQL is told to think again."""
        self._begun += 1
        if self._begun < self._plan_at:
            return b""
        self._plan_at += min(self._plan_at, REPLAN)
        return b"; DISCARD PLANS"

    def commit(self) -> None:
        """Where the answer of the server is lost, it is asked again over a new connection."""
        if not self._wrote and not self._notices:
            self._tell(b"COMMIT")
            return
        self._number += 1
        try:
            self._seal()
        except psycopg.Error as error:
            if not errors.is_lost(error):
                raise
            self._connection.close()
            if not self._was_committed():
                raise

    def _seal(self) -> None:
        """Say who committed what, and commit: one message to the server and back."""
        script = [
            "INSERT INTO servers (server, number) VALUES (%s, %s) "
            "ON CONFLICT (server) DO UPDATE SET number = excluded.number, seen = now()"
        ]
        values: list[Any] = [self._server.id, self._number]
        for notice in self._notices:
            script.append("SELECT pg_notify(%s, %s)")
            values += [self._server.channel, notice]
        text = "; ".join([*script, "COMMIT"])
        self._tell(ClientCursor(self._connection).mogrify(text.encode(), values).encode())

    def _tell(self, command: bytes) -> None:
        """Past psycopg, which forgets every prepared statement when it sees a ROLLBACK."""
        _check(self._connection.pgconn.exec_(command))

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
        """Whatever the lost connection still has under way is over when this returns."""
        end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s AND backend_start = %s"
        while self._connection.execute(end.encode(), backend).fetchall():
            time.sleep(0.01)

    def rollback(self) -> None:
        if self._connection.closed:
            return
        try:
            self._tell(b"ROLLBACK")
        except psycopg.Error:
            self._connection.close()  # the server undoes it

    def close(self) -> None:
        if not self._read_only:
            with contextlib.suppress(psycopg.Error):
                self._connection.execute("DELETE FROM servers WHERE server = %s", [self._server.id])
        self._connection.close()

    # -- statements --------------------------------------------------------------------------------------------------

    def all(self, statement: Statement, *values: Any) -> list[Any]:
        result = self._execute(statement, values)
        self._loader.set_pgresult(result)
        return self._loader.load_rows(0, result.ntuples, tuple)

    def run(self, statement: Statement, *values: Any) -> int:
        self._wrote = True
        return self._execute(statement, values).command_tuples or 0

    def _execute(self, statement: Statement, values: tuple[Any, ...]) -> pq.abc.PGresult:
        """Past psycopg's cursor, which takes twice as long for a statement and five times for each row of many."""
        wire = self._connection.pgconn
        compiled = statement.compiled(DIALECT)
        name = self._statements.get(statement)
        if name is None:
            name = b"one_%d" % len(self._statements)
            _check(wire.prepare(name, compiled.sql.encode()))
            self._statements[statement] = name
        arranged = compiled.arrange(values)
        param: list[Any] = [encode(value) for value in arranged]
        return _check(wire.exec_prepared(name, param, [int(type(value) is bytes) for value in arranged], 1))

    def insert(self, insert: Insert, rows: Sequence[Row]) -> int:
        return sum(self._many(insert, insert_sql, chunk) for chunk in _chunks(rows))

    def update(self, update: Update, rows: Sequence[Row]) -> None:
        for chunk in _chunks(rows):
            self._many(update, update_sql, chunk)

    def _many(self, what: Any, write_sql: Callable[[Any, int], bytes], rows: Sequence[Row]) -> int:
        """One statement for many rows."""
        self._wrote = True
        wire = self._connection.pgconn
        prepared = self._prepared.get((what, len(rows)))
        if prepared is None:
            name = b"many_%d" % len(self._prepared)
            _check(wire.prepare(name, write_sql(what, len(rows))))
            prepared = self._prepared[what, len(rows)] = (name, formats(what.columns, what.table) * len(rows))
        name, kinds = prepared
        values: list[Any] = [encode(value) for row in rows for value in row]
        result = _check(wire.exec_prepared(name, values, kinds))
        return result.command_tuples or 0

    def keys(self, table: Table, count: int) -> Sequence[int]:
        sequence = f"{table.name}_key_seq"
        if table is rollouts:
            return [key for (key,) in self.all(_SHOWN_KEYS, table.name, sequence, count)]
        return [key for (key,) in self.all(_KEYS, sequence, count)]

    def commit_in_order(self, table: Table) -> None:
        self.all(_TAKE_TURNS, table.name)

    def check_files(self) -> None:
        """They are the server's own."""

    def stable_key(self, table: Table) -> int:
        """The last key that was given, once every transaction has ended that may have been given one before."""
        self.rollback()
        last = int(fetch_value(self._connection, f"SELECT last_value FROM {table.name}_key_seq"))
        cancel_waiter = time.monotonic() + SETTLE_SECONDS
        under_way = self._under_way(table)
        while under_way and time.monotonic() < cancel_waiter:
            time.sleep(_POLL_SECONDS)
            under_way &= self._under_way(table)
        if under_way:
            raise StoreError(
                f"{self._server.name}: another server has not ended a transaction for {SETTLE_SECONDS:g} s, and what "
                "it adds would be missing in this page; call again"
            )
        self.begin(False)
        return last

    def _under_way(self, table: Table) -> set[str]:
        return {name for (name,) in self._connection.execute(_UNDER_WAY.encode(), [table.name]).fetchall()}

    def lock(self, table: Table) -> None:
        self._tell(f"LOCK TABLE {table.name} IN SHARE ROW EXCLUSIVE MODE".encode())

    def sync_clock(self, clock: Clock) -> None:
        """One statement, which is a transaction of its own: a server that is suspended in this moment holds up no
        other."""
        if self._connection.closed:
            self._use(self._server.reopen())
        asked = clock.reading()
        while not (rows := self.all(_KEEP_TIME, OUTAGE_SECONDS, clock.certain_seconds())):
            ((seen,),) = self.all(statements.LAST_SIGN_OF_LIFE)
            ((now,),) = self.all(_NOW)
            self.insert(statements.START_CLOCK, [("", now, now if seen is None else seen)])
        told = clock.reading()
        clock.sync((asked + told) / 2, rows[0][0])

    def changed(self) -> bool:
        return True

    def notify(self, queued: bool, finished: Sequence[str]) -> None:
        if queued or finished:
            self._notices += payloads(self._server.id, queued, finished)

    # -- the whole database ------------------------------------------------------------------------------------------

    def size(self) -> int:
        """Of our tables with their indexes."""
        query = "SELECT sum(pg_total_relation_size(to_regclass(n))) FROM unnest(%s::text[]) n"
        return int(fetch_value(self._connection, query, list(TABLES)))

    def vacuum(self) -> None:
        """Beside those who read and write. What is free at the end of a table goes back to the system, the rest is used
        again: to rewrite tables, which locks them, is for the administrator to decide."""
        for name in TABLES:
            self._connection.execute(sql.SQL("VACUUM (ANALYZE) {}").format(sql.Identifier(name)))


def _chunks(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Rows in lots of the sizes in STEPS, and a smaller one."""
    start = 0
    while start < len(rows):
        left = len(rows) - start
        size = next((step for step in STEPS if step <= left), left)
        yield rows[start : start + size]
        start += size


def _check(result: pq.abc.PGresult) -> pq.abc.PGresult:
    """Raises what psycopg would."""
    if result.status in (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK):
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
