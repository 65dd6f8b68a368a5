"""The store contract over a SQL database: SQLite in a file or in memory, PostgreSQL.

What changes the database is submitted to the committer (committer.py) as a command, whose arguments are validated, and
spans packed, in the caller's event loop. What only reads is a function of a connection, and goes to the reader.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import closing
from itertools import count
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, TypeVar

from agentlightning.errors import ConfigError, StoreClosedError, StoreError
from agentlightning.rollouts import (
    ATTEMPT_TRANSITIONS,
    ROLLOUT_TRANSITIONS,
    AttemptedRollout,
    EnqueueRolloutRequest,
    Rollout,
)
from agentlightning.span import Span
from agentlightning.store import durability, idempotency, validation
from agentlightning.store.base import LightningStoreBase, binder, implement, parameters_of, store_url
from agentlightning.store.clock import Clock
from agentlightning.store.ids import first_of_claim
from agentlightning.store.sql import admin, mapping, queries
from agentlightning.store.sql import rollouts as rollout_commands
from agentlightning.store.sql import spans as span_commands
from agentlightning.store.sql.admin import DELETE_BATCH, Excess, RolloutSize
from agentlightning.store.sql.committer import CommandObserver, Committer, DatabaseThread
from agentlightning.store.sql.rollouts import ClaimRollouts
from agentlightning.store.sql.spans import SpanWriteResult, group_by_attempt
from agentlightning.store.sql.sqlite import SqliteDatabase, locate
from agentlightning.store.sql.tx import Connection, Database, Tx, explained
from agentlightning.store.sql.waiting import Command, Wait, given
from agentlightning.store.types import Pruned, Queue, Retention, RolloutRecord

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LARGE: Final = 512 * 1024
"""Bytes of the attributes of spans that are packed in a thread."""


def find_database(url: str | Path | None) -> Database:
    """The database at `url`. Raises ConfigError for a URL that names none."""
    named = str(store_url(url))
    if named.startswith(("postgresql:", "postgres:", "postgresql+")):
        from agentlightning.store.sql.postgres import PostgresDatabase

        return PostgresDatabase(named)
    return SqliteDatabase(locate(named))


class SqlStore(LightningStoreBase):
    """A store in one database. Any number of tasks, event loops and threads may use one object at the same time.

    Raises StoreError where the database cannot be opened, and StoreClosedError once `close` was called.
    """

    def __init__(self, url: str | Path | None = None, clock: Clock | None = None) -> None:
        self.database = find_database(url)
        self.path: Path | None = getattr(self.database, "path", None)
        """The file; None where there is none."""
        self.database.prepare()
        self.clock = Clock() if clock is None else clock
        connection = self.database.connect(read_only=False)
        self.writer = Committer("agl-store-writer", self.database, connection, self.clock)
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

    # -- life ------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        self.database.begin_close()
        try:
            # The last command: once its result has arrived, all results before it have.
            await self.write(Command("close", lambda db: None, reads=True))
        except StoreClosedError:
            if self.writer.crash is None:
                return
        except StoreError as error:  # nothing of a read is lost
            logger.warning("the store was closed while its database could not be reached: %s", error)
        await asyncio.get_running_loop().run_in_executor(None, self._finalizer)

    async def check_health(self) -> None:
        self.writer.check_open()
        await self.read("check_health", lambda db: db.check_files())

    # -- submitting commands -----------------------------------------------------------------------------------------

    async def write(self, command: Command, convert: Callable[[Any], Any] | None = None) -> Any:
        """The result of a command, converted. Raises AlreadyAnsweredError where the call has an idempotency key that
        was used before."""
        key = idempotency.current()
        if key is not None:
            command.idempotent, command.convert = key, convert
        command.durable = not durability.is_relaxed()
        self.writer.submit(command)
        result = await command.future
        return result if convert is None else convert(result)

    async def do(self, name: str, run: Callable[[Tx], T], *rollouts: str, worker: str | None = None) -> T:
        """Run a function of a transaction, with these rollouts and the worker loaded."""
        return await self.write(Command(name, run, rollouts, given(worker)))

    async def read(self, name: str, query: Callable[[Connection], T]) -> T:
        command = Command(name, query, reads=True)
        self.reader.submit(command)
        return await command.future

    async def claim(
        self, name: str, limit: int = 1, worker_id: str | None = None, timeout: float | None = None, **names: Any
    ) -> list[AttemptedRollout]:
        """Claim by the command `name`. names: queues, claim_id."""
        command = ClaimRollouts(self.writer.claims, name, limit, worker_id, **names)
        command.deadline = time.monotonic() + max(0.0, timeout or 0.0)
        if not limit:
            return []
        self.writer.submit(command)
        try:
            return await command.future
        except asyncio.CancelledError:
            self.writer.abandon(command)
            raise

    # -- rollouts: the queue ---------------------------------------------------------------------------------------

    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
        return await self.enqueue("enqueue_many_rollouts", rollouts) if rollouts else []

    async def enqueue(
        self, name: str, requests: Sequence[EnqueueRolloutRequest], convert: Callable[[Any], Any] | None = None
    ) -> Any:
        """Queue rollouts by the command `name`."""
        now = self.clock.wall()
        new = [mapping.new_rollout(request, now) for request in requests]
        ids = frozenset([request.rollout_id for request in requests if request.rollout_id is not None])
        command = Command(name, lambda tx: rollout_commands.enqueue(tx, new, ids), ids, new_rollouts=len(new))
        return await self.write(command, convert)

    # -- rollouts: queries and changes ----------------------------------------------------------------------------

    async def wait_for_rollouts(
        self, *, rollout_ids: Sequence[str], timeout: float | None = None, minimum: int | None = None
    ) -> list[Rollout]:
        ids = list(dict.fromkeys(validation.check_texts(rollout_ids, "rollout_ids")))
        wanted = len(ids) if minimum is None else minimum
        if not 0 <= wanted <= len(ids):
            raise ConfigError(f"minimum={minimum} of {len(ids)} rollouts can never be reached; leave it out for all")
        deadline, wait, left = time.monotonic() + (timeout or 0.0), Wait(ids, wanted), None
        with self.writer.waits.add(wait):
            while True:
                self.writer.check_open()
                wait.begin()
                finished = await self.read("wait_for_rollouts", lambda db: queries.finished(db, ids))
                if timeout is not None:
                    left = deadline - time.monotonic()
                if len(finished) >= wanted or (left is not None and left <= 0):
                    return finished
                wait.note(rollout.rollout_id for rollout in finished)
                await wait.enough(left)

    # -- spans -----------------------------------------------------------------------------------------------------

    async def add_span(self, span: Span) -> Span:
        return await self._add_spans("add_span", [span], alone=True)

    async def add_many_spans(self, spans: Sequence[Span]) -> list[Span]:
        return await self._add_spans("add_many_spans", spans)

    async def _add_spans(self, name: str, added: Sequence[Span], alone: bool = False) -> Any:
        if not added:
            return []
        # Packing a long conversation takes a while, in which the event loop serves others.
        long = _size(added) > _LARGE
        groups = await asyncio.to_thread(group_by_attempt, added) if long else group_by_attempt(added)

        def convert(results: list[SpanWriteResult]) -> list[Span] | Span:
            stored: list[Any] = [None] * len(added)
            for group, result in zip(groups, results, strict=True):
                group.read_result(result, stored)
            return stored[0] if alone else stored

        ids = [group.rollout_id for group in groups]
        return await self.write(Command(name, lambda tx: self.writer.spans.add(tx, groups), ids), convert)

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        return await self._reserve("get_next_span_sequence_id", [(rollout_id, attempt_id)], itemgetter(0))

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> list[int]:
        return await self._reserve("get_many_span_sequence_ids", list(rollout_attempt_ids))

    async def _reserve(
        self, name: str, pairs: Sequence[tuple[str, str]], convert: Callable[[Any], Any] | None = None
    ) -> Any:
        for pair in pairs:
            if isinstance(pair, str) or len(pair) != 2:
                raise ConfigError(f"rollout_attempt_ids: {pair!r} is not a pair of a rollout_id and an attempt_id")
            validation.check_text(pair[0], "rollout_id")
            validation.check_text(pair[1], "attempt_id")
        ids = [rollout_id for rollout_id, _ in pairs]
        return await self.write(Command(name, lambda tx: span_commands.reserve_sequence_ids(tx, pairs), ids), convert)

    # -- queues ----------------------------------------------------------------------------------------------------

    async def update_queue(self, name: str, limit: int | None) -> Queue:
        validation.check_new_id(name, "name")
        if limit is not None and (isinstance(limit, bool) or not 0 <= limit < 2**31):
            raise ConfigError(f"limit={limit!r} of queue {name!r}: use 0 to pause it, or None for no limit")

        await self.do("update_queue", lambda tx: admin.limit_queue(tx, name, limit))
        return next(queue for queue in await self.query_queues() if queue.name == name)

    # -- retention, export and import ------------------------------------------------------------------------------

    async def prune(self, retention: Retention, dry_run: bool = False) -> Pruned:
        admin.check_retention(retention)
        oldest = float("-inf") if retention.max_age_seconds is None else self.clock.wall() - retention.max_age_seconds
        excess = Excess(retention, oldest)
        if retention.max_rollouts is not None or retention.max_bytes is not None:
            async for sizes in self._rollout_sizes():
                excess.count(sizes)
        rollouts = spans = size = 0
        async for sizes in self._rollout_sizes():
            removed = list(excess.take(sizes))
            for start in range(0, 0 if dry_run else len(removed), DELETE_BATCH):
                ends = {each.rollout_id: each.end_time for each in removed[start : start + DELETE_BATCH]}
                await self.do("prune", lambda tx, ends=ends: admin.delete_finished(tx, ends), *ends)
            rollouts += len(removed)
            spans += sum(each.spans for each in removed)
            size += sum(each.bytes for each in removed)
            if excess.fits:
                break
        return Pruned(rollouts, spans, size)

    async def _rollout_sizes(self) -> AsyncIterator[list[RolloutSize]]:
        last: RolloutSize | None = None
        while sizes := await self.read("prune", lambda db, last=last: admin.rollout_sizes(db, last)):
            yield sizes
            last = sizes[-1]

    async def vacuum(self) -> None:
        if not self.database.single:
            await asyncio.to_thread(self._release_free_space)

    def _release_free_space(self) -> None:
        with closing(self.database.connect(read_only=False)) as connection, explained(self.database):
            connection.vacuum()

    async def add_records(self, records: Sequence[RolloutRecord]) -> int:
        prepared = [admin.prepare(record) for record in records]
        ids = [record.rollout.rollout_id for record in prepared]
        if not prepared:
            return 0
        return await self.do("add_records", lambda tx: admin.add_records(tx, self.writer.spans, prepared), *ids)


def _size(spans: Sequence[Span]) -> int:
    """The bytes of their attributes, about. Every span of every caller comes by here, so it is a plain loop."""
    size = 0
    for span in spans:
        for value in span.attributes.values():
            if type(value) is str:
                size += len(value)
            elif type(value) is list:
                size += 8 * len(value)
    return size


Check = Callable[[Any, str], Any]
"""Of an argument and its name: returns what is stored or looked for, or raises ConfigError."""


def _arguments(name: str) -> Callable[..., dict[str, Any]]:
    """Gives the arguments of a call their names, and checks them. What is left at its default is left out."""
    bind, checks = binder(name), {**_CHECKS, **_OWN_CHECKS.get(name, {})}
    defaults = {each.name: each.default for each in parameters_of(name).values()}

    def read(*arguments: Any, **options: Any) -> dict[str, Any]:
        return {
            each: checks[each](value, each) if each in checks else value
            for each, value in bind(*arguments, **options).items()
            if value is not defaults[each]
        }

    return read


def _check_lease(value: Any, name: str) -> float:
    if validation.check_time(value, name) <= 0:
        raise ConfigError(f"{name}={value} is not positive; use more than 0")
    return value


def _optional_text(value: Any, name: str) -> str | None:
    return None if value is None else validation.check_text(value, name)


_CHECKS: Final[Mapping[str, Check]] = {
    **dict.fromkeys(("rollout_id", "attempt_id", "worker_id", "claim_id", "resources_id"), validation.check_text),
    **dict.fromkeys(("rollout_ids", "queues"), validation.check_texts),
    "reason": lambda value, name: validation.to_json(value, name) and value,
    "input": validation.to_json,
    "mode": _optional_text,
    "config": lambda value, _: mapping.config_text(value),
    "metadata": validation.dict_to_json,
    "stats": validation.dict_to_json,
    "last_heartbeat_time": validation.check_time,
    "lease_seconds": _check_lease,
    "resources": lambda value, _: mapping.dump_resources(value),
}
"""By argument: its check. What is left at its default is not passed."""
_OWN_CHECKS: Final[Mapping[str, Mapping[str, Check]]] = {
    "update_rollout": {
        "resources_id": _optional_text,
        "status": lambda value, _: validation.check_status(value, ROLLOUT_TRANSITIONS),
    },
    "update_attempt": {
        "status": lambda value, _: validation.check_status(value, ATTEMPT_TRANSITIONS),
        "metadata": lambda value, name: validation.dict_to_json(value, name) and value,
    },
    "add_resources": {"resources_id": validation.check_new_id},
    "update_resources": {"resources_id": validation.check_new_id},
}
"""By method: where it checks otherwise."""

# -- reads -------------------------------------------------------------------------------------------------------------


def _reader(name: str, query: Callable[..., T]) -> Callable[..., Coroutine[Any, Any, T]]:
    arguments_of = _arguments(name)

    async def read(self: SqlStore, *arguments: Any, **options: Any) -> T:
        values = arguments_of(*arguments, **options)
        return await self.read(name, lambda connection: query(connection, **values))

    return read


_READS: Final[Mapping[str, Callable[..., Any]]] = {
    "statistics": queries.statistics,
    "query_rollouts": queries.rollouts,
    "count_rollouts": queries.count_rollouts,
    "get_rollout_by_id": queries.rollout,
    "query_attempts": queries.attempts,
    "get_attempt": queries.attempt,
    "get_latest_attempt": queries.latest_attempt,
    "get_latest_attempts": queries.latest_attempts,
    "count_spans": span_commands.count,
    "newest_spans": span_commands.newest,
    "query_resources": queries.resources_page,
    "get_resources_by_id": queries.resources,
    "get_latest_resources": queries.latest_resources,
    "query_workers": queries.workers,
    "get_worker": queries.worker,
    "query_queues": queries.queues,
    "read_records": admin.read_records,
}
"""By method of the contract: the function of a connection and its arguments that it runs in the reader's thread."""


