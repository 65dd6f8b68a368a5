"""A thread that owns a connection and answers the calls handed over to it. Used as it is, it reads.

A caller in any event loop hands over a `Call` and awaits its future. Answers for one event loop travel in one wake-up.
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
from agentlightning.store.sql.commands.base import Call, Read
from agentlightning.store.sql.tables.backend import Connection, Database

logger = logging.getLogger(__name__)

TOGETHER_SECONDS: Final = 0.002
"""Answers to reads travel together when they take no longer than this."""
TRIES: Final = 5
"""How often a transaction is tried that failed for a reason that passes."""

Observer = Callable[[str, float, float, int], None]
"""(name of the call, seconds it waited to be taken, seconds its batch took, calls in the batch)"""

Answer = tuple[Call, Any, BaseException | None]


class Lane:
    """A thread, its connection, and the calls handed over to it."""

    def __init__(self, name: str, database: Database, connection: Connection) -> None:
        self._database = database
        self._connection = connection
        self._calls: deque[Call] = deque()
        self._lock = threading.Lock()
        self._wake = threading.Lock()
        """Free when the thread is to wake up."""
        self._wake.acquire()
        self._asleep = False
        self._rung = False
        self._closed = False
        self._reading = False
        """A transaction is open that only looks."""
        self._fault: BaseException | None = None
        """What ended the thread before its time."""
        self._taken: list[Call] = []
        """Calls that are being answered."""
        self._process_id = os.getpid()
        self.observe: Observer | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self._database.name

    @property
    def failed(self) -> bool:
        """Its thread has ended before its time."""
        return self._fault is not None

    @property
    def thread(self) -> threading.Thread:
        return self._thread

    def submit(self, call: Call) -> None:
        """Hand over a call; its future is settled in its own event loop."""
        if self.observe is not None:
            call.since = time.perf_counter()
        if self._process_id != os.getpid():
            raise self._refusal()
        with self._lock:
            if self._closed:
                raise self._refusal()
            self._calls.append(call)
            if self._asleep:
                self._asleep = False
                self._wake.release()

    def check_open(self) -> None:
        """Raises StoreClosedError where `submit` would."""
        if self._closed or self._process_id != os.getpid():
            raise self._refusal()

    def _refusal(self) -> StoreClosedError:
        if self._process_id != os.getpid():
            return StoreClosedError(f"{self.name} was opened by a parent process; open it again in this one")
        if self._fault is not None:
            return StoreClosedError(f"{self.name}: its thread ended with {self._fault!r}; open it again")
        return StoreClosedError(f"{self.name} is closed; open it again with LightningStore(...)")

    def _ring(self) -> None:
        """Wake the thread. Any number of times is as good as once."""
        with self._lock:
            self._rung = True
            if self._asleep:
                self._asleep = False
                self._wake.release()

    def _sleep(self, seconds: float | None) -> None:
        """Until something is there to do, `seconds` at most."""
        with self._lock:
            if self._calls or self._rung or self._closed:
                self._rung = False
                return
            self._asleep = True
        timeout = -1 if seconds is None else min(max(0.0, seconds), threading.TIMEOUT_MAX)
        if not self._wake.acquire(timeout=timeout):
            with self._lock:
                if not self._asleep:  # rung at the last moment
                    self._wake.acquire()
                self._asleep = False
        self._rung = False

    def stop(self) -> None:
        """Have the thread end once everything handed over is done. Does not wait."""
        if self._process_id != os.getpid():  # a forked child has no thread to end, and perhaps a lock held for ever
            return
        with self._lock:
            self._closed = True
        self._ring()

    def _run(self) -> None:
        """The boundary of the thread: whatever ends it, nobody waits for it for ever."""
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001  every caller raises it
            self._die(error)

    def _work(self) -> None:
        while not self._closed or self._calls:
            if not self._calls:
                self._sleep(None)
            self._answer_some()
        self._connection.close()
        self._abandon(f"{self.name} was closed while this call waited")

    def _die(self, error: BaseException) -> None:
        logger.critical("%s: the thread %s has ended: %r", self.name, self._thread.name, error, exc_info=error)
        with self._lock:
            self._fault = error
            self._closed = True
        taken, self._taken = self._taken, []
        reason = f"{self.name}: its thread ended with {error!r} before it answered this call"
        self._refuse(taken, f"{reason}; look before calling again")
        self._abandon(f"{reason}; open the store again")
        with contextlib.suppress(*self._database.errors):
            self._connection.close()

    def _answer_some(self) -> None:
        """The calls that are there now, in one transaction: it begins after them, so it shows what each may expect."""
        answers: list[Answer] = []
        enough = time.monotonic() + TOGETHER_SECONDS
        for _ in range(len(self._calls)):
            call = self._calls.popleft()
            if not call.future.cancelled():
                self._taken.append(call)
                answers.append(self._answer(call))
            if time.monotonic() > enough:
                break
        self._end_reading()
        if answers:
            self._settle(answers)
        self._taken = []

    def _answer(self, call: Call) -> Answer:
        started = time.perf_counter()
        answer = self._look_at(call)
        if self.observe is not None:
            self._tell_observer(call, started, time.perf_counter() - started, 1)
        return answer

    def _tell_observer(self, call: Call, started: float, took: float, batch: int) -> None:
        """Its failures are its own."""
        try:
            if self.observe is not None:
                self.observe(call.name, started - call.since, took, batch)
        except Exception:
            logger.exception("the observer of %s failed and is asked no more", self.name)
            self.observe = None

    def _look_at(self, call: Call) -> Answer:
        for last in (False,) * (TRIES - 1) + (True,):
            try:
                if not isinstance(call, Read):
                    raise TypeError(f"{call.name} is no read")
                if not self._reading:
                    self._connection.begin(False)
                    self._reading = True
                return call, call.look(self._connection), None
            except Exception as error:  # noqa: BLE001  the caller's thread raises it
                self._end_reading()
                if last or not self._database.may_retry(error):
                    return call, None, self._explain(error)
        raise AssertionError("unreachable")

    def _end_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._connection.rollback()

    def _explain(self, error: Exception) -> Exception:
        return self._database.explain(error) if isinstance(error, self._database.errors) else error

    def _settle(self, answers: list[Answer]) -> None:
        """Answer the callers: one wake-up for each event loop."""
        loops: dict[asyncio.AbstractEventLoop, list[Answer]] = {}
        for answer in answers:
            loop = answer[0].loop
            if loop in loops:
                loops[loop].append(answer)
            else:
                loops[loop] = [answer]
        for loop, ours in loops.items():
            try:
                loop.call_soon_threadsafe(self._resolve, ours)
            except RuntimeError:  # the loop is closed: nobody is left to hear
                for call, result, error in ours:
                    if error is None:
                        self._lost(call, result)

    def _resolve(self, answers: list[Answer]) -> None:
        for call, result, error in answers:
            future = call.future
            if future.done():
                if error is None:
                    self._lost(call, result)
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

    def _lost(self, call: Call, result: Any) -> None:
        """An answer came too late for its caller."""

    def _abandon(self, reason: str) -> None:
        """The end: those still waiting are told why."""
        calls = list(self._calls)
        self._calls.clear()
        self._refuse(calls, reason)

    def _refuse(self, calls: Iterable[Call], reason: str) -> None:
        self._settle([(call, None, StoreClosedError(reason)) for call in calls])
