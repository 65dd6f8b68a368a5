"""Writing the spans of attempts as packs. packs.py says what is in a pack, span_reading.py reads them back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import orjson
from msgspec import Struct

from agentlightning.span import SUPERSEDED, Span
from agentlightning.store.sql.lifecycle import transitions
from agentlightning.store.sql.spans import codec
from agentlightning.store.sql.spans.codec import Pack
from agentlightning.store.sql.spans.read import spans_by_id
from agentlightning.store.sql.tables import mapping, statements
from agentlightning.store.sql.tables.mapping import Row
from agentlightning.store.sql.tables.rows import AttemptState, State

if TYPE_CHECKING:
    from agentlightning.store.sql.execution.unit_of_work import Unit

IDS_BYTES: Final = 8 << 20
"""Of span ids in memory, about."""
_ID_BYTES: Final = 120


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
                ids.update(codec.split_ids(bytes(some)))
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
        mapping.check_text(rollout_id, "rollout_id")
        mapping.check_text(attempt_id, "attempt_id")
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
        self._pack = codec.pack(self._spans)
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
            pack = codec.select(pack, [index for index in range(pack.count) if index not in twice])
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
        transitions.hear(unit, attempt, unit.wall)
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
