"""The commands that store spans and reserve their sequence numbers."""

from __future__ import annotations

from collections.abc import Sequence

from agentlightning.span import Span
from agentlightning.store.sql.commands.base import Command
from agentlightning.store.sql.lifecycle import transitions
from agentlightning.store.sql.session.rows import AttemptRow, PendingPack
from agentlightning.store.sql.session.unit_of_work import Prefetch, UnitOfWork
from agentlightning.store.sql.spans import codec
from agentlightning.store.sql.spans.attempt_spans import AttemptSpans, SpanWriteResult
from agentlightning.store.sql.spans.read import spans_by_id
from agentlightning.store.sql.tables.schema import MAX_PACK


class AddSpans(Command):
    """Stores the spans of one call, all or none."""

    __slots__ = ("_groups",)

    def __init__(self, name: str, groups: Sequence[AttemptSpans]) -> None:
        super().__init__(name)
        self._groups = groups

    def prefetch(self, needs: Prefetch) -> None:
        for group in self._groups:
            needs.rollouts.add(group.rollout_id)

    def run(self, unit: UnitOfWork) -> list[SpanWriteResult]:
        attempts = [unit.attempt(group.rollout_id, group.attempt_id) for group in self._groups]
        pairs = list(zip(self._groups, attempts, strict=True))
        duplicates = [_duplicates(unit, group, attempt) for group, attempt in pairs]
        stored = [
            _stored(unit, attempt, set(found.values())) if found else {}
            for attempt, found in zip(attempts, duplicates, strict=True)
        ]
        return [
            _add(unit, group, attempt, found, existing)
            for (group, attempt), found, existing in zip(pairs, duplicates, stored, strict=True)
        ]


def _duplicates(unit: UnitOfWork, group: AttemptSpans, attempt: AttemptRow) -> dict[int, str]:
    """By index, the ids that are stored already, or occur twice. Must come before the first change of a command."""
    if not group.named:
        return {}
    known = unit.span_ids.of(attempt)
    span_ids = group.pack.span_ids
    if known.isdisjoint(span_ids) and len(set(span_ids)) == len(span_ids):
        return {}
    found: dict[int, str] = {}
    seen: set[str] = set()
    for index, span_id in enumerate(span_ids):
        if span_id in known or span_id in seen:
            found[index] = span_id
        seen.add(span_id)
    return found


def _stored(unit: UnitOfWork, attempt: AttemptRow, span_ids: set[str]) -> dict[str, Span]:
    unit.flush()
    return spans_by_id(unit.connection, attempt.key, attempt.rollout.rollout_id, attempt.attempt_id, span_ids)


def _add(
    unit: UnitOfWork, group: AttemptSpans, attempt: AttemptRow, duplicates: dict[int, str], stored: dict[str, Span]
) -> SpanWriteResult:
    pack, body = group.pack, group.body
    if duplicates:
        pack = codec.select(pack, [index for index in range(pack.count) if index not in duplicates])
        body = pack.body
    sequence_ids = _assign_sequence_ids(pack.sequence_ids, attempt.last_span)
    superseded = attempt.superseded
    unit.modify_attempt(attempt)
    if pack.count:
        before = attempt.spans
        for start, end in _runs(sequence_ids):
            part = pack if end - start == pack.count else codec.select(pack, range(start, end))
            some = body if part is pack else part.body
            unit.add_pack(PendingPack(attempt, part, some, sequence_ids[start], superseded))
        attempt.spans = before + pack.count
        attempt.bytes += len(body) + 9 * pack.count
        attempt.last_span = max(attempt.last_span, max(sequence_ids))
        unit.span_ids.add(attempt, before, pack.span_ids, group.named)
    transitions.record_heartbeat(unit, attempt, unit.wall)
    existing = {index: stored[span_id] for index, span_id in duplicates.items() if span_id in stored}
    return SpanWriteResult(attempt.attempt_id, sequence_ids, bool(superseded), existing)


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """The bounds of the packs to make: consecutive numbers, MAX_PACK at most."""
    if type(numbers) is range and len(numbers) <= MAX_PACK:
        return [(0, len(numbers))]
    starts = [0]
    for index in range(1, len(numbers)):
        if numbers[index] != numbers[index - 1] + 1 or index - starts[-1] == MAX_PACK:
            starts.append(index)
    return list(zip(starts, [*starts[1:], len(numbers)], strict=True))


def _assign_sequence_ids(requested: Sequence[int], last: int) -> Sequence[int]:
    if not any(requested):
        return range(last + 1, last + 1 + len(requested))
    numbers: list[int] = []
    for sequence_id in requested:
        last = max(last, sequence_id) if sequence_id else last + 1
        numbers.append(sequence_id or last)
    return numbers


def reserve_sequence_ids(unit: UnitOfWork, attempt_ids: Sequence[tuple[str, str]]) -> list[int]:
    """The next sequence number of each attempt, given as (rollout_id, attempt_id)."""
    numbers: list[int] = []
    for attempt in [unit.attempt(*ids) for ids in attempt_ids]:
        unit.modify_attempt(attempt)
        attempt.last_span += 1
        numbers.append(attempt.last_span)
    return numbers
