"""Spans: how they are added to an attempt, and the queries that read them. See pack.py for what a pack holds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, dropwhile, islice, pairwise, repeat
from operator import attrgetter
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.span import DAMAGED, SUPERSEDED, Span
from agentlightning.store import validation
from agentlightning.store.sql import mapping, pack
from agentlightning.store.sql.pack import SpanPack
from agentlightning.store.sql.prompts import Leaf, PromptReader, add_prompt, place_of, read_leaves
from agentlightning.store.sql.queries import AttemptKey, Order, attempts_of, check_logic
from agentlightning.store.sql.rollouts import beat
from agentlightning.store.sql.schema import MAX_PACK, PACK, UNPLACED, AttemptRow, select
from agentlightning.store.sql.tx import SPANS, Connection, Tx, insert
from agentlightning.store.types import FilterLogic, SortOrder

# -- the spans of one call -------------------------------------------------------------------------------------------


class SpanWriteResult(Struct, gc=False):
    """How the spans of one attempt were stored."""

    attempt_id: str
    sequence_ids: Sequence[int]
    """Of the spans that are new."""
    superseded: bool
    existing: dict[int, Span]
    """By index: spans that were stored before."""


class AttemptSpans:
    """The spans of one call that belong to one attempt: packed in the caller's thread, then stored, then returned as
    stored."""

    __slots__ = ("_positions", "_spans", "attempt_id", "pack", "rollout_id")

    def __init__(self, positions: Sequence[int], spans: Sequence[Span]) -> None:
        """positions: the indexes of these spans among all those of the call."""
        self.rollout_id = validation.check_text(spans[0].rollout_id, "rollout_id")
        self.attempt_id = validation.check_text(spans[0].attempt_id, "attempt_id")
        self._positions = positions
        self._spans = spans
        self.pack = pack.pack(spans)

    def read_result(self, result: SpanWriteResult, output: list[Any]) -> None:
        """Put each span, as it was stored, at its position in `output`."""
        sequence_ids, new = iter(result.sequence_ids), dict[str, Span]()
        attempt_id, superseded = result.attempt_id, result.superseded
        for index, (position, span, span_id) in enumerate(
            zip(self._positions, self._spans, self.pack.span_ids, strict=True)
        ):
            stored = result.existing.get(index) or new.get(span_id)
            if stored is None:
                attributes = {**span.attributes, SUPERSEDED: True} if superseded else span.attributes
                number = next(sequence_ids)
                stored = new[span_id] = replace(
                    span, attempt_id=attempt_id, span_id=span_id, sequence_id=number, attributes=attributes
                )
            output[position] = stored


def group_by_attempt(spans: Sequence[Span]) -> list[AttemptSpans]:
    """The spans of one call, packed for each attempt, MAX_PACK at most in a group."""
    owners, attempts = [span.rollout_id for span in spans], [span.attempt_id for span in spans]
    if owners.count(owners[0]) == attempts.count(attempts[0]) == len(spans) <= MAX_PACK:
        return [AttemptSpans(range(len(spans)), spans)]
    positions: dict[tuple[str, str], list[int]] = {}
    for position, span in enumerate(spans):
        positions.setdefault((span.rollout_id, span.attempt_id), []).append(position)
    ids = [span.span_id for span in spans if span.span_id]
    most = MAX_PACK if len(set(ids)) == len(ids) else len(spans)  # equal ids are told apart within one group
    groups = [own[start : start + most] for own in positions.values() for start in range(0, len(own), most)]
    return [AttemptSpans(group, [spans[position] for position in group]) for group in groups]


# -- adding ----------------------------------------------------------------------------------------------------------

_INSERT_PACK: Final = insert("span_packs", PACK)
_INSERT_PLACE: Final = insert("span_places", ("attempt_key", "span_id", "pack_key"), "ON CONFLICT DO NOTHING")
_INSERT_PROMPT: Final = insert("prompts", ("place", "attempt_key", "root", "base", "keep", "ids"))
_IDS_AFTER: Final = "SELECT key, ids FROM span_packs WHERE attempt_key = ? AND key > ? ORDER BY key"
CACHE_BYTES: Final = 32 << 20
"""Of what is remembered of attempts, estimated. Then that of all but one is forgotten."""
ID_BYTES: Final = 128
KNOWN_BYTES: Final = 512
"""Of an attempt, without its ids and prompts."""


class _Known:
    """What this process knows of the spans of an attempt, to compare the next ones with."""

    __slots__ = ("ids", "last_key", "leaves", "spans")

    def __init__(self, spans: int) -> None:
        self.spans = spans
        """How many spans the attempt had when `leaves` were complete; -1: that is not known."""
        self.leaves: list[Leaf] = []
        self.ids: set[str] | None = None
        """Every span id, if they are as many as the attempt has spans; else other processes have added some. None:
        nobody has asked, as the spans had no names."""
        self.last_key = 0
        """Of the packs up to this key, all ids are there."""


RECENT_ROLLOUTS: Final = 128
"""In `RecentSpans` at most."""
SMALL_BYTES: Final = 64 << 10
"""Of the packs of one of them at most, estimated: an event loop decodes them."""
SMALL_PACKS: Final = 32
_Recent = tuple[str, tuple[tuple[SpanPack, range, bool], ...]]
"""All spans of a rollout that has them in one attempt: its id; the packs, with their sequence numbers, and whether the
attempt was superseded."""


class RecentSpans:
    """Every span of small rollouts that were just written: to read them soon needs neither the database nor its thread.
    What a transaction changes is left out from before its commit until after it: a reader that has seen the commit in
    the database must not see less here. Changed by the committer; any thread may read."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.clear()

    def clear(self) -> None:
        self._rollouts: dict[str, _Recent] = {}
        self._changed: dict[str, _Recent] = {}
        """By this transaction."""

    def of(self, rollout_id: str, attempt_id: str | None) -> list[Span] | None:
        """The spans of a rollout or of one attempt; None: ask the database."""
        if rollout_id not in self._rollouts or not self._connection.fresh():
            return None
        owner, packs = self._rollouts.get(rollout_id, ("", ()))
        if not owner or attempt_id not in (None, owner):
            return None
        return [
            span
            for each, numbers, superseded in packs
            for span in pack.unpack(each.body, rollout_id, owner, each.span_ids, numbers, superseded)
        ]

    def add(self, attempt: AttemptRow, new: SpanPack, numbers: Sequence[int]) -> None:
        """Before the row of the attempt has these spans."""
        rollout_id = attempt.rollout.rollout_id
        owner, packs = self.forget(rollout_id) or ("", ())
        if not attempt.spans and len(attempt.rollout.attempts) == 1:
            owner, packs = attempt.attempt_id, ()
        if owner != attempt.attempt_id or new.prompts or not isinstance(numbers, range):
            return
        packs = (*packs, (new, numbers, bool(attempt.superseded)))
        if len(packs) <= SMALL_PACKS and sum([len(each.body) + 100 * each.count for each, *_ in packs]) <= SMALL_BYTES:
            self._changed[rollout_id] = owner, packs

    def forget(self, rollout_id: str) -> _Recent | None:
        """Returns what was there."""
        return self._rollouts.pop(rollout_id, None) or self._changed.pop(rollout_id, None)

    def committed(self) -> None:
        self._rollouts |= self._changed
        self._changed = {}
        while len(self._rollouts) > RECENT_ROLLOUTS:
            self._rollouts.pop(next(iter(self._rollouts)))


