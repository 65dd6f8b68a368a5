"""The thread that writes: group commit, waiting commands, deadlines.

Everything queued is taken as one batch: the rows it needs are loaded at once, each command decides in memory, the
changes are flushed and committed, and only then are the results delivered: a result is durable. Long queries run on a
thread and a connection of their own (database_thread.py), which see everything that was answered.

A command that finds nothing to do yet may return WAIT. It runs again after each batch that may concern it, until it
returns a result or its deadline passes. Nothing polls, except for what other processes write to the same file.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from agentlightning.errors import StoreError
from agentlightning.rollouts import is_private_queue
from agentlightning.store.clock import Clock
from agentlightning.store.sql.commands.base import Command
from agentlightning.store.sql.commands.waiters import WAIT, QueueNames, Waiters
from agentlightning.store.sql.execution.database_thread import MAX_ATTEMPTS, DatabaseThread, Result
from agentlightning.store.sql.lifecycle.expiry import expire
from agentlightning.store.sql.session.unit_of_work import Prefetch, UnitOfWork
from agentlightning.store.sql.tables.backend import Connection, Database

logger = logging.getLogger(__name__)

MAX_BATCH: Final = 1024
"""Commands in one transaction at most, which bounds the latency of the first one."""
TICK_SECONDS: Final = 0.25
"""Deadlines are checked no more often than this."""
POLL_SECONDS: Final = 0.5
"""How often an idle store checks what other processes wrote."""

Notification = tuple[bool, Sequence[str] | None]
"""Of another process: (rollouts were queued, ids of those that finished; None: any may have)."""


class _Committed(NamedTuple):
    """What a committed transaction did."""

    undone_results: int
    """Results whose callers were gone."""
    deadlines_checked: bool
    next_deadline: float | None
    """Without the deadlines set by this transaction."""


class GroupCommitWriter(DatabaseThread):
    """The thread of the connection that writes."""

    def __init__(self, name: str, database: Database, connection: Connection, clock: Clock) -> None:
        self._clock = clock
        self._unit = UnitOfWork(connection, clock, database.shared)
        self._next_deadline: float | None = clock.steady()
        self._last_tick = clock.steady() - TICK_SECONDS
        self._last_poll = -math.inf
        """When it last checked what other servers wrote, on time.monotonic."""
        self._waiters: Waiters[Command] = Waiters()
        self._cancelled: deque[Command] = deque()
        """Waiting commands whose callers are gone."""
        self._undelivered: deque[tuple[Command, Any]] = deque()
        """Committed results that no caller took, to be undone."""
        self._notifications: deque[Notification] = deque()
        self._accepted: list[Notification] = []
        """The notifications that the current transaction acts on."""
        self._last_failure = ""
        """Logged once, not for each tick that fails the same way."""
        self._committed: list[Result] = []
        """Durable results that are not delivered yet."""
        self.batches = 0
        self.commits = 0
        self.commands = 0
        super().__init__(name, database, connection)
        self._listener = None
        try:
            self._listener = database.listen(self._on_notification)
        except BaseException:
            self.stop()
            raise

    def cancel_waiter(self, command: Command) -> None:
        """Remove a waiting command whose caller was cancelled."""
        self._cancelled.append(command)
        self._notify()

    def return_result(self, command: Command) -> None:
        """Undo a result that arrived while its caller was being cancelled."""
        if command.future.exception() is None:
            self._on_undelivered(command, command.future.result())

    def _on_undelivered(self, command: Command, value: Any) -> None:
        self._undelivered.append((command, value))
        self._notify()

    def _on_notification(self, queued: bool, finished: Sequence[str] | None) -> None:
        self._notifications.append((queued, finished))
        self._notify()

    def stop(self) -> None:
        if self._process_id == os.getpid() and self._listener is not None:
            self._listener.close()
        super().stop()

    def _work(self) -> None:
        while not self._closed or self._queue or self._undelivered:
            if not (self._queue or self._cancelled or self._notifications):
                self._sleep(self._idle_seconds())
            self._next_batch()
            self._process(self._running)
            self._running = []
            if not self._queue or self._deliver_at_once:
                self._deliver_committed()
        self._connection.close()
        self._reject_all(f"{self.name} was closed while this call waited")

    # -- scheduling ------------------------------------------------------------------------------------------------

    def _next_batch(self) -> None:
        queue, batch = self._queue, self._running
        for _ in range(min(len(queue), MAX_BATCH)):
            batch.append(queue.popleft())
        while self._cancelled:
            batch.append(self._cancelled.popleft())

    def _idle_seconds(self) -> float | None:
        """How long to sleep without being notified; None: until notified."""
        pauses = [] if self._database.single else [POLL_SECONDS]
        if self._undelivered:  # undoing them failed, with the disk full perhaps
            pauses.append(TICK_SECONDS)
        if self._next_deadline is not None:
            clock = self._clock
            until_tick = min(TICK_SECONDS, self._last_tick + TICK_SECONDS - clock.steady())
            pauses.append(max(min(self._next_deadline - clock.steady(), clock.fresh_seconds), until_tick))
        if self._waiters.deadline < math.inf:
            pauses.append(self._waiters.deadline - time.monotonic())
        return max(0.0, min(pauses)) if pauses else None

    def _is_due(self) -> bool:
        """Whether to check deadlines, or to record that this server is alive in order to do so."""
        if self._next_deadline is None:
            return False
        now = self._clock.steady()
        return (now >= self._next_deadline or self._clock.stale) and abs(now - self._last_tick) >= TICK_SECONDS

    @property
    def _deliver_at_once(self) -> bool:
        """Whether durable results are delivered before the next batch. Otherwise, while commands are queued, results
        are delivered just before the next commit: a commit releases the interpreter lock, so the callers of one batch
        run while the next is written. Not where another process may hold up the next batch."""
        return self._database.shared or self._unit.changed_elsewhere

    def _deliver_committed(self) -> None:
        if self._committed:
            results, self._committed = self._committed, []
            self._deliver(results)

    # -- one batch -------------------------------------------------------------------------------------------------

    def _process(self, batch: list[Command]) -> None:
        started = time.perf_counter()
        results = self._try_batch(batch)
        self._committed += results
        self.batches += 1
        self.commands += len(batch)
        if self.observe is not None:
            seconds = time.perf_counter() - started
            for command, _, _ in results:
                self._notify_observer(command, started, seconds, len(batch))

    def _try_batch(self, batch: list[Command]) -> list[Result]:
        """Run a batch in one transaction. If that fails, possibly through one command, run each in its own."""
        for last in (False,) * (MAX_ATTEMPTS - 1) + (True,):
            results: list[Result] = []
            try:
                committed = self._transact(batch, results)
            except Exception as error:  # noqa: BLE001  every caller of the batch raises it
                self._roll_back()
                for command, _, _ in results:
                    command.done = False
                if not last and self._database.may_retry(error):
                    continue
                fatal = isinstance(error, StoreError) or self._database.is_fatal(error)
                if len(batch) > 1 and not fatal:
                    logger.warning(
                        "a transaction of %d calls was rolled back; retrying each call on its own: %r",
                        len(batch),
                        error,
                    )
                    return [result for command in batch for result in self._try_batch([command])]
                return self._failures(batch, results, error)
            try:
                self._after_commit(committed)
            except Exception:  # what is durable must not run again
                logger.exception("%s: failed after a commit; rows in memory are dropped and read again", self.name)
                self._reset()
            for command, _, _ in results:
                self._waiters.remove(command)
            return results
        raise AssertionError("unreachable")

    def _roll_back(self) -> None:
        try:
            self._connection.rollback()
        except self._database.errors as error:
            logger.warning("the store could not roll back a transaction: %s", self._database.explain(error))
        self._unit.rolled_back()
        self._clock.invalidate()

    def _failures(self, batch: list[Command], results: list[Result], error: Exception) -> list[Result]:
        """The results of a transaction that was rolled back for good."""
        self._last_tick = self._clock.steady()
        known = isinstance(error, (*self._database.errors, StoreError))
        fault = self._explain(error) if known else StoreError(f"{self.name}: {error!r}")
        commands = dict.fromkeys([*batch, *(command for command, _, _ in results)])
        if commands or str(fault) != self._last_failure:
            what = "a transaction was rolled back" if commands else "the store could not check deadlines; retrying"
            logger.warning("%s: %s", what, fault, exc_info=error)
        self._last_failure = str(fault)
        for command in commands:
            command.done = True
            self._waiters.remove(command)
        return [(command, None, type(fault)(*fault.args)) for command in commands]

    def _transact(self, batch: list[Command], results: list[Result]) -> _Committed:
        """Run one transaction up to and including its commit."""
        unit, connection = self._unit, self._connection
        self._accepted += [self._notifications.popleft() for _ in range(len(self._notifications))]
        due = self._is_due()
        writing = [command for command in batch if command.writes]
        undelivered = list(self._undelivered)
        writes, changed_elsewhere = self._begin(bool(batch), due or bool(writing or undelivered or self._accepted))
        unit.begin(changed_elsewhere)
        self._prefetch(writing)
        for command, value in undelivered:
            command.undo(unit, value)
            unit.release_savepoint()
        unit.waiting_ahead = self._waiters.claims
        for command in writing:
            self._run_command(command, results)
        if due or changed_elsewhere:
            unit.flush()
            next_deadline = expire(unit)
        else:
            next_deadline = self._next_deadline
        notification = unit.queues.claimable, list(unit.finished)
        self._apply_notifications(changed_elsewhere)
        self._serve_claims(results)
        unit.flush()
        unit.write_totals()
        self._run_reads(batch, results)
        if writes:
            connection.notify(*notification)
            self._deliver_committed()
            connection.commit()
            self.commits += 1
        else:
            self._deliver_committed()
            connection.rollback()
        return _Committed(len(undelivered), due or changed_elsewhere, next_deadline)

    def _begin(self, called: bool, writes: bool) -> tuple[bool, bool]:
        """Begin a transaction, with the clock in sync. Returns whether it writes, and whether to look at everything
        because another process may have written; on a shared database that is done in time however busy this server
        is."""
        connection, clock = self._connection, self._clock
        if self._database.shared:
            now = time.monotonic()
            poll = not (called or self._accepted) or now - self._last_poll >= POLL_SECONDS
            if poll:
                self._last_poll = now
            writes |= poll
            if writes and clock.stale:
                connection.sync_clock(clock)
            connection.begin(writes)
            return writes, poll
        connection.begin(writes)
        changed = connection.changed()
        if changed and not writes:  # the other process may have left something that is due
            connection.rollback()
            connection.begin(True)
            writes = True
            connection.changed()
        if changed or (writes and clock.stale):
            connection.sync_clock(clock)
        return writes, changed

    def _after_commit(self, committed: _Committed) -> None:
        unit = self._unit
        unit.committed()
        self._accepted.clear()
        for _ in range(committed.undone_results):
            self._undelivered.popleft()
        if committed.deadlines_checked:
            self._last_tick = self._clock.steady()
        deadlines = [each for each in (committed.next_deadline, unit.deadline) if each is not None]
        self._next_deadline = min(deadlines, default=None)

    def _reset(self) -> None:
        """Drop everything in memory, which may differ from what was committed."""
        self._unit.rolled_back()
        self._accepted.clear()
        self._next_deadline = self._clock.steady()

    def _apply_notifications(self, changed_elsewhere: bool) -> None:
        """Let waiting commands see what other processes did. Comes after this server's own notification, so that
        theirs is not sent again."""
        unit = self._unit
        unit.changed_elsewhere = changed_elsewhere
        unit.queues.claimable |= changed_elsewhere
        for queued, finished in self._accepted:
            unit.queues.claimable |= queued
            unit.changed_elsewhere |= finished is None
            unit.finished.update(finished or ())

    def _prefetch(self, commands: list[Command]) -> None:
        needs = Prefetch()
        for command in commands:
            command.prefetch(needs)
            if command.idempotent is not None:
                needs.keys.add(command.idempotent.key)
        if self._unit.queues.claimable or needs.claims or self._waiters.claims:
            needs.claims += len(self._waiters.claims)
        self._unit.prefetch(needs)

    # -- running commands ------------------------------------------------------------------------------------------

    def _serve_claims(self, results: list[Result]) -> None:
        """Run the waiting claims, in order of arrival."""
        self._unit.waiting_ahead = ()
        if not (self._unit.queues.claimable or self._unit.claims_queued):
            return
        empty: set[QueueNames] = set()
        for command, queues in list(self._waiters.claims.items()):
            hopeless = queues in empty or (None in empty and not _names_private_queue(queues))
            if not hopeless and not self._run_command(command, results):
                empty.add(queues)  # other claims of the same queues would find nothing either

    def _run_reads(self, batch: list[Command], results: list[Result]) -> None:
        """Run the waiting commands that are affected, the queries of the batch, and what has timed out."""
        unit = self._unit
        waiters = self._waiters
        for command in waiters.rollout_waits() if unit.changed_elsewhere else waiters.affected(unit.finished):
            self._run_command(command, results)
        for command in batch:
            if not command.writes:
                self._run_command(command, results)
        for command in waiters.expired():
            if not command.done:
                self._execute(command, command.on_timeout, results)

    def _run_command(self, command: Command, results: list[Result]) -> bool:
        """Returns False where it has to wait."""
        if command.done or command.future.cancelled():
            self._waiters.remove(command)
            return True
        return self._execute(command, command.run, results)

    def _execute(self, command: Command, run: Callable[[UnitOfWork], Any], results: list[Result]) -> bool:
        unit = self._unit
        try:
            if command.idempotent is None:
                value = run(unit)
            else:
                value = unit.answered.run(command.idempotent, partial(run, unit), command.convert)
        except self._database.errors:
            raise
        except Exception as error:  # noqa: BLE001  the caller raises it
            unit.rollback_to_savepoint()
            command.done = True
            results.append((command, None, error))
            return True
        unit.release_savepoint()
        if value is WAIT:
            command.wait(self._waiters)
            return False
        command.done = True
        results.append((command, value, None))
        return True

    # -- the end ---------------------------------------------------------------------------------------------------

    def _on_crash(self, error: BaseException) -> None:
        durable = {command for command, _, _ in self._committed}
        self._deliver_committed()
        self._running = [command for command in self._running if command not in durable]
        super()._on_crash(error)

    def _reject_all(self, reason: str) -> None:
        waiting = self._waiters.all()
        for command in waiting:
            self._waiters.remove(command)
        self._deliver_committed()
        self._reject(waiting, reason)
        super()._reject_all(reason)


def _names_private_queue(queues: QueueNames) -> bool:
    """Whether a claim may find what one that names no queue does not."""
    return queues is not None and any(map(is_private_queue, queues))
