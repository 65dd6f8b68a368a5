"""Receives notifications of what other servers committed: LISTEN and NOTIFY.

A transaction that commits something others may wait for notifies them on a channel of the schema. The listener, a
thread with a connection of its own, passes notifications on. PostgreSQL delivers only to those who listen at that
moment, so after a lost connection the listener reports once that anything may have happened.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import psycopg
from psycopg import pq, sql

from agentlightning.store.sql.postgres.errors import ConnectError
from agentlightning.store.sql.tables.backend import Wake

logger = logging.getLogger(__name__)

PAYLOAD_BYTES: Final = 7_900
"""PostgreSQL accepts payloads of less than 8,000 bytes."""
MAX_PAYLOADS: Final = 8
"""More notifications than this are replaced by one: any rollout may have finished."""
PROBE_SECONDS: Final = 30.0
"""An idle connection is tested this often."""
RETRY_SECONDS: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Pauses between attempts to reconnect; the last one repeats."""

Connect = Callable[[], "psycopg.Connection[Any]"]
"""Raises ConnectError."""


def payloads(server: str, queued: bool, finished: Sequence[str]) -> list[str]:
    """The notifications of a transaction: `SERVER 1 ID,ID`, or `SERVER 1 *` for too many ids."""
    head = f"{server} {int(queued)} "
    texts, line = [], ""
    for rollout_id in finished:
        if len(head) + len(line) + len(rollout_id) + 1 > PAYLOAD_BYTES:
            texts.append(head + line)
            head, line = f"{server} 0 ", ""
        line = f"{line},{rollout_id}" if line else rollout_id
    texts.append(head + line)
    return texts if len(texts) <= MAX_PAYLOADS else [f"{server} {int(queued)} *"]


def read_payload(text: str) -> tuple[str, bool, list[str] | None]:
    """(server, queued, finished; None: any may have). Raises ValueError for a payload of another program."""
    server, queued, ids = text.split(" ")
    return server, queued == "1", None if ids == "*" else ids.split(",") if ids else []


class PostgresListener:
    """Calls `wake` for notifications of servers other than `server` on `channel`. It listens once it is created.
    `closed` is set when it is closed."""

    def __init__(self, connect: Connect, channel: str, server: str, wake: Wake, closed: threading.Event) -> None:
        self._connect = connect
        self._channel = channel
        self._server = server
        self._wake = wake
        self._closed = closed
        self._ended, self._end = os.pipe()
        self._connection: psycopg.Connection[Any] | None = self._listen()
        self._thread = threading.Thread(target=self._work, name="agl-store-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent. Does not wait for the thread."""
        if not self._closed.is_set():
            self._closed.set()
            os.close(self._end)

    def _listen(self) -> psycopg.Connection[Any]:
        connection = self._connect()
        try:
            connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
        except psycopg.Error as error:
            connection.close()
            raise ConnectError(error) from error
        return connection

    def _work(self) -> None:
        failures = 0
        while not self._closed.is_set():
            try:
                if self._connection is None:
                    self._connection = self._listen()
                    self._wake(True, None)
                failures = 0
                self._receive(self._connection)
            except (psycopg.Error, ConnectError) as error:
                if not failures and not self._closed.is_set():
                    logger.warning(
                        "notifications of other servers cannot be received; retrying: %s", str(error).strip()
                    )
                self._drop()
                self._closed.wait(RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)])
                failures += 1
        self._drop()
        os.close(self._ended)

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _receive(self, connection: psycopg.Connection[Any]) -> None:
        """Receive until closed. Raises psycopg.Error when the connection is lost."""
        pgconn = connection.pgconn
        while not self._closed.is_set():
            ready, _, _ = select.select([pgconn.socket, self._ended], [], [], PROBE_SECONDS)
            if self._ended in ready:
                return
            if not ready:
                _probe(pgconn)
            pgconn.consume_input()
            self._pass_on(pgconn)

    def _pass_on(self, pgconn: pq.abc.PGconn) -> None:
        """Report everything that has arrived in one call."""
        queued, finished, anything, others = False, list[str](), False, False
        while (notice := pgconn.notifies()) is not None:
            try:
                server, claims, ids = read_payload(notice.extra.decode())
            except ValueError:
                logger.warning("unexpected notification on the channel %r: %r", self._channel, notice.extra)
                continue
            if server == self._server:
                continue
            others, queued, anything = True, queued or claims, anything or ids is None
            finished += ids or ()
        if others:
            self._wake(queued, None if anything else finished)


def _probe(pgconn: pq.abc.PGconn) -> None:
    """Unlike `execute` of the connection, this leaves notifications for `_pass_on`."""
    result = pgconn.exec_(b"SELECT 1")
    if result.status != pq.ExecStatus.TUPLES_OK:
        raise psycopg.OperationalError(result.get_error_message())
