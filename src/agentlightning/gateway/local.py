"""Serves the calls that our own engines answer: reads the request, prepares its prompts, samples, records and replies.

An answer is recorded before the end of the reply is sent, so no complete answer is lost. A failure is recorded too, and
raised. A client that disconnects ends the sampling, in every dialect; what is sampled by then is still recorded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from agentlightning import span as names
from agentlightning.chat.base import ChatFormat, Message
from agentlightning.chat.reasoning import find_reasoning_markers
from agentlightning.engine.base import AdapterView, Engine, Sample, SamplingParams
from agentlightning.engine.likeliest_tokens import likeliest_to_text
from agentlightning.engine.servers.joining import JoinRequest
from agentlightning.errors import AgentLightningError, ConfigError, ContextLengthError, PolicyError
from agentlightning.gateway.answer import Answer, Event, Usage
from agentlightning.gateway.callers import AttemptContext, AttemptIds, AttemptTable, RecordedAnswer, Replay
from agentlightning.gateway.config import GatewayConfig
from agentlightning.gateway.conversation import Conversations, Prompt
from agentlightning.gateway.dialects import DIALECTS
from agentlightning.gateway.dialects.base import ReplyWriter, Request, apply_resource_params
from agentlightning.gateway.dialects.messages import count_reply
from agentlightning.gateway.dialects.response_store import ResponseLookup, ResponseStore
from agentlightning.gateway.errors import bad_request
from agentlightning.gateway.http import PASSED, ResponseWriter, offload, released_slot, run_to_completion
from agentlightning.gateway.record import (
    CallRecord,
    Counters,
    as_json,
    failure_of,
    output_attributes,
    output_messages,
    request_attributes,
    shown_message,
)
from agentlightning.gateway.routing import ResolvedCall
from agentlightning.gateway.sampling import NEUTRAL, OnPolicySampling, SampledAnswer, constrain_sampling
from agentlightning.gateway.upstream.limits import estimate_prompt_tokens
from agentlightning.span import Span, new_span_id
from agentlightning.store.base import LightningStoreBase
from agentlightning.util.json_values import Json

logger = logging.getLogger(__name__)

_BYTES_PER_TOKEN = 4
_PARAMS: Final = ("temperature", "top_p", "top_k", "max_tokens", "seed", "stop")
"""Parameters that spans show."""


# -- the update gate ---------------------------------------------------------------------------------------------------

# Makes calls to an engine wait while its weights are updated. Each engine has its own gate, so an update of one policy
# does not delay calls of another. Calls enter in the order they arrived; the gate is closed within `update`. A gate
# rejects no call and never touches weights.

WARN_SECONDS = 30.0
"""Log a warning if a drain takes longer than this, and again after twice the time."""
MAX_NAMED = 5
"""Calls named in the warning."""


@dataclass(slots=True, eq=False)
class InFlightCall:
    """A call that waits at the gate or has entered."""

    name: str
    since: float = field(default_factory=time.monotonic)


class UpdateGate:
    """Calls enter an open gate at once. At a closed one they wait, and enter in order when it opens."""

    def __init__(self) -> None:
        self._in_flight: set[InFlightCall] = set()
        self._waiting: set[InFlightCall] = set()
        self._resuming: set[InFlightCall] = set()
        """Calls in flight that waited, and whose tasks have not resumed; new calls queue behind them."""
        self._open, self._drained, self._update_lock = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._open.set()

    @property
    def closed(self) -> bool:
        return not self._open.is_set()

    @property
    def num_in_flight(self) -> int:
        """Calls that have entered and not left."""
        return len(self._in_flight)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def enter(self, name: str = "a call") -> InFlightCall:
        """Enter once the gate is open; `leave` must follow. `name` describes the call in logs."""
        call = InFlightCall(name)
        if self._resuming:
            await asyncio.sleep(0)  # they resume first
        if not self.closed:
            self._in_flight.add(call)
            return call
        self._waiting.add(call)
        try:
            await self._open.wait()
        except asyncio.CancelledError:
            self._waiting.discard(call)
            if call in self._in_flight:  # Released, then cancelled before it resumed.
                self.leave(call)
            raise
        finally:
            self._resuming.discard(call)
        return call

    def leave(self, call: InFlightCall) -> None:
        self._in_flight.remove(call)
        if not self._in_flight:
            self._drained.set()

    @asynccontextmanager
    async def update(self, *, in_flight: bool = False, drain_seconds: float | None = None) -> AsyncGenerator[bool]:
        """A context in which weights may change and new calls wait. Yields whether calls are in progress.

        With `in_flight`, calls in progress continue across the update. Otherwise they finish first, but those left
        after `drain_seconds` continue across it too. Updates of one engine run one after another.
        """
        async with self._update_lock:
            self._open.clear()
            try:
                if not in_flight:
                    await self._drain(drain_seconds)
                yield bool(self._in_flight)
            finally:
                # Released calls count as in progress at once, even if the gate closes before they resume.
                self._in_flight |= self._waiting
                self._resuming |= self._waiting
                self._waiting.clear()
                self._open.set()

    async def _drain(self, seconds: float | None) -> None:
        """Wait until all calls have left, for at most `seconds`; logs a warning about slow ones."""
        started, warn = time.monotonic(), WARN_SECONDS
        while self._in_flight:
            elapsed = time.monotonic() - started
            if seconds is not None and elapsed >= seconds:
                message = "%d calls go on across the update after %g s: %s"
                return logger.info(message, self.num_in_flight, seconds, self._names())
            if elapsed >= warn:
                logger.warning(
                    "an update has waited %.0f s for %d calls: %s", elapsed, self.num_in_flight, self._names()
                )
                warn *= 2
            until = warn if seconds is None else min(warn, seconds)
            self._drained.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), until - elapsed)

    def _names(self) -> str:
        oldest, now = sorted(self._in_flight, key=lambda call: call.since), time.monotonic()
        named = [f"{call.name} ({now - call.since:.0f} s)" for call in oldest[:MAX_NAMED]]
        more = len(oldest) - len(named)
        return ", ".join(named) + (f" and {more} more" if more else "")


class UpdateGates:
    """One gate for each engine, whatever its model names. The adapters of an engine share its gate."""

    def __init__(self) -> None:
        self._gates: dict[int, tuple[object, UpdateGate]] = {}
        """By id(engine). The reference keeps the id from being reused."""

    def of(self, engine: object) -> UpdateGate:
        if isinstance(engine, AdapterView):
            engine = engine.engine
        if id(engine) not in self._gates:
            self._gates[id(engine)] = engine, UpdateGate()
        return self._gates[id(engine)][1]

    def forget(self, engine: object) -> UpdateGate:
        """Drop an engine, which is called no more; returns its gate."""
        gate = self.of(engine)
        del self._gates[id(engine)]
        return gate


# -- the service -------------------------------------------------------------------------------------------------------


LocalSettings = GatewayConfig | JoinRequest
"""What says how calls to an engine are sampled and recorded."""


@dataclass(frozen=True, slots=True)
class LocalService:
    """Prepares and serves calls to engines."""

    store: LightningStoreBase
    attempts: AttemptTable
    counters: Counters
    on_policy: OnPolicySampling
    responses: ResponseStore
    conversations: Conversations
    gates: UpdateGates
    settings: LocalSettings
    """Those of engines that have none of their own."""
    settings_of: dict[UpdateGate, LocalSettings]
    """Those of training runs elsewhere, by the gate of their policy."""

    async def count(self, call: ResolvedCall, size: int, writer: ResponseWriter) -> None:
        """Reply with the number of prompt tokens of a request of `size` bytes. Nothing is sampled or recorded."""
        request, engine, chat = await self._read(call, size)
        try:
            (prompt,) = await offload(size, partial(self._build_prompts, call, request, engine, chat))
            tokens = len(prompt.token_ids)
        except ContextLengthError:  # Clients shorten their conversations by this number, so an estimate will do.
            tokens = await offload(size, partial(estimate_prompt_tokens, request.raw))
        await writer.send_json(200, count_reply(tokens))

    async def prepare(self, call: ResolvedCall, size: int) -> LocalCall:
        """Prepare the prompts and parameters of a request of `size` bytes. Raises ApiError."""
        request, engine, chat = await self._read(call, size)
        caller, context, model, dialect = call.caller, call.context, call.route.name, DIALECTS[call.path]
        # In the modes val and test, calls never serve as training data.
        trainable = context is not None and context.mode not in ("val", "test")
        resource, forced, overridden = self.on_policy.forced_params(call)
        neutral = {name: NEUTRAL[name] for name in overridden}
        params = replace(request.params, **neutral) if neutral else request.params
        params = apply_resource_params(params, resource, forced)
        for name in params.unsupported(engine.supported_params):
            raise bad_request(name, f"{name} cannot be honoured by what serves {engine.model}; leave it out")
        settings = self.settings_of.get(self.gates.of(engine), self.settings)
        self.counters.tools_in_messages += bool(request.tools) and chat.tools_in_messages
        mode = settings.structured_output
        if not request.prefill and (mode == "always" or (mode == "auto" and not trainable)):
            # A grammar describes whole answers.
            params = await constrain_sampling(engine, chat, params, request, size)
        if trainable and params.truncates:
            params = replace(params, record_kept=True)
        prompts = await offload(size, partial(self._build_prompts, call, request, engine, chat))
        self.counters.unattributed += caller.attempt is None
        self.counters.continued += sum(prompt.continues is not None for prompt in prompts)
        self.counters.drift += sum(prompt.drift is not None for prompt in prompts)
        replay, tokens_of = context.replay if context else Replay(), [prompt.token_ids for prompt in prompts]
        again, differs = replay.take(model, tokens_of, request.n, params)
        if begun := again and again.begun:
            prompts = [replace(prompts[0], token_ids=[*prompts[0].token_ids, *begun])]
        shown, recorded = params.top_logprobs, settings.record_top_logprobs if caller.attempt else 0
        params = replace(params, top_logprobs=max(shown, recorded))
        usage = Usage(sum(len(prompt.token_ids) for prompt in prompts))
        answer = partial(
            SampledAnswer,
            stops=params.stop,
            call_prefix=dialect.call_prefix,
            prefill=request.prefill,
            is_constrained=params.constraint is not None,
            chat=chat,
            stop_tokens=params.stop_token_ids,
            single_tool_call=request.constraint.single_tool_call,
            tools=request.tools,
            top_logprobs=shown,
            call_ids=again.call_ids if again else (),
            reasoning_markers=None if request.prompts or request.prefill else find_reasoning_markers(chat),
        )
        messages = _input_messages(request, engine)
        asked = [each for each in zip(prompts, messages, strict=True) for _ in range(request.n)]
        return LocalCall(
            self,
            engine,
            request,
            params,
            CallRecord(f"{dialect.operation} {model}", caller, call.trace_id),
            dialect.new_reply(request, model, usage),
            [
                Choice(prompt, said, answer(index, prompt_token_ids=prompt.token_ids))
                for index, (prompt, said) in enumerate(asked)
            ],
            context,
            again,
            {
                names.OPERATION_NAME: dialect.operation,
                names.OVERRIDDEN: overridden or None,
                names.REPLAYS: again and again.replays,
                names.BEGUN: len(begun or ()) or None,
                names.REPLAY_MISMATCH: differs or None,
                names.TURN_LIMIT: None if context is None else context.begin_turn(model),
            },
        )

    async def _read(self, call: ResolvedCall, size: int) -> tuple[Request, Engine, ChatFormat]:
        """(the request of a call, its engine, the chat format with the variables of the request)."""
        engine, lookup = call.route.engine, ResponseLookup(self.responses, call.caller.attempt)
        assert engine is not None
        request = await offload(size, partial(DIALECTS[call.path].read, call.body, lookup))
        self.counters.unknown_fields += len(request.ignored_fields)
        return request, engine, await offload(size, partial(_chat_format, engine, request))

    def _build_prompts(self, call: ResolvedCall, request: Request, engine: Engine, chat: ChatFormat) -> list[Prompt]:
        """The prompts of a request. Slow for long conversations; may be called from any thread. Raises ConfigError if
        the template cannot render them, ContextLengthError if they certainly exceed the context."""
        conversations, attempt, model = self.conversations, call.caller.attempt, call.route.name
        limit = engine.context_length
        if request.prompts:
            return [conversations.raw_prompt(attempt, model, chat, prompt, limit) for prompt in request.prompts]
        return [conversations.prompt(attempt, model, chat, request.messages, request.tools, limit, request.prefill)]


def _input_messages(request: Request, engine: Engine) -> list[list[Message]]:
    """The messages of each prompt, for its span. A raw prompt is one message of the user."""
    if not request.prompts:
        prefill: list[Message] = [{"role": "assistant", "content": request.prefill}] if request.prefill else []
        return [request.messages + prefill]
    texts = [prompt if isinstance(prompt, str) else engine.chat.decode(prompt) for prompt in request.prompts]
    return [[{"role": "user", "content": text}] for text in texts]


def _chat_format(engine: Engine, request: Request) -> ChatFormat:
    """The chat format with the template variables of a request. Raises ApiError 400 if the template rejects them."""
    chat = engine.chat
    if request.template:
        try:
            chat = chat.with_template_kwargs(request.template)
        except ConfigError as error:
            raise bad_request("chat_template_kwargs", str(error)) from None
    if request.prefill and (markers := find_reasoning_markers(chat)) is not None and markers.opened:
        raise bad_request(
            "messages", f"answers of {engine.model} begin with reasoning, so they cannot continue the last message"
        )
    return chat


# -- one call ----------------------------------------------------------------------------------------------------------


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

    service: LocalService
    engine: Engine
    request: Request
    params: SamplingParams
    record: CallRecord
    reply: ReplyWriter
    choices: list[Choice]
    context: AttemptContext | None
    """Of its attempt."""
    recorded: RecordedAnswer | None
    """What is given again: a whole answer, or its beginning, which is then the end of the prompt."""
    marks: Json
    """Attributes of its spans that are known before it is sampled; None: absent."""
    is_sampled: bool = field(default=False, init=False)
    """All answers are complete. From here on the call must not be cancelled."""
    end_reason: BaseException | None = field(default=None, init=False)
    """What cancelled the call."""
    _events: list[tuple[Answer, Event]] = field(default_factory=list, init=False)
    """Of a streamed reply, not sent yet."""
    _progress: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set with each of these, and once the sampling has ended."""

    @property
    def attempt(self) -> AttemptIds | None:
        return self.record.caller.attempt

    # -- the reply ---------------------------------------------------------------------------------------------------

    async def run(self, writer: ResponseWriter) -> None:
        """Sample, record and send the reply: events while it is sampled if the client streams, else one JSON body.
        Raises what the engine or the store raises."""
        reply, stream, answers = self.reply, self.request.stream, [choice.answer for choice in self.choices]
        sampling = asyncio.ensure_future(self._sample_and_record())
        sampling.add_done_callback(lambda _: self._progress.set())
        try:
            with writer.kept_alive() if stream else nullcontext():
                while not sampling.done() or self._events:
                    await self._progress.wait()
                    self._progress.clear()
                    events, self._events = self._events, []
                    if events:  # Sent with one write.
                        await writer.send_events(reply.more(answers, events))
                await sampling
            end = reply.more(answers) + reply.end(answers) if stream else reply.body(answers)
            if self.attempt is not None:  # Before the client can know of it: later requests may refer to it.
                for choice in self.choices:
                    reply.store(self.service.responses, self.attempt, choice.answer, digests=choice.prompt.digests)
            await writer.finish(end, stream)
        except asyncio.CancelledError as error:
            self.end_reason = error
            raise
        finally:
            # A call that failed does not count against the limit on turns.
            if self.context is not None and self.marks[names.TURN_LIMIT] is not None and not self.is_sampled:
                self.context.answered -= 1
            # No task is left running, and complete answers are recorded even if the client has disconnected. A server
            # reports the end of a reply as a disconnect, so nothing is awaited after it.
            if not sampling.done():
                if not self.is_sampled:
                    sampling.cancel()
                await run_to_completion(asyncio.wait({sampling}))
                if not sampling.cancelled() and (failure := sampling.exception()) is not None:
                    logger.error("a call whose client disconnected could not be recorded", exc_info=failure)

    # -- sampling --------------------------------------------------------------------------------------------------

    async def _sample_and_record(self) -> None:
        """Inside the engine's update gate."""
        gate, in_flight = self.service.gates.of(self.engine), None
        try:
            try:
                async with released_slot() if gate.closed else nullcontext():
                    in_flight = await gate.enter(" ".join(self.attempt) if self.attempt else "a call of no rollout")
                await self._sample_all()
            except BaseException as error:
                await self._record(partial(self._failed_span, failure_of(self.end_reason or error)))
                raise
            self.is_sampled = True
            spans = await self._record(self._span)
        finally:
            if in_flight is not None:
                gate.leave(in_flight)
        self._remember_answers()
        self.service.counters.violated += sum(span.attributes.get(names.CONSTRAINT) == "violated" for span in spans)
        self.service.attempts.recheck_superseded(spans)

    async def _sample_all(self) -> None:
        if len(self.choices) == 1:
            return await self._sample_one(self.choices[0])
        try:
            async with asyncio.TaskGroup() as group:
                for choice in self.choices:
                    group.create_task(self._sample_one(choice))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _sample_one(self, choice: Choice) -> None:
        """A reply that is not streamed reads its answer at the end, all at once."""
        answer, stream = choice.answer, self.request.stream

        def show(events: Sequence[Event]) -> None:
            if stream and events:
                self._events += [(answer, event) for event in events]
                self._progress.set()

        def receive(*sampled: Any) -> None:
            show(answer.feed(*sampled))

        params = replace(self._params(answer), stop=answer.engine_stops)
        sample = None
        if self.recorded is not None:
            show(answer.begin(self.recorded.begun))
            sample = self.recorded.sample
            if params.max_tokens is not None:
                params = replace(params, max_tokens=max(1, params.max_tokens - len(self.recorded.begun)))
        on_tokens = receive if stream else None
        show(answer.finish(sample or await self._call_engine(choice.prompt.token_ids, params, on_tokens)))

    async def _call_engine(
        self, prompt: Sequence[int], params: SamplingParams, on_tokens: Callable[..., None] | None
    ) -> Sample:
        """Raises AgentLightningError; any other exception of the engine becomes a PolicyError."""
        try:
            return await self.engine.sample(prompt, params, on_tokens, affinity=self.record.caller.affinity)
        except AgentLightningError:
            raise
        except Exception as error:  # The boundary to engines, which may be third-party code.
            raise PolicyError(f"{type(error).__name__}: {error}") from error

    def _params(self, answer: Answer) -> SamplingParams:
        """The answers to one seeded request must differ, and be reproducible."""
        if self.params.seed is None or answer.index == 0:
            return self.params
        return replace(self.params, seed=self.params.seed + answer.index)

    def _remember_answers(self) -> None:
        """Count the tokens, and let later calls of the attempt continue the answers."""
        attempt, service = self.attempt, self.service
        service.counters.prompt_tokens += self.reply.usage.input_tokens
        for choice in self.choices:
            answer, prompt, span_id = choice.answer, choice.prompt, choice.span_id
            if (sample := answer.sample) is None:
                continue
            service.counters.response_tokens += len(sample.token_ids)
            if attempt is not None:
                service.conversations.add_answer(attempt, prompt, self.engine.chat, answer.message, sample, span_id)

    # -- the record ------------------------------------------------------------------------------------------------

    async def _record(self, make: Callable[[Choice], Span]) -> list[Span]:
        store = self.service.store
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
        params, prompt, reply = self._params(choice.answer), choice.prompt, self.reply
        continued = prompt.continues
        attributes: Json = {
            names.PROVIDER_NAME: "agentlightning",
            names.REQUEST_MODEL: self.request.model or reply.model,
            names.RESPONSE_MODEL: reply.model,
            names.RESPONSE_ID: reply.id,
            names.INPUT_TOKENS: len(prompt.token_ids),
            names.INPUT_MESSAGES: as_json([shown_message(message) for message in choice.messages]),
            **request_attributes({name: getattr(params, name) for name in _PARAMS} | {"tools": self.request.tools}),
            names.REQUEST_PRESENCE_PENALTY: params.presence_penalty or None,
            names.REQUEST_FREQUENCY_PENALTY: params.frequency_penalty or None,
            names.RESHAPED: list(params.distribution_params) or None,
            names.CONTINUES: continued.span_id if continued and continued.is_complete else None,
            names.DRIFT: prompt.drift is not None or None,
            names.DRIFT_REASON: prompt.drift,
        }
        return {name: value for name, value in (self.marks | attributes).items() if value is not None}
