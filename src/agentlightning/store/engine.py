"""The threads that own the database connections, and group commit.

A caller in any event loop hands over a `Call` and awaits its future. One writer thread takes all calls that are there
as one batch: it loads what they need at once, has each decide in memory, writes everything at once (unit.py), commits,
and only then answers: an answer is durable. Answers for one event loop travel in one wake-up. Long reads run on a
second thread with a connection of its own, which sees everything that was answered.

A call that finds nothing to do yet may return PARK: it is run again after each batch that could concern it, until it
answers or its time is up. Nothing polls, except for what other processes write to the same file.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from agentlightning.errors import StoreClosedError, StoreError
from agentlightning.store.clock import Clock
from agentlightning.store.database import Connection, Database
from agentlightning.store.hot import HotSpans
from agentlightning.store.parking import PARK, Parked
from agentlightning.store.unit import Unit, Wants

logger = logging.getLogger(__name__)

MAX_BATCH: Final = 1024
"""Calls in one transaction at most: bounds the wait of the first one."""
TOGETHER_SECONDS: Final = 0.002
"""Answers to reads travel together when they take no longer than this."""
TICK_SECONDS: Final = 0.25
"""The clock looks for expired attempts no more often than this."""
IDLE_SECONDS: Final = 0.5
"""How often a quiet store looks for what other processes wrote."""
TRIES: Final = 5
"""How often a transaction is tried that failed for a reason that passes."""

Observer = Callable[[str, float, float, int], None]
"""(name of the call, seconds it waited to be taken, seconds its batch took, calls in the batch)"""


class Call:
    """One thing to do, and where its answer goes. It may be run several times until its transaction is committed, so
    it keeps nothing from one time to the next."""

    __slots__ = ("answered", "deadline", "future", "loop", "name", "since")

    writes = True
    """Whether it changes anything. One that does not is run after all that do, on what they have written."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.answered = False
        self.deadline = math.inf
        """Until when it may be parked, on time.monotonic."""
        self.since = 0.0

    def want(self, wants: Wants) -> None:
        """Say what is needed."""

    def run(self, unit: Unit) -> Any:
        """The answer, or PARK."""
        raise NotImplementedError

    def at_timeout(self, unit: Unit) -> Any:
        """The answer of a parked call whose time is up."""
        raise NotImplementedError

    def undo(self, unit: Unit, answer: Any) -> None:
        """What to do with an answer nobody is left to take."""

    def park(self, parked: Parked) -> None:
        """Wait for what may concern it."""
        raise NotImplementedError


class Do(Call):
    """A call that is a function of the unit."""

    __slots__ = ("_function", "_rollouts", "_workers")

    def __init__(
        self, name: str, function: Callable[[Unit], Any], rollouts: Iterable[str] = (), workers: Iterable[str] = ()
    ) -> None:
        super().__init__(name)
        self._function = function
        self._rollouts = rollouts
        self._workers = workers

    def want(self, wants: Wants) -> None:
        wants.rollouts.update(self._rollouts)
        wants.workers.update(self._workers)

    def run(self, unit: Unit) -> Any:
        return self._function(unit)


class Read(Call):
    """A call that only looks at the database."""

    __slots__ = ("look",)

    writes = False

    def __init__(self, name: str, look: Callable[[Connection], Any]) -> None:
        super().__init__(name)
        self.look = look

    def run(self, unit: Unit) -> Any:
        return self.look(unit.connection)


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
        self._process_id = os.getpid()
        self.observe: Observer | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self._database.name

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
        if not self._wake.acquire(timeout=-1 if seconds is None else max(0.0, seconds)):
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

    def _work(self) -> None:
        while not self._closed or self._calls:
            if not self._calls:
                self._sleep(None)
            self._answer_some()
        self._connection.close()
        self._abandon()

    def _answer_some(self) -> None:
        """The calls that are there now, in one transaction: it begins after them, so it shows what each may expect."""
        answers: list[Answer] = []
        enough = time.monotonic() + TOGETHER_SECONDS
        for _ in range(len(self._calls)):
            call = self._calls.popleft()
            if not call.future.cancelled():
                answers.append(self._answer(call))
            if time.monotonic() > enough:
                break
        self._end_reading()
        if answers:
            self._settle(answers)

    def _answer(self, call: Call) -> Answer:
        started = time.perf_counter()
        answer = self._look_at(call)
        if self.observe is not None:
            self.observe(call.name, started - call.since, time.perf_counter() - started, 1)
        return answer

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

    def _abandon(self) -> None:
        """The end: those still waiting are told."""
        calls = list(self._calls)
        self._calls.clear()
        self._settle([(call, None, self._refusal()) for call in calls])


