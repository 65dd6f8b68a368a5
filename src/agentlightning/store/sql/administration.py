"""The store contract over SQL, part two: resources, workers, queues, retention, export and import."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from agentlightning.errors import ConfigError, ConflictError
from agentlightning.resources import NamedResources, ResourcesUpdate
from agentlightning.store import validation
from agentlightning.store.ids import new_id
from agentlightning.store.sql import deletion, queries
from agentlightning.store.sql.commands.base import FunctionCommand
from agentlightning.store.sql.execution.executor import SqlExecutor
from agentlightning.store.sql.lifecycle import transitions
from agentlightning.store.sql.queries import WorkerFilters
from agentlightning.store.sql.records import add_records, prepare, read_records
from agentlightning.store.sql.session.unit_of_work import UnitOfWork
from agentlightning.store.sql.sort_order import Order, check_logic
from agentlightning.store.sql.tables import mapping, statements
from agentlightning.store.sql.tables.mapping import Row
from agentlightning.store.types import (
    FilterLogic,
    Pruned,
    Queue,
    Retention,
    RolloutRecord,
    SortOrder,
    Worker,
    WorkerStatus,
)


class SqlAdministration(SqlExecutor):
    """See base.py for each method."""

    # -- resources -------------------------------------------------------------------------------------------------

    async def add_resources(self, resources: NamedResources, resources_id: str | None = None) -> ResourcesUpdate:
        body = mapping.dump_resources(resources)
        if resources_id is not None:
            validation.check_new_id(resources_id, "resources_id")
        name = new_id("rs") if resources_id is None else resources_id

        def add(unit: UnitOfWork) -> Row:
            found = unit.connection.all(statements.FIND_RESOURCES, name)
            if found:
                if mapping.load(found[0][3]) == mapping.load(body):
                    return found[0]
                raise ConflictError(f"resources {name!r} exist already; use update_resources, or another id")
            return _publish(unit, name, body)

        return await self.write(FunctionCommand("add_resources", add), mapping.to_resources)

    async def update_resources(self, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
        validation.check_new_id(resources_id, "resources_id")
        body = mapping.dump_resources(resources)

        def change(unit: UnitOfWork) -> Row:
            found = unit.connection.all(statements.FIND_RESOURCES, resources_id)
            if not found:
                return _publish(unit, resources_id, body)
            version, create_time, now = _next_version(unit), found[0][2], unit.wall
            unit.connection.run(statements.CHANGE_RESOURCES, version, body, now, resources_id)
            return (resources_id, version, create_time, body, now)

        return await self.write(FunctionCommand("update_resources", change), mapping.to_resources)

    async def delete_resources(self, resources_id: str) -> int:
        validation.check_text(resources_id, "resources_id")

        def delete(unit: UnitOfWork) -> int:
            unit.resources.discard(resources_id)
            return unit.connection.run(statements.DELETE_RESOURCES, resources_id)

        return await self.do("delete_resources", delete)

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        validation.check_text(resources_id, "resources_id")
        return await self.read("get_resources_by_id", lambda connection: queries.resources(connection, resources_id))

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        return await self.read("get_latest_resources", queries.latest_resources)

    async def query_resources(
        self,
        *,
        resources_id: str | None = None,
        resources_id_contains: str | None = None,
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        after: str | None = None,
        limit: int = -1,
        offset: int = 0,
    ) -> list[ResourcesUpdate]:
        filters = (resources_id, resources_id_contains)
        for name, value in zip(("resources_id", "resources_id_contains"), filters, strict=True):
            if value is not None:
                validation.check_text(value, name)
        many, skip = validation.check_cursor(after, limit, offset)
        order = Order.of("resources", sort_by, sort_order, after)
        return await self.read(
            "query_resources",
            lambda connection: queries.resources_page(connection, filters, order, after, many, skip),
        )

    # -- workers ---------------------------------------------------------------------------------------------------

    async def update_worker(
        self, worker_id: str, stats: dict[str, Any] | None = None, *, lease_seconds: float | None = None
    ) -> Worker:
        validation.check_text(worker_id, "worker_id")
        text = None if stats is None else validation.dict_to_json(stats, "stats")
        if lease_seconds is not None:
            validation.check_time(lease_seconds, "lease_seconds")
            if lease_seconds <= 0:
                raise ConfigError(f"lease_seconds={lease_seconds} is not positive; use more than 0")
        return await self.do(
            "update_worker",
            lambda unit: transitions.update_worker(unit, worker_id, text, lease_seconds),
            (),
            [worker_id],
        )

    async def get_worker(self, worker_id: str) -> Worker | None:
        validation.check_text(worker_id, "worker_id")
        return await self.read("get_worker", lambda connection: queries.worker(connection, worker_id))

    async def query_workers(
        self,
        *,
        status_in: Sequence[WorkerStatus] | None = None,
        worker_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        after: str | None = None,
        limit: int = -1,
        offset: int = 0,
    ) -> list[Worker]:
        many, skip = validation.check_cursor(after, limit, offset)
        order = Order.of("workers", sort_by, sort_order, after)
        filters = WorkerFilters(status_in, worker_id_contains, check_logic(filter_logic))
        return await self.read(
            "query_workers", lambda connection: queries.workers(connection, filters, order, after, many, skip)
        )

    # -- queues ----------------------------------------------------------------------------------------------------

    async def update_queue(self, name: str, limit: int | None) -> Queue:
        validation.check_new_id(name, "name")
        if limit is not None and (isinstance(limit, bool) or not 0 <= limit < 2**31):
            raise ConfigError(f"limit={limit!r} of queue {name!r}: use 0 to pause it, or None for no limit")

        def change(unit: UnitOfWork) -> None:
            unit.flush()
            unit.connection.insert(statements.WRITE_QUEUES, [(name, limit)])
            unit.queues.limits_changed()

        await self.do("update_queue", change)
        return next(queue for queue in await self.query_queues() if queue.name == name)

    async def query_queues(self) -> list[Queue]:
        return await self.read("query_queues", queries.queues)

    # -- retention, export and import ------------------------------------------------------------------------------

    async def delete_rollouts(self, rollout_ids: Sequence[str]) -> int:
        validation.check_texts(rollout_ids, "rollout_ids")
        ids = list(rollout_ids)
        return await self.do("delete_rollouts", lambda unit: deletion.delete(unit, ids), ids)

    async def prune(self, retention: Retention, dry_run: bool = False) -> Pruned:
        deletion.check_retention(retention)
        oldest = float("-inf") if retention.max_age_seconds is None else self.clock.wall() - retention.max_age_seconds
        excess = deletion.Excess(retention, oldest)
        if retention.max_rollouts is not None or retention.max_bytes is not None:
            async for sizes in self._rollout_sizes():
                excess.count(sizes)
        rollouts = spans = size = 0
        async for sizes in self._rollout_sizes():
            removed = list(excess.take(sizes))
            for start in range(0, 0 if dry_run else len(removed), deletion.DELETE_BATCH):
                ends = {each.rollout_id: each.end_time for each in removed[start : start + deletion.DELETE_BATCH]}
                await self.do("prune", lambda unit, ends=ends: deletion.delete_finished(unit, ends), list(ends))
            rollouts += len(removed)
            spans += sum(each.spans for each in removed)
            size += sum(each.bytes for each in removed)
            if excess.fits:
                break
        return Pruned(rollouts, spans, size)

    async def _rollout_sizes(self) -> AsyncIterator[list[deletion.RolloutSize]]:
        last: deletion.RolloutSize | None = None
        while sizes := await self.read("prune", lambda connection, last=last: deletion.rollout_sizes(connection, last)):
            yield sizes
            last = sizes[-1]

    async def vacuum(self) -> None:
        async for unused in self._unused_blocks():
            while unused:  # then their parents
                some, unused = unused[: deletion.BLOCK_DELETE_BATCH], unused[deletion.BLOCK_DELETE_BATCH :]
                unused += await self.do("vacuum", lambda unit, some=some: deletion.delete_blocks(unit, some))
        if not self.database.single:
            await asyncio.to_thread(self._release_free_space)

    async def _unused_blocks(self) -> AsyncIterator[list[bytes]]:
        last: bytes | None = b""
        while last is not None:
            last, unused = await self.read(
                "vacuum", lambda connection, after=last: deletion.unused_blocks(connection, after)
            )
            yield unused

    def _release_free_space(self) -> None:
        connection = self.database.connect(read_only=False)
        try:
            connection.vacuum()
        except self.database.errors as error:
            raise self.database.explain(error) from error
        finally:
            connection.close()

    async def read_records(self, rollout_ids: Sequence[str]) -> list[RolloutRecord]:
        validation.check_texts(rollout_ids, "rollout_ids")
        ids = list(rollout_ids)
        return await self.read("read_records", lambda connection: read_records(connection, ids))

    async def add_records(self, records: Sequence[RolloutRecord]) -> int:
        prepared = [prepare(record) for record in records]
        ids = [record.rollout_id for record in prepared]
        return await self.do("add_records", lambda unit: add_records(unit, prepared), ids) if prepared else 0


def _next_version(unit: UnitOfWork) -> int:
    return unit.connection.all(statements.LAST_VERSION)[0][0] + 1


def _publish(unit: UnitOfWork, resources_id: str, body: str) -> Row:
    """Insert new resources; returns the row of `statements.RESOURCES`."""
    row = (resources_id, _next_version(unit), unit.wall, body, None)
    unit.connection.insert(statements.INSERT_RESOURCES, [row])
    return row
