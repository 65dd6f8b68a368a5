"""Queries of rollouts, attempts, resources, workers, queues and totals; the fields and the order of lists.

What a method of the contract reads is a function here, or in spans.py, of a connection and the arguments of the method.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple, Self, TypeVar

from agentlightning.errors import ConfigError, NotFoundError, StoreError
from agentlightning.resources import ResourcesUpdate
from agentlightning.rollouts import ROLLOUT_TRANSITIONS, WAITING, Attempt, Rollout
from agentlightning.store import validation
from agentlightning.store.sql import mapping, schema
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

    def sort(self, items: Iterable[Item]) -> list[Item]:
        """The items in this order: None first, stable among equal values; descending reverses all of it."""
        ordered = list(items)
        if self.descending:
            ordered.reverse()
        if self.field is not None:
            value_of = attrgetter(self.field)
            ordered.sort(key=lambda item: ((value := value_of(item)) is not None, value), reverse=self.descending)
        return ordered

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


# -- lists -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Listing:
    """A kind of list: where its items are read, and what they are filtered and sorted by."""

    kind: str
    source: str
    """Its SELECT up to the conditions."""
    position: str
    """The SQL of the place of an item in the natural order."""
    key: str
    """The column of the id that `after` takes."""
    filters: Mapping[str, str]
    """By argument: a column. The end of the argument's name says how the two are compared."""
    computed: Mapping[str, str] = field(default_factory=dict[str, str])
    """The SQL of fields that are no columns."""

    def column(self, name: str | None) -> str | None:
        return None if name is None else self.computed.get(name, f"{self.position[0]}.{name}")


class Filters:
    """Conditions with the value of each. Raises ConfigError for a value that is no filter."""

    def __init__(self, columns: Mapping[str, str], filter_logic: FilterLogic = "and", **given: Any) -> None:
        self.any_of = check_logic(filter_logic)
        """Whether one of them is enough."""
        self.values: dict[str, Any] = {}
        """By argument."""
        self._conditions: list[str] = []
        for name, column in columns.items():
            value = given.get(name)
            if value is None:
                continue
            if name.endswith("_in"):
                condition, value = f"{column} = ANY (?)", validation.check_texts(value, name)
            else:
                validation.check_text(value, name)
                condition = f"strpos({column}, ?) > 0" if name.endswith("_contains") else f"{column} = ?"
            self._conditions.append(condition)
            self.values[name] = value

    def where(self, others: Iterable[str] = ()) -> str:
        """The WHERE of a statement, with more conditions that must all be met."""
        joined = (" OR " if self.any_of else " AND ").join(self._conditions)
        conditions = [*([f"({joined})"] if joined else []), *others]
        return f"WHERE {' AND '.join(conditions)}" if conditions else ""


def _page(
    connection: Connection,
    listing: Listing,
    *,
    sort_by: str | None = None,
    sort_order: SortOrder = "asc",
    after: str | None = None,
    limit: int = -1,
    offset: int = 0,
    **given: Any,
) -> list[Any]:
    """The rows of one page of a list, each with its position as its last column. given: the filters."""
    filters, position = Filters(listing.filters, **given), listing.position
    limit, offset = validation.check_page(limit, offset, after)
    order = Order.of(listing.kind, sort_by, sort_order, after)
    bounds: dict[str, int] = {}
    if listing.kind == "rollouts":
        position = connection.position
        if order.natural and (after is not None or limit < validation.NO_LIMIT):
            bounds[f"{position} <= ?"] = connection.last_position()
    if after is not None:
        found = connection.all(f"{listing.source.format(position)} WHERE {listing.key} = ?", after)
        if not found:
            raise NotFoundError(f"no {listing.key[2:]} {after!r} in this store to continue after")
        bounds[f"{position} {'<' if order.descending else '>'} ?"] = found[0][-1]
    values: list[Any] = [*filters.values.values(), *bounds.values()]
    where, ordered = filters.where(bounds), order.sql(position, listing.column(order.field))
    sql = f"{listing.source.format(position)} {where} {ordered} LIMIT ? OFFSET ?"
    if listing.kind != "rollouts" or "status_in" not in filters.values or filters.any_of or order.field is not None:
        return connection.all(sql, *values, limit, offset)
    # An index has the rollouts of each status in order.
    sql, end = sql.replace("r.status = ANY (?)", "r.status = ?", 1), min(limit + offset, validation.NO_LIMIT)
    pages = [connection.all(sql, each, *values[1:], end, 0) for each in dict.fromkeys(values[0])]
    return sorted((row for page in pages for row in page), key=itemgetter(-1), reverse=order.descending)[offset:end]


# -- rollouts --------------------------------------------------------------------------------------------------------

