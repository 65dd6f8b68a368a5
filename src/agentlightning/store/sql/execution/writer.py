"""The thread that writes: group commit.

It takes all calls that are there as one batch: it loads what they need at once, has each decide in memory, writes
everything at once (unit.py), commits, and only then answers: an answer is durable. Long reads run on a thread and a
connection of their own (lane.py), which see everything that was answered.

A call that finds nothing to do yet may return PARK: it is run again after each batch that could concern it, until it
answers or its time is up. Nothing polls, except for what other processes write to the same file.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from agentlightning.errors import StoreError
from agentlightning.rollouts import is_private_queue
from agentlightning.store.clock import Clock
from agentlightning.store.sql.commands.base import Call
from agentlightning.store.sql.execution.database_thread import TRIES, Answer, Lane
from agentlightning.store.sql.execution.unit_of_work import Unit, Wants
from agentlightning.store.sql.execution.waiters import PARK, Group, Parked
from agentlightning.store.sql.spans.recent import HotSpans
from agentlightning.store.sql.tables.backend import Connection, Database

logger = logging.getLogger(__name__)

MAX_BATCH: Final = 1024
"""Calls in one transaction at most: bounds the wait of the first one."""
TICK_SECONDS: Final = 0.25
"""The clock looks for expired attempts no more often than this."""
IDLE_SECONDS: Final = 0.5
"""How often a quiet store looks for what other processes wrote."""


class _Done(NamedTuple):
    """A transaction that was committed."""

    taken_back: int
    """Answers that nobody was left to take."""
    looked: bool
    """The deadlines were looked at."""
    next_due: float | None
    """The next of them, without those that this transaction set."""


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
        self._looked = -math.inf
        """When this last looked for what other servers wrote, on time.monotonic."""
        self._parked = Parked()
        self._again: deque[Call] = deque()
        """Parked calls whose time is up or whose callers are gone."""
        self._lost_answers: deque[tuple[Call, Any]] = deque()
        self._heard: deque[tuple[bool, Sequence[str] | None]] = deque()
        """What other processes told."""
        self._hearing: list[tuple[bool, Sequence[str] | None]] = []
        """Of that, what the transaction under way goes by."""
        self._said = ""
        """The last failure, which is not said again for each look at the clock."""
        self._last: list[Answer] = []
        """Answers that are durable, and not told yet."""
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
            self._next_batch()
            self._process(self._taken)
            self._taken = []
            if not self._calls or self._at_once:
                self._settle_last()
        self._connection.close()
        self._abandon(f"{self.name} was closed while this call waited")

    # -- what to do next -------------------------------------------------------------------------------------------

    def _next_batch(self) -> None:
        calls, taken = self._calls, self._taken
        for _ in range(min(len(calls), MAX_BATCH)):
            taken.append(calls.popleft())
        while self._again:
            taken.append(self._again.popleft())

    def _patience(self) -> float | None:
        """Seconds until something has to be done unasked; None: never."""
        waits = [] if self._database.single else [IDLE_SECONDS]
        if self._lost_answers:  # they failed once, with the disk full perhaps
            waits.append(TICK_SECONDS)
        if self._due is not None:
            clock = self._clock
            pause = min(TICK_SECONDS, self._last_tick + TICK_SECONDS - clock.steady())
            waits.append(max(min(self._due - clock.steady(), clock.next_mark), pause))
        if self._parked.deadline < math.inf:
            waits.append(self._parked.deadline - time.monotonic())
        return max(0.0, min(waits)) if waits else None

    def _is_due(self) -> bool:
        """Whether the clock has to look for expired attempts, or to be told that this server is alive to do so."""
        if self._due is None:
            return False
        now = self._clock.steady()
        return (now >= self._due or self._clock.stale) and abs(now - self._last_tick) >= TICK_SECONDS

    # -- one batch -------------------------------------------------------------------------------------------------

    def _process(self, batch: list[Call]) -> None:
        started = time.perf_counter()
        answers = self._attempt(batch)
        self._last += answers
        self.batches += 1
        self.calls += len(batch)
        if self.observe is not None:
            took = time.perf_counter() - started
            for call, _, _ in answers:
                self._tell_observer(call, started, took, len(batch))

    @property
    def _at_once(self) -> bool:
        """Whether what is durable is answered at once. Otherwise, where more calls wait, their transaction is made
        ready to commit first: a commit leaves the interpreter to others, so the callers of one batch run while the
        next is written. Not where somebody else may hold the next one up."""
        return self._database.shared or self._unit.foreign

    def _settle_last(self) -> None:
        """Answer the callers of the transactions that are done."""
        if self._last:
            answers, self._last = self._last, []
            self._settle(answers)

    def _attempt(self, batch: list[Call]) -> list[Answer]:
        """Answer a batch in one transaction; where that fails for the fault of one call perhaps, each in its own."""
        for last in (False,) * (TRIES - 1) + (True,):
            answers: list[Answer] = []
            try:
                done = self._transact(batch, answers)
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
            try:
                self._conclude(done)
            except Exception:  # what is durable must not be done again
                logger.exception("%s: a transaction is done, and what is kept in memory is read anew", self.name)
                self._start_over()
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
        self._clock.doubt()

    def _fail(self, batch: list[Call], answers: list[Answer], error: Exception) -> list[Answer]:
        """What to tell the callers of a transaction that was undone."""
        self._last_tick = self._clock.steady()
        known = isinstance(error, (*self._database.errors, StoreError))
        fault = self._explain(error) if known else StoreError(f"{self.name}: {error!r}")
        calls = dict.fromkeys([*batch, *(call for call, _, _ in answers)])
        if calls or str(fault) != self._said:  # the clock tries again several times a second
            what = "a transaction was undone" if calls else "the store could not apply its time limits, and tries again"
            logger.warning("%s: %s", what, fault, exc_info=error)
        self._said = str(fault)
        for call in calls:
            call.answered = True
            self._parked.remove(call)
        return [(call, None, type(fault)(*fault.args)) for call in calls]

    def _transact(self, batch: list[Call], answers: list[Answer]) -> _Done:
        """Up to the commit."""
        unit, connection = self._unit, self._connection
        self._hearing += [self._heard.popleft() for _ in range(len(self._heard))]
        due = self._is_due()
        writing = [call for call in batch if call.writes]
        lost = list(self._lost_answers)
        writes, foreign = self._begin(bool(batch), due or bool(writing or lost or self._hearing))
        if foreign and self._hot is not None:  # before the commit makes it look fresh
            self._hot.clear()
        unit.begin(foreign)
        self._prefetch(writing)
        for call, answer in lost:
            call.undo(unit, answer)
            unit.settle()
        unit.line = self._parked.claims
        for call in writing:
            self._take(call, answers)
        if due or foreign:
            unit.write_first()
            next_due = self._expire(unit)
        else:
            next_due = self._due
        news = unit.queued, list(unit.finished)
        self._learn(foreign)
        self._claim_parked(answers)
        unit.write_first()
        unit.write_counts()
        self._look(batch, answers)
        if writes:
            connection.notify(*news)
            self._settle_last()
            connection.commit()
            self.commits += 1
        else:
            self._settle_last()
            connection.rollback()
        return _Done(len(lost), due or foreign, next_due)

    def _begin(self, called: bool, writes: bool) -> tuple[bool, bool]:
        """Begin a transaction with the time it is; returns whether it writes, and whether to look at everything for
        what other processes wrote. On a shared database, on time however busy this server is."""
        connection, clock = self._connection, self._clock
        if self._database.shared:
            now = time.monotonic()
            foreign = not (called or self._hearing) or now - self._looked >= IDLE_SECONDS
            if foreign:
                self._looked = now
            writes |= foreign
            if writes and clock.stale:
                connection.keep_time(clock)
            connection.begin(writes)
            return writes, foreign
        connection.begin(writes)
        foreign = connection.changed()
        if foreign and not writes:  # what expired elsewhere may have to be seen to
            connection.rollback()
            connection.begin(True)
            writes = True
            connection.changed()
        if foreign or (writes and clock.stale):
            connection.keep_time(clock)
        return writes, foreign

    def _conclude(self, done: _Done) -> None:
        """After the commit."""
        unit = self._unit
        unit.committed()
        self._hearing.clear()
        if self._hot is not None and (unit.written or unit.dropped):
            self._hot.committed(unit.written, unit.dropped)
        for _ in range(done.taken_back):
            self._lost_answers.popleft()
        if done.looked:
            self._last_tick = self._clock.steady()
        deadlines = [each for each in (done.next_due, unit.deadline) if each is not None]
        self._due = min(deadlines, default=None)

    def _start_over(self) -> None:
        """Nothing in memory is relied on any more: what it says may not be what was committed."""
        self._unit.rolled_back()
        if self._hot is not None:
            self._hot.clear()
        self._hearing.clear()
        self._due = self._clock.steady()

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
            if call.idempotent is not None:
                wants.keys.add(call.idempotent.key)
        if self._unit.queued or wants.claims or self._parked.claims:
            wants.claims += len(self._parked.claims)
        self._unit.prefetch(wants)

    def _claim_parked(self, answers: list[Answer]) -> None:
        """Give what waits to be claimed to those who wait for it, the first ones first."""
        self._unit.line = ()
        if not (self._unit.queued or self._unit.lined_up):
            return
        in_vain: set[Group] = set()
        for call, group in list(self._parked.claims.items()):
            hopeless = group in in_vain or (None in in_vain and not _names_private_queue(group))
            if not hopeless and not self._take(call, answers):
                in_vain.add(group)  # the others of the group want the same

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
            result = run(unit) if call.idempotent is None else unit.answered.run(call, run, unit)
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

    def _die(self, error: BaseException) -> None:
        durable = {call for call, _, _ in self._last}
        self._settle_last()
        self._taken = [call for call in self._taken if call not in durable]
        super()._die(error)

    def _abandon(self, reason: str) -> None:
        parked = self._parked.all()
        for call in parked:
            self._parked.remove(call)
        self._settle_last()
        self._refuse(parked, reason)
        super()._abandon(reason)


def _names_private_queue(group: Group) -> bool:
    """Whether a claim may find what one that names no queue does not."""
    return group is not None and any(map(is_private_queue, group))