class SpanWriter:
    """Adds spans, and remembers of recent attempts what the next spans are compared with."""

    def __init__(self, connection: Connection) -> None:
        self.recent = RecentSpans(connection)
        self.clear()

    def clear(self) -> None:
        """After something was undone: what is remembered may not be in the database."""
        self.recent.clear()
        self._known: dict[tuple[int, str, float], _Known] = {}
        """By key, id and start time of an attempt: another process may delete it and make one of its id or key."""
        self._bytes = 0

    def add(self, tx: Tx, groups: Sequence[AttemptSpans]) -> list[SpanWriteResult]:
        """Store the spans of one call, all or none."""
        attempts = [tx.attempt(group.rollout_id, group.attempt_id) for group in groups]
        return [self._add(tx, *each) for each in zip(groups, attempts, strict=True)]

    def _add(self, tx: Tx, group: AttemptSpans, attempt: AttemptRow) -> SpanWriteResult:
        new, existing = group.pack, dict[int, Span]()
        repeated = self._repeated(tx, new.span_ids, attempt) if new.named else None
        if repeated:
            stored = _by_id(tx, attempt, set(repeated.values()))
            existing = {index: stored[span_id] for index, span_id in repeated.items() if span_id in stored}
            new = pack.select(new, [index for index in range(new.count) if index not in repeated])
        last, count = attempt.last_span, new.count
        if count > MAX_PACK or any(new.sequence_ids):
            sequence_ids = _assign_sequence_ids(new.sequence_ids, last)
            parts = [(first, pack.select(new, indexes)) for first, indexes in _runs(sequence_ids)] if count else []
        else:
            sequence_ids, parts = range(last + 1, last + 1 + count), [(last + 1, new)] if count else []
        if count and not tx.database.shared:
            self.recent.add(attempt, new, sequence_ids)
        for first, part in parts:
            self.add_pack(tx, attempt, part, first)
        beat(tx, attempt, tx.wall)
        return SpanWriteResult(attempt.attempt_id, sequence_ids, bool(attempt.superseded), existing)

    def _repeated(self, tx: Tx, span_ids: Sequence[str], attempt: AttemptRow) -> dict[int, str]:
        """By index, the ids that are stored already, or occur twice."""
        known = self._ids_of(tx, attempt) if attempt.spans else frozenset[str]()
        if known.isdisjoint(span_ids) and len(set(span_ids)) == len(span_ids):
            return {}
        found: dict[int, str] = {}
        seen: set[str] = set()
        for index, span_id in enumerate(span_ids):
            if span_id in known or span_id in seen:
                found[index] = span_id
            seen.add(span_id)
        return found

    def _ids_of(self, tx: Tx, attempt: AttemptRow) -> set[str]:
        """Every span id of an attempt. Of those that another process has added, only the new are read."""
        known = self._known_of(attempt)
        if known.ids is None:
            known.ids = set()
        while len(known.ids) != attempt.spans:
            rows, before = tx.all(_IDS_AFTER, attempt.key, known.last_key), len(known.ids)
            known.ids.update(*[pack.split_ids(bytes(packed)) for _, packed in rows])
            self._bytes += ID_BYTES * (len(known.ids) - before)
            if len(known.ids) == attempt.spans or not known.last_key:
                known.last_key = rows[-1][0] if rows else known.last_key
                break
            known.last_key, known.ids = 0, set()  # other servers have stored packs with lower keys
        return known.ids

    def _known_of(self, attempt: AttemptRow, remember: bool = True) -> _Known:
        """Nothing is known of an attempt without spans, though one of its key and id may have been deleted. remember:
        the next spans will be compared with it; many objects would slow the garbage collector down."""
        identity = attempt.key, attempt.attempt_id, attempt.start_time
        known = self._known.get(identity)
        if known is None or not attempt.spans:
            known = _Known(-1 if attempt.spans else 0)
            self._known.pop(identity, None)
            if remember:
                self._known[identity] = known
                self._bytes += KNOWN_BYTES
        if self._bytes > CACHE_BYTES:
            self._known, self._bytes = {identity: known}, 0
        return known

    def add_pack(self, tx: Tx, attempt: AttemptRow, part: SpanPack, first: int, superseded: int | None = None) -> None:
        """Add a pack of new spans with consecutive numbers. superseded: whether the attempt was, when it sent them; by
        default, whether it is now."""
        tx.changed = True  # from here on, what is remembered is
        key, before, count = tx.connection.new_key("span_packs", 0), attempt.spans, part.count
        known = self._known_of(attempt, part.named or bool(part.prompts))
        if part.named and not before:
            known.ids = set()
        if known.ids is not None and len(known.ids) == before:
            known.ids.update(part.span_ids)
            self._bytes += ID_BYTES * count
        kept = 0
        if part.prompts:
            self._bytes -= sum([len(leaf.ids) for leaf in known.leaves])
            if known.spans != before:
                known.leaves = read_leaves(tx, attempt.key, known.leaves, place_of(key, 0))
            known.spans = before
            prompts = [add_prompt(known.leaves, attempt.key, place_of(key, index), ids) for index, ids in part.prompts]
            self._bytes += sum([len(leaf.ids) for leaf in known.leaves])
            kept = sum([len(row[-1]) for row in prompts])
            tx.insert(_INSERT_PROMPT, prompts)
        if known.spans == before:
            known.spans += count
        mark = attempt.superseded if superseded is None else superseded
        tx.insert(_INSERT_PACK, [(key, attempt.key, first, count, mark, part.ids, part.body)])
        if first > UNPLACED:
            tx.insert(_INSERT_PLACE, [(attempt.key, span_id, key) for span_id in part.span_ids])
        tx.count(SPANS, count)
        size, last = attempt.bytes + len(part.body) + 9 * count + kept, max(attempt.last_span, first + count - 1)
        tx.set(attempt, spans=before + count, bytes=size, last_span=last)


