"""Writes the agents' spans to the store: what arrives during a write goes into the next one."""

from __future__ import annotations

import time
from collections.abc import Callable

from agentlightning.attempt_address import trace_id_of
from agentlightning.errors import ConfigError, ConflictError, Failure, NotFoundError
from agentlightning.rollouts import AttemptedRollout
from agentlightning.span import EXCEPTION, SUPERSEDED, Span, new_span_id, new_trace_id
from agentlightning.store.base import LightningStoreBase
from agentlightning.tracing.emit import exception_attributes
from agentlightning.tracing.outbox import Outbox, Retry
from agentlightning.tracing.sanitize import sanitize_span


class SpanWriter(Outbox[Span]):
    """An outbox in the runner's event loop, which ends with an error where the store cannot be used for longer than
    `retry` tries: nothing that an agent emits is dropped, but for what the store rejects. `on_fenced` is called with
    the id of each attempt that the store has superseded."""

    rejections = (ConfigError, ConflictError, NotFoundError)

    def __init__(self, store: LightningStoreBase, retry: Retry, on_fenced: Callable[[str], None]) -> None:
        super().__init__("the store", patience=retry.patience)
        self._store, self._on_fenced = store, on_fenced
        self.failed = retry.failed

    async def send(self, batch: list[Span]) -> None:
        kept = await self._store.add_many_spans(batch)
        for attempt_id in {span.attempt_id for span in kept if span.attributes.get(SUPERSEDED)}:
            self._on_fenced(attempt_id)

    def repair(self, item: Span) -> Span:
        return sanitize_span(item)

    def give_up(self, batch: list[Span], error: Exception) -> None:
        raise error


def failure_span(claimed: AttemptedRollout, failure: Failure) -> Span:
    """An exception span of the attempt, created now."""
    now = time.time()
    return Span(
        claimed.rollout_id,
        claimed.attempt.attempt_id,
        EXCEPTION,
        now,
        now,
        trace_id=trace_id_of(claimed.attempt.attempt_id) or new_trace_id(),
        span_id=new_span_id(),
        status_code="ERROR",
        status_message=failure.message,
        attributes=exception_attributes(failure),
    )
