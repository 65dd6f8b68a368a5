"""Opens a database in this process and submits commands to its threads."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from agentlightning.errors import StoreClosedError, StoreError
from agentlightning.store import idempotency
from agentlightning.store.base import LightningStoreBase, store_url
from agentlightning.store.clock import Clock
from agentlightning.store.sql import queries
from agentlightning.store.sql.commands.base import Command, FunctionCommand, ReadCommand
from agentlightning.store.sql.execution.database_thread import CommandObserver, DatabaseThread
from agentlightning.store.sql.execution.writer import GroupCommitWriter
from agentlightning.store.sql.session.unit_of_work import UnitOfWork
from agentlightning.store.sql.sqlite.backend import SqliteDatabase, locate
from agentlightning.store.sql.tables.backend import Connection, Database

logger = logging.getLogger(__name__)

T = TypeVar("T")


def find_database(url: str | Path | None) -> Database:
    """The database at `url`. Raises ConfigError for a URL that names none."""
    named = str(store_url(url))
    if named.startswith(("postgresql:", "postgres:", "postgresql+")):
        from agentlightning.store.sql.postgres import PostgresDatabase

        return PostgresDatabase(named)
    return SqliteDatabase(locate(named))


class SqlExecutor(LightningStoreBase):
    """The part of a SQL store that owns its threads. Any number of tasks, event loops and threads may use one object
    at the same time.

    Raises StoreError where the database cannot be opened, and StoreClosedError once `close` was called.
    """

    def __init__(self, url: str | Path | None = None, clock: Clock | None = None) -> None:
        self.database = find_database(url)
        self.path: Path | None = getattr(self.database, "path", None)
        """The file; None where there is none."""
        self.database.prepare()
        self.clock = Clock() if clock is None else clock
        connection = self.database.connect(read_only=False)
        self.writer = GroupCommitWriter("agl-store-writer", self.database, connection, self.clock)
        self.reader: DatabaseThread = self.writer
        threads: list[DatabaseThread] = [self.writer]
        self._finalizer = weakref.finalize(self, _stop, threads)  # also where the next connection fails
        if not self.database.single:
            read_only = self.database.connect(read_only=True)
            self.reader = DatabaseThread("agl-store-reader", self.database, read_only)
            threads.append(self.reader)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.database.name}>"

    @property
    def observe(self) -> CommandObserver | None:
        """Called in the store's threads after each command: (name, seconds it was queued, seconds its batch took,
        commands in the batch)."""
        return self.writer.observe

    @observe.setter
    def observe(self, observer: CommandObserver | None) -> None:
        self.writer.observe = self.reader.observe = observer

    def counters(self) -> dict[str, int]:
        """Since the store was opened: `calls` that change something, `batches` they were taken in, `commits`."""
        return {"calls": self.writer.commands, "batches": self.writer.batches, "commits": self.writer.commits}

    # -- life ------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        self.database.begin_close()
        try:
            # The last command: once its result has arrived, all results before it have.
            await self.write(ReadCommand("close", lambda connection: None))
        except StoreClosedError:
            if not self.writer.crashed:
                return
        except StoreError as error:  # nothing of a read is lost
            logger.warning("the store was closed while its database could not be reached: %s", error)
        await asyncio.get_running_loop().run_in_executor(None, self._finalizer)

    async def check_health(self) -> None:
        self.writer.check_open()
        await self.read("check_health", lambda connection: connection.check_files())

    async def statistics(self) -> dict[str, int]:
        return await self.read("statistics", queries.statistics)

    # -- submitting commands ---------------------------------------------------------------------------------------

    async def write(self, command: Command, convert: Callable[[Any], Any] | None = None) -> Any:
        """The result of a command, converted. Raises AlreadyAnsweredError where the command has an idempotency key
        that was used before."""
        key = idempotency.current()
        if key is not None:
            command.idempotent, command.convert = key, convert
        self.writer.submit(command)
        result = await command.future
        return result if convert is None else convert(result)

    async def do(
        self, name: str, function: Callable[[UnitOfWork], T], rollouts: Sequence[str] = (), workers: Sequence[str] = ()
    ) -> T:
        """Run a function of the unit of work, with these rollouts and workers loaded."""
        return await self.write(FunctionCommand(name, function, rollouts, workers))

    async def read(self, name: str, query: Callable[[Connection], T]) -> T:
        command = ReadCommand(name, query)
        self.reader.submit(command)
        return await command.future

    async def write_and_wait(self, command: Command, timeout: float | None) -> Any:
        """Like `write`, for a command that may wait: until its timeout, or until its caller is cancelled."""
        command.deadline = math.inf if timeout is None else time.monotonic() + max(0.0, timeout)
        self.writer.submit(command)
        try:
            return await command.future
        except asyncio.CancelledError:
            if command.future.cancelled():
                self.writer.cancel_waiter(command)
            else:
                self.writer.return_result(command)
            raise


def _stop(threads: Sequence[DatabaseThread]) -> None:
    """End the threads once their queues are empty. Also runs at exit, and when the store is garbage-collected."""
    for thread in threads:
        thread.stop()
    for thread in threads:
        if thread.thread is not threading.current_thread():
            thread.thread.join()