def _by_id(tx: Tx, attempt: AttemptRow, span_ids: set[str]) -> dict[str, Span]:
    """The spans of an attempt that have one of these ids."""
    rows = tx.all(_PACKS, [each.key for each, _ in _find_packs(tx, [attempt.key], span_ids)])
    reader = PromptReader(tx.connection)
    unpacked = _unpack(reader, rows, attempt.rollout.rollout_id, attempt.attempt_id)
    return {span.span_id: span for spans in unpacked for span in spans if span.span_id in span_ids}


def _runs(numbers: Sequence[int]) -> list[tuple[int, range]]:
    """The packs to make, of consecutive numbers, MAX_PACK at most: (the first number, the indexes)."""
    starts = [0]
    for index in range(1, len(numbers)):
        if numbers[index] != numbers[index - 1] + 1 or index - starts[-1] == MAX_PACK:
            starts.append(index)
    return [(numbers[start], range(start, end)) for start, end in pairwise([*starts, len(numbers)])]


def _assign_sequence_ids(requested: Sequence[int], last: int) -> list[int]:
    numbers: list[int] = []
    for sequence_id in requested:
        last = max(last, sequence_id) if sequence_id else last + 1
        numbers.append(sequence_id or last)
    return numbers


def reserve_sequence_ids(tx: Tx, attempt_ids: Sequence[tuple[str, str]]) -> list[int]:
    """The next sequence number of each attempt, given as (rollout_id, attempt_id)."""
    numbers: list[int] = []
    for attempt in [tx.attempt(*ids) for ids in attempt_ids]:
        tx.set(attempt, last_span=attempt.last_span + 1)
        numbers.append(attempt.last_span)
    return numbers


