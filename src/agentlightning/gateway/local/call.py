"""One local call, from its prompts to its spans: sample the answers, record them, then let the reply end.

An answer is recorded before the end of the reply is sent, so no complete answer is lost. A failure is recorded too, and
raised.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from agentlightning.engine.base import Engine, Sample, SamplingParams
from agentlightning.errors import AgentLightningError, PolicyError
from agentlightning.gateway.concurrency import released_slot
from agentlightning.gateway.dialects.output import OutputEvent
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.local.answer import Answer
from agentlightning.gateway.local.logprobs import TopLogprobs
from agentlightning.gateway.local.span import SpanDraft
from agentlightning.gateway.local.update_gate import InFlightCall, UpdateGate
from agentlightning.gateway.offload import PASSED, offload
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase

OnEvent = Callable[[Answer, OutputEvent], None]
"""Receives the events of an answer."""

_BYTES_PER_TOKEN = 4


@dataclass(slots=True)
class LocalCall:
    """A call with its prompts."""

    engine: Engine
    params: SamplingParams
    drafts: list[SpanDraft]
    """One span draft for each answer."""
    answers: list[Answer]
    attributed: bool = True
    """If False, nothing is recorded."""
    is_sampled: bool = field(default=False, init=False)
    """All answers are complete. From here on the call must not be cancelled."""
    end_reason: ApiError | None = field(default=None, init=False)
    """Why the call was cancelled, unless its client disconnected."""

    async def run(self, store: LightningStoreBase, gate: UpdateGate, on_event: OnEvent | None = None) -> list[Span]:
        """Sample and record, inside the engine's update gate; returns the stored spans. Raises what the engine or
        the store raises."""
        in_flight: InFlightCall | None = None
        try:
            try:
                async with released_slot() if gate.closed else nullcontext():
                    in_flight = await gate.enter(self._name())
                await self._sample_all(on_event)
            except BaseException as error:
                await self._record(store, partial(self._failures, error))
                raise
            self.is_sampled = True
            return await self._record(store, self._spans)
        finally:
            if in_flight is not None:
                gate.leave(in_flight)

    def _name(self) -> str:
        draft = self.drafts[0]
        return f"{draft.rollout_id} {draft.attempt_id}" if self.attributed else "a call of no rollout"

    async def _sample_all(self, on_event: OnEvent | None) -> None:
        if len(self.answers) == 1:
            return await self._sample_one(self.drafts[0], self.answers[0], on_event)
        try:
            async with asyncio.TaskGroup() as group:
                for draft, answer in self._pairs():
                    group.create_task(self._sample_one(draft, answer, on_event))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _sample_one(self, draft: SpanDraft, answer: Answer, on_event: OnEvent | None) -> None:
        def receive(token_ids: Sequence[int], logprobs: Sequence[float] = (), tops: Sequence[TopLogprobs] = ()) -> None:
            _emit(answer, answer.feed(token_ids, logprobs, tops), on_event)

        # A reply that is not streamed reads its answer at the end, all at once.
        on_tokens = receive if on_event is not None else None
        params = replace(self._params(answer), stop=answer.engine_stops)
        affinity = f"{draft.rollout_id}/{draft.attempt_id}" if self.attributed else ""
        sample = None
        if draft.recorded is not None:
            _emit(answer, answer.begin(draft.recorded.begun), on_event)
            sample = draft.recorded.sample
            if params.max_tokens is not None:
                params = replace(params, max_tokens=max(1, params.max_tokens - len(draft.recorded.begun)))
        sample = sample or await self._call_engine(draft.prompt.token_ids, params, on_tokens, affinity)
        _emit(answer, answer.finish(sample), on_event)

    async def _call_engine(
        self, prompt: Sequence[int], params: SamplingParams, on_tokens: Callable[..., None] | None, affinity: str
    ) -> Sample:
        """Raises AgentLightningError; any other exception of the engine becomes a PolicyError."""
        try:
            return await self.engine.sample(prompt, params, on_tokens, affinity=affinity)
        except AgentLightningError:
            raise
        except Exception as error:  # The boundary to engines, which may be third-party code.
            raise PolicyError(f"{type(error).__name__}: {error}") from error

    def _params(self, answer: Answer) -> SamplingParams:
        """The answers to one seeded request must differ, and be reproducible."""
        if self.params.seed is None or answer.index == 0:
            return self.params
        return replace(self.params, seed=self.params.seed + answer.index)

    def _spans(self) -> list[Span]:
        now = time.time()
        return [draft.answered(answer, self._params(answer), now) for draft, answer in self._pairs()]

    def _failures(self, error: BaseException) -> list[Span]:
        cancelled = isinstance(error, asyncio.CancelledError)
        kind = "client_disconnected" if cancelled else type(error).__qualname__
        message = "the caller hung up before the answer was whole" if cancelled else str(error)
        if cancelled and self.end_reason is not None:
            kind, message = self.end_reason.code or self.end_reason.type, self.end_reason.message
        now = time.time()
        return [draft.failed(answer, self._params(answer), now, kind, message) for draft, answer in self._pairs()]

    def _pairs(self) -> list[tuple[SpanDraft, Answer]]:
        return list(zip(self.drafts, self.answers, strict=True))

    async def _record(self, store: LightningStoreBase, make: Callable[[], list[Span]]) -> list[Span]:
        if not self.attributed:
            return []
        size = _BYTES_PER_TOKEN * sum(len(draft.prompt.token_ids) for draft in self.drafts)
        spans = await offload(size // PASSED, make)
        return [await store.add_span(spans[0])] if len(spans) == 1 else await store.add_many_spans(spans)


def _emit(answer: Answer, events: Sequence[OutputEvent], on_event: OnEvent | None) -> None:
    if on_event is not None:
        for event in events:
            on_event(answer, event)
