"""Writing the spans of attempts as packs, and reading them back. packs.py says what is in a pack."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import orjson
from msgspec import Struct

from agentlightning.errors import NotFoundError
from agentlightning.span import SUPERSEDED, Span
from agentlightning.store.sql import codec, lifecycle, packs, statements, tokens
from agentlightning.store.sql.codec import Row
from agentlightning.store.sql.database import Connection
from agentlightning.store.sql.ordering import NATURAL, Order
from agentlightning.store.sql.packs import Pack
from agentlightning.store.sql.states import AttemptState, State

if TYPE_CHECKING:
    from agentlightning.store.sql.unit import Unit

IDS_BYTES: Final = 8 << 20
"""Of span ids in memory, about."""
_ID_BYTES: Final = 120
PACKS_AT_ONCE: Final = 16
"""Packs of an attempt that are read at once."""


class WrittenPack(State, eq=False):
    """A pack on its way to the database."""

    attempt: AttemptState
    pack: Pack
    body: bytes
    sequence_ids: Sequence[int]
    before: int = -1
    """How many spans its rollout had before; -1: not counted."""
    superseded: int = 0
    key: int = 0

    def row(self) -> Row:
        first, sequences = min(self.sequence_ids), None
        if type(self.sequence_ids) is not range:
            sequences = orjson.dumps(self.sequence_ids).decode()
        return (
            self.key,
            self.attempt.key,
            first,
            len(self.sequence_ids),
            self.superseded,
            sequences,
            self.pack.ids,
            self.body,
        )


class SpanIds:
    """The ids of the spans of recent attempts, so that a span that comes twice is kept once. What is remembered of an
    attempt holds while its number of spans is the one it was remembered with."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[int, set[str]]] = OrderedDict()
        self._bytes = 0

    def clear(self) -> None:
        self._known.clear()
        self._bytes = 0

    def of(self, unit: Unit, attempt: AttemptState) -> set[str]:
        """Every id there is. Before the call changes anything."""
        found = self._known.get(attempt.key)
        if found is not None and found[0] == attempt.spans:
            return found[1]
        ids: set[str] = set()
        if attempt.spans:
            unit.write_first()
            for (some,) in unit.connection.all(statements.IDS_OF, attempt.key):
                ids.update(packs.split_ids(bytes(some)))
        self._remember(attempt.key, attempt.spans, ids)
        return ids

    def add(self, attempt: AttemptState, before: int, ids: Sequence[str], named: bool) -> None:
        """After spans were added to an attempt that had `before`. Only those whose caller names spans will ask."""
        found = self._known.get(attempt.key)
        if found is None and not before and named:
            self._remember(attempt.key, attempt.spans, set(ids))
        elif found is not None and found[0] == before:
            found[1].update(ids)
            self._known[attempt.key] = (attempt.spans, found[1])
            self._bytes += _ID_BYTES * len(ids)

    def _remember(self, key: int, count: int, ids: set[str]) -> None:
        old = self._known.pop(key, None)
        self._bytes += _ID_BYTES * (2 + len(ids)) - (0 if old is None else _ID_BYTES * (2 + len(old[1])))
        self._known[key] = (count, ids)
        while self._bytes > IDS_BYTES and len(self._known) > 1:
            _, (_, forgotten) = self._known.popitem(last=False)
            self._bytes -= _ID_BYTES * (2 + len(forgotten))


# -- writing ---------------------------------------------------------------------------------------------------------


class Kept(Struct, gc=False):
    """What the store says of a group of spans."""

    attempt_id: str
    sequence_ids: Sequence[int]
    superseded: bool
    known: dict[int, Span]
    """By index: spans that were there before, as they were kept."""


class PackedSpans(Struct, frozen=True, array_like=True):
    """Spans of one attempt, packed. Can be sent to another process."""

    rollout_id: str
    attempt_id: str
    pack: Pack


