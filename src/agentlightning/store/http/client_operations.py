"""What a client of a store's server is made of: how a call and a list are asked for, and the parts of the contract
beside the loop of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from agentlightning.errors import ConfigError
from agentlightning.resources import NamedResources, ResourcesUpdate
from agentlightning.store.base import (
    UNSET,
    FilterLogic,
    LightningStoreBase,
    Pruned,
    Queue,
    Retention,
    RolloutRecord,
    SortOrder,
    Worker,
    WorkerStatus,
)
from agentlightning.store.http.encoding import encode, written
from agentlightning.store.http.operations import ALONE, RESULTS, is_keyed
from agentlightning.store.http.transport import Remote
from agentlightning.store.ids import new_hex, new_id

LONG_SECONDS: Final = 3600.0
"""What a call that may take long is given."""
PAGE: Final = 500
"""Items of a list that are read in one call."""
PAGE_OF_SPANS: Final = 100
"""These may be large."""
PAGE_OF_SORTED_SPANS: Final = 2000
"""The store reads all spans of the rollout for each page of these."""


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list is asked for."""

    cursor: str | None
    """The field of an item that `after` takes, where the method has one."""
    after: str | None
    limit: int
    offset: int
    sort_by: str | None
    sort_order: SortOrder

    @property
    def order(self) -> dict[str, Any]:
        sort_by = {} if self.sort_by is None else {"sort_by": self.sort_by}
        return sort_by | ({} if self.sort_order == "asc" else {"sort_order": self.sort_order})

    @property
    def next_by(self) -> str | None:
        """The field to go on by, where the order is the one of creation; else pages go by offset."""
        return self.cursor if not self.order else None


class CallingStore(LightningStoreBase):
    """Asks a server for what the contract says."""

    _remote: Remote

    # -- the way to the server -------------------------------------------------------------------------------------

    async def _call(self, method: str, /, **arguments: Any) -> Any:
        return await self._send(method, _written(arguments))

    async def _send(self, method: str, arguments: dict[str, Any]) -> Any:
        """A call whose arguments are written already."""
        line = self._remote.line()
        body = _body(method, arguments)
        if method in ALONE:
            answer = await line.call_alone(body, LONG_SECONDS)
        else:
            answer = await line.call(body)
        return RESULTS[method](answer)

    async def _call_and_wait(self, method: str, timeout: float, **arguments: Any) -> Any:
        """A call that the server answers within `timeout` seconds or when there is something."""
        body = _body(method, _written({**arguments, "timeout": timeout}))
        return RESULTS[method](await self._remote.line().call_alone(body, timeout, "/waits/calls"))

    async def _pages(self, page: Page, method: str, **filters: Any) -> list[Any]:
        """A list, read in calls of limited size. What says nothing is not sent."""
        if page.limit < 0 and page.limit != -1:
            raise ConfigError(f"limit={page.limit} is no number of items; use -1 for all of them")
        said = {name: value for name, value in filters.items() if value not in (None, False, "and")} | page.order
        size = PAGE if method != "query_spans" else PAGE_OF_SPANS if page.next_by else PAGE_OF_SORTED_SPANS
        found: list[Any] = []
        place: dict[str, Any] = {"offset": page.offset} | ({} if page.after is None else {"after": page.after})
        while True:
            wanted = size if page.limit == -1 else min(size, page.limit - len(found))
            some = await self._call(method, **said, **place, limit=wanted)
            found += some
            if len(some) < wanted or len(found) == page.limit:
                return found
            next_by = page.next_by
            place = {"offset": page.offset + len(found)} if next_by is None else {"after": getattr(some[-1], next_by)}

    # -- resources -------------------------------------------------------------------------------------------------

    async def add_resources(self, resources: NamedResources, resources_id: str | None = None) -> ResourcesUpdate:
        resources_id = new_id("rs") if resources_id is None else resources_id
        return await self._call("add_resources", resources=resources, resources_id=resources_id)

    async def update_resources(self, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
        return await self._call("update_resources", resources_id=resources_id, resources=resources)

    async def delete_resources(self, resources_id: str) -> int:
        return await self._call("delete_resources", resources_id=resources_id)

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        return await self._call("get_resources_by_id", resources_id=resources_id)

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        return await self._call("get_latest_resources")

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
        return await self._pages(
            Page("resources_id", after, limit, offset, sort_by, sort_order),
            "query_resources",
            resources_id=resources_id,
            resources_id_contains=resources_id_contains,
        )

    # -- workers and queues ----------------------------------------------------------------------------------------

    async def update_worker(
        self, worker_id: str, stats: dict[str, Any] | None = None, *, lease_seconds: float | None = None
    ) -> Worker:
        return await self._call("update_worker", worker_id=worker_id, stats=stats, lease_seconds=lease_seconds)

    async def get_worker(self, worker_id: str) -> Worker | None:
        return await self._call("get_worker", worker_id=worker_id)

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
        return await self._pages(
            Page("worker_id", after, limit, offset, sort_by, sort_order),
            "query_workers",
            status_in=status_in,
            worker_id_contains=worker_id_contains,
            filter_logic=filter_logic,
        )

    async def update_queue(self, name: str, limit: int | None) -> Queue:
        return await self._call("update_queue", name=name, limit=limit)

    async def query_queues(self) -> list[Queue]:
        return await self._call("query_queues")

    # -- keeping the store small -----------------------------------------------------------------------------------

    async def delete_rollouts(self, rollout_ids: Sequence[str]) -> int:
        return await self._call("delete_rollouts", rollout_ids=rollout_ids)

    async def prune(self, retention: Retention, dry_run: bool = False) -> Pruned:
        return await self._call("prune", retention=retention, dry_run=dry_run)

    async def vacuum(self) -> None:
        await self._call("vacuum")

    async def read_records(self, rollout_ids: Sequence[str]) -> list[RolloutRecord]:
        return await self._call("read_records", rollout_ids=rollout_ids)

    async def add_records(self, records: Sequence[RolloutRecord]) -> int:
        return await self._call("add_records", records=records)


def _written(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: written(value, name) for name, value in arguments.items() if value is not UNSET}


def _body(method: str, arguments: dict[str, Any]) -> bytes:
    """One call as it travels. Raises ConfigError for what JSON cannot hold."""
    call: dict[str, Any] = {"method": method, "arguments": arguments}
    if is_keyed(method, arguments):
        call["key"] = new_hex() + new_hex()
    try:
        return encode(call)
    except UnicodeEncodeError as error:
        raise ConfigError(f"{error.object!r} holds half a character, which no database keeps") from None
