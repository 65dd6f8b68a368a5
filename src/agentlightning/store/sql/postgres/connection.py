"""A connection to PostgreSQL that reconnects, and finds out whether a commit in doubt succeeded."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import psycopg
from psycopg import ClientCursor, pq, sql
from psycopg.adapt import Transformer
from sqlalchemy import Table, text

from agentlightning.store.clock import OUTAGE_SECONDS, Clock
from agentlightning.store.sql.postgres import errors
from agentlightning.store.sql.postgres.dialect import (
    DIALECT,
    MERGE_COUNTERS,
    POSITION,
    TABLES,
    bulk_values,
    encode,
    formats,
)
from agentlightning.store.sql.postgres.errors import ConnectError, UnknownOutcomeError
from agentlightning.store.sql.postgres.listener import payloads
from agentlightning.store.sql.postgres.server import PostgresServer
from agentlightning.store.sql.tables import bulk, statements
from agentlightning.store.sql.tables.backend import Insert, Row, Statement, Update
from agentlightning.store.sql.tables.schema import rollouts

REPLAN_TRANSACTIONS: Final = 500
"""Plans of prepared statements are discarded at least this often."""
SERVER_RETENTION_SECONDS: Final = 7 * 86_400
"""The row of a server that was killed is deleted after this time."""

_KEYS: Final = Statement(
    text("SELECT nextval(:sequence) FROM generate_series(1, CAST(:many AS BIGINT))"), ("sequence", "many")
)
_LOCK: Final = 0x61676C6B
"""The upper half of the advisory locks that order rows; the lower half is the oid of the table."""
_TABLE: Final = f"{_LOCK << 32} + CAST(CAST(to_regclass(:table) AS oid) AS BIGINT)"
_LOCK_KEYS: Final = Statement(text(f"SELECT pg_advisory_xact_lock({_TABLE})"), ("table",))
_ROLLOUTS: Final = _TABLE.replace(":table", "'rollouts'")
_SHOW: Final = (
    f"SELECT pg_advisory_xact_lock({_ROLLOUTS}); "
    "SELECT setval('rollouts_shown', greatest((SELECT last_value FROM rollouts_shown), "
    f"(SELECT max({POSITION}) FROM rollouts)))"
)
"""From now on, no rollout is committed at or before the last position there is."""
_PLACE: Final = (
    f"SELECT pg_advisory_xact_lock_shared({_ROLLOUTS})",
    "UPDATE rollouts SET position = new.position FROM (SELECT key, nextval('rollouts_key_seq') AS position "
    "FROM unnest(%s::bigint[]) AS key ORDER BY key) AS new "
    "WHERE rollouts.key = new.key AND %s <= (SELECT last_value FROM rollouts_shown)",
)
"""With a commit: where pages have shown what comes after the first of some new rollouts, move these to the end."""
_NOW: Final = Statement(text("SELECT extract(epoch FROM clock_timestamp())::float8"))
_PASSED: Final = "(extract(epoch FROM clock_timestamp())::float8 - reading)"
_SYNC_CLOCK: Final = Statement(
    text(
        f"UPDATE clocks SET steady = steady + CASE WHEN abs({_PASSED}) > CAST(:gap AS FLOAT8) "
        f"THEN CAST(:witnessed AS FLOAT8) ELSE greatest({_PASSED}, 0) END, reading = reading + {_PASSED} "
        "WHERE name = '' RETURNING steady"
    ),
    ("gap", "witnessed"),
)
"""`Clock.advance`, by the database's own clock: those of its servers are never compared. For a server that had to wait
for this row, slightly negative time has passed."""
_WRITE: Final = b"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
_READ: Final = b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
"""All queries of one transaction see the same snapshot."""


class PostgresConnection:
    """One connection, reopened when it is lost. Raises ConnectError if that fails."""

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
        self._payloads: list[str] = []
        self._new_rollouts: list[int] = []
        """Keys of those that this transaction has inserted."""
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
        self._loader = Transformer(connection)
        self._statements: dict[Statement, bytes] = {}
        self._prepared: dict[tuple[Insert | Update, int], tuple[bytes, list[int]]] = {}
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

    def begin(self, write: bool) -> None:
        self._wrote = False
        self._payloads.clear()
        self._new_rollouts.clear()
        start = (_WRITE if write else _READ) + self._discard_plans()
        for again in (True, False):
            try:
                if self._connection.closed:
                    self._use(self._server.reopen())
                self._send(start)
                return
            except psycopg.Error as error:
                if not errors.is_lost(error) or not again:
                    raise
                self._connection.close()

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
        if not self._wrote and not self._payloads:
            self._send(b"COMMIT")
            return
        self._number += 1
        try:
            self._commit_with_number()
        except psycopg.Error as error:
            if not errors.is_lost(error):
                raise
            self._connection.close()
            if not self._was_committed():
                raise

    def _commit_with_number(self) -> None:
        """Store the number of the transaction, notify others, and commit, in one round trip."""
        script = [
            "INSERT INTO servers (server, number) VALUES (%s, %s) "
            "ON CONFLICT (server) DO UPDATE SET number = excluded.number, seen = now()"
        ]
        values: list[Any] = [self._server.id, self._number]
        for payload in self._payloads:
            script.append("SELECT pg_notify(%s, %s)")
            values += [self._server.channel, payload]
        if self._new_rollouts:
            script += _PLACE
            values += [self._new_rollouts, min(self._new_rollouts)]
        text = "; ".join([*script, "COMMIT"])
        self._send(ClientCursor(self._connection).mogrify(text.encode(), values).encode())

    def _send(self, command: bytes) -> None:
        """Bypasses psycopg, which forgets every prepared statement when it sees a ROLLBACK."""
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
        """End the server process of the lost connection, and wait until it has ended."""
        end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s AND backend_start = %s"
        while self._connection.execute(end.encode(), backend).fetchall():
            time.sleep(0.01)

    def rollback(self) -> None:
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

    def all(self, statement: Statement, *values: Any) -> list[Any]:
        result = self._execute(statement, values)
        self._loader.set_pgresult(result)
        return self._loader.load_rows(0, result.ntuples, tuple)

    def run(self, statement: Statement, *values: Any) -> int:
        self._wrote = True
        return self._execute(statement, values).command_tuples or 0

    def _execute(self, statement: Statement, values: tuple[Any, ...]) -> pq.abc.PGresult:
        """Bypasses psycopg's cursor, with which a rollout costs a fifth more CPU (benchmarks/store.py --postgres)."""
        pgconn = self._connection.pgconn
        compiled = statement.compiled(DIALECT)
        name = self._statements.get(statement)
        if name is None:
            name = b"one_%d" % len(self._statements)
            _check(pgconn.prepare(name, compiled.sql.encode()))
            self._statements[statement] = name
        arranged = compiled.arrange(values)
        param: list[Any] = [encode(value) for value in arranged]
        return _check(pgconn.exec_prepared(name, param, [int(type(value) is bytes) for value in arranged], 1))

    def insert(self, insert: Insert, rows: Sequence[Row]) -> int:
        if insert.table is rollouts:
            self._new_rollouts += [row[0] for row in rows]
        return sum(self._bulk(insert, bulk.insert_sql, chunk) for chunk in bulk.chunks(rows))

    def update(self, update: Update, rows: Sequence[Row]) -> None:
        for chunk in bulk.chunks(rows):
            self._bulk(update, bulk.update_sql, chunk)

    def _bulk(self, statement: Any, write_sql: Callable[[Any, int, bulk.Values], str], rows: Sequence[Row]) -> int:
        """One statement for many rows."""
        self._wrote = True
        pgconn = self._connection.pgconn
        prepared = self._prepared.get((statement, len(rows)))
        if prepared is None:
            name = b"many_%d" % len(self._prepared)
            _check(pgconn.prepare(name, write_sql(statement, len(rows), bulk_values).encode()))
            prepared = self._prepared[statement, len(rows)] = (
                name,
                formats(statement.columns, statement.table) * len(rows),
            )
        name, kinds = prepared
        values: list[Any] = [encode(value) for row in rows for value in row]
        result = _check(pgconn.exec_prepared(name, values, kinds))
        return result.command_tuples or 0

    def keys(self, table: Table, count: int) -> Sequence[int]:
        return [key for (key,) in self.all(_KEYS, f"{table.name}_key_seq", count)]

    def commit_in_order(self, table: Table) -> None:
        self.all(_LOCK_KEYS, table.name)

    def check_files(self) -> None:
        """Nothing to do: the files are those of the server."""

    def last_position(self) -> int:
        self.rollback()
        last = _check(self._connection.pgconn.exec_(_SHOW.encode())).get_value(0, 0)
        self.begin(False)
        return int(last or 0)

    def lock(self, table: Table) -> None:
        self._send(f"LOCK TABLE {table.name} IN SHARE ROW EXCLUSIVE MODE".encode())

    def sync_clock(self, clock: Clock) -> None:
        """A single statement in a transaction of its own, so that a server that is suspended meanwhile blocks no
        other."""
        if self._connection.closed:
            self._use(self._server.reopen())
        sent = clock.reading()
        while not (rows := self.all(_SYNC_CLOCK, OUTAGE_SECONDS, clock.certain_seconds())):
            ((last_event,),) = self.all(statements.LAST_SIGN_OF_LIFE)
            ((now,),) = self.all(_NOW)
            self.insert(statements.START_CLOCK, [("", now, now if last_event is None else last_event)])
        clock.sync((sent + clock.reading()) / 2, rows[0][0])

    def changed(self) -> bool:
        return True

    def notify(self, queued: bool, finished: Sequence[str]) -> None:
        if queued or finished:
            self._payloads += payloads(self._server.id, queued, finished)

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


def _check(result: pq.abc.PGresult) -> pq.abc.PGresult:
    """Raises what psycopg would raise."""
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
