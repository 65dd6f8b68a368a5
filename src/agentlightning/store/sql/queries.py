"""Reading from the database what is not decided on: rollouts, attempts, resources, queues, counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentlightning.errors import NotFoundError
from agentlightning.resources import ResourcesUpdate
from agentlightning.rollouts import ROLLOUT_TRANSITIONS, WAITING, Attempt, Rollout
from agentlightning.store.base import Queue
from agentlightning.store.sql import counters
from agentlightning.store.sql.sort_order import Order
from agentlightning.store.sql.tables import mapping, statements
from agentlightning.store.sql.tables.backend import Connection
from agentlightning.store.sql.tables.rows import OPEN
from agentlightning.store.sql.tables.schema import rollouts as rollouts_table


@dataclass(frozen=True, slots=True)
class RolloutFilters:
    """What `query_rollouts` and `count_rollouts` filter by. Raises ConfigError for what no filter can be."""

    status_in: Sequence[str] | None = None
    rollout_id_in: Sequence[str] | None = None
    rollout_id_contains: str | None = None
    queue_in: Sequence[str] | None = None
    mode_in: Sequence[str] | None = None
    any_of: bool = False
    """One of them is enough."""

    def __post_init__(self) -> None:
        mapping.check_texts(self.status_in, "status_in")
        mapping.check_texts(self.rollout_id_in, "rollout_id_in")
        mapping.check_texts(self.queue_in, "queue_in")
        mapping.check_texts(self.mode_in, "mode_in")
        if self.rollout_id_contains is not None:
            mapping.check_text(self.rollout_id_contains, "rollout_id_contains")

    @property
    def values(self) -> list[Any]:
        lists = [self.status_in, self.rollout_id_in, self.queue_in, self.mode_in]
        status, ids, queues, modes = (None if each is None else list(each) for each in lists)
        return [value for value in (status, ids, self.rollout_id_contains, queues, modes) if value is not None]

    @property
    def given(self) -> statements.Filters:
        fields = (self.status_in, self.rollout_id_in, self.rollout_id_contains, self.queue_in, self.mode_in)
        status, ids, part, queue, mode = (field is not None for field in fields)
        return status, ids, part, queue, mode


def rollouts(
    connection: Connection, filters: RolloutFilters, order: Order, after: str | None, limit: int, offset: int
) -> list[Rollout]:
    paged = order.natural and (after is not None or limit < mapping.NO_LIMIT)
    last = connection.settled(rollouts_table) if paged else mapping.NO_LIMIT
    values = filters.values
    if after is not None:
        values.append(rollout_key(connection, after))
    statement = statements.query_rollouts(
        filters.given, after is not None, order.field, order.descending, filters.any_of
    )
    return [mapping.to_rollout(row) for row in connection.all(statement, *values, limit, offset) if row[0] <= last]


def count_rollouts(connection: Connection, filters: RolloutFilters) -> int:
    by_status, _, _, by_queue, _ = filters.given
    counted = filters.rollout_id_in is None and filters.rollout_id_contains is None and filters.mode_in is None
    if counted and not (filters.any_of and by_status and by_queue):
        return counters.total(connection, filters.status_in, filters.queue_in)
    return int(connection.all(statements.count_rollouts(filters.given, filters.any_of), *filters.values)[0][0])


def rollout_key(connection: Connection, rollout_id: str) -> int:
    rows = connection.all(statements.ROLLOUT_KEY, rollout_id)
    if not rows:
        raise NotFoundError(f"no rollout {rollout_id!r} in this store")
    return rows[0][0]


def rollout(connection: Connection, rollout_id: str) -> Rollout | None:
    rows = connection.all(statements.FIND_ROLLOUT, rollout_id)
    return mapping.to_rollout(rows[0]) if rows else None


def latest_attempts(connection: Connection, rollout_ids: Sequence[str]) -> list[Attempt]:
    rows = connection.all(statements.LATEST_ATTEMPTS, list(rollout_ids))
    return [mapping.to_attempt(row[-1], row) for row in rows]


def attempts(connection: Connection, rollout_id: str) -> list[Attempt]:
    rows = connection.all(statements.ATTEMPTS_OF, rollout_id)
    if not rows:
        rollout_key(connection, rollout_id)
    return [mapping.to_attempt(rollout_id, row) for row in rows]


def attempt(connection: Connection, attempt_id: str) -> Attempt | None:
    rows = connection.all(statements.FIND_ATTEMPT, attempt_id)
    return mapping.to_attempt(rows[0][-1], rows[0]) if rows else None


def latest_attempt(connection: Connection, rollout_id: str) -> Attempt | None:
    rows = connection.all(statements.LATEST_ATTEMPT, rollout_id)
    if not rows:
        rollout_key(connection, rollout_id)
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
    """filters: the id, a part of the id."""
    key = -1
    if after is not None:
        rows = connection.all(statements.RESOURCES_KEY, after)
        if not rows:
            raise NotFoundError(f"no resources {after!r} in this store to go on after")
        key = rows[0][0]
    resources_id, part = filters
    statement = statements.query_resources(resources_id is not None, part is not None, order.field, order.descending)
    values = [value for value in filters if value is not None]
    return [mapping.to_resources(row) for row in connection.all(statement, key, *values, limit, offset)]


def queues(connection: Connection) -> list[Queue]:
    waiting, unfinished = counters.by_queue(connection, WAITING), counters.by_queue(connection, OPEN)
    return [
        Queue(name, limit, waiting.get(name, 0), unfinished.get(name, 0))
        for name, limit in connection.all(statements.ALL_QUEUES)
    ]


def statistics(connection: Connection) -> dict[str, int]:
    counted = counters.by_name(connection)
    found = {f"rollouts.{status}": counted.get(status, 0) for status in ROLLOUT_TRANSITIONS}
    found |= {name: counted.get(name, 0) for name in (counters.ATTEMPTS, counters.SPANS)}
    found |= {name: int(connection.all(statement)[0][0]) for name, statement in statements.ROWS_OF.items()}
    return {**found, "bytes": connection.size()}
