"""A thread that owns a database connection and runs the commands submitted to it. Used as it is, it runs queries.

Callers in any event loop submit a command and await its future. Results for one event loop travel in one wake-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from agentlightning.errors import StoreClosedError
from agentlightning.store.sql.commands.base import Command, ReadCommand
from agentlightning.store.sql.tables.backend import Connection, Database

logger = logging.getLogger(__name__)

READ_BATCH_SECONDS: Final = 0.002
"""Results of queries are delivered together when they take no longer than this."""
MAX_ATTEMPTS: Final = 5
"""How often a transaction is attempted that fails for a transient reason."""

CommandObserver = Callable[[str, float, float, int], None]
"""(name of the command, seconds it was queued, seconds its batch took, commands in the batch)"""

Result = tuple[Command, Any, BaseException | None]


class DatabaseThread:
    """The thread, its connection, and the queue of commands."""

    def __init__(self, name: str, database: Database, connection: Connection) -> None:
        self._database = database
        self._connection = connection
        self._queue: deque[Command] = deque()
        self._lock = threading.Lock()
        self._wake = threading.Lock()
        """Released to wake the thread."""
        self._wake.acquire()
        self._asleep = False
        self._notified = False
        self._closed = False
        self._reading = False
        """A read-only transaction is open."""
        self._crash: BaseException | None = None
        """The error that ended the thread."""
        self._running: list[Command] = []
        """The batch that is being run."""
        self._process_id = os.getpid()
        self.observe: CommandObserver | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self._database.name

    @property
    def crashed(self) -> bool:
        """Whether an error has ended the thread."""
        return self._crash is not None

    @property
    def thread(self) -> threading.Thread:
        return self._thread

    def submit(self, command: Command) -> None:
        """Queue a command; its future is resolved in its own event loop."""
        if self.observe is not None:
            command.submitted_at = time.perf_counter()
        if self._process_id != os.getpid():
            raise self._closed_error()
        with self._lock:
            if self._closed:
                raise self._closed_error()
            self._queue.append(command)
            if self._asleep:
                self._asleep = False
                self._wake.release()

    def check_open(self) -> None:
        """Raises StoreClosedError where `submit` would."""
        if self._closed or self._process_id != os.getpid():
            raise self._closed_error()

    def _closed_error(self) -> StoreClosedError:
        if self._process_id != os.getpid():
            return StoreClosedError(f"{self.name} was opened by a parent process; open it again in this one")
        if self._crash is not None:
            return StoreClosedError(f"{self.name}: its thread ended with {self._crash!r}; open it again")
        return StoreClosedError(f"{self.name} is closed; open it again with LightningStore(...)")

    def _notify(self) -> None:
        """Wake the thread."""
        with self._lock:
            self._notified = True
            if self._asleep:
                self._asleep = False
                self._wake.release()

    def _sleep(self, seconds: float | None) -> None:
        """Sleep until there is something to do, `seconds` at most."""
        with self._lock:
            if self._queue or self._notified or self._closed:
                self._notified = False
                return
            self._asleep = True
        timeout = -1 if seconds is None else min(max(0.0, seconds), threading.TIMEOUT_MAX)
        if not self._wake.acquire(timeout=timeout):
            with self._lock:
                if not self._asleep:  # woken in the moment of the timeout
                    self._wake.acquire()
                self._asleep = False
        self._notified = False

    def stop(self) -> None:
        """End the thread once the queue is empty. Does not wait for that."""
        if self._process_id != os.getpid():  # a forked child has no thread to end, and may hold a lock forever
            return
        with self._lock:
            self._closed = True
        self._notify()

    def _run(self) -> None:
        """The error boundary of the thread: whatever ends it, no caller waits forever."""
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001  every caller raises it
            self._on_crash(error)

    def _work(self) -> None:
        while not self._closed or self._queue:
            if not self._queue:
                self._sleep(None)
            self._run_queries()
        self._connection.close()
        self._reject_all(f"{self.name} was closed while this call waited")

    def _on_crash(self, error: BaseException) -> None:
        logger.critical("%s: the thread %s has ended: %r", self.name, self._thread.name, error, exc_info=error)
        with self._lock:
            self._crash = error
            self._closed = True
        running, self._running = self._running, []
        reason = f"{self.name}: its thread ended with {error!r} before it answered this call"
        self._reject(running, f"{reason}; look before calling again")
        self._reject_all(f"{reason}; open the store again")
        with contextlib.suppress(*self._database.errors):
            self._connection.close()

    # -- queries ---------------------------------------------------------------------------------------------------

    def _run_queries(self) -> None:
        """Run the queued queries in one transaction. It begins after they were submitted, so each sees what its caller
        may expect."""
        results: list[Result] = []
        deadline = time.monotonic() + READ_BATCH_SECONDS
        for _ in range(len(self._queue)):
            command = self._queue.popleft()
            if not command.future.cancelled():
                self._running.append(command)
                started = time.perf_counter()
                results.append(self._run_query(command))
                if self.observe is not None:
                    self._notify_observer(command, started, time.perf_counter() - started, 1)
            if time.monotonic() > deadline:
                break
        self._end_reading()
        if results:
            self._deliver(results)
        self._running = []

    def _run_query(self, command: Command) -> Result:
        for last in (False,) * (MAX_ATTEMPTS - 1) + (True,):
            try:
                if not isinstance(command, ReadCommand):
                    raise TypeError(f"{command.name} is no query")
                if not self._reading:
                    self._connection.begin(False)
                    self._reading = True
                return command, command.query(self._connection), None
            except Exception as error:  # noqa: BLE001  the caller raises it
                self._end_reading()
                if last or not self._database.may_retry(error):
                    return command, None, self._explain(error)
        raise AssertionError("unreachable")

    def _end_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._connection.rollback()

    def _explain(self, error: Exception) -> Exception:
        return self._database.explain(error) if isinstance(error, self._database.errors) else error

    def _notify_observer(self, command: Command, started: float, seconds: float, batch: int) -> None:
        try:
            if self.observe is not None:
                self.observe(command.name, started - command.submitted_at, seconds, batch)
        except Exception:
            logger.exception("the observer of %s failed and is disabled", self.name)
            self.observe = None

    # -- results ---------------------------------------------------------------------------------------------------

    def _deliver(self, results: list[Result]) -> None:
        """Hand results over to the event loops of their callers: one wake-up for each loop."""
        loops: dict[asyncio.AbstractEventLoop, list[Result]] = {}
        for result in results:
            loop = result[0].loop
            if loop in loops:
                loops[loop].append(result)
            else:
                loops[loop] = [result]
        for loop, its_results in loops.items():
            try:
                loop.call_soon_threadsafe(self._resolve, its_results)
            except RuntimeError:  # the loop is closed, and its callers are gone
                for command, value, error in its_results:
                    if error is None:
                        self._on_undelivered(command, value)

    def _resolve(self, results: list[Result]) -> None:
        for command, value, error in results:
            future = command.future
            if future.done():
                if error is None:
                    self._on_undelivered(command, value)
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)

    def _on_undelivered(self, command: Command, value: Any) -> None:
        """The caller of a command was cancelled before the result arrived."""

    def _reject_all(self, reason: str) -> None:
        """Fail everything that is queued: the thread ends."""
        commands = list(self._queue)
        self._queue.clear()
        self._reject(commands, reason)

    def _reject(self, commands: Iterable[Command], reason: str) -> None:
        self._deliver([(command, None, StoreClosedError(reason)) for command in commands])