_recent_reads: Final = count()
YIELD_READS: Final = 64
"""So many reads that nothing waits for are followed by others of the event loop, even if one task makes them all."""


_read_spans: Final = _reader("query_spans", span_commands.query)


async def _query_spans(store: SqlStore, rollout_id: str, attempt_id: str | None = None, **options: Any) -> list[Span]:
    if not options and isinstance(rollout_id, str):
        store.writer.check_open()
        if (found := store.writer.spans.recent.of(rollout_id, attempt_id)) is not None:
            if next(_recent_reads) % YIELD_READS == 0:
                await asyncio.sleep(0)
            return found
    return await _read_spans(store, rollout_id, attempt_id, **options)


# -- new rollouts -----------------------------------------------------------------------------------------------------

_bind_enqueued: Final = binder("enqueue_rollout")
_bind_started: Final = binder("start_rollout")


async def _enqueue_rollout(store: SqlStore, *arguments: Any, **options: Any) -> Rollout:
    request = EnqueueRolloutRequest(**_bind_enqueued(*arguments, **options))
    return await store.enqueue("enqueue_rollout", [request], itemgetter(0))


async def _start_rollout(store: SqlStore, *arguments: Any, **options: Any) -> AttemptedRollout:
    fields = _bind_started(*arguments, **options)
    worker_id, claim_id = [_optional_text(fields.pop(name, None), name) for name in ("worker_id", "claim_id")]
    request = EnqueueRolloutRequest(**fields)
    new, has_id = mapping.new_rollout(request, store.clock.wall()), request.rollout_id is not None
    command = Command(
        "start_rollout",
        lambda tx: rollout_commands.start(tx, new, has_id, worker_id, claim_id),
        given(request.rollout_id),
        given(worker_id),
        given(first_of_claim(claim_id)),
        new_rollouts=1,
    )
    return await store.write(command)


