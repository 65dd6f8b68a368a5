"""Read-only queries of rollouts, attempts, resources, workers, queues and totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from agentlightning.errors import NotFoundError, StoreError
from agentlightning.resources import ResourcesUpdate
from agentlightning.rollouts import ROLLOUT_TRANSITIONS, WAITING, Attempt, Rollout
from agentlightning.store import validation
from agentlightning.store.sql.session.counters import ATTEMPTS, SPANS
from agentlightning.store.sql.session.rows import OPEN
from agentlightning.store.sql.sort_order import NATURAL, Order
from agentlightning.store.sql.tables import mapping, statements
from agentlightning.store.sql.tables.backend import Connection
from agentlightning.store.types import Queue, Worker


@dataclass(frozen=True, slots=True)
class RolloutFilters:
    """The filters of `query_rollouts` and `count_rollouts`. Raises ConfigError for a value that is no filter."""

    status_in: Sequence[str] | None = None
    rollout_id_in: Sequence[str] | None = None
    rollout_id_contains: str | None = None
    queue_in: Sequence[str] | None = None
    mode_in: Sequence[str] | None = None
    any_of: bool = False
    """Whether one of them is enough."""

    def __post_init__(self) -> None:
        validation.check_texts(self.status_in, "status_in")
        validation.check_texts(self.rollout_id_in, "rollout_id_in")
        validation.check_texts(self.queue_in, "queue_in")
        validation.check_texts(self.mode_in, "mode_in")
        if self.rollout_id_contains is not None:
            validation.check_text(self.rollout_id_contains, "rollout_id_contains")

    @property
    def values(self) -> list[Any]:
        lists = [self.status_in, self.rollout_id_in, self.queue_in, self.mode_in]
        status, ids, queues, modes = (None if each is None else list(each) for each in lists)
        return [value for value in (status, ids, self.rollout_id_contains, queues, modes) if value is not None]

    @property
    def present(self) -> statements.Filters:
        fields = (self.status_in, self.rollout_id_in, self.rollout_id_contains, self.queue_in, self.mode_in)
        status, ids, part, queue, mode = (field is not None for field in fields)
        return status, ids, part, queue, mode


def rollouts(
    connection: Connection, filters: RolloutFilters, order: Order, after: str | None, limit: int, offset: int
) -> list[Rollout]:
    bounds: list[int] = []
    if order.natural:
        paged = after is not None or limit < validation.NO_LIMIT
        bounds.append(connection.last_position() if paged else validation.NO_LIMIT)
    if after is not None:
        bounds.append(rollout_position(connection, after))
    one_status = filters.status_in is not None and order.field is None and not filters.any_of
    statement = statements.query_rollouts(
        filters.present, one_status, after is not None, order.field, order.descending, filters.any_of
    )
    values = filters.values
    if not one_status:
        rows = connection.all(statement, *values, *bounds, limit, offset)
    else:  # an index has the rollouts of each status in order
        end = min(limit + offset, validation.NO_LIMIT)
        found = (connection.all(statement, status, *values[1:], *bounds, end, 0) for status in dict.fromkeys(values[0]))
        rows = sorted((row for page in found for row in page), key=itemgetter(-1), reverse=order.descending)[offset:end]
    return [mapping.to_rollout(row[:-1]) for row in rows]


def count_rollouts(connection: Connection, filters: RolloutFilters) -> int:
    by_status, by_id, by_part, by_queue, by_mode = filters.present
    if not (by_id or by_part or by_mode or (filters.any_of and by_status and by_queue)):
        return _total(connection, filters)
    return int(connection.all(statements.count_rollouts(filters.present, filters.any_of), *filters.values)[0][0])


def rollout_position(connection: Connection, rollout_id: str) -> int:
    rows = connection.all(statements.ROLLOUT_POSITION, rollout_id)
    if not rows:
        raise NotFoundError(f"no rollout {rollout_id!r} in this store")
    return rows[0][0]


def rollout(connection: Connection, rollout_id: str) -> Rollout | None:
    rows = connection.all(statements.FIND_ROLLOUT, rollout_id)
    return mapping.to_rollout(rows[0]) if rows else None


def latest_attempts(connection: Connection, rollout_ids: Sequence[str]) -> list[Attempt]:
    rows = connection.all(statements.LATEST_ATTEMPTS, list(rollout_ids))
    return [mapping.to_attempt(row[-1], row) for row in rows]


def attempts(
    connection: Connection, rollout_id: str, order: Order = NATURAL, limit: int = validation.NO_LIMIT, offset: int = 0
) -> list[Attempt]:
    if order.natural:
        rows = connection.all(statements.ATTEMPTS_PAGE, rollout_id, offset, limit)
    else:
        rows = connection.all(statements.ATTEMPTS_OF, rollout_id)
    if not rows:
        rollout_position(connection, rollout_id)
    found = [mapping.to_attempt(rollout_id, row) for row in rows]
    return found if order.natural else order.page(found, limit, offset)


def attempt(connection: Connection, attempt_id: str) -> Attempt | None:
    rows = connection.all(statements.FIND_ATTEMPT, attempt_id)
    return mapping.to_attempt(rows[0][-1], rows[0]) if rows else None


def latest_attempt(connection: Connection, rollout_id: str) -> Attempt | None:
    rows = connection.all(statements.LATEST_ATTEMPT, rollout_id)
    if not rows:
        rollout_position(connection, rollout_id)
        return None
    return mapping.to_attempt(rollout_id, rows[0])


def resources(connection: Connection, resources_id: str) -> ResourcesUpdate | None:
    rows = connection.all(statements.FIND_RESOURCES, resources_id)
    return mapping.to_resources(rows[0]) if rows else None


def latest_resources(connection: Connection) -> ResourcesUpdate | None:
    rows = connection.all(statements.LATEST_RESOURCES)
    return mapping.to_resources(rows[0]) if rows else None


def resources_page(
    connection: Connection,
    filters: tuple[str | None, str | None],
    order: Order,
    after: str | None,
    limit: int,
    offset: int,
) -> list[ResourcesUpdate]:
    """filters: the id, a part of the id. Those that cannot be read are left out and named in the log."""
    key = -1
    if after is not None:
        rows = connection.all(statements.RESOURCES_KEY, after)
        if not rows:
            raise NotFoundError(f"no resources {after!r} in this store to continue after")
        key = rows[0][0]
    resources_id, part = filters
    statement = statements.query_resources(resources_id is not None, part is not None, order.field, order.descending)
    values = [value for value in filters if value is not None]
    found, read, wanted = list[ResourcesUpdate](), 0, min(limit + offset, validation.NO_LIMIT)
    while len(found) < wanted and (rows := connection.all(statement, key, *values, wanted - len(found), read)):
        read += len(rows)
        for row in rows:
            try:
                found.append(mapping.to_resources(row))
            except StoreError as error:
                mapping.report(f"a list leaves out what cannot be read: {error}")
    return found[offset:]


def queues(connection: Connection) -> list[Queue]:
    waiting, unfinished = _totals_by_queue(connection, WAITING), _totals_by_queue(connection, OPEN)
    return [
        Queue(name, limit, waiting.get(name, 0), unfinished.get(name, 0))
        for name, limit in connection.all(statements.ALL_QUEUES)
    ]


# -- totals ----------------------------------------------------------------------------------------------------------


def statistics(connection: Connection) -> dict[str, int]:
    totals = {name: int(number) for name, number in connection.all(statements.COUNTS_BY_NAME)}
    found = {f"rollouts.{status}": totals.get(status, 0) for status in ROLLOUT_TRANSITIONS}
    found |= {name: totals.get(name, 0) for name in (ATTEMPTS, SPANS)}
    found |= {name: int(connection.all(statement)[0][0]) for name, statement in statements.ROWS_OF.items()}
    return {**found, "bytes": connection.size()}


def _totals_by_queue(connection: Connection, statuses: Iterable[str]) -> dict[str, int]:
    """The number of rollouts with one of these statuses, by queue."""
    return {queue: int(number) for queue, number in connection.all(statements.COUNTS_BY_QUEUE, list(statuses))}


def _total(connection: Connection, filters: RolloutFilters) -> int:
    """The number of rollouts that fit filters by status and queue."""
    statuses = [each for each in ROLLOUT_TRANSITIONS if filters.status_in is None or each in filters.status_in]
    totals = _totals_by_queue(connection, statuses)
    return sum(number for queue, number in totals.items() if filters.queue_in is None or queue in filters.queue_in)


# -- workers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerFilters:
    """The filters of `query_workers`. Raises ConfigError for values that cannot be filtered by."""

    status_in: Sequence[str] | None = None
    worker_id_contains: str | None = None
    any_of: bool = False
    """Whether one of them is enough."""

    def __post_init__(self) -> None:
        validation.check_texts(self.status_in, "status_in")
        if self.worker_id_contains is not None:
            validation.check_text(self.worker_id_contains, "worker_id_contains")

    @property
    def values(self) -> list[Any]:
        status = None if self.status_in is None else list(self.status_in)
        return [value for value in (status, self.worker_id_contains) if value is not None]

    @property
    def present(self) -> tuple[bool, bool]:
        return self.status_in is not None, self.worker_id_contains is not None


def worker(connection: Connection, worker_id: str) -> Worker | None:
    found = _with_open_attempts(connection, connection.all(statements.FIND_WORKER, worker_id))
    return found[0] if found else None


def workers(
    connection: Connection, filters: WorkerFilters, order: Order, after: str | None, limit: int, offset: int
) -> list[Worker]:
    key = -1
    if after is not None:
        rows = connection.all(statements.WORKER_KEY, after)
        if not rows:
            raise NotFoundError(f"no worker {after!r} in this store to continue after")
        key = rows[0][0]
    statement = statements.query_workers(filters.present, filters.any_of)
    page = (limit, offset) if order.natural else (validation.NO_LIMIT, 0)
    found = _with_open_attempts(connection, connection.all(statement, key, *filters.values, *page))
    return found if order.natural else order.page(found, limit, offset)


def _with_open_attempts(connection: Connection, rows: list[mapping.Row]) -> list[Worker]:
    ids = [row[0] for row in rows]
    found = connection.all(statements.OPEN_ATTEMPTS_OF_WORKERS, ids) if ids else []
    newest = {worker_id: (rollout_id, attempt_id) for worker_id, rollout_id, attempt_id in found}
    counts = Counter(worker_id for worker_id, _, _ in found)
    return [mapping.to_worker(row, newest.get(row[0]), counts[row[0]]) for row in rows]
