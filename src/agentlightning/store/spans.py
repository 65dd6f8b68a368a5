"""Writing the spans of one attempt, and reading them back."""

from __future__ import annotations

from typing import Any

from agentlightning.errors import ConfigError
from agentlightning.span import SUPERSEDED, Span
from agentlightning.store import codec, lifecycle, statements
from agentlightning.store.codec import Row
from agentlightning.store.engine import Transaction
from agentlightning.store.ids import new_hex


class SpanGroup:
    """The spans of one call that belong to one attempt: taken in order, written, read as kept."""

    def __init__(self, rollout_id: str, attempt_id: str) -> None:
        self._rollout_id = rollout_id
        self._attempt_id = attempt_id
        self._positions: list[int] = []
        self._spans: list[Span] = []
        self._ids: list[str] = []
        self._rows: list[Row] = []
        self._sequence_ids: list[int] = []
        self._superseded = False
        self._kept: dict[str, Row] | None = None

    def take(self, position: int, span: Span) -> None:
        """Check a span and make it a row. `position` is its place among all spans of the call."""
        if span.sequence_id < 0:
            raise ConfigError(f"sequence_id={span.sequence_id} of span {span.name!r}: use 0 for the next, or 1 and up")
        self._positions.append(position)
        self._spans.append(span)
        self._ids.append(span.span_id or new_hex())
        self._rows.append(codec.from_span(span))

    def write(self, transaction: Transaction) -> None:
        state = lifecycle.find_attempt(transaction, self._rollout_id, self._attempt_id)
        self._attempt_id = state.attempt_id
        self._superseded = bool(state.superseded)
        self._kept = None
        self._number(state.last_span)
        rows = [
            (state.key, span_id, sequence_id, *row, state.superseded)
            for span_id, sequence_id, row in zip(self._ids, self._sequence_ids, self._rows, strict=True)
        ]
        if transaction.many(statements.INSERT_SPAN, rows) < len(rows):
            ids = codec.dump(self._ids, "span ids")
            self._kept = {row[2]: row for row in transaction.all(statements.SPANS_BY_ID, state.key, ids)}
        state.last_span = max(state.last_span, *self._sequence_ids)
        lifecycle.hear(transaction, state, transaction.clock.wall())

    def _number(self, last: int) -> None:
        self._sequence_ids = []
        for span in self._spans:
            last = max(last, span.sequence_id) if span.sequence_id else last + 1
            self._sequence_ids.append(span.sequence_id or last)

    def read(self, kept: list[Any]) -> None:
        """Put each span, as it was kept, at its position in `kept`."""
        everything = zip(self._positions, self._spans, self._ids, self._sequence_ids, strict=True)
        for position, span, span_id, sequence_id in everything:
            if self._kept is not None:
                kept[position] = codec.to_span(self._kept[span_id])
                continue
            kept[position] = Span(
                span.rollout_id,
                self._attempt_id,
                span.name,
                span.start_time,
                span.end_time,
                sequence_id,
                span.trace_id,
                span_id,
                span.parent_id,
                span.status_code,
                span.status_message,
                {**span.attributes, SUPERSEDED: True} if self._superseded else span.attributes,
                span.events,
                span.resource,
            )


def latest_spans(transaction: Transaction, rollout_ids: list[str]) -> dict[str, list[Span]]:
    """The spans of the latest attempt of each rollout, by rollout."""
    spans: dict[str, list[Span]] = {rollout_id: [] for rollout_id in rollout_ids}
    for row in transaction.all(statements.SPANS_OF_LATEST, codec.dump(list(spans), "rollout_ids")):
        spans[row[0]].append(codec.to_span(row))
    for rollout_id, found in spans.items():
        if not found:
            lifecycle.find_rollout(transaction, rollout_id)
    return spans
