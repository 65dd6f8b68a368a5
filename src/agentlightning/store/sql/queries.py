"""Queries of rollouts, attempts, resources, workers, queues and totals; the fields and the order of lists.

What a method of the contract reads is a function here, or in spans.py, of a connection and the arguments of the method.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, Final, Self, TypeVar

from agentlightning.errors import ConfigError, NotFoundError, StoreError
from agentlightning.resources import ResourcesUpdate
from agentlightning.rollouts import ROLLOUT_TRANSITIONS, WAITING, Attempt, Rollout
from agentlightning.store import validation
from agentlightning.store.sql import mapping
from agentlightning.store.sql.schema import (
    ATTEMPT,
    IS_OPEN,
    OPEN,
    RESOURCES,
    ROLLOUT,
    WORKER,
    AttemptColumns,
    RolloutColumns,
    WorkerColumns,
    select,
)
from agentlightning.store.sql.tx import ATTEMPTS, OPEN_ATTEMPTS, SPANS, Connection
from agentlightning.store.types import FilterLogic, Queue, SortOrder, Worker

Item = TypeVar("Item")

# -- order -----------------------------------------------------------------------------------------------------------

SORTABLE: Final[dict[str, tuple[str, ...]]] = {
    "rollouts": ("rollout_id", "start_time", "end_time", "status", "mode", "resources_id", "queue", "priority"),
    "attempts": (
        *("sequence_id", "attempt_id", "start_time", "end_time", "status", "worker_id", "last_heartbeat_time"),
    ),
    "spans": (
        *("sequence_id", "start_time", "end_time", "name", "span_id", "trace_id", "parent_id", "attempt_id"),
        "status_code",
    ),
    "resources": ("resources_id", "version", "create_time", "update_time"),
    "workers": (
        *("worker_id", "status", "last_heartbeat_time", "current_rollout_id", "current_attempt_id", "open_attempts"),
    ),
}
"""By kind of list: the fields it can be sorted by."""
_NATURAL: Final = {"attempts": "sequence_id", "spans": "sequence_id"}
"""By kind of list: the field that it is sorted by without `sort_by`."""


@dataclass(frozen=True, slots=True)
class Order:
    """How a list is sorted."""

    field: str | None = None
    """None: the natural order of its kind."""
    descending: bool = False

    @classmethod
    def of(cls, kind: str, sort_by: str | None, sort_order: SortOrder, after: str | None = None) -> Self:
        """Raises ConfigError for an unknown field, and for `after` with an order that has no such cursor."""
        if sort_by is not None and sort_by not in SORTABLE[kind]:
            raise ConfigError(f"sort_by={sort_by!r} cannot sort {kind}; use one of: {', '.join(SORTABLE[kind])}")
        if sort_order not in ("asc", "desc"):
            raise ConfigError(f"sort_order={sort_order!r} is neither asc nor desc")
        field = None if sort_by == _NATURAL.get(kind) else sort_by
        descending = sort_order == "desc"
        if after is not None and (field is not None or (descending and kind != "rollouts")):
            raise ConfigError(f"after={after!r} requires the order of creation; page through other orders by offset")
        return cls(field, descending)

    @property
    def natural(self) -> bool:
        """Whether it is the natural order."""
        return self.field is None and not self.descending

    def page(self, items: Sequence[Item], limit: int, offset: int) -> list[Item]:
        """One page of the items, sorted: None first, stable among equal values; descending reverses all of it. limit
        -1: all of them."""
        ordered = list(items[::-1]) if self.descending else list(items)
        if self.field is not None:
            field = attrgetter(self.field)

            def key(item: Item) -> tuple[bool, Any]:
                value = field(item)
                return (value is not None, value)

            ordered.sort(key=key, reverse=self.descending)
        return ordered[offset:] if limit < 0 else ordered[offset : offset + limit]

    def sql(self, place: str, column: str | None) -> str:
        """Order by a column, NULL first, then by `place`."""
        suffix = " DESC" if self.descending else ""
        if column is None:
            return f"ORDER BY {place}{suffix}"
        return f"ORDER BY {column}{suffix} NULLS {'LAST' if self.descending else 'FIRST'}, {place}{suffix}"


def check_logic(filter_logic: FilterLogic) -> bool:
    """Whether one filter is enough. Raises ConfigError for an unknown logic."""
    if filter_logic not in ("and", "or"):
        raise ConfigError(f"filter_logic={filter_logic!r} is neither and nor or")
    return filter_logic == "or"


# -- filters ---------------------------------------------------------------------------------------------------------


class Filters:
    """Conditions with the value of each. Raises ConfigError for a value that is no filter."""

    def __init__(self, filter_logic: FilterLogic = "and") -> None:
        self._any_of = check_logic(filter_logic)
        """Whether one of them is enough."""
        self._conditions: list[str] = []
        self.values: list[Any] = []

    def among(self, column: str, name: str, values: Sequence[str] | None) -> Self:
        validation.check_texts(values, name)
        return self._add(f"{column} = ANY (?)", None if values is None else list(values))

    def contains(self, column: str, name: str, part: str | None) -> Self:
        if part is not None:
            validation.check_text(part, name)
        return self._add(f"strpos({column}, ?) > 0", part)

    def equals(self, column: str, name: str, value: str | None) -> Self:
        if value is not None:
            validation.check_text(value, name)
        return self._add(f"{column} = ?", value)

    def _add(self, condition: str, value: Any) -> Self:
        if value is not None:
            self._conditions.append(condition)
            self.values.append(value)
        return self

    def where(self, *others: str) -> str:
        """The WHERE of a statement, with more conditions that must all be met."""
        joined = (" OR " if self._any_of else " AND ").join(self._conditions)
        conditions = [*([f"({joined})"] if joined else []), *others]
        return f"WHERE {' AND '.join(conditions)}" if conditions else ""


class RolloutFilters(Filters):
    """The filters of `query_rollouts` and `count_rollouts`."""

    def __init__(
        self,
        status_in: Sequence[str] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        queue_in: Sequence[str] | None = None,
        mode_in: Sequence[str] | None = None,
        filter_logic: FilterLogic = "and",
    ) -> None:
        super().__init__(filter_logic)
        self.among("r.status", "status_in", status_in).among("r.rollout_id", "rollout_id_in", rollout_id_in)
        self.contains("r.rollout_id", "rollout_id_contains", rollout_id_contains)
        self.among("r.queue", "queue_in", queue_in).among("r.mode", "mode_in", mode_in)
        self.statuses, self.queues = status_in, queue_in
        one_of_two = self._any_of and status_in is not None and queue_in is not None
        counted = (each is not None for each in (status_in, queue_in))
        self.counted = len(self.values) == sum(counted) and not one_of_two
        """Whether the table of counters has how many rollouts fit."""
        self.by_status = status_in is not None and not self._any_of


# -- rollouts --------------------------------------------------------------------------------------------------------


def rollouts(
    connection: Connection,
    *,
    newest_first: bool = False,
    sort_by: str | None = None,
    sort_order: SortOrder = "asc",
    after: str | None = None,
    limit: int = -1,
    offset: int = 0,
    **given: Any,
) -> list[Rollout]:
    """given: those of RolloutFilters."""
    filters, position = RolloutFilters(**given), connection.position
    limit, offset = validation.check_cursor(after, limit, offset)
    order = Order.of("rollouts", sort_by, "desc" if newest_first and sort_by is None else sort_order, after)
    others: list[str] = []
    bounds: list[int] = []
    if order.natural and (after is not None or limit < validation.NO_LIMIT):
        bounds.append(connection.last_position())
        others.append(f"{position} <= ?")
    if after is not None:
        bounds.append(_position_of(connection, after))
        others.append(f"{position} {'<' if order.descending else '>'} ?")
    values, end = filters.values, min(limit + offset, validation.NO_LIMIT)
    column = None if order.field is None else f"r.{order.field}"
    sql = (
        f"SELECT {select('r', ROLLOUT)}, {position} FROM rollouts r {filters.where(*others)} "
        f"{order.sql(position, column)} LIMIT ? OFFSET ?"
    )
    if not filters.by_status or order.field is not None:
        rows = connection.all(sql, *values, *bounds, limit, offset)
    else:  # an index has the rollouts of each status in order
        sql = sql.replace("r.status = ANY (?)", "r.status = ?", 1)
        pages = [connection.all(sql, each, *values[1:], *bounds, end, 0) for each in dict.fromkeys(values[0])]
        rows = sorted((row for page in pages for row in page), key=itemgetter(-1), reverse=order.descending)[offset:end]
    return [mapping.to_rollout(RolloutColumns(*row[:-1])) for row in rows]


def count_rollouts(connection: Connection, **given: Any) -> int:
    filters = RolloutFilters(**given)
    if not filters.counted:
        sql = f"SELECT count(*) FROM rollouts r {filters.where()}"
        return int(connection.all(sql, *filters.values)[0][0])
    statuses = [each for each in ROLLOUT_TRANSITIONS if filters.statuses is None or each in filters.statuses]
    totals = _totals_by_queue(connection, statuses)
    return sum(number for queue, number in totals.items() if filters.queues is None or queue in filters.queues)


def _position_of(connection: Connection, rollout_id: str) -> int:
    rows = connection.all(f"SELECT {connection.position} FROM rollouts r WHERE r.rollout_id = ?", rollout_id)
    if not rows:
        raise NotFoundError(f"no rollout {rollout_id!r} in this store")
    return rows[0][0]


_ROLLOUT: Final = f"SELECT {select('r', ROLLOUT)} FROM rollouts r WHERE r.rollout_id = ?"


def rollout(connection: Connection, rollout_id: str) -> Rollout | None:
    validation.check_text(rollout_id, "rollout_id")
    rows = connection.all(_ROLLOUT, rollout_id)
    return mapping.to_rollout(RolloutColumns(*rows[0])) if rows else None


# -- attempts --------------------------------------------------------------------------------------------------------

_ATTEMPTS: Final = (
    f"SELECT {select('a', ATTEMPT)}, r.rollout_id FROM rollouts r JOIN attempts a ON a.rollout_key = r.key "
)
_LATEST: Final = "AND a.sequence_id = r.attempt_count"


def _attempts(connection: Connection, condition: str, *values: Any) -> list[Attempt]:
    rows = connection.all(_ATTEMPTS + condition, *values)
    return [mapping.to_attempt(AttemptColumns(*row[:-1]), row[-1]) for row in rows]


def attempts(
    connection: Connection,
    rollout_id: str,
    *,
    sort_by: str | None = None,
    sort_order: SortOrder = "asc",
    limit: int = -1,
    offset: int = 0,
) -> list[Attempt]:
    validation.check_text(rollout_id, "rollout_id")
    limit, offset = validation.check_page(limit, offset)
    order = Order.of("attempts", sort_by, sort_order)
    where = "WHERE r.rollout_id = ? AND a.sequence_id > ? ORDER BY a.sequence_id LIMIT ?"  # numbered from 1, no gaps
    page = (offset, limit) if order.natural else (0, validation.NO_LIMIT)
    found = _attempts(connection, where, rollout_id, *page)
    if not found:
        _position_of(connection, rollout_id)
    return found if order.natural else order.page(found, limit, offset)


def attempts_of(connection: Connection, rollout_id: str, attempt_id: str | None) -> list[AttemptColumns]:
    """The rows of all attempts of a rollout, of one, or of the "latest"."""
    validation.check_text(rollout_id, "rollout_id")
    if attempt_id is not None:
        validation.check_text(attempt_id, "attempt_id")
    rows = connection.all(f"{_ATTEMPTS}WHERE r.rollout_id = ? ORDER BY a.sequence_id", rollout_id)
    found = [AttemptColumns(*row[:-1]) for row in rows]
    if not found:
        _position_of(connection, rollout_id)
    if attempt_id is None:
        return found
    if attempt_id == "latest":
        return found[-1:]
    found = [row for row in found if row.attempt_id == attempt_id]
    if not found:
        raise NotFoundError(f"rollout {rollout_id!r} has no attempt {attempt_id!r}")
    return found


def attempt(connection: Connection, attempt_id: str) -> Attempt | None:
    validation.check_text(attempt_id, "attempt_id")
    found = _attempts(connection, "WHERE a.attempt_id = ?", attempt_id)
    return found[0] if found else None


def latest_attempt(connection: Connection, rollout_id: str) -> Attempt | None:
    validation.check_text(rollout_id, "rollout_id")
    found = _attempts(connection, f"WHERE r.rollout_id = ? {_LATEST}", rollout_id)
    if not found:
        _position_of(connection, rollout_id)
    return found[0] if found else None


def latest_attempts(connection: Connection, rollout_ids: Sequence[str]) -> list[Attempt]:
    validation.check_texts(rollout_ids, "rollout_ids")
    return _attempts(connection, f"WHERE r.rollout_id = ANY (?) {_LATEST}", list(rollout_ids))


# -- resources -------------------------------------------------------------------------------------------------------

_RESOURCES: Final = f"SELECT {select('s', RESOURCES)} FROM resources s "


def find_resources(connection: Connection, resources_id: str) -> Any:
    """The columns RESOURCES; None for an unknown id."""
    rows = connection.all(f"{_RESOURCES}WHERE s.resources_id = ?", resources_id)
    return rows[0] if rows else None


def resources(connection: Connection, resources_id: str) -> ResourcesUpdate | None:
    validation.check_text(resources_id, "resources_id")
    row = find_resources(connection, resources_id)
    return None if row is None else mapping.to_resources(row)


def latest_resources(connection: Connection) -> ResourcesUpdate | None:
    rows = connection.all(f"{_RESOURCES}ORDER BY s.version DESC LIMIT 1")
    return mapping.to_resources(rows[0]) if rows else None


def resources_page(
    connection: Connection,
    *,
    resources_id: str | None = None,
    resources_id_contains: str | None = None,
    sort_by: str | None = None,
    sort_order: SortOrder = "asc",
    after: str | None = None,
    limit: int = -1,
    offset: int = 0,
) -> list[ResourcesUpdate]:
    """Those that cannot be read are left out and named in the log."""
    filters = Filters().equals("s.resources_id", "resources_id", resources_id)
    filters.contains("s.resources_id", "resources_id_contains", resources_id_contains)
    limit, offset = validation.check_cursor(after, limit, offset)
    order = Order.of("resources", sort_by, sort_order, after)
    key = _key_after(connection, "resources", "resources_id", after)
    column = None if order.field is None else f"s.{order.field}"
    if order.field == "update_time":
        column = "coalesce(s.update_time, s.create_time)"
    sql = f"{_RESOURCES}{filters.where('s.key > ?')} {order.sql('s.key', column)} LIMIT ? OFFSET ?"
    found, read, wanted = list[ResourcesUpdate](), 0, min(limit + offset, validation.NO_LIMIT)
    while len(found) < wanted and (rows := connection.all(sql, *filters.values, key, wanted - len(found), read)):
        read += len(rows)
        for row in rows:
            try:
                found.append(mapping.to_resources(row))
            except StoreError as error:
                mapping.report(f"a list leaves out what cannot be read: {error}")
    return found[offset:]


def _key_after(connection: Connection, table: str, column: str, after: str | None) -> int:
    """The key of the row to continue after; -1 for the start."""
    if after is None:
        return -1
    rows = connection.all(f"SELECT key FROM {table} WHERE {column} = ?", after)
    if not rows:
        raise NotFoundError(f"no {table.removesuffix('s') if table == 'workers' else table} {after!r} in this store "
                            "to continue after")  # fmt: skip
    return rows[0][0]


# -- workers and queues ----------------------------------------------------------------------------------------------

_STATUS: Final = (
    f"CASE WHEN w.lost <> 0 THEN 'lost' WHEN EXISTS (SELECT 1 FROM attempts WHERE {IS_OPEN} "
    "AND worker_id = w.worker_id AND superseded = 0) THEN 'busy' ELSE 'idle' END"
)
_WORKERS: Final = f"SELECT {select('w', WORKER)} FROM workers w "


def worker(connection: Connection, worker_id: str) -> Worker | None:
    validation.check_text(worker_id, "worker_id")
    found = _with_open_attempts(connection, connection.all(f"{_WORKERS}WHERE w.worker_id = ?", worker_id))
    return found[0] if found else None


def workers(
    connection: Connection,
    *,
    status_in: Sequence[str] | None = None,
    worker_id_contains: str | None = None,
    filter_logic: FilterLogic = "and",
    sort_by: str | None = None,
    sort_order: SortOrder = "asc",
    after: str | None = None,
    limit: int = -1,
    offset: int = 0,
) -> list[Worker]:
    limit, offset = validation.check_cursor(after, limit, offset)
    order = Order.of("workers", sort_by, sort_order, after)
    filters = Filters(filter_logic).among(_STATUS, "status_in", status_in)
    filters.contains("w.worker_id", "worker_id_contains", worker_id_contains)
    key = _key_after(connection, "workers", "worker_id", after)
    page = (limit, offset) if order.natural else (validation.NO_LIMIT, 0)
    sql = f"{_WORKERS}{filters.where('w.key > ?')} ORDER BY w.key LIMIT ? OFFSET ?"
    found = _with_open_attempts(connection, connection.all(sql, *filters.values, key, *page))
    return found if order.natural else order.page(found, limit, offset)


def _with_open_attempts(connection: Connection, rows: list[Any]) -> list[Worker]:
    ids = [row[0] for row in rows]
    found = connection.all(OPEN_ATTEMPTS, ids) if ids else []
    newest = {worker_id: (rollout_id, attempt_id) for worker_id, rollout_id, attempt_id in found}
    counts = Counter(worker_id for worker_id, _, _ in found)
    return [mapping.to_worker(WorkerColumns(*row), newest.get(row[0]), counts[row[0]]) for row in rows]


def queues(connection: Connection) -> list[Queue]:
    waiting, unfinished = _totals_by_queue(connection, WAITING), _totals_by_queue(connection, OPEN)
    rows = connection.all("SELECT name, max_open FROM queues ORDER BY name")
    return [Queue(name, limit, waiting.get(name, 0), unfinished.get(name, 0)) for name, limit in rows]


# -- totals ----------------------------------------------------------------------------------------------------------


def statistics(connection: Connection) -> dict[str, int]:
    totals = dict(connection.all("SELECT name, CAST(sum(number) AS BIGINT) FROM counts GROUP BY name"))
    found = {f"rollouts.{status}": totals.get(status, 0) for status in ROLLOUT_TRANSITIONS}
    found |= {name: totals.get(name, 0) for name in (ATTEMPTS, SPANS)}
    for table in ("resources", "workers"):
        found[table] = int(connection.all(f"SELECT count(*) FROM {table}")[0][0])
    return {**found, "bytes": connection.size()}


def _totals_by_queue(connection: Connection, statuses: Iterable[str]) -> dict[str, int]:
    """The number of rollouts with one of these statuses, by queue."""
    sql = "SELECT queue, CAST(sum(number) AS BIGINT) FROM counts WHERE name = ANY (?) GROUP BY queue"
    return dict(connection.all(sql, list(statuses)))
