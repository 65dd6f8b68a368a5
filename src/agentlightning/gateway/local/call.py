"""One call, from its prompts to its spans: draw the answers, record them, and only then let them be finished.

An answer is recorded before its last piece is shown, so that nothing an agent has heard is lost. A failure is
recorded too, and raised.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from agentlightning.engine.base import Engine, Sample, SamplingParams
from agentlightning.errors import AgentLightningError, PolicyError
from agentlightning.gateway.concurrency import released_slot
from agentlightning.gateway.dialects.output import OutputEvent
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.local.answer import Answer
from agentlightning.gateway.local.logprobs import TopLogprobs
from agentlightning.gateway.local.span import SpanDraft
from agentlightning.gateway.local.update_gate import InFlightCall, UpdateGate
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase

OnEvent = Callable[[Answer, OutputEvent], None]
"""Takes an answer and the next piece of it."""


@dataclass(slots=True)
class LocalCall:
    """One call whose prompts are known."""

    engine: Engine
    params: SamplingParams
    records: list[SpanDraft]
    """One for each answer."""
    answers: list[Answer]
    attributed: bool = True
    """False: nothing is recorded."""
    is_sampled: bool = field(default=False, init=False)
    """All answers are whole; from here on the exchange is not to be cancelled."""
    end_reason: ApiError | None = field(default=None, init=False)
    """Why it is cancelled, where its caller has not hung up."""

    async def run(self, store: LightningStoreBase, gate: UpdateGate, show: OnEvent | None = None) -> list[Span]:
        """Draw and record behind the engine's gate; returns the spans as kept. Raises what the engine or the store
        raised."""
        visitor: InFlightCall | None = None
        try:
            try:
                async with released_slot() if gate.closed else nullcontext():
                    visitor = await gate.enter(self._name())
                await self._sample_all(show)
            except BaseException as error:
                await self._record(store, self._failures(error))
                raise
            self.is_sampled = True
            return await self._record(store, self._spans())
        finally:
            if visitor is not None:
                gate.leave(visitor)

    def _name(self) -> str:
        record = self.records[0]
        return f"{record.rollout_id} {record.attempt_id}" if self.attributed else "a call of no rollout"

    async def _sample_all(self, show: OnEvent | None) -> None:
        if len(self.answers) == 1:
            return await self._sample_one(self.records[0], self.answers[0], show)
        try:
            async with asyncio.TaskGroup() as group:
                for record, answer in self._pairs():
                    group.create_task(self._sample_one(record, answer, show))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _sample_one(self, record: SpanDraft, answer: Answer, show: OnEvent | None) -> None:
        def receive(token_ids: Sequence[int], logprobs: Sequence[float] = (), tops: Sequence[TopLogprobs] = ()) -> None:
            _emit(answer, answer.feed(token_ids, logprobs, tops), show)

        # Nobody watches a plain call: its answer is read at once when it is whole.
        on_tokens = receive if show is not None else None
        params = replace(self._params(answer), stop=answer.engine_stops)
        affinity = f"{record.rollout_id}/{record.attempt_id}" if self.attributed else ""
        sample = await self._call_engine(record.prompt.token_ids, params, on_tokens, affinity)
        _emit(answer, answer.finish(sample), show)

    async def _call_engine(
        self, prompt: Sequence[int], params: SamplingParams, on_tokens: Callable[..., None] | None, affinity: str
    ) -> Sample:
        """Raises AgentLightningError: what an engine raises beyond that is a failure of the engine."""
        try:
            return await self.engine.sample(prompt, params, on_tokens, affinity=affinity)
        except AgentLightningError:
            raise
        except Exception as error:  # The boundary to engines, which may be anybody's.
            raise PolicyError(f"{type(error).__name__}: {error}") from error

    def _params(self, answer: Answer) -> SamplingParams:
        """Several answers to a seeded request must differ, and be the same again next time."""
        if self.params.seed is None or answer.index == 0:
            return self.params
        return replace(self.params, seed=self.params.seed + answer.index)

    def _spans(self) -> list[Span]:
        now = time.time()
        return [record.answered(answer, self._params(answer), now) for record, answer in self._pairs()]

    def _failures(self, error: BaseException) -> list[Span]:
        cancelled = isinstance(error, asyncio.CancelledError)
        kind = "client_disconnected" if cancelled else type(error).__qualname__
        message = "the caller hung up before the answer was whole" if cancelled else str(error)
        if cancelled and self.end_reason is not None:
            kind, message = self.end_reason.code or self.end_reason.type, self.end_reason.message
        now = time.time()
        return [record.failed(answer, self._params(answer), now, kind, message) for record, answer in self._pairs()]

    def _pairs(self) -> list[tuple[SpanDraft, Answer]]:
        return list(zip(self.records, self.answers, strict=True))

    async def _record(self, store: LightningStoreBase, spans: list[Span]) -> list[Span]:
        if not self.attributed:
            return []
        return [await store.add_span(spans[0])] if len(spans) == 1 else await store.add_many_spans(spans)


def _emit(answer: Answer, pieces: Sequence[OutputEvent], show: OnEvent | None) -> None:
    if show is not None:
        for piece in pieces:
            show(answer, piece)
