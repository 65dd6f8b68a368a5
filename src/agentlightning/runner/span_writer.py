"""Writes the agents' spans to the store in batches: spans that arrive during a write go into the next one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from agentlightning.attempt_address import trace_id_of
from agentlightning.errors import AgentLightningError, ConfigError, ConflictError, Failure, NotFoundError
from agentlightning.rollouts import AttemptedRollout
from agentlightning.span import (
    EXCEPTION,
    EXCEPTION_MESSAGE,
    EXCEPTION_STACKTRACE,
    EXCEPTION_TYPE,
    SUPERSEDED,
    Span,
    new_span_id,
    new_trace_id,
)
from agentlightning.store.base import LightningStoreBase
from agentlightning.tracing.sanitize import sanitize_span

logger = logging.getLogger(__name__)

T = TypeVar("T")

BATCH = 1000
"""Maximum number of spans in one write."""


class Retry(Protocol):
    """Runs an operation, retrying it as needed."""

    async def __call__(self, operation: Callable[[], Awaitable[T]], /) -> T: ...


class SpanWriter:
    """Writes spans in the order of `put`. `on_fenced` is called with the id of each attempt that the store has
    superseded."""

    def __init__(self, store: LightningStoreBase, retry: Retry, on_fenced: Callable[[str], None]) -> None:
        self._store = store
        self._retry = retry
        self._on_fenced = on_fenced
        self._waiting: deque[Span] = deque()
        self._arrived = asyncio.Event()
        self._put = 0
        self._done = 0
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    def put(self, spans: Sequence[Span]) -> None:
        """Queue spans for writing."""
        self._waiting.extend(spans)
        self._put += len(spans)
        self._arrived.set()

    async def written(self) -> None:
        """Wait until all spans queued so far are in the store."""
        if self._done < self._put:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append((self._put, future))
            await future

    async def run(self) -> None:
        """Write until cancelled. Raises errors of the store, except for spans that it rejects."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
                await self._write(batch)
                self._done += len(batch)
                self._notify_waiters()

    def _notify_waiters(self) -> None:
        while self._waiters and self._waiters[0][0] <= self._done:
            _, future = self._waiters.popleft()
            if not future.done():
                future.set_result(None)

    async def _write(self, batch: Sequence[Span], sanitized: bool = False) -> None:
        try:
            kept = await self._retry(lambda: self._store.add_many_spans(batch))
        except (ConfigError, ConflictError, NotFoundError) as error:
            for span in batch if len(batch) > 1 else ():  # a rejected span must not take others with it
                await self._write([span])
            if len(batch) == 1:
                await self._write_sanitized(batch[0], error, sanitized)
            return
        for attempt_id in {span.attempt_id for span in kept if span.attributes.get(SUPERSEDED)}:
            self._on_fenced(attempt_id)

    async def _write_sanitized(self, span: Span, error: AgentLightningError, sanitized: bool) -> None:
        """Store what can be stored of a rejected span: nothing that an agent emits may end the runner."""
        if isinstance(error, ConfigError) and not sanitized:
            return await self._write([sanitize_span(span)], sanitized=True)
        logger.warning("the store rejects span %r of attempt %s: %s", span.name, span.attempt_id, error)


def failure_span(claimed: AttemptedRollout, failure: Failure) -> Span:
    """An exception span of the attempt, created now."""
    now = time.time()
    attributes = {
        EXCEPTION_TYPE: failure.type,
        EXCEPTION_MESSAGE: failure.message,
        EXCEPTION_STACKTRACE: failure.traceback,
    }
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
        attributes=attributes,
    )
