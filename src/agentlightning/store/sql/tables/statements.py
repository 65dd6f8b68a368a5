"""Every statement about rollouts, attempts, resources, workers, queues, totals, idempotency keys, clocks and retention.

Written once in SQLAlchemy Core for all dialects; see backend.py for how they are executed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Select,
    and_,
    bindparam,
    case,
    delete,
    func,
    literal_column,
    null,
    or_,
    select,
    text,
    update,
)

from agentlightning.store.sql.tables.backend import Insert, Statement, Update
from agentlightning.store.sql.tables.schema import (
    OPEN,
    WAITING,
    answered_calls,
    attempts,
    clocks,
    columns,
    contains_text,
    counts,
    in_list,
    param,
    position,
    queues,
    resources,
    rollouts,
    workers,
)

_zero = literal_column("0")

# -- rollouts --------------------------------------------------------------------------------------------------------

ROLLOUT = tuple(rollouts.columns)

INSERT_ROLLOUTS = Insert(rollouts, columns(rollouts))
UPDATE_ROLLOUT_STATUS = Update(rollouts, ("key", "status", "end_time", "attempts"))
UPDATE_ROLLOUTS = Update(
    rollouts,
    ("key", "status", "end_time", "attempts", "input", "mode", "resources_id", "config", "metadata"),
)

_by_ids = select(*ROLLOUT).where(in_list(rollouts.c.rollout_id, "ids"))
LOCK_ROLLOUTS = Statement(_by_ids.order_by(rollouts.c.key).with_for_update(), ("ids",))
"""Rollouts by id, locked until the transaction ends."""
FIND_ROLLOUT = Statement(select(*ROLLOUT).where(rollouts.c.rollout_id == param("id")), ("the_id",))
ROLLOUT_POSITION = Statement(select(position()).where(rollouts.c.rollout_id == param("id")), ("the_id",))

FINISHED_AMONG = Statement(
    _by_ids.where(text("status IN ('succeeded', 'failed', 'cancelled')")),
    ("ids",),
)
KNOWN_AMONG = Statement(select(rollouts.c.rollout_id).where(in_list(rollouts.c.rollout_id, "ids")), ("ids",))

_next = (
    select(rollouts.c.priority, rollouts.c.key, rollouts.c.rollout_id)
    .where(
        WAITING,
        rollouts.c.queue == param("queue"),
        rollouts.c.priority <= param("priority"),
        or_(rollouts.c.priority < param("priority"), rollouts.c.key >= param("key")),
    )
    .order_by(text("priority DESC"), rollouts.c.key)
    .limit(bindparam("many"))
    .offset(_zero)
)
NEXT_WAITING = Statement(_next.with_for_update(skip_locked=True), ("the_queue", "the_priority", "the_key", "many"))
"""(priority, key, rollout_id) in claiming order from a position on, without the rows that another server has locked."""
COUNT_OPEN = Statement(select(func.count()).where(OPEN, rollouts.c.queue == param("queue")), ("the_queue",))

DELETE_ROLLOUTS = Statement(delete(rollouts).where(in_list(rollouts.c.key, "keys")), ("keys",))

Filters = tuple[bool, bool, bool, bool, bool]
"""Which filters are used: status, id, part of the id, queue, mode."""


_Conditions = tuple[tuple[ColumnElement[bool], str], ...]
"""Conditions and the parameter of each."""
_BY_ONE_STATUS = rollouts.c.status == bindparam("statuses"), "statuses"
_BY_STATUS = in_list(rollouts.c.status, "statuses"), "statuses"
_BY_OTHERS = (
    (in_list(rollouts.c.rollout_id, "ids"), "ids"),
    (contains_text(rollouts.c.rollout_id, "part"), "part"),
    (in_list(rollouts.c.queue, "queues"), "queues"),
    (in_list(rollouts.c.mode, "modes"), "modes"),
)


def _filtered(
    query: Select[Any], filters: Sequence[bool], conditions: _Conditions, any_of: bool
) -> tuple[Select[Any], list[str]]:
    wanted = [each for is_given, each in zip(filters, conditions, strict=True) if is_given]
    if wanted:
        query = query.where((or_ if any_of else and_)(*(condition for condition, _ in wanted)))
    return query, [name for _, name in wanted]


def _ordered(
    query: Select[Any], place: ColumnElement[Any], column: ColumnElement[Any] | None, descending: bool
) -> Select[Any]:
    """Order by a column, NULL first, then by creation; descending reverses all of it."""
    columns = [place] if column is None else [column, place]
    columns = [each.desc() for each in columns] if descending else columns
    if column is not None and getattr(column, "nullable", True):
        columns[0] = columns[0].nulls_last() if descending else columns[0].nulls_first()
    return query.order_by(*columns)


@cache
def query_rollouts(
    filters: Filters,
    one_status: bool,
    after: bool,
    field: str | None = None,
    descending: bool = False,
    any_of: bool = False,
) -> Statement:
    """Rollouts with their positions. Its parameters: one for each filter used (with `one_status`, a status), the last
    position (in order of creation), the position to continue after, limit and offset."""
    place = position()
    conditions = _BY_ONE_STATUS if one_status else _BY_STATUS, *_BY_OTHERS
    query, names = _filtered(select(*ROLLOUT, place.label("place")), filters, conditions, any_of)
    if field is None and not descending:
        query = query.where(place <= param("last"))
        names.append("the_last")
    if after:
        query = query.where(place < param("place") if descending else place > param("place"))
        names.append("the_place")
    query = _ordered(query, place, None if field is None else rollouts.c[field], descending)
    return Statement(query.limit(bindparam("many")).offset(bindparam("skip")), (*names, "many", "skip"))


@cache
def count_rollouts(filters: Filters, any_of: bool = False) -> Statement:
    query, names = _filtered(select(func.count()).select_from(rollouts), filters, (_BY_STATUS, *_BY_OTHERS), any_of)
    return Statement(query, tuple(names))


# -- attempts --------------------------------------------------------------------------------------------------------

ATTEMPT = tuple(attempts.columns)

INSERT_ATTEMPTS = Insert(attempts, columns(attempts))
UPDATE_ATTEMPTS = Update(
    attempts, columns(attempts, "rollout_key", "sequence_id", "attempt_id", "start_time", "silence")
)

ATTEMPTS_AMONG = Statement(
    select(*ATTEMPT).where(in_list(attempts.c.rollout_key, "keys")).order_by(attempts.c.sequence_id), ("keys",)
)
"""The attempts of some rollouts, by `sequence_id`."""
_owners = select(attempts.c.attempt_id, rollouts.c.rollout_id).join_from(
    attempts, rollouts, attempts.c.rollout_key == rollouts.c.key
)
OWNERS = Statement(_owners.where(in_list(attempts.c.attempt_id, "ids")), ("ids",))
"""(attempt_id, rollout_id)"""
ATTEMPTS_OF = Statement(
    select(*ATTEMPT)
    .join_from(rollouts, attempts, attempts.c.rollout_key == rollouts.c.key)
    .where(rollouts.c.rollout_id == param("rollout"))
    .order_by(attempts.c.sequence_id),
    ("the_rollout",),
)
ATTEMPTS_PAGE = Statement(
    select(*ATTEMPT)
    .join_from(rollouts, attempts, attempts.c.rollout_key == rollouts.c.key)
    .where(rollouts.c.rollout_id == param("rollout"), attempts.c.sequence_id > param("skip"))
    .order_by(attempts.c.sequence_id)
    .limit(bindparam("many"))
    .offset(_zero),
    ("the_rollout", "the_skip", "many"),
)
"""Attempts are numbered from 1, without gaps."""
LATEST_ATTEMPT = Statement(
    select(*ATTEMPT)
    .join_from(rollouts, attempts, attempts.c.rollout_key == rollouts.c.key)
    .where(rollouts.c.rollout_id == param("rollout"), attempts.c.sequence_id == rollouts.c.attempts),
    ("the_rollout",),
)
LATEST_ATTEMPTS = Statement(
    select(*ATTEMPT, rollouts.c.rollout_id)
    .join_from(rollouts, attempts, attempts.c.rollout_key == rollouts.c.key)
    .where(in_list(rollouts.c.rollout_id, "ids"), attempts.c.sequence_id == rollouts.c.attempts),
    ("ids",),
)
FIND_ATTEMPT = Statement(
    select(*ATTEMPT, rollouts.c.rollout_id)
    .join_from(attempts, rollouts, attempts.c.rollout_key == rollouts.c.key)
    .where(attempts.c.attempt_id == param("id")),
    ("the_id",),
)


def _due(column: ColumnElement[Any], condition: str) -> Statement:
    due = _owners.where(text(condition), column <= param("now")).order_by(column)
    return Statement(due.limit(bindparam("many")).offset(_zero), ("the_now", "many"))


TIMED_OUT = _due(attempts.c.timeout_at, "timeout_at IS NOT NULL")
FELL_SILENT = _due(attempts.c.silent_at, "silent_at IS NOT NULL")
NEXT_TIMEOUT = Statement(select(func.min(attempts.c.timeout_at)).where(text("timeout_at IS NOT NULL")))
NEXT_SILENCE = Statement(select(func.min(attempts.c.silent_at)).where(text("silent_at IS NOT NULL")))

DELETE_ATTEMPTS = Statement(delete(attempts).where(in_list(attempts.c.key, "keys")), ("keys",))

# -- resources -------------------------------------------------------------------------------------------------------

RESOURCES = tuple(column for column in resources.columns if column.name != "key")

INSERT_RESOURCES = Insert(resources, columns(resources, "key"))
FIND_RESOURCES = Statement(select(*RESOURCES).where(resources.c.resources_id == param("id")), ("the_id",))
DELETE_RESOURCES = Statement(delete(resources).where(resources.c.resources_id == param("id")), ("the_id",))
RESOURCES_KEY = Statement(select(resources.c.key).where(resources.c.resources_id == param("id")), ("the_id",))
LATEST_RESOURCES = Statement(
    select(*RESOURCES).order_by(resources.c.version.desc()).limit(literal_column("1")).offset(_zero)
)
LAST_VERSION = Statement(select(func.coalesce(func.max(resources.c.version), _zero)))


@cache
def query_resources(exact: bool, part: bool, field: str | None = None, descending: bool = False) -> Statement:
    """Its parameters: the key to continue after, one for each filter by id, limit and offset."""
    query, names = select(*RESOURCES).where(resources.c.key > param("key")), ["the_key"]
    if exact:
        query = query.where(resources.c.resources_id == param("id"))
        names.append("the_id")
    if part:
        query = query.where(contains_text(resources.c.resources_id, "part"))
        names.append("part")
    column = None if field is None else resources.c[field]
    if field == "update_time":
        column = func.coalesce(resources.c.update_time, resources.c.create_time)
    query = _ordered(query, resources.c.key, column, descending)
    return Statement(query.limit(bindparam("many")).offset(bindparam("skip")), (*names, "many", "skip"))


CHANGE_RESOURCES = Statement(
    update(resources)
    .where(resources.c.resources_id == param("id"))
    .values(version=param("version"), body=param("body"), update_time=param("time")),
    ("the_version", "the_body", "the_time", "the_id"),
)

# -- workers ---------------------------------------------------------------------------------------------------------

WORKER = tuple(column for column in workers.columns if column.name != "key")
WRITE_WORKERS = Insert(
    workers, columns(workers, "key"), unique=("worker_id",), replace=columns(workers, "key", "worker_id")
)
LOCK_WORKERS = Statement(
    select(*WORKER).where(in_list(workers.c.worker_id, "ids")).order_by(workers.c.worker_id).with_for_update(),
    ("ids",),
)
FIND_WORKER = Statement(select(*WORKER).where(workers.c.worker_id == param("worker")), ("the_worker",))
WORKER_KEY = Statement(select(workers.c.key).where(workers.c.worker_id == param("worker")), ("the_worker",))
_has_open_attempts = (
    select(attempts.c.key)
    .where(OPEN, attempts.c.worker_id == workers.c.worker_id, attempts.c.superseded == _zero)
    .correlate(workers)
    .exists()
)
_worker_status = case(
    (workers.c.lost != _zero, literal_column("'lost'")),
    (_has_open_attempts, literal_column("'busy'")),
    else_=literal_column("'idle'"),
)


@cache
def query_workers(filters: tuple[bool, bool], any_of: bool) -> Statement:
    """By status and a part of the id. Its parameters: the key to continue after, one for each filter used, limit and
    offset."""
    conditions = (in_list(_worker_status, "statuses"), "statuses"), (contains_text(workers.c.worker_id, "part"), "part")
    query, names = _filtered(select(*WORKER).where(workers.c.key > param("key")), filters, conditions, any_of)
    query = query.order_by(workers.c.key).limit(bindparam("many")).offset(bindparam("skip"))
    return Statement(query, ("the_key", *names, "many", "skip"))


LOST_WORKERS = Statement(
    select(workers.c.worker_id)
    .where(text("lost_at IS NOT NULL"), workers.c.lost_at <= param("now"))
    .order_by(workers.c.lost_at)
    .limit(bindparam("many"))
    .offset(_zero),
    ("the_now", "many"),
)
NEXT_LOST = Statement(select(func.min(workers.c.lost_at)).where(text("lost_at IS NOT NULL")))

OPEN_ATTEMPTS_OF_WORKERS = Statement(
    select(attempts.c.worker_id, rollouts.c.rollout_id, attempts.c.attempt_id)
    .join_from(attempts, rollouts, attempts.c.rollout_key == rollouts.c.key)
    .where(
        text("attempts.status IN ('preparing', 'running')"),
        in_list(attempts.c.worker_id, "workers"),
        attempts.c.superseded == _zero,
    )
    .order_by(attempts.c.key),
    ("workers",),
)
"""(worker_id, rollout_id, attempt_id), the newest last."""

# -- queues ----------------------------------------------------------------------------------------------------------

WRITE_QUEUES = Insert(queues, ("name", "max_open"), unique=("name",), replace=("max_open",))
NAME_QUEUES = Insert(queues, ("name", "max_open"), unique=("name",))
ALL_QUEUES = Statement(select(queues.c.name, queues.c.max_open).order_by(queues.c.name))
LIMITED_QUEUES = Statement(
    select(queues.c.name, queues.c.max_open)
    .where(queues.c.max_open.is_not(null()))
    .order_by(queues.c.name)
    .with_for_update()
)
# -- counts ----------------------------------------------------------------------------------------------------------

ADD_COUNTS = Insert(counts, columns(counts), unique=("shard", "name", "queue"), add=("number",))
COUNTS_BY_NAME = Statement(select(counts.c.name, func.sum(counts.c.number)).group_by(counts.c.name))
COUNTS_BY_QUEUE = Statement(
    select(counts.c.queue, func.sum(counts.c.number)).where(in_list(counts.c.name, "names")).group_by(counts.c.queue),
    ("names",),
)
COUNT_OF = Statement(select(func.sum(counts.c.number)).where(counts.c.name == param("name")), ("the_name",))
ROWS_OF = {str(table.name): Statement(select(func.count()).select_from(table)) for table in (resources, workers)}

# -- answered calls --------------------------------------------------------------------------------------------------

FIND_ANSWERED = Statement(
    select(answered_calls.c.key, answered_calls.c.digest, answered_calls.c.answer).where(
        in_list(answered_calls.c.key, "keys")
    ),
    ("keys",),
)
INSERT_ANSWERED = Insert(answered_calls, ("key", "digest", "answered_at", "answer"))
OLDEST_ANSWERED = Statement(
    select(answered_calls.c.key, answered_calls.c.answered_at, func.length(answered_calls.c.answer))
    .order_by(answered_calls.c.answered_at)
    .limit(bindparam("many"))
    .offset(_zero)
    .with_for_update(skip_locked=True),
    ("many",),
)
"""The oldest ones, without those that another server is removing."""
DELETE_ANSWERED = Statement(delete(answered_calls).where(in_list(answered_calls.c.key, "keys")), ("keys",))

# -- the clock -------------------------------------------------------------------------------------------------------

CLOCK = Statement(select(clocks.c.reading, clocks.c.steady).where(clocks.c.name == text("''")))
WRITE_CLOCK = Insert(clocks, ("name", "reading", "steady"), unique=("name",), replace=("reading", "steady"))
START_CLOCK = Insert(clocks, ("name", "reading", "steady"), unique=("name",))
LAST_SIGN_OF_LIFE = Statement(
    text(
        "SELECT max(seconds) FROM (SELECT max(start_time) AS seconds FROM rollouts UNION ALL "
        "SELECT max(end_time) FROM rollouts UNION ALL SELECT max(start_time) FROM attempts UNION ALL "
        "SELECT max(end_time) FROM attempts UNION ALL SELECT max(last_heartbeat_time) FROM workers) AS signs"
    )
)
"""When anything last happened in a database without a clock."""

# -- retention -------------------------------------------------------------------------------------------------------

_sums = [
    select(func.coalesce(func.sum(column), _zero)).where(attempts.c.rollout_key == rollouts.c.key).scalar_subquery()
    for column in (attempts.c.spans, attempts.c.bytes)
]
ROLLOUT_SIZES = Statement(
    select(
        rollouts.c.key,
        rollouts.c.rollout_id,
        rollouts.c.end_time,
        _sums[0],
        _sums[1] + func.length(rollouts.c.input) + func.length(rollouts.c.metadata) + literal_column("400"),
    )
    .where(
        text("rollouts.end_time IS NOT NULL"),
        rollouts.c.end_time >= param("time"),
        or_(rollouts.c.end_time > param("time"), rollouts.c.key > param("key")),
    )
    .order_by(rollouts.c.end_time, rollouts.c.key)
    .limit(bindparam("many"))
    .offset(_zero),
    ("the_time", "the_key", "many"),
)
"""(key, rollout_id, end_time, spans, bytes) of finished rollouts after a position, by end time. 400 is the size of the
other columns."""