class Writer(Lane):
    """The lane of the connection that writes: group commit, parked calls, and the clock of the store."""

    def __init__(
        self,
        name: str,
        database: Database,
        connection: Connection,
        clock: Clock,
        expire: Callable[[Unit], float | None],
        hot: HotSpans | None,
    ) -> None:
        self._clock = clock
        self._hot = hot
        self._expire = expire
        self._unit = Unit(connection, clock, database.shared)
        self._due: float | None = clock.steady()
        self._last_tick = clock.steady() - TICK_SECONDS
        self._parked = Parked()
        self._again: deque[Call] = deque()
        """Parked calls whose time is up or whose callers are gone."""
        self._lost_answers: deque[tuple[Call, Any]] = deque()
        self._heard: deque[tuple[bool, Sequence[str] | None]] = deque()
        """What other processes told."""
        self._hearing: list[tuple[bool, Sequence[str] | None]] = []
        """Of that, what the transaction under way goes by."""
        self.batches = 0
        self.commits = 0
        self.calls = 0
        super().__init__(name, database, connection)
        self._listener = database.listen(self._hear)

    def give_up(self, call: Call) -> None:
        """Look at a parked call for the last time: its caller is gone."""
        self._again.append(call)
        self._ring()

    def take_back(self, call: Call) -> None:
        """Undo an answer that arrived while its caller was being cancelled."""
        if call.future.exception() is None:
            self._lost(call, call.future.result())

    def _hear(self, queued: bool, finished: Sequence[str] | None) -> None:
        self._heard.append((queued, finished))
        self._ring()

    def stop(self) -> None:
        if self._process_id == os.getpid() and self._listener is not None:
            self._listener.close()
        super().stop()

    def _work(self) -> None:
        while not self._closed or self._calls or self._lost_answers:
            if not (self._calls or self._again or self._heard):
                self._sleep(self._patience())
            self._process(self._next_batch())
        self._connection.close()
        self._abandon()

    # -- what to do next -------------------------------------------------------------------------------------------

    def _next_batch(self) -> list[Call]:
        calls = self._calls
        batch = [calls.popleft() for _ in range(min(len(calls), MAX_BATCH))]
        while self._again:
            batch.append(self._again.popleft())
        return batch

    def _patience(self) -> float | None:
        """Seconds until something has to be done unasked; None: never."""
        waits = [] if self._database.single else [IDLE_SECONDS]
        if self._lost_answers:  # they failed once, with the disk full perhaps
            waits.append(TICK_SECONDS)
        if self._due is not None:
            waits.append(max(self._due, self._last_tick + TICK_SECONDS) - self._clock.steady())
        if self._parked.deadline < math.inf:
            waits.append(self._parked.deadline - time.monotonic())
        return max(0.0, min(waits)) if waits else None

    def _is_due(self) -> bool:
        if self._due is None:
            return False
        now = self._clock.steady()
        return now >= self._due and now >= self._last_tick + TICK_SECONDS

    # -- one batch -------------------------------------------------------------------------------------------------

    def _process(self, batch: list[Call]) -> None:
        started = time.perf_counter()
        answers = self._attempt(batch)
        self.batches += 1
        self.calls += len(batch)
        if self.observe is not None:
            took = time.perf_counter() - started
            for call, _, _ in answers:
                self.observe(call.name, started - call.since, took, len(batch))
        if answers:
            self._settle(answers)

    def _attempt(self, batch: list[Call]) -> list[Answer]:
        """Answer a batch in one transaction; where that fails for the fault of one call perhaps, each in its own."""
        for last in (False,) * (TRIES - 1) + (True,):
            answers: list[Answer] = []
            try:
                self._transact(batch, answers)
            except Exception as error:  # noqa: BLE001  every caller of the batch raises it
                self._roll_back()
                for call, _, _ in answers:
                    call.answered = False
                if not last and self._database.may_retry(error):
                    continue
                fatal = isinstance(error, StoreError) or self._database.is_fatal(error)
                if len(batch) > 1 and not fatal:
                    logger.warning("a transaction of %d calls was undone, each is tried alone: %r", len(batch), error)
                    return [answer for call in batch for answer in self._attempt([call])]
                return self._fail(batch, answers, error)
            for call, _, _ in answers:
                self._parked.remove(call)
            return answers
        raise AssertionError("unreachable")

    def _roll_back(self) -> None:
        try:
            self._connection.rollback()
        except self._database.errors as error:
            logger.warning("the store could not undo a transaction: %s", self._database.explain(error))
        self._unit.rolled_back()

    def _fail(self, batch: list[Call], answers: list[Answer], error: Exception) -> list[Answer]:
        """What to tell the callers of a transaction that was undone."""
        self._last_tick = self._clock.steady()
        known = isinstance(error, (*self._database.errors, StoreError))
        fault = self._explain(error) if known else StoreError(f"{self.name}: {error!r}")
        logger.warning("a transaction was undone: %s", fault, exc_info=error)
        calls = dict.fromkeys([*batch, *(call for call, _, _ in answers)])
        if not calls:
            logger.warning("the store could not apply its time limits, and tries again: %s", fault)
        for call in calls:
            call.answered = True
            self._parked.remove(call)
        return [(call, None, type(fault)(*fault.args)) for call in calls]

    def _transact(self, batch: list[Call], answers: list[Answer]) -> None:
        unit, connection = self._unit, self._connection
        self._hearing += [self._heard.popleft() for _ in range(len(self._heard))]
        due = self._is_due()
        writing = [call for call in batch if call.writes]
        lost = list(self._lost_answers)
        writes = due or bool(writing or lost or self._hearing)
        connection.begin(writes)
        foreign = not (batch or self._hearing) if self._database.shared else connection.changed()
        if foreign and not writes:  # what expired elsewhere may have to be seen to
            connection.rollback()
            connection.begin(True)
            writes = due = True
            connection.changed()
        if foreign and self._hot is not None:  # before the commit makes it look fresh
            self._hot.clear()
        unit.begin(foreign)
        self._prefetch(writing)
        for call, answer in lost:
            call.undo(unit, answer)
            unit.settle()
        for call in writing:
            self._take(call, answers)
        if due or foreign:
            if unit.dirty:
                unit.flush()
            next_due = self._expire(unit)
        else:
            next_due = self._due
        news = unit.queued, list(unit.finished)
        self._learn(foreign)
        self._claim_parked(answers)
        if unit.dirty:
            unit.flush()
        self._look(batch, answers)
        if writes:
            connection.notify(*news)
            connection.commit()
            self.commits += 1
        else:
            connection.rollback()
        unit.committed()
        self._hearing.clear()
        if self._hot is not None and (unit.written or unit.dropped):
            self._hot.committed(unit.written, unit.dropped)
        for _ in lost:
            self._lost_answers.popleft()
        if due or foreign:
            self._last_tick = self._clock.steady()
        if unit.deadline is not None:
            next_due = unit.deadline if next_due is None else min(next_due, unit.deadline)
        self._due = next_due

    def _learn(self, foreign: bool) -> None:
        """Have those who wait look at what other processes did. What they told is not told again."""
        unit = self._unit
        unit.foreign = foreign
        unit.queued |= foreign
        for queued, finished in self._hearing:
            unit.queued |= queued
            unit.foreign |= finished is None
            unit.finished.update(finished or ())

    def _prefetch(self, calls: list[Call]) -> None:
        wants = Wants()
        for call in calls:
            call.want(wants)
        if self._unit.queued or wants.claims or self._parked.claims:
            wants.claims += len(self._parked.claims)
        self._unit.prefetch(wants)

    def _claim_parked(self, answers: list[Answer]) -> None:
        """Give what waits to be claimed to those who wait for it, the first ones first."""
        if not self._unit.queued:
            return
        for waiting in self._parked.groups():
            for call in waiting:
                if not self._take(call, answers):
                    break  # the others of the group want the same

    def _look(self, batch: list[Call], answers: list[Answer]) -> None:
        """Answer those who only look, those parked whom it concerns, and those whose time is up."""
        for call in self._parked.concerned(self._unit):
            self._take(call, answers)
        for call in batch:
            if not call.writes:
                self._take(call, answers)
        for call in self._parked.expired():
            if not call.answered:
                self._answer_call(call, call.at_timeout, answers)

    def _take(self, call: Call, answers: list[Answer]) -> bool:
        """Run a call; False where it found nothing to do."""
        if call.answered or call.future.cancelled():
            self._parked.remove(call)
            return True
        return self._answer_call(call, call.run, answers)

    def _answer_call(self, call: Call, run: Callable[[Unit], Any], answers: list[Answer]) -> bool:
        unit = self._unit
        try:
            result = run(unit)
            if result is PARK and call.deadline <= time.monotonic():
                result = call.at_timeout(unit)
        except self._database.errors:
            raise
        except Exception as error:  # noqa: BLE001  the caller's thread raises it
            unit.undo()
            call.answered = True
            answers.append((call, None, error))
            return True
        unit.settle()
        if result is PARK:
            call.park(self._parked)
            return False
        call.answered = True
        answers.append((call, result, None))
        return True

    def _lost(self, call: Call, result: Any) -> None:
        self._lost_answers.append((call, result))
        self._ring()

    def _abandon(self) -> None:
        """The end: those still waiting are told."""
        error = f"{self.name} was closed while this call waited"
        self._settle([(call, None, StoreClosedError(error)) for call in self._parked.all()])
        super()._abandon()