class SpanGroup:
    """The spans of one call that belong to one attempt: packed in the caller's thread, written, read as kept."""

    __slots__ = ("_body", "_pack", "_positions", "_spans", "attempt_id", "named", "rollout_id")

    def __init__(self, rollout_id: str, attempt_id: str) -> None:
        codec.check_text(rollout_id, "rollout_id")
        codec.check_text(attempt_id, "attempt_id")
        self.rollout_id = rollout_id
        self.attempt_id = attempt_id
        self.named = False
        """The caller gave an id to one of them at least."""
        self._positions: list[int] = []
        self._spans: list[Span] = []

    @classmethod
    def of(cls, packed: PackedSpans) -> SpanGroup:
        """One that is never read as kept."""
        group = cls(packed.rollout_id, packed.attempt_id)
        group.named = True
        group._pack, group._body = packed.pack, packed.pack.body
        return group

    def packed(self) -> PackedSpans:
        return PackedSpans(self.rollout_id, self.attempt_id, self._pack)

    def take(self, position: int, span: Span) -> None:
        """`position` is its place among all spans of the call."""
        self._positions.append(position)
        self._spans.append(span)
        if span.span_id:
            self.named = True

    def seal(self) -> None:
        """Check the spans and pack them."""
        self._pack = packs.pack(self._spans)
        self._body = self._pack.body

    def duplicates(self, unit: Unit, attempt: AttemptState) -> dict[int, str]:
        """By index, the ids that are there already, or twice. Before the call changes anything."""
        if not self.named:
            return {}
        known = unit.span_ids.of(unit, attempt)
        span_ids = self._pack.span_ids
        if known.isdisjoint(span_ids) and len(set(span_ids)) == len(span_ids):
            return {}
        found: dict[int, str] = {}
        seen: set[str] = set()
        for index, span_id in enumerate(span_ids):
            if span_id in known or span_id in seen:
                found[index] = span_id
            seen.add(span_id)
        return found

    def write(self, unit: Unit, attempt: AttemptState, twice: dict[int, str], stored: dict[str, Span]) -> Kept:
        """twice: what `duplicates` found; stored: those of them that are in the database."""
        pack, body = self._pack, self._body
        if twice:
            pack = packs.select(pack, [index for index in range(pack.count) if index not in twice])
            body = pack.body
        sequence_ids = _number(pack.sequence_ids, attempt.last_span)
        superseded = attempt.superseded
        unit.touch_attempt(attempt)
        if pack.count:
            before = attempt.spans
            unit.add_pack(WrittenPack(attempt, pack, body, sequence_ids, attempt.rollout.spans, superseded))
            attempt.spans = before + pack.count
            attempt.bytes += len(body) + 9 * pack.count
            attempt.last_span = max(attempt.last_span, max(sequence_ids))
            unit.span_ids.add(attempt, before, pack.span_ids, self.named)
        lifecycle.hear(unit, attempt, unit.wall)
        return Kept(attempt.attempt_id, sequence_ids, bool(superseded), self._known(twice, stored))

    def _known(self, twice: dict[int, str], stored: dict[str, Span]) -> dict[int, Span]:
        return {index: stored[span_id] for index, span_id in twice.items() if span_id in stored}

    def read(self, kept: Kept, answers: list[Any]) -> None:
        """Put each span, as it was kept, at its position among the answers."""
        if kept.known or self.named:
            self._read_some(kept, answers)
            return
        attempt_id, superseded = kept.attempt_id, kept.superseded
        everything = zip(self._positions, self._spans, self._pack.span_ids, kept.sequence_ids, strict=True)
        for position, span, span_id, sequence_id in everything:
            answers[position] = _as_kept(span, attempt_id, span_id, sequence_id, superseded)

    def _read_some(self, kept: Kept, answers: list[Any]) -> None:
        """Some of them may have been there before, or come twice."""
        sequence_ids = iter(kept.sequence_ids)
        made: dict[str, Span] = {}
        known, attempt_id, superseded = kept.known, kept.attempt_id, kept.superseded
        for index, (position, span) in enumerate(zip(self._positions, self._spans, strict=True)):
            span_id = self._pack.span_ids[index]
            if index in known:
                answers[position] = known[index]
                continue
            if span_id not in made:
                made[span_id] = _as_kept(span, attempt_id, span_id, next(sequence_ids), superseded)
            answers[position] = made[span_id]


