"""The threads that own the database connections, and group commit.

A caller in any event loop hands over a `Call` and awaits its future. One writer thread drains all calls that are
there, runs each within its own savepoint so that a failing one fails alone, commits once, and only then answers: an
answer is durable. Answers for one event loop travel in one wake-up. Long reads run on a second thread with a
connection of its own; in a WAL database it sees everything that was answered.

A call that finds nothing to do yet may return PARK: it is run again after each batch that could concern it, until it
answers or its time is up. Nothing polls, except for what other processes write to the same file.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from agentlightning.errors import StoreClosedError, StoreError
from agentlightning.store.clock import Clock
from agentlightning.store.faults import explain, is_fatal
from agentlightning.store.statements import Statement

logger = logging.getLogger(__name__)

MAX_BATCH: Final = 1024
"""Calls in one transaction at most: bounds the wait of the first one."""
TOGETHER_SECONDS: Final = 0.002
"""Answers to reads travel together when they take no longer than this."""
TICK_SECONDS: Final = 0.25
"""The clock looks for expired attempts no more often than this."""
IDLE_SECONDS: Final = 0.5
"""How often a quiet store looks for what other processes wrote."""


class Transaction:
    """What a call works with: statements, the time, and what others may be waiting for."""

    __slots__ = ("clock", "cursor", "deadline", "finished", "foreign", "queued")

    def __init__(self, cursor: sqlite3.Cursor, clock: Clock, foreign: bool = False) -> None:
        self.cursor = cursor
        self.clock = clock
        self.foreign = foreign
        """Another process has written: anything may have happened."""
        self.queued = foreign
        """A rollout may now be waiting to be claimed."""
        self.finished: set[str] = set()
        """Ids of rollouts that have finished."""
        self.deadline: float | None = None
        """The earliest deadline set, on the steady clock."""

    def one(self, statement: Statement, *values: Any) -> Any:
        """The first row, or None."""
        return self.cursor.execute(statement.sql, values).fetchone()

    def all(self, statement: Statement, *values: Any) -> list[Any]:
        return self.cursor.execute(statement.sql, values).fetchall()

    def run(self, statement: Statement, *values: Any) -> int:
        """Returns the number of rows changed."""
        return self.cursor.execute(statement.sql, values).rowcount

    def many(self, statement: Statement, rows: list[tuple[Any, ...]]) -> int:
        """Run once for each row of values; returns the number of rows changed in all."""
        return self.cursor.executemany(statement.sql, rows).rowcount

    def remind(self, deadline: float) -> None:
        """Have the clock look again at `deadline`."""
        if self.deadline is None or deadline < self.deadline:
            self.deadline = deadline


class Park:
    """The type of PARK."""


PARK: Final = Park()
"""What a call returns when it has to wait for something to happen."""


@dataclass(slots=True, eq=False)
class Call:
    """One thing to do, and where its answer goes."""

    run: Callable[[Transaction], Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    writes: bool = True
    undo: Callable[[Any, Transaction], None] | None = None
    """What to do with an answer nobody is left to take."""
    concerns: Callable[[Transaction], bool] | None = None
    """Whether to run this parked call again after what happened in the transaction."""
    at_timeout: Callable[[Transaction], Any] | None = None
    """The answer of a parked call whose time is up."""
    expired: bool = False
    answered: bool = False


Answer = tuple[Call, Any, BaseException | None]
Chore = Callable[[Transaction], None]
"""Something to do in the next transaction that nobody waits for."""


class Lane:
    """A thread, its connection, and the calls it answers one by one. Used as it is for reading."""

    def __init__(self, name: str, path: Path | None, connection: sqlite3.Connection, clock: Clock) -> None:
        self._path = path
        self._connection = connection
        self._cursor = connection.cursor()
        self._clock = clock
        self._queue: queue.SimpleQueue[Call | Chore | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._process_id = os.getpid()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Call) -> None:
        """Hand over a call; its future is settled in its own event loop."""
        if self._process_id != os.getpid():
            raise StoreClosedError(f"{self.name} was opened by a parent process; open it again in this one")
        with self._lock:
            if self._closed:
                raise StoreClosedError(f"{self.name} is closed; open it again with LightningStore(...)")
            self._queue.put(call)

    @property
    def name(self) -> str:
        return "the in-memory store" if self._path is None else f"the store {self._path}"

    @property
    def thread(self) -> threading.Thread:
        return self._thread

    def stop(self) -> None:
        """Have the thread end once everything handed over is done. Does not wait."""
        if self._process_id != os.getpid():  # a forked child has no thread to end, and perhaps a lock held for ever
            return
        with self._lock:
            if not self._closed:
                self._queue.put(None)
            self._closed = True

    def _work(self) -> None:
        running = True
        while running:
            answers, running = self._answer_some()
            settle(answers, self._lost)
        self._connection.close()

    def _answer_some(self) -> tuple[list[Answer], bool]:
        """(answers to the calls that are there, as far as they are quick; whether there may be more)."""
        answers: list[Answer] = []
        call = self._queue.get()
        enough = self._clock.steady() + TOGETHER_SECONDS
        while call is not None:
            if isinstance(call, Call) and not call.future.cancelled():
                answers.append(self._answer(call))
            if self._queue.empty() or self._clock.steady() > enough:
                return answers, True
            call = self._queue.get_nowait()
        return answers, False

    def _answer(self, call: Call) -> Answer:
        try:
            return call, call.run(Transaction(self._cursor, self._clock)), None
        except sqlite3.Error as error:
            return call, None, explain(error, self._path)
        except Exception as error:  # noqa: BLE001  the caller's thread raises it
            return call, None, error

    def _lost(self, call: Call, result: Any) -> None:
        """An answer came too late for its caller."""


class Writer(Lane):
    """The lane of the connection that writes: group commit, parked calls, and the clock of the store."""

    def __init__(
        self,
        name: str,
        path: Path | None,
        connection: sqlite3.Connection,
        clock: Clock,
        expire: Callable[[Transaction], float | None],
    ) -> None:
        self._expire = expire
        self._due: float | None = clock.steady()
        self._last_tick = clock.steady() - TICK_SECONDS
        self._parked: dict[Call, None] = {}
        self._chores: list[Chore] = []
        self._data_version = -1
        super().__init__(name, path, connection, clock)

    def _work(self) -> None:
        running = True
        while running:
            batch, running = self._next_batch()
            foreign = self._foreign_write()
            if batch or self._chores or self._is_due() or foreign:
                self._process(batch, foreign)
        self._abandon()
        self._connection.close()

    def resubmit(self, call: Call) -> None:
        """Look at a parked call again, now that it has expired or its caller is gone."""
        with self._lock:
            if not self._closed:
                self._queue.put(call)

    def take_back(self, call: Call) -> None:
        """Undo an answer that arrived while its caller was being cancelled."""
        if call.future.exception() is None:
            self._lost(call, call.future.result())

    # -- what to do next -------------------------------------------------------------------------------------------

    def _next_batch(self) -> tuple[list[Call], bool]:
        """(what is there, waiting for it if need be; whether there may be more)."""
        batch: list[Call] = []
        try:
            item = self._queue.get(timeout=self._patience())
            while item is not None:
                if isinstance(item, Call):
                    batch.append(item)
                else:
                    self._chores.append(item)
                if len(batch) == MAX_BATCH:
                    return batch, True
                item = self._queue.get_nowait()
        except queue.Empty:
            return batch, True
        return batch, False

    def _patience(self) -> float | None:
        """Seconds until something has to be done unasked; None: never."""
        idle = None if self._path is None else IDLE_SECONDS
        if self._chores:  # they failed once, with the disk full perhaps
            return TICK_SECONDS
        if self._due is None:
            return idle
        due = max(self._due, self._last_tick + TICK_SECONDS) - self._clock.steady()
        return max(0.0, due if idle is None else min(due, idle))

    def _is_due(self) -> bool:
        if self._due is None:
            return False
        now = self._clock.steady()
        return now >= self._due and now >= self._last_tick + TICK_SECONDS

    def _foreign_write(self) -> bool:
        """Whether another process has written to the file since the last look."""
        if self._path is None:
            return False
        try:
            version = self._cursor.execute("PRAGMA data_version").fetchone()[0]
        except sqlite3.Error as error:
            logger.warning("the store could not look for changes: %s", explain(error, self._path))
            return False
        changed = self._data_version not in (-1, version)
        self._data_version = version
        return changed

    # -- one transaction -------------------------------------------------------------------------------------------

    def _process(self, batch: list[Call], foreign: bool) -> None:
        answers: list[Answer] = []
        try:
            self._transact(batch, foreign, answers)
        except Exception as error:  # noqa: BLE001  every caller of the batch raises it
            fault = self._fail(error)
            calls = dict.fromkeys([*batch, *(call for call, _, _ in answers)])
            if not calls:
                logger.warning("the store could not apply its time limits, and tries again: %s", fault)
            answers = [(call, None, _copy(fault)) for call in calls]
            for call in calls:
                call.answered = True
                self._parked.pop(call, None)
        settle(answers, self._lost)

    def _fail(self, error: Exception) -> StoreError:
        """Undo the transaction; what to tell its callers."""
        if self._connection.in_transaction:
            self._cursor.execute("ROLLBACK")
        self._last_tick = self._clock.steady()
        fault = (
            explain(error, self._path) if isinstance(error, sqlite3.Error) else StoreError(f"{self.name}: {error!r}")
        )
        logger.warning("a transaction was undone: %s", fault, exc_info=error)
        return fault

    def _transact(self, batch: list[Call], foreign: bool, answers: list[Answer]) -> None:
        transaction = Transaction(self._cursor, self._clock, foreign)
        due = foreign or self._is_due()
        writes = due or bool(self._chores) or any(call.writes for call in batch)
        self._cursor.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
        for chore in self._chores:
            chore(transaction)
        for call in batch:
            self._take(call, transaction, answers)
        if due:
            self._due = self._expire(transaction)
            self._last_tick = self._clock.steady()
        for call in [call for call in self._parked if writes]:
            if call.concerns is not None and call.concerns(transaction):
                self._take(call, transaction, answers)
        self._cursor.execute("COMMIT")
        self._chores.clear()
        if transaction.deadline is not None:
            self._due = transaction.deadline if self._due is None else min(self._due, transaction.deadline)

    def _take(self, call: Call, transaction: Transaction, answers: list[Answer]) -> None:
        if call.answered or call.future.cancelled():
            self._parked.pop(call, None)
            return
        answer = self._answer_alone(call, call.run, transaction)
        if answer[1] is PARK and call.expired and call.at_timeout is not None:
            answer = self._answer_alone(call, call.at_timeout, transaction)
        if answer[1] is PARK:
            self._parked[call] = None
            return
        call.answered = True
        self._parked.pop(call, None)
        answers.append(answer)

    def _answer_alone(self, call: Call, run: Callable[[Transaction], Any], transaction: Transaction) -> Answer:
        self._cursor.execute("SAVEPOINT one_call")
        try:
            result = run(transaction)
        except Exception as error:
            if is_fatal(error):
                raise
            self._cursor.execute("ROLLBACK TO one_call")
            self._cursor.execute("RELEASE one_call")
            return call, None, explain(error, self._path) if isinstance(error, sqlite3.Error) else error
        self._cursor.execute("RELEASE one_call")
        return call, result, None

    def _lost(self, call: Call, result: Any) -> None:
        if call.undo is not None:
            self._queue.put(partial(call.undo, result))

    def _abandon(self) -> None:
        """The end: those still waiting are told."""
        error = StoreClosedError(f"{self.name} was closed while this call waited")
        settle([(call, None, _copy(error)) for call in self._parked], self._lost)


def settle(answers: list[Answer], lost: Callable[[Call, Any], None]) -> None:
    """Answer the callers: one wake-up for each event loop."""
    loops: dict[asyncio.AbstractEventLoop, list[Answer]] = {}
    for answer in answers:
        loops.setdefault(answer[0].loop, []).append(answer)
    for loop, ours in loops.items():
        try:
            loop.call_soon_threadsafe(_resolve, ours, lost)
        except RuntimeError:  # the loop is closed: nobody is left to hear
            for call, result, error in ours:
                if error is None:
                    lost(call, result)


def _resolve(answers: list[Answer], lost: Callable[[Call, Any], None]) -> None:
    for call, result, error in answers:
        if call.future.done():
            if error is None:
                lost(call, result)
        elif error is not None:
            call.future.set_exception(error)
        else:
            call.future.set_result(result)


def _copy(error: StoreError) -> StoreError:
    """A new one for each caller, as each adds its own traceback."""
    return type(error)(*error.args)
