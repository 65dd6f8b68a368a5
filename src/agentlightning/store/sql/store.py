"""The store contract over a SQL database: SQLite in a file or in memory, PostgreSQL.

Arguments are validated and spans packed in the caller's event loop. What changes the database is submitted to the
writer (execution/writer.py) as a command, which decides in memory by the rules of lifecycle/; queries go to the reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from operator import itemgetter
from typing import Any, Final

from agentlightning.errors import ConfigError
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
from agentlightning.store import validation
from agentlightning.store.ids import claimed_id
from agentlightning.store.sql import queries
from agentlightning.store.sql.administration import SqlAdministration
from agentlightning.store.sql.commands.rollouts import (
    ClaimRollouts,
    EnqueueRollouts,
    StartRollout,
    UpdateAttempt,
    claimed_before,
)
from agentlightning.store.sql.commands.spans import AddSpans, reserve_sequence_ids
from agentlightning.store.sql.commands.wait import WaitForRollouts
from agentlightning.store.sql.lifecycle import transitions
from agentlightning.store.sql.queries import RolloutFilters
from agentlightning.store.sql.session.unit_of_work import UnitOfWork
from agentlightning.store.sql.sort_order import Order, check_logic
from agentlightning.store.sql.spans import read
from agentlightning.store.sql.spans.attempt_spans import (
    SpanWriteResult,
    group_by_attempt,
)
from agentlightning.store.sql.spans.read import SpanQuery
from agentlightning.store.sql.tables import mapping
from agentlightning.store.sql.tables.mapping import Row
from agentlightning.store.types import UNSET, FilterLogic, SortOrder, Unset

ITER_BATCH: Final = 32
"""Rollouts whose spans `iter_spans` reads at once."""
_LARGE: Final = 256 * 1024
"""Characters and tokens of spans that are packed in a thread."""


class SqlStore(SqlAdministration):
    """A store in one database. Any number of tasks, event loops and threads may use one object at the same time.

    Raises StoreError where the database cannot be opened, and StoreClosedError once `close` was called.
    """

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
        new = mapping.new_rollout(request, self.clock.wall())
        return await self.write(StartRollout(new, rollout_id is not None, worker_id, claim_id))

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
        new = mapping.new_rollout(request, self.clock.wall())
        with_id = () if rollout_id is None else (rollout_id,)
        return await self.write(EnqueueRollouts("enqueue_rollout", (new,), with_id), itemgetter(0))

    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
        now = self.clock.wall()
        new = [mapping.new_rollout(request, now) for request in rollouts]
        with_id = [request.rollout_id for request in rollouts if request.rollout_id is not None]
        return await self.write(EnqueueRollouts("enqueue_many_rollouts", new, with_id)) if new else []

    async def dequeue_rollout(
        self,
        worker_id: str | None = None,
        timeout: float | None = None,
        *,
        queues: Sequence[str] | None = None,
        claim_id: str | None = None,
    ) -> AttemptedRollout | None:
        _check_claimer(worker_id, claim_id)
        validation.check_texts(queues, "queues")
        command = ClaimRollouts("dequeue_rollout", 1, worker_id, queues, claim_id)
        claimed = await self.write_and_wait(command, timeout or 0.0)
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
        if limit < 0:
            raise ConfigError(f"limit={limit} is negative; use 0 or more")
        if limit == 0:
            return []
        _check_claimer(worker_id, claim_id)
        validation.check_texts(queues, "queues")
        command = ClaimRollouts("dequeue_many_rollouts", limit, worker_id, queues, claim_id)
        return await self.write_and_wait(command, timeout or 0.0)

    async def start_attempt(
        self, rollout_id: str, worker_id: str | None = None, *, claim_id: str | None = None
    ) -> AttemptedRollout:
        validation.check_text(rollout_id, "rollout_id")
        _check_claimer(worker_id, claim_id)

        def start(unit: UnitOfWork) -> AttemptedRollout:
            before = claimed_before(unit, claim_id, 1)
            if before:
                return before[0].rollout.to_attempted(before[0])
            attempt_id = None if claim_id is None else claimed_id(claim_id, 0)
            return transitions.claim(unit, unit.rollout(rollout_id), worker_id, attempt_id)

        return await self.do("start_attempt", start, [rollout_id], [] if worker_id is None else [worker_id])

    async def requeue_rollout(self, rollout_id: str, reason: str) -> Rollout:
        validation.check_text(rollout_id, "rollout_id")
        validation.to_json(reason, "reason")

        def requeue(unit: UnitOfWork) -> Rollout:
            rollout = unit.rollout(rollout_id)
            if rollout.status not in WAITING:
                transitions.requeue(unit, rollout, reason)
            return rollout.to_rollout()

        return await self.do("requeue_rollout", requeue, [rollout_id])

    async def cancel_rollout(self, rollout_id: str) -> Rollout:
        validation.check_text(rollout_id, "rollout_id")

        def cancel(unit: UnitOfWork) -> Rollout:
            rollout = unit.rollout(rollout_id)
            if rollout.status not in FINISHED:
                transitions.cancel(unit, rollout)
            return rollout.to_rollout()

        return await self.do("cancel_rollout", cancel, [rollout_id])

    # -- rollouts: queries and changes ----------------------------------------------------------------------------

    async def query_rollouts(
        self,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        queue_in: Sequence[str] | None = None,
        mode_in: Sequence[RolloutMode] | None = None,
        filter_logic: FilterLogic = "and",
        newest_first: bool = False,
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        after: str | None = None,
        limit: int = -1,
        offset: int = 0,
    ) -> list[Rollout]:
        any_of = check_logic(filter_logic)
        filters = RolloutFilters(status_in, rollout_id_in, rollout_id_contains, queue_in, mode_in, any_of)
        many, skip = validation.check_cursor(after, limit, offset)
        newest_first = newest_first and sort_by is None
        order = Order.of("rollouts", sort_by, "desc" if newest_first else sort_order, after)
        return await self.read(
            "query_rollouts",
            lambda connection: queries.rollouts(connection, filters, order, after, many, skip),
        )

    async def count_rollouts(
        self,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        queue_in: Sequence[str] | None = None,
        mode_in: Sequence[RolloutMode] | None = None,
        filter_logic: FilterLogic = "and",
    ) -> int:
        any_of = check_logic(filter_logic)
        filters = RolloutFilters(status_in, rollout_id_in, rollout_id_contains, queue_in, mode_in, any_of)
        return await self.read("count_rollouts", lambda connection: queries.count_rollouts(connection, filters))

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        validation.check_text(rollout_id, "rollout_id")
        return await self.read("get_rollout_by_id", lambda connection: queries.rollout(connection, rollout_id))

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
        validation.check_text(rollout_id, "rollout_id")
        for name, value in (("mode", mode), ("resources_id", resources_id)):
            if not isinstance(value, Unset) and value is not None:
                validation.check_text(value, name)
        new: dict[str, Any] = {
            "input": input if isinstance(input, Unset) else validation.to_json(input, "input"),
            "mode": mode,
            "resources_id": resources_id,
            "config": config if isinstance(config, Unset) else mapping.config_text(config),
            "metadata": metadata if isinstance(metadata, Unset) else validation.dict_to_json(metadata, "metadata"),
        }
        changes = {name: value for name, value in new.items() if not isinstance(value, Unset)}

        def change(unit: UnitOfWork) -> Rollout:
            rollout = unit.rollout(rollout_id)
            if isinstance(resources_id, str):
                unit.check_resources(resources_id)
            if changes:
                unit.modify_rollout(rollout, fields_changed=True)
                for name, value in changes.items():
                    setattr(rollout, name, value)
            if not isinstance(status, Unset):
                transitions.update_rollout_status(unit, rollout, validation.check_rollout_status(status))
            return rollout.to_rollout()

        return await self.do("update_rollout", change, [rollout_id])

    async def wait_for_rollouts(
        self, *, rollout_ids: Sequence[str], timeout: float | None = None, minimum: int | None = None
    ) -> list[Rollout]:
        command = WaitForRollouts(rollout_ids, minimum)
        rows: list[Row] = await self.read(command.name, command.finished)
        if not command.over(rows) and (timeout is None or timeout > 0):
            rows = await self.write_and_wait(command, timeout)
        return [mapping.to_rollout(row) for row in rows]

    # -- attempts --------------------------------------------------------------------------------------------------

    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> list[Attempt]:
        validation.check_text(rollout_id, "rollout_id")
        page = validation.check_page(limit, offset)
        order = Order.of("attempts", sort_by, sort_order)
        return await self.read(
            "query_attempts", lambda connection: queries.attempts(connection, rollout_id, order, *page)
        )

    async def get_latest_attempts(self, rollout_ids: Sequence[str]) -> list[Attempt]:
        validation.check_texts(rollout_ids, "rollout_ids")
        return await self.read(
            "get_latest_attempts", lambda connection: queries.latest_attempts(connection, rollout_ids)
        )

    async def get_attempt(self, attempt_id: str) -> Attempt | None:
        validation.check_text(attempt_id, "attempt_id")
        return await self.read("get_attempt", lambda connection: queries.attempt(connection, attempt_id))

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        validation.check_text(rollout_id, "rollout_id")
        return await self.read("get_latest_attempt", lambda connection: queries.latest_attempt(connection, rollout_id))

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
        validation.check_text(rollout_id, "rollout_id")
        validation.check_text(attempt_id, "attempt_id")
        if status is not UNSET:
            validation.check_attempt_status(status)
        if worker_id is not UNSET:
            validation.check_text(worker_id, "worker_id")
        if last_heartbeat_time is not UNSET:
            validation.check_time(last_heartbeat_time, "last_heartbeat_time")
        if metadata is not UNSET:
            validation.dict_to_json(metadata, "metadata")
        return await self.write(UpdateAttempt(rollout_id, attempt_id, status, worker_id, last_heartbeat_time, metadata))

    # -- spans -----------------------------------------------------------------------------------------------------

    async def add_span(self, span: Span) -> Span:
        return await self._add_spans("add_span", [span], alone=True)

    async def add_many_spans(self, spans: Sequence[Span]) -> list[Span]:
        return await self._add_spans("add_many_spans", spans)

    async def _add_spans(self, name: str, added: Sequence[Span], alone: bool = False) -> Any:
        if not added:
            return []
        size = sum(len(each) for span in added for each in span.attributes.values() if isinstance(each, str | list))
        # Packing a long conversation takes a while, in which the event loop serves others.
        groups = await asyncio.to_thread(group_by_attempt, added) if size > _LARGE else group_by_attempt(added)

        def convert(results: list[SpanWriteResult]) -> list[Span] | Span:
            stored: list[Any] = [None] * len(added)
            for group, result in zip(groups, results, strict=True):
                group.read_result(result, stored)
            return stored[0] if alone else stored

        return await self.write(AddSpans(name, groups), convert)

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        _check_pair((rollout_id, attempt_id))
        return await self.do(
            "get_next_span_sequence_id",
            lambda unit: reserve_sequence_ids(unit, [(rollout_id, attempt_id)])[0],
            [rollout_id],
        )

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> list[int]:
        pairs = list(rollout_attempt_ids)
        for pair in pairs:
            _check_pair(pair)
        ids = list(dict.fromkeys(rollout_id for rollout_id, _ in pairs))
        return await self.do("get_many_span_sequence_ids", lambda unit: reserve_sequence_ids(unit, pairs), ids)

    async def query_spans(
        self,
        rollout_id: str,
        attempt_id: str | None = None,
        *,
        name: str | None = None,
        name_contains: str | None = None,
        trace_id: str | None = None,
        trace_id_contains: str | None = None,
        span_id: str | None = None,
        span_id_contains: str | None = None,
        parent_id: str | None = None,
        parent_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        after: str | None = None,
        limit: int = -1,
        offset: int = 0,
        tokens: bool = True,
    ) -> list[Span]:
        validation.check_text(rollout_id, "rollout_id")
        if attempt_id is not None:
            validation.check_text(attempt_id, "attempt_id")
        validation.check_cursor(after, limit, offset)
        exact = {"name": name, "trace_id": trace_id, "span_id": span_id, "parent_id": parent_id}
        parts = {
            "name": name_contains,
            "trace_id": trace_id_contains,
            "span_id": span_id_contains,
            "parent_id": parent_id_contains,
        }
        any_of, order = check_logic(filter_logic), Order.of("spans", sort_by, sort_order, after)
        query = SpanQuery(rollout_id, attempt_id, after, limit, offset, exact, parts, any_of, order, tokens)
        return await self.read("query_spans", lambda connection: read.query_spans(connection, query))

    async def count_spans(self, rollout_id: str, attempt_id: str) -> int:
        validation.check_text(rollout_id, "rollout_id")
        validation.check_text(attempt_id, "attempt_id")
        return await self.read("count_spans", lambda connection: read.count_spans(connection, rollout_id, attempt_id))

    async def newest_spans(self, limit: int = 100) -> list[Span]:
        if limit < 0:
            raise ConfigError(f"limit={limit} is negative; use 0 or more")
        return await self.read("newest_spans", lambda connection: read.newest_spans(connection, limit))

    async def iter_spans(
        self, rollout_ids: Sequence[str], tokens: bool = True
    ) -> AsyncIterator[tuple[str, list[Span]]]:
        validation.check_texts(rollout_ids, "rollout_ids")
        for start in range(0, len(rollout_ids), ITER_BATCH):
            chunk = list(rollout_ids[start : start + ITER_BATCH])
            found = await self.read(
                "iter_spans", lambda connection, chunk=chunk: read.latest_spans(connection, chunk, tokens=tokens)
            )
            for rollout_id in chunk:
                yield rollout_id, found[rollout_id]


def _check_claimer(worker_id: str | None, claim_id: str | None) -> None:
    if worker_id is not None:
        validation.check_text(worker_id, "worker_id")
    if claim_id is not None:
        validation.check_text(claim_id, "claim_id")


def _check_pair(pair: tuple[str, str]) -> None:
    if isinstance(pair, str) or len(pair) != 2:
        raise ConfigError(f"rollout_attempt_ids: {pair!r} is not a pair of a rollout_id and an attempt_id")
    validation.check_text(pair[0], "rollout_id")
    validation.check_text(pair[1], "attempt_id")