def _as_kept(span: Span, attempt_id: str, span_id: str, sequence_id: int, superseded: bool) -> Span:
    return Span(
        span.rollout_id,
        attempt_id,
        span.name,
        span.start_time,
        span.end_time,
        sequence_id,
        span.trace_id,
        span_id,
        span.parent_id,
        span.status_code,
        span.status_message,
        {**span.attributes, SUPERSEDED: True} if superseded else span.attributes,
        span.events,
        span.resource,
    )


def _number(asked: Sequence[int], last: int) -> Sequence[int]:
    if not any(asked):
        return range(last + 1, last + 1 + len(asked))
    numbers: list[int] = []
    for sequence_id in asked:
        last = max(last, sequence_id) if sequence_id else last + 1
        numbers.append(sequence_id or last)
    return numbers


def group_by_attempt(spans: Sequence[Span]) -> list[SpanGroup]:
    """The spans of one call, packed."""
    groups: dict[tuple[str, str], SpanGroup] = {}
    group: SpanGroup | None = None
    for position, span in enumerate(spans):
        if group is None or span.attempt_id != group.attempt_id or span.rollout_id != group.rollout_id:
            key = (span.rollout_id, span.attempt_id)
            group = groups.get(key)
            if group is None:
                group = groups[key] = SpanGroup(*key)
        group.take(position, span)
    for group in groups.values():
        group.seal()
    return list(groups.values())


def pack_spans(spans: Sequence[Span]) -> list[PackedSpans]:
    """Spans of any attempts, packed for each."""
    return [group.packed() for group in group_by_attempt(spans)]


def add(unit: Unit, groups: Sequence[SpanGroup]) -> list[Kept]:
    """Write the spans of one call, all or none."""
    attempts = [unit.attempt(group.rollout_id, group.attempt_id) for group in groups]
    twice = [group.duplicates(unit, attempt) for group, attempt in zip(groups, attempts, strict=True)]
    stored: list[dict[str, Span]] = []
    for attempt, found in zip(attempts, twice, strict=True):
        if found:
            unit.write_first()
        stored.append(spans_by_id(unit.connection, attempt, set(found.values())) if found else {})
    everything = zip(groups, attempts, twice, stored, strict=True)
    return [group.write(unit, attempt, found, there) for group, attempt, found, there in everything]


# -- reading ---------------------------------------------------------------------------------------------------------


def sequence_ids_of(row: Row) -> Sequence[int]:
    """Of a row that begins as those of `statements.PACK` do."""
    first, count, sequences = row[2], row[3], row[5]
    return range(first, first + count) if sequences is None else orjson.loads(sequences)


def unpack_rows(connection: Connection, rows: Sequence[Row], rollout_id: str, attempt_id: str) -> list[list[Span]]:
    """The spans of each pack, from rows of `statements.PACK`."""
    bodies = [bytes(row[7]) for row in rows]
    ids = {"rollout_id": rollout_id, "attempt_id": attempt_id}
    try:
        chains = read_chains(connection, rows, bodies)
        return [
            packs.unpack(
                body,
                **ids,
                span_ids=packs.split_ids(bytes(row[6])),
                sequence_ids=sequence_ids_of(row),
                superseded=bool(row[4]),
                chains=chains,
            )
            for row, body in zip(rows, bodies, strict=True)
        ]
    except codec.UNREADABLE as error:
        what = f"a span of attempt {attempt_id!r} of rollout {rollout_id!r}"
        raise codec.damaged(what, rollout_id, error) from error


