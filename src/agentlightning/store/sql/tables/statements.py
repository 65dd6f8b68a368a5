"""Every statement of the store, written once in SQLAlchemy Core for every dialect. See database.py for how they run."""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Select,
    Table,
    and_,
    bindparam,
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
    contains_text,
    counts,
    in_list,
    pack_blocks,
    param,
    queues,
    resources,
    rollouts,
    span_packs,
    token_blocks,
    workers,
)


def _columns(table: Table, *without: str) -> tuple[str, ...]:
    return tuple(name for name in table.columns.keys() if name not in without)  # noqa: SIM118


_zero = literal_column("0")

# -- rollouts --------------------------------------------------------------------------------------------------------

ROLLOUT = tuple(rollouts.columns)

INSERT_ROLLOUTS = Insert(rollouts, _columns(rollouts))
UPDATE_ROLLOUT_STATUS = Update(rollouts, ("key", "status", "end_time", "attempts"))
UPDATE_ROLLOUTS = Update(
    rollouts,
    ("key", "status", "end_time", "attempts", "input", "mode", "resources_id", "config", "metadata"),
)

_by_ids = select(*ROLLOUT).where(in_list(rollouts.c.rollout_id, "ids"))
LOCK_ROLLOUTS = Statement(_by_ids.order_by(rollouts.c.key).with_for_update(), ("ids",))
"""Rollouts by id, locked until the transaction ends."""
FIND_ROLLOUT = Statement(select(*ROLLOUT).where(rollouts.c.rollout_id == param("id")), ("the_id",))
ROLLOUT_KEY = Statement(select(rollouts.c.key).where(rollouts.c.rollout_id == param("id")), ("the_id",))

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
"""(priority, key, rollout_id), from a place on, in the order of claiming; what others are claiming is passed over."""
COUNT_OPEN = Statement(select(func.count()).where(OPEN, rollouts.c.queue == param("queue")), ("the_queue",))

DELETE_ROLLOUTS = Statement(delete(rollouts).where(in_list(rollouts.c.key, "keys")), ("keys",))

Filters = tuple[bool, bool, bool, bool, bool]
"""Whether there is a filter by status, id, part of the id, queue, mode."""


def _filtered(query: Select[Any], filters: Filters, any_of: bool) -> tuple[Select[Any], list[str]]:
    conditions: tuple[tuple[ColumnElement[bool], str], ...] = (
        (in_list(rollouts.c.status, "statuses"), "statuses"),
        (in_list(rollouts.c.rollout_id, "ids"), "ids"),
        (contains_text(rollouts.c.rollout_id, "part"), "part"),
        (in_list(rollouts.c.queue, "queues"), "queues"),
        (in_list(rollouts.c.mode, "modes"), "modes"),
    )
    wanted = [each for is_given, each in zip(filters, conditions, strict=True) if is_given]
    if wanted:
        query = query.where((or_ if any_of else and_)(*(condition for condition, _ in wanted)))
    return query, [name for _, name in wanted]


def _ordered(query: Select[Any], table: Table, column: ColumnElement[Any] | None, descending: bool) -> Select[Any]:
    """By a column, a missing value first; rows of the same value in order of creation. Descending, all of it turned
    round."""
    last = table.c.key.desc() if descending else table.c.key
    if column is None:
        return query.order_by(last)
    return query.order_by(column.desc().nulls_last() if descending else column.nulls_first(), last)


@cache
def query_rollouts(
    filters: Filters, after: bool, field: str | None = None, descending: bool = False, any_of: bool = False
) -> Statement:
    """The filters that are given, each a parameter; then the key of the last one seen, limit and offset."""
    query, names = _filtered(select(*ROLLOUT), filters, any_of)
    if after:
        query = query.where(rollouts.c.key < param("key") if descending else rollouts.c.key > param("key"))
        names.append("the_key")
    query = _ordered(query, rollouts, None if field is None else rollouts.c[field], descending)
    return Statement(query.limit(bindparam("many")).offset(bindparam("skip")), (*names, "many", "skip"))


@cache
def count_rollouts(filters: Filters, any_of: bool = False) -> Statement:
    query, names = _filtered(select(func.count()).select_from(rollouts), filters, any_of)
    return Statement(query, tuple(names))


# -- attempts --------------------------------------------------------------------------------------------------------

ATTEMPT = tuple(attempts.columns)

INSERT_ATTEMPTS = Insert(attempts, _columns(attempts))
UPDATE_ATTEMPTS = Update(
    attempts, _columns(attempts, "rollout_key", "sequence_id", "attempt_id", "start_time", "silence")
)

ATTEMPTS_AMONG = Statement(
    select(*ATTEMPT).where(in_list(attempts.c.rollout_key, "keys")).order_by(attempts.c.sequence_id), ("keys",)
)
"""Every attempt of some rollouts, by `sequence_id`."""
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

