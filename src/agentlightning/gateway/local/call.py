"""One local call, from its prompts to its spans: sample the answers, record them, then let the reply end.

An answer is recorded before the end of the reply is sent, so no complete answer is lost. A failure is recorded too, and
raised. A client that disconnects ends the sampling, in every dialect; what is sampled by then is still recorded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from agentlightning import span as names
from agentlightning.chat.base import Message
from agentlightning.engine.base import Engine, Sample, SamplingParams
from agentlightning.engine.likeliest_tokens import likeliest_to_text
from agentlightning.errors import AgentLightningError, PolicyError
from agentlightning.gateway.answer import Answer, Event, Json
from agentlightning.gateway.callers.replay import RecordedAnswer
from agentlightning.gateway.concurrency import released_slot
from agentlightning.gateway.dialects.base import ReplyWriter, Request
from agentlightning.gateway.dialects.raw_request import as_json, chat_message
from agentlightning.gateway.http import PASSED, ResponseWriter, offload, run_to_completion
from agentlightning.gateway.local.answer import SampledAnswer, TopLogprobs
from agentlightning.gateway.local.conversation import Prompt
from agentlightning.gateway.local.update_gate import InFlightCall, UpdateGate
from agentlightning.gateway.record import CallRecord, failure_of, output_attributes, output_messages
from agentlightning.span import Span, new_span_id
from agentlightning.store.base import LightningStoreBase

logger = logging.getLogger(__name__)

OnEvent = Callable[[Answer, Event], None]
"""Receives the events of an answer."""

_BYTES_PER_TOKEN = 4


@dataclass(slots=True)
class Choice:
    """One answer, and what it answers."""

    prompt: Prompt
    messages: Sequence[Message]
    answer: SampledAnswer
    span_id: str = field(default_factory=new_span_id)


@dataclass(slots=True)
class LocalCall:
    """A call with its prompts. Nothing is recorded of one without an attempt."""

    engine: Engine
    request: Request
    operation: str
    """OpenTelemetry's name for the operation."""
    params: SamplingParams
    record: CallRecord
    response_id: str
    model: str
    """The model that serves it."""
    choices: list[Choice]
    overridden: tuple[str, ...] = ()
    """Sampling parameters of the request that were overridden for training."""
    recorded: RecordedAnswer | None = None
    """What is given again: a whole answer, or its beginning, which is then the end of the prompt."""
    replay_mismatch: bool = False
    """The request differs from the recorded ones."""
    turn_limit: int | None = None
    """The number of answers that the attempt may be given, if it is limited."""
    is_sampled: bool = field(default=False, init=False)
    """All answers are complete. From here on the call must not be cancelled."""
    end_reason: BaseException | None = field(default=None, init=False)
    """What cancelled the call."""

    @property
    def attempt(self) -> tuple[str, str] | None:
        return self.record.caller.attempt

    @property
    def answers(self) -> list[SampledAnswer]:
        return [choice.answer for choice in self.choices]

    # -- sampling --------------------------------------------------------------------------------------------------

    async def run(self, store: LightningStoreBase, gate: UpdateGate, on_event: OnEvent | None = None) -> list[Span]:
        """Sample and record, inside the engine's update gate; returns the stored spans. Raises what the engine or
        the store raises."""
        in_flight: InFlightCall | None = None
        try:
            try:
                async with released_slot() if gate.closed else nullcontext():
                    in_flight = await gate.enter(" ".join(self.attempt) if self.attempt else "a call of no rollout")
                await self._sample_all(on_event)
            except BaseException as error:
                await self._record(store, partial(self._failed_span, failure_of(self.end_reason or error)))
                raise
            self.is_sampled = True
            return await self._record(store, self._span)
        finally:
            if in_flight is not None:
                gate.leave(in_flight)

    async def _sample_all(self, on_event: OnEvent | None) -> None:
        if len(self.choices) == 1:
            return await self._sample_one(self.choices[0], on_event)
        try:
            async with asyncio.TaskGroup() as group:
                for choice in self.choices:
                    group.create_task(self._sample_one(choice, on_event))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _sample_one(self, choice: Choice, on_event: OnEvent | None) -> None:
        answer = choice.answer

        def show(events: Sequence[Event]) -> None:
            if on_event is not None:
                for event in events:
                    on_event(answer, event)

        def receive(token_ids: Sequence[int], logprobs: Sequence[float] = (), tops: Sequence[TopLogprobs] = ()) -> None:
            show(answer.feed(token_ids, logprobs, tops))

        # A reply that is not streamed reads its answer at the end, all at once.
        on_tokens = receive if on_event is not None else None
        params = replace(self._params(answer), stop=answer.engine_stops)
        sample = None
        if self.recorded is not None:
            show(answer.begin(self.recorded.begun))
            sample = self.recorded.sample
            if params.max_tokens is not None:
                params = replace(params, max_tokens=max(1, params.max_tokens - len(self.recorded.begun)))
        show(answer.finish(sample or await self._call_engine(choice.prompt.token_ids, params, on_tokens)))

    async def _call_engine(
        self, prompt: Sequence[int], params: SamplingParams, on_tokens: Callable[..., None] | None
    ) -> Sample:
        """Raises AgentLightningError; any other exception of the engine becomes a PolicyError."""
        try:
            return await self.engine.sample(prompt, params, on_tokens, affinity="/".join(self.attempt or ()))
        except AgentLightningError:
            raise
        except Exception as error:  # The boundary to engines, which may be third-party code.
            raise PolicyError(f"{type(error).__name__}: {error}") from error

    def _params(self, answer: Answer) -> SamplingParams:
        """The answers to one seeded request must differ, and be reproducible."""
        if self.params.seed is None or answer.index == 0:
            return self.params
        return replace(self.params, seed=self.params.seed + answer.index)

    # -- the record ------------------------------------------------------------------------------------------------

    async def _record(self, store: LightningStoreBase, make: Callable[[Choice], Span]) -> list[Span]:
        if self.attempt is None:
            return []
        size = _BYTES_PER_TOKEN * sum(len(choice.prompt.token_ids) for choice in self.choices)
        spans = await offload(size // PASSED, lambda: [make(choice) for choice in self.choices])
        return [await store.add_span(spans[0])] if len(spans) == 1 else await store.add_many_spans(spans)

    def _span(self, choice: Choice) -> Span:
        """The span of a complete answer."""
        answer, sample = choice.answer, choice.answer.sample
        assert sample is not None
        attributes = self._attributes(choice) | output_attributes(answer, answer.finish_reason, self.request.constraint)
        attributes |= {
            names.OUTPUT_TOKENS: len(sample.token_ids),
            names.PROMPT_TOKEN_IDS: choice.prompt.token_ids,
            names.RESPONSE_TOKEN_IDS: list(sample.token_ids),
            names.LOGPROBS: list(sample.logprobs),
            names.POLICY_VERSION: sample.policy_version,
        }
        if sample.versions:
            attributes[names.POLICY_VERSIONS] = [number for run in sample.versions for number in run]
        if sample.kept_sets is not None:
            attributes[names.KEPT_SETS] = sample.kept_sets.to_text()
        if sample.top_logprobs:
            attributes[names.TOP_LOGPROBS] = likeliest_to_text(sample.top_logprobs)
        return self.record.span(attributes, span_id=choice.span_id)

    def _failed_span(self, failure: tuple[str, str], choice: Choice) -> Span:
        """The span of an answer that failed, with the tokens sampled so far. It is not trained on."""
        answer = choice.answer
        attributes = self._attributes(choice) | {
            names.OUTPUT_TOKENS: answer.num_tokens,
            names.OUTPUT_MESSAGES: output_messages(answer, "error"),
        }
        if answer.num_tokens:
            attributes[names.PROMPT_TOKEN_IDS] = choice.prompt.token_ids
            attributes[names.RESPONSE_TOKEN_IDS] = list(answer.token_ids)
        return self.record.span(attributes, failure, span_id=choice.span_id)

    def _attributes(self, choice: Choice) -> Json:
        params, prompt, recorded = self._params(choice.answer), choice.prompt, self.recorded
        attributes: Json = {
            names.OPERATION_NAME: self.operation,
            names.PROVIDER_NAME: "agentlightning",
            names.REQUEST_MODEL: self.request.model or self.model,
            names.RESPONSE_MODEL: self.model,
            names.RESPONSE_ID: self.response_id,
            names.REQUEST_TEMPERATURE: params.temperature,
            names.REQUEST_TOP_P: params.top_p,
            names.REQUEST_TOP_K: params.top_k,
            names.INPUT_TOKENS: len(prompt.token_ids),
            names.INPUT_MESSAGES: as_json([chat_message(message) for message in choice.messages]),
        }
        optional = {
            names.REQUEST_MAX_TOKENS: params.max_tokens,
            names.REQUEST_SEED: params.seed,
            names.REQUEST_STOP: list(params.stop) or None,
            names.REQUEST_PRESENCE_PENALTY: params.presence_penalty or None,
            names.REQUEST_FREQUENCY_PENALTY: params.frequency_penalty or None,
            names.OVERRIDDEN: list(self.overridden) or None,
            names.RESHAPED: list(params.distribution_params) or None,
            names.TOOL_DEFINITIONS: as_json(self.request.tools) if self.request.tools else None,
            names.REPLAYS: recorded and recorded.replays,
            names.BEGUN: recorded and (len(recorded.begun) or None),
            names.REPLAY_MISMATCH: self.replay_mismatch or None,
            names.TURN_LIMIT: self.turn_limit,
            names.CONTINUES: prompt.continued_span,
            names.DRIFT: prompt.drift or None,
            names.DRIFT_REASON: prompt.reason,
        }
        return attributes | {name: value for name, value in optional.items() if value is not None}


# -- the reply ---------------------------------------------------------------------------------------------------------

Events = asyncio.Queue[tuple[Answer, Event] | None]
"""Events of answers; None if the sampling has ended."""


async def send_reply(
    call: LocalCall,
    run: Callable[[LocalCall, OnEvent | None], Awaitable[None]],
    reply: ReplyWriter,
    finish: Callable[[], None],
    writer: ResponseWriter,
) -> None:
    """Sample with `run` and send the reply: events while it is sampled if the client streams, else one JSON body. Calls
    `finish` when everything is sampled and recorded, before the client can know. Raises what `run` raises."""
    events: Events = asyncio.Queue()
    opened, stream, answers = False, call.request.stream, call.answers

    def put(answer: Answer, event: Event) -> None:
        events.put_nowait((answer, event))

    sampling = asyncio.ensure_future(run(call, put if stream else None))
    sampling.add_done_callback(lambda _: events.put_nowait(None))
    try:
        with writer.kept_alive(lambda: stream):
            while (event := await events.get()) is not None:
                start = b"" if opened else reply.start(answers)
                await writer.send_events(start + _take_all(reply, event, events))
                opened = True
            await sampling
        if stream:
            ending = (b"" if opened else reply.start(answers)) + reply.end(answers)
            finish()
            await writer.send_events(ending)
            await writer.close()
        else:
            body = reply.body(answers)
            finish()
            await writer.send_json(200, body)
    except asyncio.CancelledError as error:
        call.end_reason = error
        raise
    finally:
        await _finish_task(call, sampling)


def _take_all(reply: ReplyWriter, first: tuple[Answer, Event], events: Events) -> bytes:
    """All events so far, to be sent with one write."""
    parts = [reply.event(*first)]
    while not events.empty():
        event = events.get_nowait()
        if event is None:
            events.put_nowait(None)
            break
        parts.append(reply.event(*event))
    return b"".join(parts)


async def _finish_task(call: LocalCall, sampling: asyncio.Future[None]) -> None:
    """Leave no task running. Complete answers are recorded even if the client has disconnected."""
    if sampling.done():  # A server reports the end of a reply as a disconnect, so nothing is awaited after it.
        return
    if not call.is_sampled:
        sampling.cancel()
    await run_to_completion(asyncio.wait({sampling}))
    if not sampling.cancelled() and (error := sampling.exception()) is not None:
        logger.error("a call whose client disconnected could not be recorded", exc_info=error)