def read_chains(connection: Connection, rows: Sequence[Row], bodies: Sequence[bytes]) -> dict[bytes, bytes]:
    """The tokens of the long prompts of some packs."""
    heads: dict[bytes, None] = {}
    keys: list[int] = []
    for row, body in zip(rows, bodies, strict=True):
        found = packs.heads_of(body)
        if found:
            heads.update(dict.fromkeys(found))
            keys.append(row[0])
    if not keys:
        return {}
    blocks = (
        (bytes(digest), bytes(parent), bytes(ids)) for digest, parent, ids in connection.all(statements.BLOCKS_OF, keys)
    )
    return tokens.join_blocks(heads, blocks)


def spans_by_id(connection: Connection, attempt: AttemptState, span_ids: set[str]) -> dict[str, Span]:
    """Those of an attempt that are in the database."""
    keys = [
        row[0]
        for row in connection.all(statements.HEADERS_OF, attempt.key)
        if not span_ids.isdisjoint(packs.split_ids(bytes(row[6])))
    ]
    rows = connection.all(statements.PACKS_BY_KEY, keys)
    unpacked = unpack_rows(connection, rows, attempt.rollout.rollout_id, attempt.attempt_id)
    return {span.span_id: span for spans in unpacked for span in spans if span.span_id in span_ids}


def _has(name: str, value: str) -> Callable[[Span], bool]:
    field_of = attrgetter(name)
    return lambda span: field_of(span) == value


def _contains(name: str, part: str) -> Callable[[Span], bool]:
    field_of = attrgetter(name)
    return lambda span: part in (field_of(span) or "")


@dataclass(frozen=True, slots=True)
class SpanQuery:
    """What `query_spans` asks for."""

    rollout_id: str
    attempt_id: str | None
    after: str | None
    limit: int
    offset: int
    exact: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    """The value that a field of a span must have."""
    parts: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    """The text that a field of a span must contain."""
    any_of: bool = False
    """One of these filters is enough."""
    order: Order = NATURAL

    @property
    def filters(self) -> list[Callable[[Span], bool]]:
        exact = [_has(name, value) for name, value in self.exact.items() if value is not None]
        return exact + [_contains(name, part) for name, part in self.parts.items() if part is not None]

    def page(self, spans: Iterable[Span]) -> list[Span]:
        """What is asked of all the spans from the place of `after` on."""
        tests, enough = self.filters, any if self.any_of else all
        if not self.order.natural:
            fitting = [span for span in spans if not tests or enough(test(span) for test in tests)]
            return self.order.page(fitting, self.limit, self.offset)
        skip, found = self.offset, list[Span]()
        if self.limit == -1 and not skip and not tests:
            return list(spans)
        if self.limit == 0:
            return found
        for span in spans:
            if tests and not enough(test(span) for test in tests):
                continue
            if skip:
                skip -= 1
                continue
            found.append(span)
            if len(found) == self.limit:
                break
        return found


def query(connection: Connection, asked: SpanQuery) -> list[Span]:
    """Spans from the database, in few reads and memory bounded by the answer."""
    attempts = attempts_asked(connection, asked.rollout_id, asked.attempt_id)
    if asked.after is None:
        return asked.page(span for row in attempts for span in _stream(connection, asked.rollout_id, row, None))
    index, place = _find(connection, attempts, asked)
    rest = attempts[index:]
    places = [place, *[None] * (len(rest) - 1)]
    return asked.page(
        span
        for row, start in zip(rest, places, strict=True)
        for span in _stream(connection, asked.rollout_id, row, start)
    )


