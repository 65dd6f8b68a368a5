"""The contract of base.py over a SQL database: SQLite in a file or in memory.

Values are checked and turned into rows in the caller's event loop; what touches the database is a function of a
transaction, handed to the engine. The rules of status are in lifecycle.py.
"""

from __future__ import annotations

import asyncio
import re
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from agentlightning.errors import ConfigError, ConflictError, NotFoundError, StoreClosedError
from agentlightning.resources import NamedResources, ResourcesUpdate
from agentlightning.rollouts import (
    ROLLOUT_TRANSITIONS,
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
from agentlightning.store import codec, connection, lifecycle, statements, workers
from agentlightning.store.base import UNSET, LightningStoreBase, Unset, Worker
from agentlightning.store.clock import Clock
from agentlightning.store.codec import Row
from agentlightning.store.engine import PARK, Call, Lane, Park, Transaction, Writer
from agentlightning.store.ids import new_id
from agentlightning.store.spans import SpanGroup, latest_spans
from agentlightning.store.waiting import Wait

T = TypeVar("T")

CHUNK: Final = 32
"""Rollouts whose spans `iter_spans` reads at once."""

_rollout_id = re.compile(r"[A-Za-z0-9_:-]{1,128}")


class SqlStore(LightningStoreBase):
    """A store in one database. Any number of tasks, event loops and threads may use one object at the same time.

    Raises StoreError where the database cannot be opened, and StoreClosedError once `close` was called.
    """

    def __init__(self, url: str | Path | None = None, clock: Clock | None = None) -> None:
        self.path: Path | None = connection.locate(url)
        """The file; None for a store in memory."""
        self._clock = Clock() if clock is None else clock
        writer, reader = connection.open_pair(self.path)
        self._writer = Writer("agl-store-writer", self.path, writer, self._clock, lifecycle.expire)
        self._reader: Lane = self._writer
        if reader is not None:
            self._reader = Lane("agl-store-reader", self.path, reader, self._clock)
        self._finalizer = weakref.finalize(self, _shut, self._reader, self._writer)

    def __repr__(self) -> str:
        return f"LightningStore({':memory:' if self.path is None else str(self.path)!r})"

    # -- life ------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        try:
            await self._write(lambda transaction: None)  # whatever was answered has arrived once this has
        except StoreClosedError:
            return
        await asyncio.get_running_loop().run_in_executor(None, self._finalizer)

    async def statistics(self) -> dict[str, int]:
        def count(transaction: Transaction) -> dict[str, int]:
            counts = {f"rollouts.{status}": 0 for status in ROLLOUT_TRANSITIONS}
            for status, number in transaction.all(statements.ROLLOUTS_BY_STATUS):
                counts[f"rollouts.{status}"] = number
            return counts | {name: transaction.one(statement)[0] for name, statement in statements.COUNTS.items()}

        return await self._read(count)

    # -- the way to the database -----------------------------------------------------------------------------------

    async def _write(self, run: Callable[[Transaction], T]) -> T:
        loop = asyncio.get_running_loop()
        call = Call(run, loop, loop.create_future())
        self._writer.submit(call)
        return await call.future

    async def _read(self, run: Callable[[Transaction], T]) -> T:
        loop = asyncio.get_running_loop()
        call = Call(run, loop, loop.create_future(), writes=False)
        self._reader.submit(call)
        return await call.future

    async def _await_parked(self, call: Call, timeout: float | None) -> Any:
        """Like `_write`, for a call that may park: it ends at its timeout and when its caller is cancelled."""
        timer = None
        if timeout is not None and timeout > 0:
            timer = call.loop.call_later(timeout, self._expire, call)
        call.expired = timeout is not None and timeout <= 0
        self._writer.submit(call)
        try:
            return await call.future
        except asyncio.CancelledError:
            if call.future.cancelled():
                self._expire(call)
            else:
                self._writer.take_back(call)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _expire(self, call: Call) -> None:
        """Have the writer look at a parked call for the last time."""
        call.expired = True
        self._writer.resubmit(call)

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
    ) -> AttemptedRollout:
        rollout = self._new_rollout(EnqueueRolloutRequest(input, mode, resources_id, config, metadata, rollout_id))
        row = codec.from_rollout(rollout)

        def start(transaction: Transaction) -> AttemptedRollout:
            lifecycle.check_resources(transaction, {rollout.resources_id})
            if not transaction.run(statements.INSERT_ROLLOUT_ONCE, *row):
                raise ConflictError(f"rollout {rollout.rollout_id!r} exists already; use start_attempt")
            return lifecycle.claim(transaction, lifecycle.find_rollout(transaction, rollout.rollout_id), worker_id)

        return await self._write(start)

    async def enqueue_rollout(
        self,
        input: Any,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        rollout_id: str | None = None,
    ) -> Rollout:
        request = EnqueueRolloutRequest(input, mode, resources_id, config, metadata, rollout_id)
        return (await self.enqueue_many_rollouts([request]))[0]

    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
        made = [self._new_rollout(request) for request in rollouts]
        rows = [codec.from_rollout(rollout) for rollout in made]
        named = {request.rollout_id for request in rollouts if request.rollout_id is not None}
        resources_ids = {rollout.resources_id for rollout in made}

        def enqueue(transaction: Transaction) -> list[Rollout]:
            lifecycle.check_resources(transaction, resources_ids)
            transaction.queued = True
            if not named:
                transaction.many(statements.INSERT_ROLLOUT, rows)
                return made
            return [lifecycle.insert_once(transaction, rollout, row) for rollout, row in zip(made, rows, strict=True)]

        return await self._write(enqueue) if rows else []

    def _new_rollout(self, request: EnqueueRolloutRequest) -> Rollout:
        if request.rollout_id is not None and not _rollout_id.fullmatch(request.rollout_id):
            raise ConfigError(
                f"rollout_id={request.rollout_id!r} cannot be part of a URL; use up to 128 letters, digits, - _ and :"
            )
        return Rollout(
            rollout_id=new_id("ro") if request.rollout_id is None else request.rollout_id,
            input=request.input,
            start_time=self._clock.wall(),
            mode=request.mode,
            resources_id=request.resources_id,
            config=codec.DEFAULT_CONFIG if request.config is None else request.config,
            metadata={} if request.metadata is None else request.metadata,
        )

    async def dequeue_rollout(
        self, worker_id: str | None = None, timeout: float | None = None
    ) -> AttemptedRollout | None:
        claimed = await self.dequeue_many_rollouts(1, worker_id, timeout)
        return claimed[0] if claimed else None

    async def dequeue_many_rollouts(
        self, limit: int = 1, worker_id: str | None = None, timeout: float | None = None
    ) -> list[AttemptedRollout]:
        if limit < 1:
            raise ConfigError(f"limit={limit} claims nothing; use at least 1")

        def dequeue(transaction: Transaction) -> list[AttemptedRollout] | Park:
            rows = transaction.all(statements.NEXT_ROLLOUTS, limit)
            if not rows:
                transaction.queued = False
                return PARK
            return [lifecycle.claim(transaction, row, worker_id) for row in rows]

        loop = asyncio.get_running_loop()
        call = Call(
            dequeue,
            loop,
            loop.create_future(),
            undo=lifecycle.unclaim,
            concerns=lambda transaction: transaction.queued,
            at_timeout=lambda transaction: [],
        )
        return await self._await_parked(call, timeout or 0.0)

    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> AttemptedRollout:
        return await self._write(
            lambda transaction: lifecycle.claim(transaction, lifecycle.find_rollout(transaction, rollout_id), worker_id)
        )

    async def requeue_rollout(self, rollout_id: str, reason: str) -> Rollout:
        def requeue(transaction: Transaction) -> Rollout:
            row = lifecycle.find_rollout(transaction, rollout_id)
            if row[5] not in WAITING:
                lifecycle.requeue(transaction, row, reason)
            return codec.to_rollout(lifecycle.find_rollout(transaction, rollout_id))

        return await self._write(requeue)

    async def cancel_rollout(self, rollout_id: str) -> Rollout:
        def cancel(transaction: Transaction) -> Rollout:
            row = lifecycle.find_rollout(transaction, rollout_id)
            if not codec.to_rollout(row).finished:
                lifecycle.cancel(transaction, row)
            return codec.to_rollout(lifecycle.find_rollout(transaction, rollout_id))

        return await self._write(cancel)

    # -- rollouts: looking and changing ----------------------------------------------------------------------------

    async def query_rollouts(
        self,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        limit: int = -1,
        offset: int = 0,
    ) -> list[Rollout]:
        filters = (
            None if status_in is None else codec.dump(list(status_in), "status_in"),
            None if rollout_id_in is None else codec.dump(list(rollout_id_in), "rollout_id_in"),
            rollout_id_contains,
        )
        statement = statements.query_rollouts(*(value is not None for value in filters))
        values = (*(value for value in filters if value is not None), limit, offset)
        return await self._read(
            lambda transaction: [codec.to_rollout(row) for row in transaction.all(statement, *values)]
        )

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        row: Row | None = await self._read(lambda transaction: transaction.one(statements.FIND_ROLLOUT, rollout_id))
        return None if row is None else codec.to_rollout(row)

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
        new = (
            input if isinstance(input, Unset) else codec.dump(input, "input"),
            mode,
            resources_id,
            config if isinstance(config, Unset) else codec.config_text(config),
            metadata if isinstance(metadata, Unset) else codec.dump(metadata, "metadata"),
        )

        def change(transaction: Transaction) -> Rollout:
            row = lifecycle.find_rollout(transaction, rollout_id)
            if isinstance(resources_id, str):
                lifecycle.check_resources(transaction, {resources_id})
            old = (row[2], row[3], row[4], row[8], row[9])
            values = [before if isinstance(after, Unset) else after for before, after in zip(old, new, strict=True)]
            transaction.run(statements.CHANGE_ROLLOUT, *values, row[0])
            if not isinstance(status, Unset):
                lifecycle.set_status(transaction, lifecycle.find_rollout(transaction, rollout_id), status)
            return codec.to_rollout(lifecycle.find_rollout(transaction, rollout_id))

        return await self._write(change)

    async def wait_for_rollouts(
        self, *, rollout_ids: Sequence[str], timeout: float | None = None, minimum: int | None = None
    ) -> list[Rollout]:
        wait = Wait(rollout_ids, minimum)
        loop = asyncio.get_running_loop()
        call = Call(
            wait.look,
            loop,
            loop.create_future(),
            writes=False,
            concerns=wait.concerns,
            at_timeout=wait.finished,
        )
        rows: list[Row] = await self._await_parked(call, timeout)
        return [codec.to_rollout(row) for row in rows]

    # -- attempts --------------------------------------------------------------------------------------------------

    async def query_attempts(self, rollout_id: str) -> list[Attempt]:
        def query(transaction: Transaction) -> list[Attempt]:
            rows = transaction.all(statements.ATTEMPTS_OF, rollout_id)
            if not rows:
                lifecycle.find_rollout(transaction, rollout_id)
            return [codec.to_attempt(rollout_id, row) for row in rows]

        return await self._read(query)

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        def query(transaction: Transaction) -> Attempt | None:
            state = lifecycle.latest_attempt(transaction, rollout_id)
            if state is None:
                lifecycle.find_rollout(transaction, rollout_id)
                return None
            return state.to_attempt()

        return await self._read(query)

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
        if not isinstance(metadata, Unset):
            codec.dump(metadata, "metadata")

        def change(transaction: Transaction) -> Attempt:
            state = lifecycle.find_attempt(transaction, rollout_id, attempt_id)
            if state.superseded or (state.status == "unresponsive" and not state.speaks):
                attempt = state.to_attempt()
                return replace(attempt, metadata={**attempt.metadata, "superseded": True})
            if not isinstance(last_heartbeat_time, Unset):
                lifecycle.hear(transaction, state, last_heartbeat_time)
            if not isinstance(status, Unset):
                lifecycle.move_attempt(transaction, state, status)
            if not isinstance(worker_id, Unset) or not isinstance(metadata, Unset):
                lifecycle.describe(transaction, state, worker_id, metadata)
            return state.to_attempt()

        return await self._write(change)

    # -- spans -----------------------------------------------------------------------------------------------------

    async def add_span(self, span: Span) -> Span:
        return (await self.add_many_spans([span]))[0]

    async def add_many_spans(self, spans: Sequence[Span]) -> list[Span]:
        groups: dict[tuple[str, str], SpanGroup] = {}
        for position, span in enumerate(spans):
            key = (span.rollout_id, span.attempt_id)
            group = groups.get(key)
            if group is None:
                group = groups[key] = SpanGroup(*key)
            group.take(position, span)
        kept: list[Any] = [None] * len(spans)

        def add(transaction: Transaction) -> None:
            for group in groups.values():
                group.write(transaction)

        if groups:
            await self._write(add)
        for group in groups.values():
            group.read(kept)
        return kept

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        def reserve(transaction: Transaction) -> int:
            state = lifecycle.find_attempt(transaction, rollout_id, attempt_id)
            transaction.run(statements.RESERVE_SPAN, state.last_span + 1, state.key)
            return state.last_span + 1

        return await self._write(reserve)

    async def query_spans(
        self,
        rollout_id: str,
        attempt_id: str | None = None,
        *,
        name: str | None = None,
        limit: int = -1,
        offset: int = 0,
    ) -> list[Span]:
        which = "all" if attempt_id is None else "latest" if attempt_id == "latest" else "one"
        statement = statements.query_spans(which, name is not None)
        values = [rollout_id]
        values += [attempt_id] if attempt_id is not None and which == "one" else []
        values += [name] if name is not None else []

        def query(transaction: Transaction) -> list[Span]:
            rows = transaction.all(statement, *values, limit, offset)
            if not rows:
                lifecycle.find_rollout(transaction, rollout_id)
                if attempt_id is not None and which == "one":
                    lifecycle.find_attempt(transaction, rollout_id, attempt_id)
            return [codec.to_span(row) for row in rows]

        return await self._read(query)

    async def iter_spans(self, rollout_ids: Sequence[str]) -> AsyncIterator[tuple[str, list[Span]]]:
        for start in range(0, len(rollout_ids), CHUNK):
            chunk = list(rollout_ids[start : start + CHUNK])
            spans = await self._read(lambda transaction, chunk=chunk: latest_spans(transaction, chunk))
            for rollout_id in chunk:
                yield rollout_id, spans[rollout_id]

    # -- resources -------------------------------------------------------------------------------------------------

    async def add_resources(self, resources: NamedResources, resources_id: str | None = None) -> ResourcesUpdate:
        body = codec.dump_resources(resources)
        name = new_id("rs") if resources_id is None else resources_id

        def add(transaction: Transaction) -> Row:
            version = transaction.one(statements.LAST_VERSION)[0] + 1
            row = (name, version, transaction.clock.wall(), body)
            if not transaction.run(statements.INSERT_RESOURCES, *row):
                raise ConflictError(f"resources {name!r} exist already; use update_resources, or another id")
            return row

        return codec.to_resources(await self._write(add))

    async def update_resources(self, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
        body = codec.dump_resources(resources)

        def change(transaction: Transaction) -> Row:
            version = transaction.one(statements.LAST_VERSION)[0] + 1
            row = (version, transaction.clock.wall(), body, resources_id)
            if not transaction.run(statements.CHANGE_RESOURCES, *row):
                raise NotFoundError(f"no resources {resources_id!r} in this store; use add_resources")
            return (resources_id, *row[:3])

        return codec.to_resources(await self._write(change))

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        row: Row | None = await self._read(lambda transaction: transaction.one(statements.FIND_RESOURCES, resources_id))
        return None if row is None else codec.to_resources(row)

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        row: Row | None = await self._read(lambda transaction: transaction.one(statements.LATEST_RESOURCES))
        return None if row is None else codec.to_resources(row)

    async def query_resources(self, *, limit: int = -1, offset: int = 0) -> list[ResourcesUpdate]:
        rows = await self._read(lambda transaction: transaction.all(statements.QUERY_RESOURCES, limit, offset))
        return [codec.to_resources(row) for row in rows]

    # -- workers ---------------------------------------------------------------------------------------------------

    async def update_worker(self, worker_id: str, stats: dict[str, Any] | None = None) -> Worker:
        text = codec.dump({} if stats is None else stats, "stats")
        statement = statements.HEAR_WORKER if stats is None else statements.CHANGE_WORKER

        def change(transaction: Transaction) -> Worker:
            wall, steady = transaction.clock.wall(), transaction.clock.steady()
            transaction.run(statement, worker_id, wall, text)
            transaction.run(statements.KEEP_ATTEMPTS_ALIVE, wall, steady, worker_id)
            return workers.find_worker(transaction, worker_id)

        return await self._write(change)

    async def query_workers(self) -> list[Worker]:
        return await self._read(workers.all_workers)


def _shut(*lanes: Lane) -> None:
    """End the threads once all that was handed over is done. Also runs at exit, and when the store is forgotten."""
    for lane in lanes:
        lane.stop()
    for lane in lanes:
        if lane.thread is not threading.current_thread():
            lane.thread.join()