# -- reading packs -----------------------------------------------------------------------------------------------------

FIRST_BATCH: Final = 4
"""Packs read at once at first for a page, which is often in one."""
PACK_BATCH: Final = 64
"""Packs read at once in the end."""
BATCH_WITHOUT_TOKENS: Final = 256
"""The same where their tokens are not read."""
NEWEST_BATCH: Final = 4
"""Packs read at once for the newest spans."""

_COLUMNS: Final = select("p", PACK)
_HEADERS: Final = f"SELECT {select('p', PACK[:-1])} FROM"
_PACKS_WITH: Final = (
    f"{_HEADERS} span_places s JOIN span_packs p ON p.key = s.pack_key "
    "WHERE s.attempt_key = ANY (?) AND s.span_id = ANY (?) UNION ALL "
    f"{_HEADERS} span_packs p WHERE p.attempt_key = ANY (?) AND p.first_sequence <= {UNPLACED}"
)
"""Packs that may have some of these spans, without their bodies."""
_PACKS: Final = f"SELECT {_COLUMNS} FROM span_packs p WHERE p.key = ANY (?)"
_PACKS_OF: Final = (
    f"SELECT {_COLUMNS} FROM span_packs p WHERE p.attempt_key = ? AND p.first_sequence >= ? "
    "ORDER BY p.first_sequence, p.key LIMIT ? OFFSET ?"
)
_FIRST_AROUND: Final = (
    "SELECT min(first_sequence) FROM span_packs WHERE attempt_key = ? AND first_sequence > ? "
    "AND first_sequence + count > ? AND first_sequence <= ?"
)
"""Where the first pack begins that reaches a sequence number: no more than MAX_PACK before it."""
_NEWEST: Final = (
    f"SELECT {_COLUMNS}, r.rollout_id, a.attempt_id FROM span_packs p JOIN attempts a ON a.key = p.attempt_key "
    "JOIN rollouts r ON r.key = a.rollout_key WHERE p.key < ? ORDER BY p.key DESC LIMIT ?"
)