def attempts_asked(connection: Connection, rollout_id: str, attempt_id: str | None) -> list[Row]:
    """Rows of `statements.ATTEMPT`."""
    rows = connection.all(statements.ATTEMPTS_OF, rollout_id)
    if not rows and not connection.all(statements.ROLLOUT_KEY, rollout_id):
        raise NotFoundError(f"no rollout {rollout_id!r} in this store")
    if attempt_id is None:
        return rows
    if attempt_id == "latest":
        return rows[-1:]
    rows = [row for row in rows if row[3] == attempt_id]
    if not rows:
        raise NotFoundError(f"rollout {rollout_id!r} has no attempt {attempt_id!r}")
    return rows


Place = tuple[int, int, int]
"""Of a span within its attempt: (sequence_id, key of its pack, index in it)."""


def _find(connection: Connection, attempts: Sequence[Row], asked: SpanQuery) -> tuple[int, tuple[Place, int]]:
    """(index of the attempt, (place, sequence number from which packs are to be read)) of the span `after`."""
    for index, attempt in enumerate(attempts):
        headers = connection.all(statements.HEADERS_OF, attempt[0])
        for row in headers:
            span_ids = packs.split_ids(bytes(row[6]))
            if asked.after in span_ids:
                inner = span_ids.index(asked.after)
                sequence_id = sequence_ids_of(row)[inner]
                start = min(header[2] for header in headers if max(sequence_ids_of(header)) >= sequence_id)
                return index, ((sequence_id, row[0], inner), start)
    raise NotFoundError(f"rollout {asked.rollout_id!r} has no span {asked.after!r} to go on after")


def _stream(connection: Connection, rollout_id: str, attempt: Row, after: tuple[Place, int] | None) -> Iterator[Span]:
    """The spans of an attempt by sequence number, those after a place only. Packs whose numbers interleave are merged;
    others pass through one by one."""
    ahead: list[tuple[Place, Span]] = []
    place, start = after or (None, -1)
    for row, spans in _packs(connection, rollout_id, attempt, start):
        while ahead and ahead[0][0][0] < row[2]:
            yield heappop(ahead)[1]
        for index, span in enumerate(spans):
            here = (span.sequence_id, row[0], index)
            if place is None or here > place:
                heappush(ahead, (here, span))
    while ahead:
        yield heappop(ahead)[1]


def _packs(connection: Connection, rollout_id: str, attempt: Row, start: int) -> Iterator[tuple[Row, list[Span]]]:
    skip = 0
    while True:
        rows = connection.all(statements.PACKS_OF, attempt[0], start, PACKS_AT_ONCE, skip)
        yield from zip(rows, unpack_rows(connection, rows, rollout_id, attempt[3]), strict=True)
        if len(rows) < PACKS_AT_ONCE:
            return
        last = rows[-1][2]
        skip = sum(row[2] == last for row in rows) + (skip if last == start else 0)
        start = last


def latest_spans(connection: Connection, rollout_ids: list[str]) -> dict[str, list[Span]]:
    """The spans of the latest attempt of each rollout, by rollout."""
    spans: dict[str, list[Span]] = {rollout_id: [] for rollout_id in rollout_ids}
    owners = {
        key: (rollout_id, attempt_id)
        for rollout_id, key, attempt_id in connection.all(statements.LATEST_AMONG, list(spans))
    }
    by_attempt: dict[int, list[Row]] = {}
    for row in connection.all(statements.PACKS_AMONG, list(owners)):
        by_attempt.setdefault(row[1], []).append(row)
    for key, rows in by_attempt.items():
        rollout_id, attempt_id = owners[key]
        places = [
            ((span.sequence_id, row[0], index), span)
            for row, found in zip(rows, unpack_rows(connection, rows, rollout_id, attempt_id), strict=True)
            for index, span in enumerate(found)
        ]
        places.sort(key=lambda each: each[0])
        spans[rollout_id] = [span for _, span in places]
    missing = [rollout_id for rollout_id, found in spans.items() if not found]
    if missing:
        known = {row[0] for row in connection.all(statements.KNOWN_AMONG, missing)}
        for rollout_id in missing:
            if rollout_id not in known:
                raise NotFoundError(f"no rollout {rollout_id!r} in this store")
    return spans
