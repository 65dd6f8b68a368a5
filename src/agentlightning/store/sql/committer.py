"""The threads of a store: one that runs queries, and the committer, which writes.

Callers in any event loop submit a command and await its future. The committer takes everything queued as one batch: the
rows it names are loaded at once, each command runs as a function of the transaction, the changes are written and
committed, and only then are the results delivered: a result is durable. A command that raises fails alone. Long
queries run on a thread and a connection of their own, which see everything that was answered.

A claim that finds nothing waits. It runs again in each batch that has queued something, until it has claimed or its
deadline passes. Nothing polls, except for what other processes write to the same file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final

from agentlightning.errors import StoreClosedError, StoreError, StoreVersionError
from agentlightning.store.clock import Clock
from agentlightning.store.sql.answers import AnsweredCalls
from agentlightning.store.sql.rollouts import ClaimRollouts, Claims, QueueNames, expire
from agentlightning.store.sql.spans import SpanWriter
from agentlightning.store.sql.tx import Connection, Database, Tx
from agentlightning.store.sql.waiting import WAIT, Command, Waits

logger = logging.getLogger(__name__)

READ_BATCH_SECONDS: Final = 0.002
"""Results of queries are delivered together when they take no longer than this."""
MAX_ATTEMPTS: Final = 5
"""How often a transaction is attempted that fails for a transient reason."""
MAX_BATCH: Final = 1024
"""Commands in one transaction at most, which bounds the latency of the first one."""
TICK_SECONDS: Final = 0.25
"""Deadlines are checked no more often than this."""
MAX_TURN_SECONDS: Final = 0.02
"""How long a batch waits at most for the callers of the one before."""
POLL_SECONDS: Final = 0.5
"""How often an idle store checks what other processes wrote."""

CommandObserver = Callable[[str, float, float, int], None]
"""(name of the command, seconds it was queued, seconds its batch took, commands in the batch)"""
Result = tuple[Command, Any, BaseException | None]


class DatabaseThread:
    """A thread, its connection, and the queue of commands. Used as it is, it runs queries."""

    def __init__(self, name: str, database: Database, connection: Connection) -> None:
        self._database, self.name = database, database.name
        self._connection = connection
        self._queue: SimpleQueue[Command | None] = SimpleQueue()
        """None only wakes the thread."""
        self._submitting = threading.Lock()
        """Held to submit and to close, so that nothing is submitted to a thread that has ended."""
        self._closed = False
        self._reading = False
        """A read-only transaction is open."""
        self.crash: BaseException | None = None
        """The error that ended the thread."""
        self._running: list[Command] = []
        """The batch that is being run."""
        self._process_id = os.getpid()
        self.observe: CommandObserver | None = None
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def submit(self, command: Command) -> None:
        """Queue a command; its future is resolved in its own event loop."""
        if self.observe is not None:
            command.submitted_at = time.perf_counter()
        self.check_open()
        with self._submitting:
            if self._closed:
                self.check_open()
            self._queue.put(command)

    def check_open(self) -> None:
        """Raises StoreClosedError where `submit` would."""
        if self._process_id != os.getpid():
            raise StoreClosedError(f"{self.name} was opened by a parent process; open it again in this one")
        if self.crash is not None:
            raise StoreClosedError(f"{self.name}: its thread ended with {self.crash!r}; open it again")
        if self._closed:
            raise StoreClosedError(f"{self.name} is closed; open it again with LightningStore(...)")

    def _notify(self) -> None:
        """Wake the thread."""
        self._queue.put(None)

    def _take_batch(self, seconds: float | None) -> None:
        """Sleep until there is something to do, `seconds` at most, and begin to run what is queued."""
        with contextlib.suppress(Empty):
            command = self._queue.get(timeout=None if seconds is None else min(seconds, threading.TIMEOUT_MAX))
            while True:
                if command is not None:
                    self._running.append(command)
                if len(self._running) == MAX_BATCH:
                    break
                command = self._queue.get_nowait()

    def stop(self) -> None:
        """End the thread once the queue is empty. Does not wait for that."""
        if self._process_id != os.getpid():  # a forked child has no thread to end, and may hold a lock forever
            return
        with self._submitting:  # what was submitted by now is in the queue
            self._closed = True
        self._notify()

    def _run(self) -> None:
        """The error boundary of the thread: whatever ends it, no caller waits forever."""
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001  every caller raises it
            self._on_crash(error)

    def _work(self) -> None:
        while not self._is_done():
            self._take_batch(self._idle_seconds())
            self._run_batch()
            self._running = []
        self._connection.close()
        self._reject_all(f"{self.name} was closed while this call waited")

    def _is_done(self) -> bool:
        return self._closed and self._queue.empty()

    def _idle_seconds(self) -> float | None:
        """How long to sleep without being notified; None: until notified."""
        return None

    def _on_crash(self, error: BaseException) -> None:
        logger.critical("%s: the thread %s has ended: %r", self.name, self.thread.name, error, exc_info=error)
        with self._submitting:  # what was submitted by now is rejected below
            self.crash = error
            self._closed = True
        running, self._running = self._running, []
        reason = f"{self.name}: its thread ended with {error!r} before it answered this call"
        self._reject(running, f"{reason}; look before calling again")
        self._reject_all(f"{reason}; open the store again")
        with contextlib.suppress(*self._database.errors):
            self._connection.close()

    # -- queries -----------------------------------------------------------------------------------------------------

    def _run_batch(self) -> None:
        """Run the queries of a batch, those that take little time in one transaction. It begins after they were
        submitted, so each sees what its caller may expect."""
        results: list[Result] = []
        started = time.perf_counter()
        deadline = started + READ_BATCH_SECONDS
        for command in self._running:
            if command.future.cancelled():
                continue
            results.append(self._run_query(command))
            now = time.perf_counter()
            self._notify_observer(command, started, now - started, 1)
            started = now
            if now > deadline:
                self._deliver_read(results)
                results, deadline = [], time.perf_counter() + READ_BATCH_SECONDS
        self._deliver_read(results)

    def _deliver_read(self, results: list[Result]) -> None:
        self._end_reading()
        self._deliver(results)

    def _run_query(self, command: Command) -> Result:
        for last in (False,) * (MAX_ATTEMPTS - 1) + (True,):
            try:
                if not self._reading:
                    self._reading = True
                    self._connection.begin(False)
                return command, command.run(self._connection), None
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
        if self.observe is None:
            return
        try:
            self.observe(command.name, started - command.submitted_at, seconds, batch)
        except Exception:
            logger.exception("the observer of %s failed and is disabled", self.name)
            self.observe = None

    # -- results -----------------------------------------------------------------------------------------------------

    def _deliver(self, results: list[Result]) -> None:
        """Hand results over to the event loops of their callers: one wake-up for each loop."""
        loops: dict[asyncio.AbstractEventLoop, list[Result]] = {}
        for result in results:
            loops.setdefault(result[0].loop, []).append(result)
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
        while not self._queue.empty():
            self._take_batch(0)
            self._reject(self._running, reason)
            self._running = []

    def _reject(self, commands: Iterable[Command], reason: str) -> None:
        self._deliver([(command, None, StoreClosedError(reason)) for command in commands])


class _CommandError(Exception):
    """A command raised an error, the cause of this one, after it had changed something."""

    def __init__(self, command: Command) -> None:
        super().__init__(command.name)
        self.command = command


class Committer(DatabaseThread):
    """The thread of the connection that writes."""

    def __init__(self, name: str, database: Database, connection: Connection, clock: Clock) -> None:
        self._clock = clock
        self.tx = Tx(connection, clock, database)
        self.spans = SpanWriter(connection)
        self.claims = Claims(self.tx)
        self.waits = Waits()
        self._answered = AnsweredCalls()
        self._next_deadline: float | None = clock.steady()
        self._last_tick = clock.steady() - TICK_SECONDS
        self._last_poll = -math.inf
        """When it last checked what other servers wrote, on time.monotonic."""
        self._changed_elsewhere = False
        """Another process has written: any rollout may have changed."""
        self._queued_elsewhere = False
        """Another server says that it has queued rollouts."""
        self._waiting: dict[ClaimRollouts, None] = {}
        """In order of arrival."""
        self._undelivered: deque[tuple[ClaimRollouts, Any]] = deque()
        """Committed claims that no caller took, to be undone."""
        self._last_failure = ""
        """Logged once, not for each tick that fails the same way."""
        self._committed: list[Result] = []
        """Durable results that are not delivered yet."""
        self._commit_seconds = self._turn_seconds = self._delivered_at = 0.0
        """How long the last commit took; how long the last callers took to run once they had their results, and when
        that was."""
        self._callers_ran = threading.Event()
        """The callers of the results delivered last have run."""
        self.commits = 0
        super().__init__(name, database, connection)
        try:
            database.listen(self._on_notification)
        except BaseException:
            self.stop()
            raise

    def abandon(self, command: ClaimRollouts) -> None:
        """The caller of a claim was cancelled, possibly just as its result arrived."""
        future = command.future
        if future.cancelled():
            self._notify()  # it waits no longer
        elif future.exception() is None:
            self._on_undelivered(command, future.result())

    def _on_undelivered(self, command: Command, value: Any) -> None:
        if isinstance(command, ClaimRollouts) and value:
            self._undelivered.append((command, value))
            self._notify()

    def _on_notification(self, queued: bool, finished: Sequence[str] | None) -> None:
        self.waits.notify(finished)
        if queued or finished is None:
            self._queued_elsewhere = True
            self._notify()

    def stop(self) -> None:
        if self._process_id == os.getpid():
            self._database.close()
        super().stop()

    # -- scheduling --------------------------------------------------------------------------------------------------

    def _is_done(self) -> bool:
        return super()._is_done() and not self._undelivered

    def _idle_seconds(self) -> float | None:
        pauses = [] if self._database.single else [POLL_SECONDS]
        if self._undelivered:  # undoing them failed, with the disk full perhaps
            pauses.append(TICK_SECONDS)
        if self._next_deadline is not None:
            clock = self._clock
            until_tick = min(TICK_SECONDS, self._last_tick + TICK_SECONDS - clock.steady())
            pauses.append(max(min(self._next_deadline - clock.steady(), clock.fresh_seconds), until_tick))
        deadline = min([command.deadline for command in self._waiting], default=math.inf)
        if deadline < math.inf:
            pauses.append(deadline - time.monotonic())
        return max(0.0, min(pauses)) if pauses else None

    def _is_due(self) -> bool:
        """Whether to check deadlines, or to record that this server is alive in order to do so."""
        if self._next_deadline is None:
            return False
        now = self._clock.steady()
        return (now >= self._next_deadline or self._clock.stale) and abs(now - self._last_tick) >= TICK_SECONDS

    def _deliver_committed(self) -> None:
        if self._committed:
            results, self._committed = self._committed, []
            self._callers_ran.clear()
            self._delivered_at = time.perf_counter()
            self._deliver(results)

    def _resolve(self, results: list[Result]) -> None:
        super()._resolve(results)
        results[0][0].loop.call_soon(self._on_callers_ran)  # after them

    def _on_callers_ran(self) -> None:
        self._turn_seconds = time.perf_counter() - self._delivered_at
        self._callers_ran.set()

    # -- one batch ---------------------------------------------------------------------------------------------------

    def _run_batch(self) -> None:
        batch, started = self._running, time.perf_counter()
        results = self._try_batch(batch)
        self._committed += results
        if self.observe is not None:
            seconds = time.perf_counter() - started
            for command, _, _ in results:
                self._notify_observer(command, started, seconds, len(batch))
        self._running = []
        # Where a commit takes longer than callers need to call again, the next one is to have their calls, too.
        # Otherwise, while commands are queued, results are delivered just before the next commit: it releases the
        # interpreter lock, so the callers of one batch run while the next is written. Not where another process may
        # hold up the next batch.
        slow_commits = self._turn_seconds < self._commit_seconds
        at_once = slow_commits or self._queue.empty() or self._database.shared or self._changed_elsewhere
        if self._committed and at_once:
            self._deliver_committed()
            if slow_commits:
                self._callers_ran.wait(min(self._commit_seconds, MAX_TURN_SECONDS))

    def _try_batch(self, batch: list[Command]) -> list[Result]:
        """Run a batch in one transaction, without the commands that fail after they have changed something. If it fails
        otherwise, possibly through one command, run each in its own."""
        failed: list[Result] = []
        attempts_left = MAX_ATTEMPTS
        while True:
            results: list[Result] = []
            try:
                self._transact(batch, results)
            except _CommandError as error:
                self._undo(results)
                error.command.done = True
                failed.append((error.command, None, error.__cause__))
            except Exception as error:  # noqa: BLE001  every caller of the batch raises it
                self._undo(results)
                attempts_left -= 1
                if attempts_left and self._database.may_retry(error):
                    continue
                fatal = isinstance(error, StoreError) or self._database.is_fatal(error)
                if fatal or len(batch) <= 1:
                    failed += self._failures(batch, results, error)
                else:
                    text = "a transaction of %d calls was rolled back; retrying each call on its own: %r"
                    logger.warning(text, len(batch), error)
                    failed += [result for command in batch for result in self._try_batch([command])]
                break
            else:
                failed += results
                break
        for command, _, _ in failed:
            if isinstance(command, ClaimRollouts):
                self._waiting.pop(command, None)
        return failed

    def _undo(self, results: list[Result]) -> None:
        """Roll the transaction back, with these results."""
        try:
            self._connection.rollback()
        except self._database.errors as error:
            logger.warning("the store could not roll back a transaction: %s", self._database.explain(error))
        self._forget()
        self._clock.invalidate()
        self._queued_elsewhere = True  # who waits is served by the next one
        for command, _, _ in results:
            command.done = False

    def _forget(self) -> None:
        """Drop everything in memory, which may differ from what was committed."""
        self.tx.rolled_back()
        self.spans.clear()

    def _failures(self, batch: list[Command], results: list[Result], error: Exception) -> list[Result]:
        """The results of a transaction that was rolled back for good."""
        self._last_tick = self._clock.steady()
        known = isinstance(error, (*self._database.errors, StoreError))
        fault = self._explain(error) if known else StoreError(f"{self.name}: {error!r}")
        waiting: Iterable[Command] = ()
        if isinstance(error, StoreVersionError):  # no later transaction succeeds
            waiting = list(self._waiting)
            self.waits.notify(None)
        commands = dict.fromkeys([*batch, *(command for command, _, _ in results), *waiting])
        if commands or str(fault) != self._last_failure:
            what = "a transaction was rolled back" if commands else "the store could not check deadlines; retrying"
            logger.warning("%s: %s", what, fault, exc_info=error)
        self._last_failure = str(fault)
        for command in commands:
            command.done = True
        return [(command, None, type(fault)(*fault.args)) for command in commands]

    def _transact(self, batch: list[Command], results: list[Result]) -> None:
        """Run one transaction up to and including its commit."""
        tx, connection = self.tx, self._connection
        due, undelivered = self._is_due(), list(self._undelivered)
        if queued := self._queued_elsewhere:
            self._queued_elsewhere = False
        writing = [command for command in batch if not command.reads]
        durable = not writing or due or bool(undelivered) or any(command.durable for command in writing)
        writes = self._begin(bool(batch or queued), due or queued or bool(writing or undelivered), durable)
        elsewhere = self._changed_elsewhere
        tx.begin(outdated=self._database.shared or elsewhere)
        if elsewhere and not self._database.shared:
            self.spans.recent.clear()
        self._prefetch(writing)
        for command, value in undelivered:
            command.undo(tx, value)
        for command in writing:
            if not isinstance(command, ClaimRollouts):
                self._run_command(command, results)
        next_deadline = expire(tx) if due or elsewhere else self._next_deadline
        own = tx.queued, list(tx.finished)
        # What other servers did comes after this server's own notification, so that it is not sent again.
        tx.queued |= elsewhere or queued
        self._serve_claims([command for command in writing if isinstance(command, ClaimRollouts)], results)
        for rollout_id in tx.deleted:
            self.spans.recent.forget(rollout_id)
        self._answered.trim(tx)
        tx.finish()
        for command in batch:
            if command.reads:
                self._run_command(command, results)
        self._deliver_committed()
        if writes:
            connection.notify(*own)
            started = time.perf_counter()
            connection.commit()
            self._commit_seconds = time.perf_counter() - started
            self.commits += 1
        else:
            connection.rollback()
        try:
            self._after_commit(len(undelivered), due or elsewhere, next_deadline)
        except Exception:  # what is durable must not run again
            logger.exception("%s: failed after a commit; rows in memory are dropped and read again", self.name)
            self._forget()
            self._next_deadline = self._clock.steady()
            self.waits.notify(None)

    def _begin(self, called: bool, writes: bool, durable: bool) -> bool:
        """Begin a transaction, with the clock in sync. Returns whether it writes, which it does to look at everything
        where another process may have written; on a shared database that is done in time however busy this server
        is."""
        connection, clock, shared = self._connection, self._clock, self._database.shared
        if shared:
            changed = not called or time.monotonic() - self._last_poll >= POLL_SECONDS
            if changed:
                self._last_poll = time.monotonic()
        else:
            changed = not writes and connection.changed()
        writes |= changed
        if shared and writes and clock.stale:
            connection.sync_clock(clock)
        connection.begin(writes, durable)
        if not shared and writes:
            changed |= connection.changed()
            if changed or clock.stale:
                connection.sync_clock(clock)
        self._changed_elsewhere = changed
        return writes

    def _after_commit(self, undone: int, deadlines_checked: bool, next_deadline: float | None) -> None:
        """undone: how many claims whose callers were gone. next_deadline: without those that this transaction set."""
        self.spans.recent.committed()
        self.waits.notify(None if self._changed_elsewhere else self.tx.finished)
        for _ in range(undone):
            self._undelivered.popleft()
        if deadlines_checked:
            self._last_tick = self._clock.steady()
        deadlines = [each for each in (next_deadline, self.tx.deadline) if each is not None]
        self._next_deadline = min(deadlines, default=None)

    def _prefetch(self, commands: list[Command]) -> None:
        """Load the rows that the commands name: on a shared database, in the one order in which rows are locked."""
        tx = self.tx
        tx.new_rollouts = sum([command.new_rollouts for command in commands])
        self._answered.load(tx, [command.idempotent.key for command in commands if command.idempotent is not None])
        tx.load_workers([name for command in commands for name in command.workers])
        tx.load_open_attempts([name for each in commands if each.name == "update_worker" for name in each.workers])
        attempts = [name for command in commands for name in command.attempts]
        tx.load_owners(attempts)
        rollouts = [name for command in commands for name in command.rollouts]
        tx.load([*rollouts, *filter(None, map(tx.owners.get, attempts))])

    # -- running commands --------------------------------------------------------------------------------------------

    def _serve_claims(self, new: list[ClaimRollouts], results: list[Result]) -> None:
        """Run the waiting claims, in order of arrival, then the new ones; answer those whose time is over."""
        claims = [*self._waiting, *new] if self.tx.queued or new else []
        if claims:
            self.claims.begin(sum([command.limit for command in claims]))
        empty: set[QueueNames] = set()
        for command in claims:
            # Not again where another claim of the same queues has found nothing.
            in_vain = command.queues in empty and not command.attempts
            if in_vain or not self._run_command(command, results):
                empty.add(command.queues)
                self._waiting.setdefault(command)
                command.waited = True
        now = time.monotonic()
        for command in list(self._waiting):
            if command.future.cancelled():
                del self._waiting[command]
            elif command.deadline <= now and not command.done:
                command.done = True
                results.append((command, [], None))

    def _run_command(self, command: Command, results: list[Result]) -> bool:
        """Returns False where it has to wait."""
        if command.done or command.future.cancelled():
            return True
        tx = self.tx
        tx.changed = False
        try:
            if command.idempotent is None:
                value = command.run(self._connection if command.reads else tx)
            else:
                value = self._answered.run(tx, command.idempotent, partial(command.run, tx), command.convert)
        except self._database.errors:
            raise
        except Exception as error:
            if tx.changed:
                raise _CommandError(command) from error
            command.done = True
            results.append((command, None, error))
            return True
        if value is WAIT:
            return False
        command.done = True
        results.append((command, value, None))
        return True

    # -- the end -----------------------------------------------------------------------------------------------------

    def _on_crash(self, error: BaseException) -> None:
        self._deliver_committed()  # before the others of the batch are rejected
        super()._on_crash(error)

    def _reject_all(self, reason: str) -> None:
        waiting, self._waiting = self._waiting, {}
        self._deliver_committed()
        self._reject(waiting, reason)
        self.waits.notify(None)
        super()._reject_all(reason)
