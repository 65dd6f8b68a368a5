"""The part of the gateway that has calls answered by our own engines.

From a request that was read to its prompts, its parameters and its exchange; then drawn, recorded, answered and
remembered. Called by the gateway for each call that goes to no provider.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from starlette.types import Receive, Scope

from agentlightning import span as names
from agentlightning.chat.base import ChatFormat, Message
from agentlightning.chat.reasoning import find_reasoning_markers
from agentlightning.engine.base import Engine, SamplingParams
from agentlightning.errors import ConfigError, ContextLengthError
from agentlightning.gateway.asgi import ResponseWriter
from agentlightning.gateway.callers.attempts import AttemptCache, AttemptContext, AttemptIds
from agentlightning.gateway.callers.attribution import Caller
from agentlightning.gateway.callers.on_policy import OnPolicySampling, is_policy, is_training
from agentlightning.gateway.dialects.base import Dialect, ReplyMetadata, ReplyWriter, Request
from agentlightning.gateway.dialects.openai.responses_reply import ResponsesReplyWriter
from agentlightning.gateway.dialects.response_store import ResponseStore
from agentlightning.gateway.dialects.sampling import apply_resource_params, refuse_unsupported
from agentlightning.gateway.errors import ApiError, bad_request
from agentlightning.gateway.local.answer import Answer
from agentlightning.gateway.local.call import LocalCall, OnEvent
from agentlightning.gateway.local.constrained_sampling import EnforcementMode, hold
from agentlightning.gateway.local.conversation import Conversations, Prompt, encode_within
from agentlightning.gateway.local.span import SpanDraft
from agentlightning.gateway.local.streaming import stream_reply
from agentlightning.gateway.local.update_gate import UpdateGates
from agentlightning.gateway.metrics import Counters
from agentlightning.gateway.offload import offload
from agentlightning.gateway.routing import Router
from agentlightning.gateway.upstream.token_bound import estimate_prompt_tokens
from agentlightning.span import new_span_id, new_trace_id
from agentlightning.store.base import LightningStoreBase


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalService:
    """Over what the gateway knows: each field is its own."""

    store: LightningStoreBase
    table: Router
    conversations: Conversations
    kept: ResponseStore
    gates: UpdateGates
    contexts: AttemptCache
    find_context: Callable[[Caller], Awaitable[AttemptContext]]
    counters: Counters
    on_policy: OnPolicySampling
    holding: EnforcementMode

    async def count(self, caller: Caller, request: Request, size: int) -> int:
        """How many tokens the prompt of a request of `size` bytes has; nothing is sampled or recorded."""
        model, engine = self._resolve(caller, "messages")
        if caller.attempt:
            await self.find_context(caller)
        chat = await offload(size, partial(_chat_format, engine, request))
        try:
            room = engine.context_length
            read = partial(_build_prompts, self.conversations, caller.attempt, request, model, chat, room)
            (prompt,) = await offload(size, read)
        except ContextLengthError:  # Clients shorten their conversations by this number, however rough.
            return await offload(size, partial(estimate_prompt_tokens, request.raw))
        return len(prompt.token_ids)

    async def prepare(
        self, dialect: Dialect, path: str, caller: Caller, request: Request, size: int
    ) -> tuple[LocalCall, ReplyWriter]:
        """What is to be drawn for a request of `size` bytes, and who writes the reply."""
        model, engine = self._resolve(caller, path)
        params, trace_id, learned, overridden = request.params, "", False, tuple[str, ...]()
        if caller.attempt:
            context = await self.find_context(caller)
            params, overridden = self._params(caller, context, model, params)
            trace_id, learned = context.trace_id, context.trainable
        refuse_unsupported(engine, params)
        chat = await offload(size, partial(_chat_format, engine, request))
        if not request.prefill:  # What is begun otherwise cannot be held.
            held = partial(hold, tools=request.tools, learned=learned, holding=self.holding, size=size)
            params = await held(engine, chat, params, request.constraint)
        read = partial(_build_prompts, self.conversations, caller.attempt, request, model, chat, engine.context_length)
        prompts = await offload(size, read)
        self._count(caller, prompts)
        tokens = sum(len(prompt.token_ids) for prompt in prompts)
        response_id = dialect.id_prefix + secrets.token_hex(12)
        head = ReplyMetadata(response_id, model, int(time.time()), tokens)
        records = [
            _span_draft(dialect, caller, request, head, prompt, asked, trace_id or new_trace_id(), overridden)
            for prompt, asked in zip(prompts, _input_messages(request, engine), strict=True)
            for _ in range(request.n)
        ]
        answers = [
            _new_answer(dialect, request, chat, params, index, record.prompt) for index, record in enumerate(records)
        ]
        exchange = LocalCall(engine, params, records, answers, attributed=caller.attempt is not None)
        return exchange, dialect.reply(request, head)

    def _params(
        self, caller: Caller, context: AttemptContext, model: str, asked: SamplingParams
    ) -> tuple[SamplingParams, tuple[str, ...]]:
        """(what is sampled with, names of what the call asked for and does not get)."""
        training = is_training(context, caller.mode, model)
        params = self.on_policy.neutral_params(asked) if training else asked
        if caller.temperature is not None and is_policy(context, model):
            params = replace(params, temperature=caller.temperature)
        params = apply_resource_params(params, *context.sampling_parameters(model))
        return params, self.on_policy.report_overridden(asked, params) if training else ()

    def _resolve(self, caller: Caller, path: str) -> tuple[str, Engine]:
        route = self.table.resolve(caller.agent.model, caller.agent.name, path)
        if route.engine is None:
            raise ApiError(404, f"the model {route.name!r} is a provider's, which counts no tokens", param="model")
        return route.name, route.engine

    def _count(self, caller: Caller, prompts: Sequence[Prompt]) -> None:
        self.counters.unattributed += caller.attempt is None
        self.counters.continued += sum(prompt.continues is not None for prompt in prompts)
        self.counters.drift += sum(prompt.drift for prompt in prompts)

    async def draw(
        self,
        exchange: LocalCall,
        request: Request,
        reply: ReplyWriter,
        scope: Scope,
        receive: Receive,
        writer: ResponseWriter,
    ) -> None:
        await stream_reply(
            exchange,
            self._run,
            reply,
            stream=request.stream,
            finish=partial(self._store_response, exchange, request, reply),
            receive=receive,
            writer=writer,
        )

    async def _run(self, exchange: LocalCall, show: OnEvent | None) -> None:
        kept = await exchange.run(self.store, self.gates.of(exchange.engine), show)
        self._remember_answers(exchange)
        self.counters.violated += sum(span.attributes.get(names.CONSTRAINT) == "violated" for span in kept)
        if any(span.attributes.get(names.SUPERSEDED) for span in kept):
            self.contexts.invalidate(exchange.records[0].rollout_id, exchange.records[0].attempt_id)

    def _remember_answers(self, exchange: LocalCall) -> None:
        chat = exchange.engine.chat
        prompts = {id(record.prompt): record.prompt for record in exchange.records}
        self.counters.prompt_tokens += sum(len(prompt.token_ids) for prompt in prompts.values())
        for answer, record in zip(exchange.answers, exchange.records, strict=True):
            if (sample := answer.sample) is None:
                continue
            self.counters.response_tokens += len(sample.token_ids)
            if not exchange.attributed:
                continue
            key, prompt, span_id = (record.rollout_id, record.attempt_id), record.prompt, record.span_id
            if prompt.raw is not None:
                self.conversations.add_raw_answer(key, prompt, chat, answer.content, sample, span_id)
            else:
                self.conversations.add_answer(key, prompt, answer.message, sample, chat.eos_token_ids, span_id)

    def _store_response(self, exchange: LocalCall, request: Request, reply: ReplyWriter) -> None:
        """Keep what a later request may name."""
        if not (isinstance(reply, ResponsesReplyWriter) and exchange.attributed):
            return
        (answer,), (record,) = exchange.answers, exchange.records
        stored = request.raw.get("store") is not False
        self.kept.add(
            (record.rollout_id, record.attempt_id),
            record.response_id,
            record.prompt.digests,
            request.messages,
            answer.message,
            reply.body([answer]) if stored else None,
            reply.items if stored else (),
            request.num_instructions,
        )


def _input_messages(request: Request, engine: Engine) -> list[list[Message]]:
    """The messages behind each prompt, for its span: a raw prompt is one message of the user."""
    if not request.prompts:
        begun: list[Message] = [{"role": "assistant", "content": request.prefill}] if request.prefill else []
        return [request.messages + begun]
    texts = [given if isinstance(given, str) else engine.chat.decode(given) for given in request.prompts]
    return [[{"role": "user", "content": text}] for text in texts]


def _chat_format(engine: Engine, request: Request) -> ChatFormat:
    """How the conversation of a request is written. Raises ApiError 400 for what the template cannot be asked."""
    if request.template:
        try:
            chat = engine.chat.with_template_kwargs(request.template)
        except ConfigError as error:
            raise bad_request("chat_template_kwargs", str(error)) from None
    else:
        chat = engine.chat
    if request.prefill and (markers := find_reasoning_markers(chat)) is not None and markers.opened:
        raise bad_request(
            "messages", f"answers of {engine.model} begin with a thought, and cannot go on with the last message"
        )
    return chat


def _build_prompts(
    conversations: Conversations, attempt: AttemptIds | None, request: Request, model: str, chat: ChatFormat, room: int
) -> list[Prompt]:
    """What the engine is given; takes long for long conversations, and may be called from any thread. Raises
    ConfigError where the template cannot hold them, ContextLengthError where the context (`room`) surely cannot."""
    if attempt and request.prompts:
        return [conversations.raw_prompt(attempt, model, chat, given, room) for given in request.prompts]
    if attempt:
        asked = request.messages, request.tools
        return [conversations.prompt(attempt, model, chat, *asked, room, request.prefill)]
    if request.prompts:
        return [
            Prompt(encode_within(chat, given, room) if isinstance(given, str) else given) for given in request.prompts
        ]
    text = chat.render(request.messages, request.tools) + chat.escape(request.prefill)
    return [Prompt(encode_within(chat, text, room))]


def _span_draft(
    dialect: Dialect,
    caller: Caller,
    request: Request,
    head: ReplyMetadata,
    prompt: Prompt,
    asked: Sequence[Message],
    trace_id: str,
    overridden: tuple[str, ...] = (),
) -> SpanDraft:
    return SpanDraft(
        rollout_id=caller.rollout_id or "",
        attempt_id=caller.attempt_id or "",
        trace_id=caller.trace_id or trace_id,
        parent_id=caller.parent_id,
        caller_attributes=caller.attributes(),
        operation=dialect.operation,
        response_id=head.id,
        requested_model=request.model or head.model,
        served_model=head.model,
        messages=asked,
        tools=request.tools,
        prompt=prompt,
        constraint=request.constraint,
        start_time=time.time(),
        span_id=new_span_id(),
        overridden=overridden,
    )


def _new_answer(
    dialect: Dialect, request: Request, chat: ChatFormat, params: SamplingParams, index: int, prompt: Prompt
) -> Answer:
    return Answer(
        index,
        chat,
        params.stop,
        prompt.token_ids,
        params.stop_token_ids,
        reads_tool_calls=request.tools is not None,
        single_tool_call=request.constraint.single_tool_call,
        call_prefix=dialect.call_prefix,
        tools=request.tools,
        is_constrained=params.constraint is not None,
        reasoning_markers=None if request.prompts or request.prefill else find_reasoning_markers(chat),
        prefill=request.prefill,
        uses_functions=request.uses_functions,
    )