class _Pack(Struct, gc=False):
    """The columns PACK."""

    key: int
    attempt_key: int
    first: int
    count: int
    superseded: int
    ids: bytes
    body: bytes = b""


def _unpack(
    reader: PromptReader, rows: Sequence[Any], rollout_id: str, attempt_id: str, tokens: bool = True
) -> Iterator[list[Span]]:
    """The spans of each pack, one after the other. Others stand for those of a pack that cannot be read
    (`span.DAMAGED`)."""
    packs = [_Pack(*row[: len(PACK)]) for row in rows]
    keys = [each.key for each in packs]
    for each in packs:
        try:
            yield pack.unpack(
                bytes(each.body),
                rollout_id,
                attempt_id,
                pack.split_ids(bytes(each.ids)),
                range(each.first, each.first + each.count),
                bool(each.superseded),
                prompt=reader.of(each.attempt_key, keys, each.key),
                tokens=tokens,
            )
        except mapping.UNREADABLE as error:
            what = f"a pack of {each.count} spans of attempt {attempt_id!r} of rollout {rollout_id!r}"
            message = str(mapping.damaged(what, rollout_id, error))
            mapping.report(message)
            yield [
                Span(
                    rollout_id, attempt_id, DAMAGED, 0.0, None, each.first + index, "", span_id, None, "ERROR", message
                )
                for index, span_id in enumerate(_ids_of(each))
            ]


def _ids_of(packed: _Pack) -> Sequence[str]:
    """The ids of the spans of a pack, or names in place of ids that cannot be read."""
    with suppress(*mapping.UNREADABLE):
        found = pack.split_ids(bytes(packed.ids))
        if len(found) == packed.count:
            return found
    return [f"damaged-{packed.key}-{index}" for index in range(packed.count)]


def _find_packs(
    database: Connection | Tx, attempts: list[int], span_ids: set[str]
) -> list[tuple[_Pack, Sequence[str]]]:
    """The packs of attempts that have some of these spans, without their bodies, each with all of its ids."""
    found = {row[0]: _Pack(*row) for row in database.all(_PACKS_WITH, attempts, list(span_ids), attempts)}
    both = [(each, _ids_of(each)) for each in found.values()]
    return [(each, ids) for each, ids in both if not span_ids.isdisjoint(ids)]


# -- queries -----------------------------------------------------------------------------------------------------------


def _test_of(name: str, field: str, value: str) -> Callable[[Span], bool]:
    """The test of a filter: `field`, or `field_contains`."""
    value_of = attrgetter(field)
    if name == field:
        return lambda span: value_of(span) == value
    return lambda span: value in (value_of(span) or "")