# -- spans -----------------------------------------------------------------------------------------------------------

INSERT_PACKS = Insert(span_packs, _columns(span_packs))
INSERT_BLOCKS = Insert(token_blocks, _columns(token_blocks), unique=("digest",))
INSERT_PACK_BLOCKS = Insert(pack_blocks, _columns(pack_blocks), unique=("pack_key", "digest"))

IDS_OF = Statement(
    select(span_packs.c.ids).where(span_packs.c.attempt_key == param("attempt")).order_by(span_packs.c.key),
    ("the_attempt",),
)

_HEADER = (
    span_packs.c.key,
    span_packs.c.attempt_key,
    span_packs.c.first_sequence,
    span_packs.c.count,
    span_packs.c.superseded,
    span_packs.c.sequences,
    span_packs.c.ids,
)
PACK = (*_HEADER, span_packs.c.body)

PACKS_OF = Statement(
    select(*PACK)
    .where(span_packs.c.attempt_key == param("attempt"), span_packs.c.first_sequence >= param("from"))
    .order_by(span_packs.c.first_sequence, span_packs.c.key)
    .limit(bindparam("many"))
    .offset(bindparam("skip")),
    ("the_attempt", "the_from", "many", "skip"),
)
PACKS_AMONG = Statement(
    select(*PACK)
    .where(in_list(span_packs.c.attempt_key, "attempts"))
    .order_by(span_packs.c.attempt_key, span_packs.c.first_sequence, span_packs.c.key),
    ("attempts",),
)
HEADERS_OF = Statement(
    select(*_HEADER)
    .where(span_packs.c.attempt_key == param("attempt"))
    .order_by(span_packs.c.first_sequence, span_packs.c.key),
    ("the_attempt",),
)
"""Packs of an attempt without their bodies."""
PACKS_BY_KEY = Statement(select(*PACK).where(in_list(span_packs.c.key, "keys")), ("keys",))

LATEST_AMONG = Statement(
    select(rollouts.c.rollout_id, attempts.c.key, attempts.c.attempt_id)
    .join_from(rollouts, attempts, attempts.c.rollout_key == rollouts.c.key)
    .where(in_list(rollouts.c.rollout_id, "ids"), attempts.c.sequence_id == rollouts.c.attempts),
    ("ids",),
)

_first = (
    select(token_blocks.c.digest, token_blocks.c.parent)
    .join_from(pack_blocks, token_blocks, token_blocks.c.digest == pack_blocks.c.digest)
    .where(in_list(pack_blocks.c.pack_key, "packs"))
    .cte("chain", recursive=True)
)
_parents = select(token_blocks.c.digest, token_blocks.c.parent).join_from(
    _first, token_blocks, token_blocks.c.digest == _first.c.parent
)
_chain = _first.union(_parents)
BLOCKS_OF = Statement(
    select(token_blocks.c.digest, token_blocks.c.parent, token_blocks.c.ids).join_from(
        _chain, token_blocks, token_blocks.c.digest == _chain.c.digest
    ),
    ("packs",),
)
"""(digest, parent, ids) of every block that some packs need."""


def _not_named(digest: ColumnElement[Any]) -> ColumnElement[bool]:
    """No pack that is there needs the chain that ends with a block. A scalar query, so that PostgreSQL looks each
    digest up instead of joining the whole tables."""
    one = literal_column("1")
    naming = (
        select(one)
        .join_from(pack_blocks, span_packs, span_packs.c.key == pack_blocks.c.pack_key)
        .where(pack_blocks.c.digest == digest)
        .limit(one)
        .offset(_zero)
    )
    return naming.correlate(token_blocks).scalar_subquery().is_(null())


def _has_no_child(blocks: Table) -> ColumnElement[bool]:
    child = token_blocks.alias("child")
    one = literal_column("1")
    found = select(one).where(child.c.parent == blocks.c.digest).limit(one).offset(_zero)
    return found.correlate(blocks).scalar_subquery().is_(null())


_is_unused = and_(_not_named(token_blocks.c.digest), _has_no_child(token_blocks))
FIND_UNUSED_BLOCKS = Statement(
    select(token_blocks.c.digest, _is_unused)
    .where(token_blocks.c.digest > param("digest"))
    .order_by(token_blocks.c.digest)
    .limit(bindparam("many"))
    .offset(_zero),
    ("the_digest", "many"),
)
"""(digest, whether no pack and no other block needs it), from a digest on."""
PARENT_OF_UNUSED = Statement(
    select(token_blocks.c.parent).where(token_blocks.c.digest == param("digest"), _is_unused), ("the_digest",)
)
DELETE_BLOCK = Statement(delete(token_blocks).where(token_blocks.c.digest == param("digest")), ("the_digest",))

