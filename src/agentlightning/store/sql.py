"""The contract of base.py over a SQL database: SQLite in a file or in memory, PostgreSQL.

Values are checked and packed in the caller's event loop; what changes the database is a call handed to the writer
(engine.py), which decides in memory (unit.py) by the rules of lifecycle.py; what only looks goes to the reader.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from agentlightning.errors import ConfigError, ConflictError, NotFoundError, StoreClosedError
from agentlightning.resources import NamedResources, ResourcesUpdate
from agentlightning.rollouts import (
    FINISHED,
    WAITING,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
)
from agentlightning.span import Span
from agentlightning.store import codec, lifecycle, looking, maintenance, spans, statements, workers
from agentlightning.store.base import (
    UNSET,
    LightningStoreBase,
    Pruned,
    Queue,
    Retention,
    RolloutRecord,
    Unset,
    Worker,
)
from agentlightning.store.calls import AddSpans, Claim, Enqueue, Start, UpdateAttempt, repeated, until
from agentlightning.store.clock import Clock
from agentlightning.store.codec import Row
from agentlightning.store.database import Connection, Database
from agentlightning.store.engine import Call, Do, Lane, Observer, Read, Writer
from agentlightning.store.hot import HotSpans
from agentlightning.store.ids import claimed_id, new_id
from agentlightning.store.looking import RolloutFilters
from agentlightning.store.spans import SpanQuery
from agentlightning.store.sqlite import SqliteConnection, SqliteDatabase, locate
from agentlightning.store.unit import Unit
from agentlightning.store.waiting import Wait

T = TypeVar("T")

CHUNK: Final = 32
"""Rollouts whose spans `iter_spans` reads at once."""


def find_database(url: str | Path | None) -> Database:
    """The database that `url` means. Raises ConfigError for one that means none."""
    if str(url).startswith(("postgresql:", "postgres:", "postgresql+")):
        from agentlightning.store.postgres import PostgresDatabase

        return PostgresDatabase(str(url))
    return SqliteDatabase(locate(url))


class SqlStore(LightningStoreBase):
    """A store in one database. Any number of tasks, event loops and threads may use one object at the same time.

    Raises StoreError where the database cannot be opened, and StoreClosedError once `close` was called.
    """

    def __init__(self, url: str | Path | None = None, clock: Clock | None = None) -> None:
        self.database = find_database(url)
        self.path: Path | None = getattr(self.database, "path", None)
        """The file; None where there is none."""
        self.database.prepare()
        self._clock = self.database.clock() if clock is None else clock
        connection = self.database.connect(read_only=False)
        self._hot = HotSpans(connection.fresh) if isinstance(connection, SqliteConnection) else None
        self._writer = Writer("agl-store-writer", self.database, connection, self._clock, lifecycle.expire, self._hot)
        self._reader: Lane = self._writer
        if not self.database.single:
            self._reader = Lane("agl-store-reader", self.database, self.database.connect(read_only=True))
        self._finalizer = weakref.finalize(self, _shut, self._reader, self._writer)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.database.name}>"

    @property
    def observe(self) -> Observer | None:
        """Called in the store's threads after each call: (name, seconds it waited to be taken, seconds its batch took,
        calls in the batch)."""
        return self._writer.observe

    @observe.setter
    def observe(self, observer: Observer | None) -> None:
        self._writer.observe = self._reader.observe = observer

    def counters(self) -> dict[str, int]:
        """Since the store was opened: `calls` that change something, `batches` they were taken in, `commits`."""
        return {"calls": self._writer.calls, "batches": self._writer.batches, "commits": self._writer.commits}

    # -- life ------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        try:
            await self._write(Read("close", lambda connection: None))  # what was answered has arrived once this has
        except StoreClosedError:
            return
        await asyncio.get_running_loop().run_in_executor(None, self._finalizer)

    async def statistics(self) -> dict[str, int]:
        return await self._read("statistics", looking.statistics)

    # -- the way to the database -----------------------------------------------------------------------------------

    async def _write(self, call: Call) -> Any:
        self._writer.submit(call)
        return await call.future

    async def _do(
        self, name: str, function: Callable[[Unit], T], rollouts: Sequence[str] = (), workers: Sequence[str] = ()
    ) -> T:
        return await self._write(Do(name, function, rollouts, workers))

    async def _read(self, name: str, look: Callable[[Connection], T]) -> T:
        call = Read(name, look)
        self._reader.submit(call)
        return await call.future

    async def _await_parked(self, call: Call, timeout: float | None) -> Any:
        """Like `_write`, for a call that may park: it ends at its timeout and when its caller is cancelled."""
        call.deadline = until(timeout, time.monotonic())
        self._writer.submit(call)
        try:
            return await call.future
        except asyncio.CancelledError:
            if call.future.cancelled():
                self._writer.give_up(call)
            else:
                self._writer.take_back(call)
            raise

    # -- rollouts: the queue ---------------------------------------------------------------------------------------

    async def start_rollout(
        self,
        input: Any,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        worker_id: str | None = None,
        rollout_id: str | None = None,
        *,
        queue: str | None = None,
        claim_id: str | None = None,
    ) -> AttemptedRollout:
        _check_claimer(worker_id, claim_id)
        request = EnqueueRolloutRequest(input, mode, resources_id, config, metadata, rollout_id, queue)
        made = codec.new_rollout(request, self._clock.wall())
        return await self._write(Start(made, rollout_id is not None, worker_id, claim_id))

    async def enqueue_rollout(
        self,
        input: Any,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        rollout_id: str | None = None,
        *,
        queue: str | None = None,
        priority: int = 0,
    ) -> Rollout:
        request = EnqueueRolloutRequest(input, mode, resources_id, config, metadata, rollout_id, queue, priority)
        made = codec.new_rollout(request, self._clock.wall())
        named = () if rollout_id is None else (rollout_id,)
        return (await self._write(Enqueue("enqueue_rollout", (made,), named)))[0]

    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
        now = self._clock.wall()
        made = [codec.new_rollout(request, now) for request in rollouts]
        named = [request.rollout_id for request in rollouts if request.rollout_id is not None]
        return await self._write(Enqueue("enqueue_many_rollouts", made, named)) if made else []

    async def dequeue_rollout(
        self,
        worker_id: str | None = None,
        timeout: float | None = None,
        *,
        queues: Sequence[str] | None = None,
        claim_id: str | None = None,
    ) -> AttemptedRollout | None:
        _check_claimer(worker_id, claim_id)
        codec.check_texts(queues, "queues")
        claimed = await self._await_parked(Claim("dequeue_rollout", 1, worker_id, queues, claim_id), timeout or 0.0)
        return claimed[0] if claimed else None

    async def dequeue_many_rollouts(
        self,
        limit: int = 1,
        worker_id: str | None = None,
        timeout: float | None = None,
        *,
        queues: Sequence[str] | None = None,
        claim_id: str | None = None,
    ) -> list[AttemptedRollout]:
        if limit < 1:
            raise ConfigError(f"limit={limit} claims nothing; use at least 1")
        _check_claimer(worker_id, claim_id)
        codec.check_texts(queues, "queues")
        call = Claim("dequeue_many_rollouts", limit, worker_id, queues, claim_id)
        return await self._await_parked(call, timeout or 0.0)

    async def start_attempt(
        self, rollout_id: str, worker_id: str | None = None, *, claim_id: str | None = None
    ) -> AttemptedRollout:
        codec.check_text(rollout_id, "rollout_id")
        _check_claimer(worker_id, claim_id)

        def start(unit: Unit) -> AttemptedRollout:
            before = repeated(unit, claim_id, 1)
            if before:
                return before[0]
            attempt_id = None if claim_id is None else claimed_id(claim_id, 0)
            return lifecycle.claim(unit, unit.rollout(rollout_id), worker_id, attempt_id)

        return await self._do("start_attempt", start, [rollout_id], [] if worker_id is None else [worker_id])

    async def requeue_rollout(self, rollout_id: str, reason: str) -> Rollout:
        codec.check_text(rollout_id, "rollout_id")
        codec.dump(reason, "reason")

        def requeue(unit: Unit) -> Rollout:
            rollout = unit.rollout(rollout_id)
            if rollout.status not in WAITING:
                lifecycle.requeue(unit, rollout, reason)
            return rollout.to_rollout()

        return await self._do("requeue_rollout", requeue, [rollout_id])

    async def cancel_rollout(self, rollout_id: str) -> Rollout:
        codec.check_text(rollout_id, "rollout_id")

        def cancel(unit: Unit) -> Rollout:
            rollout = unit.rollout(rollout_id)
            if rollout.status not in FINISHED:
                lifecycle.cancel(unit, rollout)
            return rollout.to_rollout()

        return await self._do("cancel_rollout", cancel, [rollout_id])

    # -- rollouts: looking and changing ----------------------------------------------------------------------------

    async def query_rollouts(
        self,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        queue_in: Sequence[str] | None = None,
        mode_in: Sequence[RolloutMode] | None = None,
        newest_first: bool = False,
        after: str | None = None,
        limit: int = -1,
        offset: int = 0,
    ) -> list[Rollout]:
        filters = RolloutFilters(status_in, rollout_id_in, rollout_id_contains, queue_in, mode_in)
        many, skip = _check_page(after, limit, offset)
        return await self._read(
            "query_rollouts",
            lambda connection: looking.rollouts(connection, filters, newest_first, after, many, skip),
        )

    async def count_rollouts(
        self,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        queue_in: Sequence[str] | None = None,
        mode_in: Sequence[RolloutMode] | None = None,
    ) -> int:
        filters = RolloutFilters(status_in, rollout_id_in, rollout_id_contains, queue_in, mode_in)
        return await self._read("count_rollouts", lambda connection: looking.count_rollouts(connection, filters))

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        codec.check_text(rollout_id, "rollout_id")
        return await self._read("get_rollout_by_id", lambda connection: looking.rollout(connection, rollout_id))

    async def update_rollout(
        self,
        rollout_id: str,
        *,
        input: Any | Unset = UNSET,
        mode: RolloutMode | Unset | None = UNSET,
        resources_id: str | Unset | None = UNSET,
        status: RolloutStatus | Unset = UNSET,
        config: RolloutConfig | Unset = UNSET,
        metadata: dict[str, Any] | Unset = UNSET,
    ) -> Rollout:
        codec.check_text(rollout_id, "rollout_id")
        for name, value in (("mode", mode), ("resources_id", resources_id)):
            if not isinstance(value, Unset) and value is not None:
                codec.check_text(value, name)
        new: dict[str, Any] = {
            "input": input if isinstance(input, Unset) else codec.dump(input, "input"),
            "mode": mode,
            "resources_id": resources_id,
            "config": config if isinstance(config, Unset) else codec.config_text(config),
            "metadata": metadata if isinstance(metadata, Unset) else codec.dump_dict(metadata, "metadata"),
        }
        given = {name: value for name, value in new.items() if not isinstance(value, Unset)}

        def change(unit: Unit) -> Rollout:
            rollout = unit.rollout(rollout_id)
            if isinstance(resources_id, str):
                unit.known_resources(resources_id)
            if given:
                unit.touch_rollout(rollout, described=True)
                for name, value in given.items():
                    setattr(rollout, name, value)
            if not isinstance(status, Unset):
                lifecycle.set_status(unit, rollout, codec.check_rollout_status(status))
            return rollout.to_rollout()

        return await self._do("update_rollout", change, [rollout_id])

    async def wait_for_rollouts(
        self, *, rollout_ids: Sequence[str], timeout: float | None = None, minimum: int | None = None
    ) -> list[Rollout]:
        rows: list[Row] = await self._await_parked(Wait(rollout_ids, minimum), timeout)
        return [codec.to_rollout(row) for row in rows]

    # -- attempts --------------------------------------------------------------------------------------------------

    async def query_attempts(self, rollout_id: str) -> list[Attempt]:
        codec.check_text(rollout_id, "rollout_id")
        return await self._read("query_attempts", lambda connection: looking.attempts(connection, rollout_id))

    async def get_attempt(self, attempt_id: str) -> Attempt | None:
        codec.check_text(attempt_id, "attempt_id")
        return await self._read("get_attempt", lambda connection: looking.attempt(connection, attempt_id))

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        codec.check_text(rollout_id, "rollout_id")
        return await self._read("get_latest_attempt", lambda connection: looking.latest_attempt(connection, rollout_id))

    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        *,
        status: AttemptStatus | Unset = UNSET,
        worker_id: str | Unset = UNSET,
        last_heartbeat_time: float | Unset = UNSET,
        metadata: dict[str, Any] | Unset = UNSET,
    ) -> Attempt:
        codec.check_text(rollout_id, "rollout_id")
        codec.check_text(attempt_id, "attempt_id")
        if status is not UNSET:
            codec.check_attempt_status(status)
        if worker_id is not UNSET:
            codec.check_text(worker_id, "worker_id")
        if last_heartbeat_time is not UNSET:
            codec.check_time(last_heartbeat_time, "last_heartbeat_time")
        if metadata is not UNSET:
            codec.dump_dict(metadata, "metadata")
        return await self._write(
            UpdateAttempt(rollout_id, attempt_id, status, worker_id, last_heartbeat_time, metadata)
        )

    # -- spans -----------------------------------------------------------------------------------------------------

    async def add_span(self, span: Span) -> Span:
        return (await self._add_spans("add_span", [span]))[0]

    async def add_many_spans(self, spans: Sequence[Span]) -> list[Span]:
        return await self._add_spans("add_many_spans", spans)

    async def _add_spans(self, name: str, added: Sequence[Span]) -> list[Span]:
        if not added:
            return []
        groups = spans.group_by_attempt(added)
        kept = await self._write(AddSpans(name, groups))
        answers: list[Any] = [None] * len(added)
        for group, each in zip(groups, kept, strict=True):
            group.read(each, answers)
        return answers

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        codec.check_text(rollout_id, "rollout_id")
        codec.check_text(attempt_id, "attempt_id")

        def reserve(unit: Unit) -> int:
            state = unit.attempt(rollout_id, attempt_id)
            unit.touch_attempt(state)
            state.last_span += 1
            return state.last_span

        return await self._do("get_next_span_sequence_id", reserve, [rollout_id])

    async def query_spans(
        self,
        rollout_id: str,
        attempt_id: str | None = None,
        *,
        name: str | None = None,
        name_contains: str | None = None,
        trace_id: str | None = None,
        span_id: str | None = None,
        parent_id: str | None = None,
        after: str | None = None,
        limit: int = -1,
        offset: int = 0,
    ) -> list[Span]:
        codec.check_text(rollout_id, "rollout_id")
        if attempt_id is not None:
            codec.check_text(attempt_id, "attempt_id")
        _check_page(after, limit, offset)
        asked = SpanQuery(
            rollout_id, attempt_id, after, limit, offset, name, name_contains, trace_id, span_id, parent_id
        )
        if self._hot is not None and after is None and attempt_id != "latest":
            self._writer.check_open()
            found = self._hot.spans(rollout_id, attempt_id)
            if found is not None:
                return asked.page(found)
        return await self._read("query_spans", lambda connection: spans.query(connection, asked))

    async def iter_spans(self, rollout_ids: Sequence[str]) -> AsyncIterator[tuple[str, list[Span]]]:
        codec.check_texts(rollout_ids, "rollout_ids")
        for start in range(0, len(rollout_ids), CHUNK):
            chunk = list(rollout_ids[start : start + CHUNK])
            found = await self._read(
                "iter_spans", lambda connection, chunk=chunk: spans.latest_spans(connection, chunk)
            )
            for rollout_id in chunk:
                yield rollout_id, found[rollout_id]

    # -- resources -------------------------------------------------------------------------------------------------

    async def add_resources(self, resources: NamedResources, resources_id: str | None = None) -> ResourcesUpdate:
        body = codec.dump_resources(resources)
        if resources_id is not None:
            codec.check_new_id(resources_id, "resources_id")
        name = new_id("rs") if resources_id is None else resources_id

        def add(unit: Unit) -> Row:
            there = unit.connection.all(statements.FIND_RESOURCES, name)
            if there:
                if codec.load(there[0][3]) == codec.load(body):
                    return there[0]
                raise ConflictError(f"resources {name!r} exist already; use update_resources, or another id")
            row = (name, unit.connection.all(statements.LAST_VERSION)[0][0] + 1, unit.wall, body)
            unit.connection.insert(statements.INSERT_RESOURCES, [row])
            return row

        return codec.to_resources(await self._do("add_resources", add))

    async def update_resources(self, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
        codec.check_text(resources_id, "resources_id")
        body = codec.dump_resources(resources)

        def change(unit: Unit) -> Row:
            version = unit.connection.all(statements.LAST_VERSION)[0][0] + 1
            row = (version, unit.wall, body, resources_id)
            if not unit.connection.run(statements.CHANGE_RESOURCES, *row):
                raise NotFoundError(f"no resources {resources_id!r} in this store; use add_resources")
            return (resources_id, *row[:3])

        return codec.to_resources(await self._do("update_resources", change))

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        codec.check_text(resources_id, "resources_id")
        return await self._read("get_resources_by_id", lambda connection: looking.resources(connection, resources_id))

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        return await self._read("get_latest_resources", looking.latest_resources)

    async def query_resources(
        self, *, after: str | None = None, limit: int = -1, offset: int = 0
    ) -> list[ResourcesUpdate]:
        many, skip = _check_page(after, limit, offset)
        return await self._read(
            "query_resources", lambda connection: looking.resources_page(connection, after, many, skip)
        )

    # -- workers ---------------------------------------------------------------------------------------------------

    async def update_worker(
        self, worker_id: str, stats: dict[str, Any] | None = None, *, lease_seconds: float | None = None
    ) -> Worker:
        codec.check_text(worker_id, "worker_id")
        text = None if stats is None else codec.dump_dict(stats, "stats")
        if lease_seconds is not None:
            codec.check_time(lease_seconds, "lease_seconds")
            if lease_seconds <= 0:
                raise ConfigError(f"lease_seconds={lease_seconds} is over before it began; use more than 0")
        return await self._do(
            "update_worker", lambda unit: workers.heartbeat(unit, worker_id, text, lease_seconds), (), [worker_id]
        )

    async def get_worker(self, worker_id: str) -> Worker | None:
        codec.check_text(worker_id, "worker_id")
        return await self._read("get_worker", lambda connection: workers.find(connection, worker_id))

    async def query_workers(self, *, after: str | None = None, limit: int = -1) -> list[Worker]:
        many, _ = _check_page(after, limit, 0)
        return await self._read("query_workers", lambda connection: workers.page(connection, after, many))

    # -- queues ----------------------------------------------------------------------------------------------------

    async def update_queue(self, name: str, limit: int | None) -> Queue:
        codec.check_new_id(name, "name")
        if limit is not None and (isinstance(limit, bool) or not 0 <= limit < 2**31):
            raise ConfigError(f"limit={limit!r} of queue {name!r}: use 0 to pause it, or None for no limit")

        def change(unit: Unit) -> None:
            if unit.dirty:
                unit.flush()
            unit.connection.insert(statements.WRITE_QUEUES, [(name, limit)])
            unit.queues.forget_limits()

        await self._do("update_queue", change)
        return next(queue for queue in await self.query_queues() if queue.name == name)

    async def query_queues(self) -> list[Queue]:
        return await self._read("query_queues", looking.queues)

    # -- keeping the store small -----------------------------------------------------------------------------------

    async def delete_rollouts(self, rollout_ids: Sequence[str]) -> int:
        codec.check_texts(rollout_ids, "rollout_ids")
        ids = list(rollout_ids)
        return await self._do("delete_rollouts", lambda unit: maintenance.delete(unit, ids), ids)

    async def prune(self, retention: Retention, dry_run: bool = False) -> Pruned:
        maintenance.check_retention(retention)
        oldest = float("-inf") if retention.max_age_seconds is None else self._clock.wall() - retention.max_age_seconds
        excess = maintenance.Excess(retention, oldest)
        if retention.max_rollouts is not None or retention.max_bytes is not None:
            async for weights in self._weigh():
                excess.count(weights)
        removed: list[maintenance.Weight] = []
        totals = [0, 0, 0]
        async for weights in self._weigh():
            removed = list(excess.take(weights))
            for start in range(0, 0 if dry_run else len(removed), maintenance.REMOVE_AT_ONCE):
                ends = {each.rollout_id: each.end_time for each in removed[start : start + maintenance.REMOVE_AT_ONCE]}
                await self._do("prune", lambda unit, ends=ends: maintenance.delete_finished(unit, ends), list(ends))
            totals[0] += len(removed)
            totals[1] += sum(weight.spans for weight in removed)
            totals[2] += sum(weight.bytes for weight in removed)
            if len(removed) < len(weights):
                break
        return Pruned(*totals)

    async def _weigh(self) -> AsyncIterator[list[maintenance.Weight]]:
        last: maintenance.Weight | None = None
        while weights := await self._read("prune", lambda connection, last=last: maintenance.weigh(connection, last)):
            yield weights
            last = weights[-1]

    async def vacuum(self) -> None:
        await self._do("vacuum", maintenance.drop_unused_blocks)
        if not self.database.single:
            await asyncio.to_thread(self._give_space_back)

    def _give_space_back(self) -> None:
        connection = self.database.connect(read_only=False)
        try:
            connection.vacuum()
        except self.database.errors as error:
            raise self.database.explain(error) from error
        finally:
            connection.close()

    async def read_records(self, rollout_ids: Sequence[str]) -> list[RolloutRecord]:
        codec.check_texts(rollout_ids, "rollout_ids")
        ids = list(rollout_ids)
        return await self._read("read_records", lambda connection: maintenance.read_records(connection, ids))

    async def add_records(self, records: Sequence[RolloutRecord]) -> int:
        ready = [maintenance.ready(record) for record in records]
        ids = [record.rollout_id for record in ready]
        return await self._do("add_records", lambda unit: maintenance.add_records(unit, ready), ids) if ready else 0


def _check_claimer(worker_id: str | None, claim_id: str | None) -> None:
    if worker_id is not None:
        codec.check_text(worker_id, "worker_id")
    if claim_id is not None:
        codec.check_text(claim_id, "claim_id")


def _check_page(after: str | None, limit: int, offset: int) -> tuple[int, int]:
    if after is not None:
        codec.check_text(after, "after")
    return codec.check_page(limit, offset)


def _shut(*lanes: Lane) -> None:
    """End the threads once all that was handed over is done. Also runs at exit, and when the store is forgotten."""
    for lane in lanes:
        lane.stop()
    for lane in lanes:
        if lane.thread is not threading.current_thread():
            lane.thread.join()