_ROLLOUTS: Final = Listing(
    "rollouts",
    f"SELECT {schema.select('r', schema.ROLLOUT)}, {{}} FROM rollouts r",
    "r.key",
    "r.rollout_id",
    {
        "status_in": "r.status",
        "rollout_id_in": "r.rollout_id",
        "rollout_id_contains": "r.rollout_id",
        "queue_in": "r.queue",
        "mode_in": "r.mode",
    },
)


def rollouts(connection: Connection, *, newest_first: bool = False, **given: Any) -> list[Rollout]:
    if newest_first and given.get("sort_by") is None:
        given["sort_order"] = "desc"
    return [mapping.to_rollout(schema.RolloutColumns(*row[:-1])) for row in _page(connection, _ROLLOUTS, **given)]


def count_rollouts(connection: Connection, **given: Any) -> int:
    filters = Filters(_ROLLOUTS.filters, **given)
    by = filters.values
    if not by.keys() <= {"status_in", "queue_in"} or (filters.any_of and len(by) > 1):
        return int(connection.all(f"SELECT count(*) FROM rollouts r {filters.where()}", *by.values())[0][0])
    totals = _totals_by_queue(connection, by.get("status_in", list(ROLLOUT_TRANSITIONS)))
    return sum(number for queue, number in totals.items() if queue in by.get("queue_in", totals))


def _check_known(connection: Connection, rollout_ids: list[str]) -> None:
    """Raises NotFoundError for the first of these ids that is unknown."""
    found = connection.all("SELECT rollout_id FROM rollouts WHERE rollout_id = ANY (?)", rollout_ids)
    known = {rollout_id for (rollout_id,) in found}
    for rollout_id in rollout_ids:
        if rollout_id not in known:
            raise NotFoundError(f"no rollout {rollout_id!r} in this store")


_ROLLOUT: Final = f"SELECT {schema.select('r', schema.ROLLOUT)} FROM rollouts r WHERE r.rollout_id = ?"


def rollout(connection: Connection, rollout_id: str) -> Rollout | None:
    rows = connection.all(_ROLLOUT, rollout_id)
    return mapping.to_rollout(schema.RolloutColumns(*rows[0])) if rows else None


_FINISHED_AMONG: Final = (
    f"SELECT {schema.select('r', schema.ROLLOUT)} FROM rollouts r "
    "WHERE r.rollout_id = ANY (?) AND coalesce(r.status, '') IN ('succeeded', 'failed', 'cancelled')"
)
"""`coalesce` keeps SQLite from the index of the status, in which it would read every rollout that has finished."""


def finished(connection: Connection, rollout_ids: list[str]) -> list[Rollout]:
    """Those of these rollouts that have finished, in the same order. Raises NotFoundError for an unknown one."""
    rows = {row[1]: schema.RolloutColumns(*row) for row in connection.all(_FINISHED_AMONG, rollout_ids)}
    if len(rows) < len(rollout_ids):
        _check_known(connection, rollout_ids)
    return [mapping.to_rollout(rows[rollout_id]) for rollout_id in rollout_ids if rollout_id in rows]


# -- attempts --------------------------------------------------------------------------------------------------------

_ATTEMPTS: Final = Listing(
    "attempts",
    f"SELECT {schema.select('a', schema.ATTEMPT)}, r.rollout_id, a.sequence_id "
    "FROM rollouts r JOIN attempts a ON a.rollout_key = r.key",
    "a.sequence_id",
    "a.attempt_id",
    {"rollout_id": "r.rollout_id"},
)
_LATEST: Final = "AND a.sequence_id = r.attempt_count"


def _attempts(connection: Connection, condition: str, *values: Any) -> list[Attempt]:
    return _to_attempts(connection.all(f"{_ATTEMPTS.source} WHERE {condition}", *values))


def _to_attempts(rows: list[Any]) -> list[Attempt]:
    return [mapping.to_attempt(schema.AttemptColumns(*row[:-2]), row[-2]) for row in rows]


def attempts(connection: Connection, rollout_id: str, **given: Any) -> list[Attempt]:
    found = _to_attempts(_page(connection, _ATTEMPTS, rollout_id=rollout_id, **given))
    if not found:
        _check_known(connection, [rollout_id])
    return found


class AttemptKey(NamedTuple):
    key: int
    attempt_id: str
    spans: int


_KEYS_OF: Final = (
    "SELECT a.key, a.attempt_id, a.spans FROM rollouts r JOIN attempts a ON a.rollout_key = r.key "
    "WHERE r.rollout_id = ? ORDER BY a.sequence_id"
)


def attempts_of(connection: Connection, rollout_id: str, attempt_id: str | None) -> list[AttemptKey]:
    """All attempts of a rollout, one, or the "latest"."""
    found = [AttemptKey(*row) for row in connection.all(_KEYS_OF, rollout_id)]
    if not found:
        _check_known(connection, [rollout_id])
    if attempt_id is None:
        return found
    if attempt_id == "latest":
        return found[-1:]
    found = [each for each in found if each.attempt_id == attempt_id]
    if not found:
        raise NotFoundError(f"rollout {rollout_id!r} has no attempt {attempt_id!r}")
    return found