_claimed: Final = _arguments("dequeue_rollout")
_many_claimed: Final = _arguments("dequeue_many_rollouts")


async def _dequeue_rollout(store: SqlStore, *arguments: Any, **options: Any) -> AttemptedRollout | None:
    claimed = await store.claim("dequeue_rollout", **_claimed(*arguments, **options))
    return claimed[0] if claimed else None


async def _dequeue_many_rollouts(store: SqlStore, *arguments: Any, **options: Any) -> list[AttemptedRollout]:
    return await store.claim("dequeue_many_rollouts", **_many_claimed(*arguments, **options))


# -- writes ------------------------------------------------------------------------------------------------------------


def _writer(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    arguments_of = _arguments(name)

    async def write(self: SqlStore, *arguments: Any, **options: Any) -> Any:
        values = arguments_of(*arguments, **options)
        command = Command(
            name,
            lambda tx: run(tx, **values),
            values.get("rollout_ids") or given(values.get("rollout_id")),
            given(values.get("worker_id")),
            given(first_of_claim(values.get("claim_id"))),
        )
        return await self.write(command)

    return write


_WRITES: Final[Mapping[str, Callable[..., Any]]] = {
    "start_attempt": rollout_commands.start_attempt,
    "requeue_rollout": rollout_commands.requeue,
    "cancel_rollout": rollout_commands.cancel,
    "update_rollout": rollout_commands.update,
    "update_attempt": rollout_commands.update_attempt,
    "update_worker": rollout_commands.update_worker,
    "add_resources": admin.add_resources,
    "update_resources": admin.update_resources,
    "delete_resources": admin.delete_resources,
    "delete_rollouts": admin.delete,
}
"""By method of the contract: the function of a transaction that it runs. Rows that an argument names are loaded with
those of the batch."""


implement(
    SqlStore,
    {
        **{name: _reader(name, query) for name, query in _READS.items()},
        **{name: _writer(name, run) for name, run in _WRITES.items()},
        "query_spans": _query_spans,
        "enqueue_rollout": _enqueue_rollout,
        "start_rollout": _start_rollout,
        "dequeue_rollout": _dequeue_rollout,
        "dequeue_many_rollouts": _dequeue_many_rollouts,
    },
)


def _stop(threads: Sequence[DatabaseThread]) -> None:
    """End the threads once their queues are empty. Also runs at exit, and when the store is garbage-collected."""
    for thread in threads:
        thread.stop()
    for thread in threads:
        if thread.thread is not threading.current_thread():
            thread.thread.join()