_heads = select(pack_blocks.c.digest).where(in_list(pack_blocks.c.pack_key, "packs")).distinct().cte("heads")
_idle_heads = (
    select(token_blocks.c.digest, token_blocks.c.parent)
    .join_from(_heads, token_blocks, token_blocks.c.digest == _heads.c.digest)
    .where(_not_named(token_blocks.c.digest))
    .cte("idle", recursive=True)
)
_idle = _idle_heads.union(
    select(token_blocks.c.digest, token_blocks.c.parent)
    .join_from(_idle_heads, token_blocks, token_blocks.c.digest == _idle_heads.c.parent)
    .where(_not_named(token_blocks.c.digest))
)
_used_child = (
    select(literal_column("1"))
    .where(token_blocks.c.parent == _idle.c.digest, token_blocks.c.digest.not_in(select(_idle.c.digest)))
    .limit(literal_column("1"))
    .offset(_zero)
    .correlate(_idle)
    .scalar_subquery()
)
_parents_of_used = select(_idle.c.digest).where(_used_child.is_not(null())).cte("kept", recursive=True)
_kept = _parents_of_used.union(
    select(token_blocks.c.parent).join_from(
        _parents_of_used, token_blocks, token_blocks.c.digest == _parents_of_used.c.digest
    )
)
DELETE_BLOCKS_OF = Statement(
    delete(token_blocks).where(
        token_blocks.c.digest.in_(select(_idle.c.digest)), token_blocks.c.digest.not_in(select(_kept.c.digest))
    ),
    ("packs",),
)
"""The blocks that only some packs needed, which were deleted; their rows of `pack_blocks` are still there. Of the
blocks that no pack names (`idle`), those with a descendant that is named are `kept`."""
HAVE_BLOCKS = Statement(
    select(pack_blocks.c.pack_key)
    .where(in_list(pack_blocks.c.pack_key, "packs"))
    .limit(literal_column("1"))
    .offset(_zero),
    ("packs",),
)
PACK_KEYS = Statement(select(span_packs.c.key).where(in_list(span_packs.c.attempt_key, "attempts")), ("attempts",))
DELETE_PACKS = Statement(delete(span_packs).where(in_list(span_packs.c.key, "keys")), ("keys",))
DELETE_PACK_BLOCKS = Statement(delete(pack_blocks).where(in_list(pack_blocks.c.pack_key, "keys")), ("keys",))

# -- resources -------------------------------------------------------------------------------------------------------

RESOURCES = tuple(column for column in resources.columns if column.name != "key")

INSERT_RESOURCES = Insert(resources, _columns(resources, "key"))
FIND_RESOURCES = Statement(select(*RESOURCES).where(resources.c.resources_id == param("id")), ("the_id",))
DELETE_RESOURCES = Statement(delete(resources).where(resources.c.resources_id == param("id")), ("the_id",))
RESOURCES_KEY = Statement(select(resources.c.key).where(resources.c.resources_id == param("id")), ("the_id",))
LATEST_RESOURCES = Statement(
    select(*RESOURCES).order_by(resources.c.version.desc()).limit(literal_column("1")).offset(_zero)
)
LAST_VERSION = Statement(select(func.coalesce(func.max(resources.c.version), _zero)))


@cache
def query_resources(exact: bool, part: bool, field: str | None = None, descending: bool = False) -> Statement:
    """The key to go on after, the filters by id that are given, limit and offset."""
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
    query = _ordered(query, resources, column, descending)
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
    workers, _columns(workers, "key"), unique=("worker_id",), replace=_columns(workers, "key", "worker_id")
)
LOCK_WORKERS = Statement(
    select(*WORKER).where(in_list(workers.c.worker_id, "ids")).order_by(workers.c.worker_id).with_for_update(),
    ("ids",),
)
FIND_WORKER = Statement(select(*WORKER).where(workers.c.worker_id == param("worker")), ("the_worker",))
WORKER_KEY = Statement(select(workers.c.key).where(workers.c.worker_id == param("worker")), ("the_worker",))
QUERY_WORKERS = Statement(
    select(*WORKER).where(workers.c.key > param("key")).order_by(workers.c.key).limit(bindparam("many")).offset(_zero),
    ("the_key", "many"),
)
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

ADD_COUNTS = Insert(counts, _columns(counts), unique=("shard", "name", "queue"), add=("number",))
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
"""The oldest ones, but for those that another server is removing."""
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
"""When anything last happened in a database whose clock was not started yet."""

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
"""(key, rollout_id, end_time, spans, bytes) of finished rollouts after a place, the one that ended first coming first.
400 stands for the columns of fixed size."""
