"""Opening a database in this process, and the way to it: who writes, who reads, who waits."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from agentlightning.errors import StoreClosedError, StoreError
from agentlightning.store import idempotency
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.clock import Clock
from agentlightning.store.sql import queries
from agentlightning.store.sql.commands.base import Call, Do, Read
from agentlightning.store.sql.commands.rollouts import until
from agentlightning.store.sql.execution.database_thread import Lane, Observer
from agentlightning.store.sql.execution.unit_of_work import Unit
from agentlightning.store.sql.execution.writer import Writer
from agentlightning.store.sql.lifecycle import transitions
from agentlightning.store.sql.spans.recent import HotSpans
from agentlightning.store.sql.sqlite.backend import SqliteConnection, SqliteDatabase, locate
from agentlightning.store.sql.tables.backend import Connection, Database

logger = logging.getLogger(__name__)

T = TypeVar("T")


def find_database(url: str | Path | None) -> Database:
    """The database that `url` means. Raises ConfigError for one that means none."""
    if str(url).startswith(("postgresql:", "postgres:", "postgresql+")):
        from agentlightning.store.sql.postgres import PostgresDatabase

        return PostgresDatabase(str(url))
    return SqliteDatabase(locate(url))


class EmbeddedStore(LightningStoreBase):
    """A store in one database. Any number of tasks, event loops and threads may use one object at the same time.

    Raises StoreError where the database cannot be opened, and StoreClosedError once `close` was called.
    """

    def __init__(self, url: str | Path | None = None, clock: Clock | None = None) -> None:
        self.database = find_database(url)
        self.path: Path | None = getattr(self.database, "path", None)
        """The file; None where there is none."""
        self.database.prepare()
        self.clock = Clock() if clock is None else clock
        connection = self.database.connect(read_only=False)
        self.hot = HotSpans(connection.fresh) if isinstance(connection, SqliteConnection) else None
        self.writer = Writer("agl-store-writer", self.database, connection, self.clock, transitions.expire, self.hot)
        self.reader: Lane = self.writer
        if not self.database.single:
            self.reader = Lane("agl-store-reader", self.database, self.database.connect(read_only=True))
        self._finalizer = weakref.finalize(self, _shut, self.reader, self.writer)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.database.name}>"

    @property
    def observe(self) -> Observer | None:
        """Called in the store's threads after each call: (name, seconds it waited to be taken, seconds its batch took,
        calls in the batch)."""
        return self.writer.observe

    @observe.setter
    def observe(self, observer: Observer | None) -> None:
        self.writer.observe = self.reader.observe = observer

    def counters(self) -> dict[str, int]:
        """Since the store was opened: `calls` that change something, `batches` they were taken in, `commits`."""
        return {"calls": self.writer.calls, "batches": self.writer.batches, "commits": self.writer.commits}

    # -- life ------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        try:
            await self.write(Read("close", lambda connection: None))  # what was answered has arrived once this has
        except StoreClosedError:
            if not self.writer.failed:
                return
        except StoreError as error:  # it was the last call, and nothing of it is missed
            logger.warning("the store was closed while its database could not be reached: %s", error)
        await asyncio.get_running_loop().run_in_executor(None, self._finalizer)

    async def check_health(self) -> None:
        self.writer.check_open()
        await self.read("check_health", lambda connection: connection.check_files())

    async def statistics(self) -> dict[str, int]:
        return await self.read("statistics", queries.statistics)

    # -- the way to the database -----------------------------------------------------------------------------------

    async def write(self, call: Call, finish: Callable[[Any], Any] | None = None) -> Any:
        """Its answer, as `finish` makes it. Raises AlreadyAnsweredError for an idempotent call that was made before."""
        once = idempotency.current()
        if once is not None:
            call.idempotent, call.finish = once, finish
        self.writer.submit(call)
        answer = await call.future
        return answer if finish is None else finish(answer)

    async def do(
        self, name: str, function: Callable[[Unit], T], rollouts: Sequence[str] = (), workers: Sequence[str] = ()
    ) -> T:
        return await self.write(Do(name, function, rollouts, workers))

    async def read(self, name: str, look: Callable[[Connection], T]) -> T:
        call = Read(name, look)
        self.reader.submit(call)
        return await call.future

    async def await_parked(self, call: Call, timeout: float | None) -> Any:
        """Like `write`, for a call that may park: it ends at its timeout and when its caller is cancelled."""
        call.deadline = until(timeout, time.monotonic())
        self.writer.submit(call)
        try:
            return await call.future
        except asyncio.CancelledError:
            if call.future.cancelled():
                self.writer.give_up(call)
            else:
                self.writer.take_back(call)
            raise


def _shut(*lanes: Lane) -> None:
    """End the threads once all that was handed over is done. Also runs at exit, and when the store is forgotten."""
    for lane in lanes:
        lane.stop()
    for lane in lanes:
        if lane.thread is not threading.current_thread():
            lane.thread.join()
