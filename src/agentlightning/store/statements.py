"""Every statement of the store, written in SQLAlchemy Core and compiled once.

Running a compiled statement on the driver's own cursor costs a few microseconds; going through SQLAlchemy's
connection each time costs several times that, and a store does little else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import ClauseElement, Select, Table, bindparam, case, func, literal_column, null, select, text, update

from agentlightning.store.schema import (
    DIALECT,
    OPEN,
    WAITING,
    attempts,
    contains_text,
    given,
    insert,
    is_one_of,
    resources,
    rollouts,
    spans,
    workers,
)


@dataclass(frozen=True, slots=True)
class Statement:
    """Compiled SQL, and the order in which it takes its parameters."""

    sql: str
    names: tuple[str, ...]


def prepare(clause: ClauseElement, *names: str) -> Statement:
    """Compile `clause`, whose parameters come in the order of `names`."""
    compiled = clause.compile(dialect=DIALECT)
    order = tuple(getattr(compiled, "positiontup", None) or ())
    if order != names:
        raise AssertionError(f"parameters come in the order {order}, not {names}: {compiled}")
    return Statement(str(compiled), order)


def _columns(table: Table, without: tuple[str, ...] = ("key",)) -> tuple[str, ...]:
    return tuple(name for name in table.columns.keys() if name not in without)  # noqa: SIM118


def _insert(table: Table) -> Statement:
    names = _columns(table)
    return prepare(insert(table).values({name: bindparam(name) for name in names}), *names)


def _insert_once(table: Table, *unique: str) -> Statement:
    names = _columns(table)
    values = insert(table).values({name: bindparam(name) for name in names})
    return prepare(values.on_conflict_do_nothing(index_elements=list(unique)), *names)


# -- rollouts --------------------------------------------------------------------------------------------------------

ROLLOUT = tuple(rollouts.columns)

INSERT_ROLLOUT = _insert(rollouts)
INSERT_ROLLOUT_ONCE = _insert_once(rollouts, "rollout_id")

FIND_ROLLOUT = prepare(select(*ROLLOUT).where(rollouts.c.rollout_id == given("id")), "the_id")

NEXT_ROLLOUTS = prepare(
    select(*ROLLOUT).where(WAITING).order_by(rollouts.c.key).limit(bindparam("many")).offset(literal_column("0")),
    "many",
)

MOVE_ROLLOUT = prepare(
    update(rollouts)
    .where(rollouts.c.key == given("key"))
    .values(status=given("status"), end_time=given("end_time"), attempts=given("attempts")),
    "the_status",
    "the_end_time",
    "the_attempts",
    "the_key",
)

CHANGE_ROLLOUT = prepare(
    update(rollouts)
    .where(rollouts.c.key == given("key"))
    .values(
        input=given("input"),
        mode=given("mode"),
        resources_id=given("resources_id"),
        config=given("config"),
        metadata=given("metadata"),
    ),
    "the_input",
    "the_mode",
    "the_resources_id",
    "the_config",
    "the_metadata",
    "the_key",
)

FINISHED_AMONG = prepare(
    select(*ROLLOUT).where(
        is_one_of(rollouts.c.rollout_id, "ids"), text("status IN ('succeeded', 'failed', 'cancelled')")
    ),
    "ids",
)

KNOWN_AMONG = prepare(select(rollouts.c.rollout_id).where(is_one_of(rollouts.c.rollout_id, "ids")), "ids")


@cache
def query_rollouts(status: bool, ids: bool, contains: bool) -> Statement:
    """Rollouts by the filters that are given, each a parameter; then limit and offset."""
    names: list[str] = []
    query: Select[Any] = select(*ROLLOUT)
    if status:
        query = query.where(is_one_of(rollouts.c.status, "statuses"))
        names.append("statuses")
    if ids:
        query = query.where(is_one_of(rollouts.c.rollout_id, "ids"))
        names.append("ids")
    if contains:
        query = query.where(contains_text(rollouts.c.rollout_id, "part"))
        names.append("part")
    query = query.order_by(rollouts.c.key).limit(bindparam("many")).offset(bindparam("skip"))
    return prepare(query, *names, "many", "skip")


# -- attempts --------------------------------------------------------------------------------------------------------

ATTEMPT = (
    attempts.c.attempt_id,
    attempts.c.sequence_id,
    attempts.c.status,
    attempts.c.start_time,
    attempts.c.end_time,
    attempts.c.worker_id,
    attempts.c.last_heartbeat_time,
    attempts.c.metadata,
)
"""What an `Attempt` is made of."""

STATE = (
    attempts.c.key,
    attempts.c.superseded,
    attempts.c.last_span,
    attempts.c.timeout_at,
    attempts.c.silence,
    rollouts.c.key,
    rollouts.c.rollout_id,
    rollouts.c.status,
    rollouts.c.config,
    rollouts.c.attempts,
    rollouts.c.end_time,
)
"""What deciding about an attempt needs besides."""

_joined = select(*ATTEMPT, *STATE).join_from(attempts, rollouts, attempts.c.rollout_key == rollouts.c.key)

INSERT_ATTEMPT = _insert(attempts)

FIND_ATTEMPT = prepare(
    _joined.where(attempts.c.attempt_id == given("id"), rollouts.c.rollout_id == given("rollout")),
    "the_id",
    "the_rollout",
)

LATEST_ATTEMPT = prepare(
    _joined.where(rollouts.c.rollout_id == given("rollout"), attempts.c.sequence_id == rollouts.c.attempts),
    "the_rollout",
)

ATTEMPTS_OF = prepare(
    _joined.where(rollouts.c.rollout_id == given("rollout")).order_by(attempts.c.sequence_id), "the_rollout"
)

TIMED_OUT = prepare(
    _joined.where(text("timeout_at IS NOT NULL"), attempts.c.timeout_at <= given("now"))
    .order_by(attempts.c.timeout_at)
    .limit(bindparam("many"))
    .offset(literal_column("0")),
    "the_now",
    "many",
)

FELL_SILENT = prepare(
    _joined.where(text("silent_at IS NOT NULL"), attempts.c.silent_at <= given("now"))
    .order_by(attempts.c.silent_at)
    .limit(bindparam("many"))
    .offset(literal_column("0")),
    "the_now",
    "many",
)

NEXT_TIMEOUT = prepare(select(func.min(attempts.c.timeout_at)).where(text("timeout_at IS NOT NULL")))
NEXT_SILENCE = prepare(select(func.min(attempts.c.silent_at)).where(text("silent_at IS NOT NULL")))

MOVE_ATTEMPT = prepare(
    update(attempts)
    .where(attempts.c.key == given("key"))
    .values(
        status=given("status"),
        end_time=given("end_time"),
        metadata=given("metadata"),
        timeout_at=given("timeout_at"),
        silent_at=given("silent_at"),
    ),
    "the_status",
    "the_end_time",
    "the_metadata",
    "the_timeout_at",
    "the_silent_at",
    "the_key",
)

SIGN_OF_LIFE = prepare(
    update(attempts)
    .where(attempts.c.key == given("key"))
    .values(
        last_heartbeat_time=given("time"),
        last_span=given("last_span"),
        silent_at=case((text("status IN ('preparing', 'running')"), given("now") + attempts.c.silence), else_=null()),
    ),
    "the_time",
    "the_last_span",
    "the_now",
    "the_key",
)

CHANGE_ATTEMPT = prepare(
    update(attempts)
    .where(attempts.c.key == given("key"))
    .values(worker_id=given("worker_id"), metadata=given("metadata")),
    "the_worker_id",
    "the_metadata",
    "the_key",
)

RESERVE_SPAN = prepare(
    update(attempts).where(attempts.c.key == given("key")).values(last_span=given("last_span")),
    "the_last_span",
    "the_key",
)

FENCE = prepare(
    update(attempts)
    .where(attempts.c.rollout_key == given("rollout"), attempts.c.superseded == literal_column("0"))
    .values(superseded=literal_column("1"), timeout_at=null(), silent_at=null()),
    "the_rollout",
)

DELETE_ATTEMPT = prepare(attempts.delete().where(attempts.c.key == given("key")), "the_key")

# -- spans -----------------------------------------------------------------------------------------------------------

SPAN = (
    rollouts.c.rollout_id,
    attempts.c.attempt_id,
    *(spans.c[name] for name in _columns(spans, ("key", "attempt_key"))),
)

INSERT_SPAN = _insert_once(spans, "attempt_key", "span_id")

_spans = (
    select(*SPAN)
    .join_from(rollouts, attempts, attempts.c.rollout_key == rollouts.c.key)
    .join(spans, spans.c.attempt_key == attempts.c.key)
)

SPANS_BY_ID = prepare(
    _spans.where(spans.c.attempt_key == given("attempt"), is_one_of(spans.c.span_id, "ids")), "the_attempt", "ids"
)

SPANS_OF_LATEST = prepare(
    _spans.where(is_one_of(rollouts.c.rollout_id, "ids"), attempts.c.sequence_id == rollouts.c.attempts).order_by(
        spans.c.sequence_id, spans.c.key
    ),
    "ids",
)


@cache
def query_spans(attempt: str, name: bool) -> Statement:
    """Spans of a rollout; `attempt` is "all", "latest" or "one"."""
    names = ["the_rollout"]
    query = _spans.where(rollouts.c.rollout_id == given("rollout"))
    if attempt == "latest":
        query = query.where(attempts.c.sequence_id == rollouts.c.attempts)
    if attempt == "one":
        query = query.where(attempts.c.attempt_id == given("attempt"))
        names.append("the_attempt")
    if name:
        query = query.where(spans.c.name == given("name"))
        names.append("the_name")
    query = query.order_by(attempts.c.sequence_id, spans.c.sequence_id, spans.c.key)
    return prepare(query.limit(bindparam("many")).offset(bindparam("skip")), *names, "many", "skip")


# -- resources -------------------------------------------------------------------------------------------------------

RESOURCES = (resources.c.resources_id, resources.c.version, resources.c.create_time, resources.c.body)

INSERT_RESOURCES = _insert_once(resources, "resources_id")
FIND_RESOURCES = prepare(select(*RESOURCES).where(resources.c.resources_id == given("id")), "the_id")
KNOWN_RESOURCES = prepare(select(resources.c.key).where(resources.c.resources_id == given("id")), "the_id")
LATEST_RESOURCES = prepare(
    select(*RESOURCES).order_by(resources.c.version.desc()).limit(literal_column("1")).offset(literal_column("0"))
)
LAST_VERSION = prepare(select(func.coalesce(func.max(resources.c.version), literal_column("0"))))
QUERY_RESOURCES = prepare(
    select(*RESOURCES).order_by(resources.c.key).limit(bindparam("many")).offset(bindparam("skip")), "many", "skip"
)
CHANGE_RESOURCES = prepare(
    update(resources)
    .where(resources.c.resources_id == given("id"))
    .values(version=given("version"), create_time=given("time"), body=given("body")),
    "the_version",
    "the_time",
    "the_body",
    "the_id",
)

# -- workers ---------------------------------------------------------------------------------------------------------

_worker = insert(workers).values(
    worker_id=bindparam("worker_id"), last_heartbeat_time=bindparam("time"), stats=bindparam("stats")
)

HEAR_WORKER = prepare(
    _worker.on_conflict_do_update(
        index_elements=["worker_id"], set_={"last_heartbeat_time": _worker.excluded.last_heartbeat_time}
    ),
    "worker_id",
    "time",
    "stats",
)

CHANGE_WORKER = prepare(
    _worker.on_conflict_do_update(
        index_elements=["worker_id"],
        set_={"last_heartbeat_time": _worker.excluded.last_heartbeat_time, "stats": _worker.excluded.stats},
    ),
    "worker_id",
    "time",
    "stats",
)

KEEP_ATTEMPTS_ALIVE = prepare(
    update(attempts)
    .where(OPEN, attempts.c.worker_id == given("worker"), attempts.c.superseded == literal_column("0"))
    .values(last_heartbeat_time=given("time"), silent_at=given("now") + attempts.c.silence),
    "the_time",
    "the_now",
    "the_worker",
)

_workers = select(workers.c.worker_id, workers.c.last_heartbeat_time, workers.c.stats)
WORKERS = prepare(_workers.order_by(workers.c.key))
FIND_WORKER = prepare(_workers.where(workers.c.worker_id == given("worker")), "the_worker")

_in_hand = (
    select(rollouts.c.rollout_id, attempts.c.attempt_id)
    .join_from(attempts, rollouts, attempts.c.rollout_key == rollouts.c.key)
    .where(
        text("attempts.status IN ('preparing', 'running')"),
        attempts.c.worker_id.is_not(null()),
        attempts.c.superseded == literal_column("0"),
    )
)
WORK_IN_HAND = prepare(
    _in_hand.with_only_columns(attempts.c.worker_id, *_in_hand.selected_columns).order_by(attempts.c.key)
)
"""(worker_id, rollout_id, attempt_id), the newest last."""
WORK_OF = prepare(
    _in_hand.where(attempts.c.worker_id == given("worker"))
    .order_by(attempts.c.key.desc())
    .limit(literal_column("1"))
    .offset(literal_column("0")),
    "the_worker",
)

# -- counts ----------------------------------------------------------------------------------------------------------

ROLLOUTS_BY_STATUS = prepare(select(rollouts.c.status, func.count()).group_by(rollouts.c.status))
COUNTS = {
    table.name: prepare(select(func.count()).select_from(table)) for table in (attempts, spans, resources, workers)
}
