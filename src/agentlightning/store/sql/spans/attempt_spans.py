"""The spans of one call, grouped by attempt and packed in the caller's thread before they are submitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from agentlightning.span import SUPERSEDED, Span
from agentlightning.store import validation
from agentlightning.store.sql.spans import codec
from agentlightning.store.sql.spans.codec import SpanPack
from agentlightning.store.sql.tables.schema import MAX_PACK


class SpanWriteResult(Struct, gc=False):
    """How the spans of one attempt were stored."""

    attempt_id: str
    sequence_ids: Sequence[int]
    """Of the spans that are new."""
    superseded: bool
    existing: dict[int, Span]
    """By index: spans that were stored before."""


class AttemptSpans:
    """The spans of one call that belong to one attempt: packed here, then stored, then returned as stored."""

    __slots__ = ("_positions", "_spans", "attempt_id", "body", "named", "pack", "rollout_id")

    pack: SpanPack
    body: bytes

    def __init__(self, rollout_id: str, attempt_id: str) -> None:
        validation.check_text(rollout_id, "rollout_id")
        validation.check_text(attempt_id, "attempt_id")
        self.rollout_id = rollout_id
        self.attempt_id = attempt_id
        self.named = False
        """The caller chose the id of at least one span."""
        self._positions: list[int] = []
        self._spans: list[Span] = []

    def __len__(self) -> int:
        return len(self._spans)

    def add(self, position: int, span: Span) -> None:
        """`position` is its index among all spans of the call."""
        self._positions.append(position)
        self._spans.append(span)
        if span.span_id:
            self.named = True

    def seal(self) -> None:
        """Validate and pack the spans."""
        self.pack = codec.pack(self._spans)
        self.body = self.pack.body

    def read_result(self, result: SpanWriteResult, output: list[Any]) -> None:
        """Put each span, as it was stored, at its position in `output`."""
        sequence_ids = iter(result.sequence_ids)
        new: dict[str, Span] = {}
        existing, attempt_id, superseded = result.existing, result.attempt_id, result.superseded
        for index, (position, span) in enumerate(zip(self._positions, self._spans, strict=True)):
            span_id = self.pack.span_ids[index]
            if index in existing:
                output[position] = existing[index]
                continue
            if span_id not in new:
                new[span_id] = _as_stored(span, attempt_id, span_id, next(sequence_ids), superseded)
            output[position] = new[span_id]


def _as_stored(span: Span, attempt_id: str, span_id: str, sequence_id: int, superseded: bool) -> Span:
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


def group_by_attempt(spans: Sequence[Span]) -> list[AttemptSpans]:
    """The spans of one call, packed for each attempt, MAX_PACK at most in a group."""
    current: dict[tuple[str, str], AttemptSpans] = {}
    groups: list[AttemptSpans] = []
    ids = [span.span_id for span in spans if span.span_id]
    most = MAX_PACK if len(set(ids)) == len(ids) else len(spans)  # equal ids are told apart within one group
    for position, span in enumerate(spans):
        key = (span.rollout_id, span.attempt_id)
        group = current.get(key)
        if group is None or len(group) == most:
            group = current[key] = AttemptSpans(*key)
            groups.append(group)
        group.add(position, span)
    for group in groups:
        group.seal()
    return groups
