"""Every statement about packs of spans and token blocks, written once for all dialects."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Table, and_, bindparam, delete, func, literal_column, null, select

from agentlightning.store.sql.tables.backend import Insert, Statement
from agentlightning.store.sql.tables.schema import (
    attempts,
    columns,
    in_list,
    pack_blocks,
    param,
    rollouts,
    span_packs,
    span_places,
    token_blocks,
)

_zero = literal_column("0")
_one = literal_column("1")

INSERT_PACKS = Insert(span_packs, columns(span_packs))
INSERT_PLACES = Insert(span_places, columns(span_places), unique=("attempt_key", "span_id"))
INSERT_BLOCKS = Insert(token_blocks, columns(token_blocks), unique=("digest",))
INSERT_PACK_BLOCKS = Insert(pack_blocks, columns(pack_blocks), unique=("pack_key", "digest"))

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
_places = span_places.join(span_packs, span_packs.c.key == span_places.c.pack_key)
PACKS_WITH = Statement(
    select(*PACK)
    .select_from(_places)
    .where(span_places.c.attempt_key == param("attempt"), in_list(span_places.c.span_id, "ids"))
    .distinct(),
    ("the_attempt", "ids"),
)
"""The packs of an attempt that hold some spans."""
PLACE_OF = Statement(
    select(*_HEADER)
    .select_from(_places)
    .where(in_list(span_places.c.attempt_key, "attempts"), span_places.c.span_id == param("id")),
    ("attempts", "the_id"),
)
FIRST_AROUND = Statement(
    select(func.min(span_packs.c.first_sequence)).where(
        span_packs.c.attempt_key == param("attempt"),
        span_packs.c.first_sequence > param("low"),
        span_packs.c.first_sequence + span_packs.c.count > param("high"),
        span_packs.c.first_sequence <= param("high"),
    ),
    ("the_attempt", "the_low", "the_high"),
)
"""Where the first pack begins that reaches a sequence number: no more than MAX_PACK before it."""

NEWEST_PACKS = Statement(
    select(*PACK, rollouts.c.rollout_id, attempts.c.attempt_id)
    .join_from(span_packs, attempts, attempts.c.key == span_packs.c.attempt_key)
    .join(rollouts, rollouts.c.key == attempts.c.rollout_key)
    .where(span_packs.c.key < param("key"))
    .order_by(span_packs.c.key.desc())
    .limit(bindparam("many"))
    .offset(_zero),
    ("the_key", "many"),
)
"""Packs below a key, the newest first, with the ids of their rollout and attempt."""

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
"""(digest, parent, ids) of every block that some packs refer to, directly or through a chain."""


def _unreferenced(digest: ColumnElement[Any]) -> ColumnElement[bool]:
    """No existing pack refers to the chain that ends with a block. A scalar subquery, so that PostgreSQL looks up each
    digest instead of joining whole tables."""
    naming = (
        select(_one)
        .join_from(pack_blocks, span_packs, span_packs.c.key == pack_blocks.c.pack_key)
        .where(pack_blocks.c.digest == digest)
        .limit(_one)
        .offset(_zero)
    )
    return naming.correlate(token_blocks).scalar_subquery().is_(null())


def _has_no_child(blocks: Table) -> ColumnElement[bool]:
    child = token_blocks.alias("child")
    found = select(_one).where(child.c.parent == blocks.c.digest).limit(_one).offset(_zero)
    return found.correlate(blocks).scalar_subquery().is_(null())


_is_unused = and_(_unreferenced(token_blocks.c.digest), _has_no_child(token_blocks))
FIND_UNUSED_BLOCKS = Statement(
    select(token_blocks.c.digest, _is_unused)
    .where(token_blocks.c.digest > param("digest"))
    .order_by(token_blocks.c.digest)
    .limit(bindparam("many"))
    .offset(_zero),
    ("the_digest", "many"),
)
"""(digest, whether no pack and no other block refers to it), from a digest on."""
PARENT_OF_UNUSED = Statement(
    select(token_blocks.c.parent).where(token_blocks.c.digest == param("digest"), _is_unused), ("the_digest",)
)
DELETE_BLOCK = Statement(delete(token_blocks).where(token_blocks.c.digest == param("digest")), ("the_digest",))

_heads = select(pack_blocks.c.digest).where(in_list(pack_blocks.c.pack_key, "packs")).distinct().cte("heads")
_idle_heads = (
    select(token_blocks.c.digest, token_blocks.c.parent)
    .join_from(_heads, token_blocks, token_blocks.c.digest == _heads.c.digest)
    .where(_unreferenced(token_blocks.c.digest))
    .cte("idle", recursive=True)
)
_idle = _idle_heads.union(
    select(token_blocks.c.digest, token_blocks.c.parent)
    .join_from(_idle_heads, token_blocks, token_blocks.c.digest == _idle_heads.c.parent)
    .where(_unreferenced(token_blocks.c.digest))
)
_used_child = (
    select(_one)
    .where(token_blocks.c.parent == _idle.c.digest, token_blocks.c.digest.not_in(select(_idle.c.digest)))
    .limit(_one)
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
"""Deletes the blocks that only some packs referred to. The packs are deleted already, their rows of `pack_blocks` are
not. Of the blocks that no pack refers to (`idle`), those with a referenced descendant are `kept`."""
HAVE_BLOCKS = Statement(
    select(pack_blocks.c.pack_key).where(in_list(pack_blocks.c.pack_key, "packs")).limit(_one).offset(_zero),
    ("packs",),
)
PACK_KEYS = Statement(select(span_packs.c.key).where(in_list(span_packs.c.attempt_key, "attempts")), ("attempts",))
DELETE_PACKS = Statement(delete(span_packs).where(in_list(span_packs.c.key, "keys")), ("keys",))
DELETE_PLACES = Statement(delete(span_places).where(in_list(span_places.c.attempt_key, "attempts")), ("attempts",))
DELETE_PACK_BLOCKS = Statement(delete(pack_blocks).where(in_list(pack_blocks.c.pack_key, "keys")), ("keys",))