def attempt(connection: Connection, attempt_id: str) -> Attempt | None:
    found = _attempts(connection, "a.attempt_id = ?", attempt_id)
    return found[0] if found else None


def latest_attempt(connection: Connection, rollout_id: str) -> Attempt | None:
    found = _attempts(connection, f"r.rollout_id = ? {_LATEST}", rollout_id)
    if not found:
        _check_known(connection, [rollout_id])
    return found[0] if found else None


def latest_attempts(connection: Connection, rollout_ids: Sequence[str]) -> list[Attempt]:
    return _attempts(connection, f"r.rollout_id = ANY (?) {_LATEST}", rollout_ids)


# -- resources -------------------------------------------------------------------------------------------------------

_RESOURCES: Final = Listing(
    "resources",
    f"SELECT {schema.select('s', schema.RESOURCES)}, s.key FROM resources s",
    "s.key",
    "s.resources_id",
    {"resources_id": "s.resources_id", "resources_id_contains": "s.resources_id"},
    {"update_time": "coalesce(s.update_time, s.create_time)"},
)


def find_resources(connection: Connection, resources_id: str) -> Any:
    """The columns RESOURCES; None for an unknown id."""
    rows = connection.all(f"{_RESOURCES.source} WHERE s.resources_id = ?", resources_id)
    return rows[0][:-1] if rows else None


def resources(connection: Connection, resources_id: str) -> ResourcesUpdate | None:
    row = find_resources(connection, resources_id)
    return None if row is None else mapping.to_resources(row)


def latest_resources(connection: Connection) -> ResourcesUpdate | None:
    rows = connection.all(f"{_RESOURCES.source} ORDER BY s.version DESC LIMIT 1")
    return mapping.to_resources(rows[0][:-1]) if rows else None


def resources_page(connection: Connection, *, limit: int = -1, offset: int = 0, **given: Any) -> list[ResourcesUpdate]:
    """Those that cannot be read are left out and named in the log."""
    end = sum(validation.check_page(limit, offset))
    found, read = list[ResourcesUpdate](), 0
    while len(found) < end and (rows := _page(connection, _RESOURCES, limit=end - len(found), offset=read, **given)):
        read += len(rows)
        for row in rows:
            try:
                found.append(mapping.to_resources(row[:-1]))
            except StoreError as error:
                mapping.report(f"a list leaves out what cannot be read: {error}")
    return found[offset:]


# -- workers and queues ----------------------------------------------------------------------------------------------

_OPEN_OF: Final = f"FROM attempts a WHERE a.{schema.IS_OPEN} AND a.worker_id = w.worker_id AND a.superseded = 0"
_STATUS: Final = f"CASE WHEN w.lost <> 0 THEN 'lost' WHEN EXISTS (SELECT 1 {_OPEN_OF}) THEN 'busy' ELSE 'idle' END"
_NEWEST: Final = f"{_OPEN_OF} ORDER BY a.key DESC LIMIT 1"
_WORKERS: Final = Listing(
    "workers",
    f"SELECT {schema.select('w', schema.WORKER)}, w.key FROM workers w",
    "w.key",
    "w.worker_id",
    {"status_in": _STATUS, "worker_id_contains": "w.worker_id"},
    {
        "status": _STATUS,
        "current_attempt_id": f"(SELECT a.attempt_id {_NEWEST})",
        "current_rollout_id": f"(SELECT (SELECT rollout_id FROM rollouts WHERE key = a.rollout_key) {_NEWEST})",
        "open_attempts": f"(SELECT count(*) {_OPEN_OF})",
    },
)


def worker(connection: Connection, worker_id: str) -> Worker | None:
    rows = connection.all(f"{_WORKERS.source} WHERE w.worker_id = ?", worker_id)
    return _with_open_attempts(connection, rows)[0] if rows else None


def workers(connection: Connection, **given: Any) -> list[Worker]:
    return _with_open_attempts(connection, _page(connection, _WORKERS, **given))


def _with_open_attempts(connection: Connection, rows: list[Any]) -> list[Worker]:
    ids = [row[0] for row in rows]
    found = connection.all(OPEN_ATTEMPTS, ids) if ids else []
    newest = {worker_id: (rollout_id, attempt_id) for worker_id, rollout_id, attempt_id in found}
    counts = Counter(worker_id for worker_id, _, _ in found)
    return [mapping.to_worker(schema.WorkerColumns(*row[:-1]), newest.get(row[0]), counts[row[0]]) for row in rows]


def queues(connection: Connection) -> list[Queue]:
    waiting, unfinished = _totals_by_queue(connection, WAITING), _totals_by_queue(connection, schema.OPEN)
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