def query(
    connection: Connection,
    rollout_id: str,
    attempt_id: str | None = None,
    *,
    filter_logic: FilterLogic = "and",
    sort_by: str | None = None,
    sort_order: SortOrder = "asc",
    after: str | None = None,
    limit: int = -1,
    offset: int = 0,
    tokens: bool = True,
    **filters: str | None,
) -> list[Span]:
    """Spans from the database, with few queries and memory bounded by the result."""
    validation.check_page(limit, offset, after)
    tests: list[Callable[[Span], bool]] = []
    for name, value in filters.items():
        if value is not None:
            tests.append(_test_of(name, name.removesuffix("_contains"), value))
    enough = any if check_logic(filter_logic) else all
    order = Order.of("spans", sort_by, sort_order, after)
    rows, start = attempts_of(connection, rollout_id, attempt_id), -1
    if after is not None:
        rows, start = _find(connection, rows, rollout_id, after)
    streams = zip(rows, chain([start], repeat(-1)), strict=False)
    batch = FIRST_BATCH if limit >= 0 else PACK_BATCH
    spans = chain.from_iterable(_stream(connection, rollout_id, row, begin, batch, tokens) for row, begin in streams)
    if after is not None:
        spans = islice(dropwhile(lambda span: span.span_id != after, spans), 1, None)
    matching = filter(lambda span: enough(test(span) for test in tests), spans) if tests else spans
    ordered = matching if order.natural else order.sort(matching)
    return list(islice(ordered, offset, None if limit < 0 else offset + limit))


def _find(connection: Connection, rows: list[AttemptKey], rollout_id: str, after: str) -> tuple[list[AttemptKey], int]:
    """(the attempt of the span `after` and those behind it, the sequence number from which to read packs)"""
    keys = [row.key for row in rows]
    places = {each.attempt_key: each.first + ids.index(after) for each, ids in _find_packs(connection, keys, {after})}
    for index, attempt_key in enumerate(keys):
        if attempt_key in places:
            number = places[attempt_key]
            around = connection.all(_FIRST_AROUND, attempt_key, number - MAX_PACK, number, number)
            return rows[index:], around[0][0]
    raise NotFoundError(f"rollout {rollout_id!r} has no span {after!r} to continue after")


_number_of: Final = attrgetter("sequence_id")


def _stream(
    connection: Connection, rollout_id: str, attempt: AttemptKey, start: int, batch: int, tokens: bool
) -> Iterator[Span]:
    """The spans of the packs of an attempt that begin at or after a sequence number, by sequence number. Packs whose
    numbers interleave are merged."""
    ahead: list[Span] = []
    for spans in _packs(connection, rollout_id, attempt, start, batch, tokens):
        over = bisect_left(ahead, spans[0].sequence_id, key=_number_of)
        yield from ahead[:over]
        ahead = spans if over == len(ahead) else sorted([*ahead[over:], *spans], key=_number_of)
    yield from ahead


def _packs(
    connection: Connection, rollout_id: str, attempt: AttemptKey, start: int, batch: int, tokens: bool
) -> Iterator[list[Span]]:
    """The spans of each pack, by its first sequence number. batch: how many are read at once at first."""
    skip = 0
    reader = PromptReader(connection)
    while True:
        rows = connection.all(_PACKS_OF, attempt.key, start, batch, skip)
        yield from _unpack(reader, rows, rollout_id, attempt.attempt_id, tokens)
        if len(rows) < batch:
            return
        batch = min(2 * batch, PACK_BATCH if tokens else BATCH_WITHOUT_TOKENS)
        last = rows[-1][2]
        skip = sum(row[2] == last for row in rows) + (skip if last == start else 0)
        start = last


def count(connection: Connection, rollout_id: str, attempt_id: str) -> int:
    """The number of spans of an attempt, as its row has it."""
    return sum(row.spans for row in attempts_of(connection, rollout_id, attempt_id))


def newest(connection: Connection, limit: int = 100) -> list[Span]:
    """The spans that were stored last, the newest first."""
    if limit < 0:
        raise ConfigError(f"limit={limit} is negative; use 0 or more")
    return list(islice(_newest(connection), limit))


def _newest(connection: Connection) -> Iterator[Span]:
    key, rows = validation.NO_LIMIT, [()]
    while rows:
        rows = connection.all(_NEWEST, key, NEWEST_BATCH)
        for row in rows:
            yield from reversed(next(_unpack(PromptReader(connection), [row], *row[-2:])))
            key = row[0]
