"""Serves the calls that our own engines answer: reads the request, prepares its prompts, and remembers the answers.

`call` samples, records and replies. Called by the gateway's endpoints for each call that goes to no provider.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from agentlightning import span as names
from agentlightning.chat.base import ChatFormat, Message
from agentlightning.chat.reasoning import find_reasoning_markers
from agentlightning.engine.base import Engine, SamplingParams
from agentlightning.errors import ConfigError, ContextLengthError
from agentlightning.gateway.callers.attempts import AttemptContext, AttemptTable
from agentlightning.gateway.callers.attribution import Caller
from agentlightning.gateway.callers.on_policy import OnPolicySampling, is_policy, is_training
from agentlightning.gateway.callers.replay import RecordedAnswer, load_replay
from agentlightning.gateway.dialects.base import Dialect, ReplyMetadata, ReplyWriter, Request
from agentlightning.gateway.dialects.fields import apply_resource_params, refuse_unsupported
from agentlightning.gateway.dialects.raw_request import OPERATIONS
from agentlightning.gateway.dialects.registry import DIALECTS
from agentlightning.gateway.dialects.response_store import ResponseStore
from agentlightning.gateway.dialects.responses import ResponsesReplyWriter
from agentlightning.gateway.errors import bad_request
from agentlightning.gateway.http import ResponseWriter, offload
from agentlightning.gateway.local.answer import SampledAnswer
from agentlightning.gateway.local.call import Choice, LocalCall, OnEvent, send_reply
from agentlightning.gateway.local.constrained_sampling import EnforcementMode, constrain_sampling
from agentlightning.gateway.local.conversation import Conversations, Prompt, encode_within
from agentlightning.gateway.local.update_gate import UpdateGates
from agentlightning.gateway.metrics import Counters
from agentlightning.gateway.record import CallRecord
from agentlightning.gateway.routing import ModelRoute, ResolvedCall
from agentlightning.gateway.upstream.token_bound import estimate_prompt_tokens
from agentlightning.store.base import LightningStoreBase


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """How calls to an engine are sampled and recorded; see `GatewayConfig`."""

    structured_output: EnforcementMode = "auto"
    record_top_logprobs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalService:
    """Prepares and serves calls to engines."""

    store: LightningStoreBase
    conversations: Conversations
    responses: ResponseStore
    gates: UpdateGates
    attempts: AttemptTable
    counters: Counters
    on_policy: OnPolicySampling
    settings: LocalSettings
    """Those of engines that have none of their own."""
    settings_of: dict[str, LocalSettings] = field(default_factory=dict[str, LocalSettings])
    """By model name, those of training runs elsewhere."""

    async def count(self, call: ResolvedCall, size: int) -> int:
        """The number of prompt tokens of a request of `size` bytes. Nothing is sampled or recorded."""
        request, engine = await self._read_request(call, size), _engine_of(call.route)
        chat = await offload(size, partial(_chat_format, engine, request))
        try:
            (prompt,) = await offload(size, partial(self._build_prompts, call, request, chat))
        except ContextLengthError:  # Clients shorten their conversations by this number, so an estimate will do.
            return await offload(size, partial(estimate_prompt_tokens, request.raw))
        return len(prompt.token_ids)

    async def prepare(self, call: ResolvedCall, size: int) -> Callable[[ResponseWriter], Awaitable[None]]:
        """Prepare the prompts and parameters of a request of `size` bytes; returns what serves it. Raises ApiError."""
        request, engine = await self._read_request(call, size), _engine_of(call.route)
        caller, context, model, dialect = call.caller, call.context, call.route.name, DIALECTS[call.path]
        params, trace_id, trainable, overridden = request.params, "", False, tuple[str, ...]()
        if context is not None:
            params, overridden = self._params(caller, context, model, params)
            trace_id, trainable = context.trace_id, context.trainable
        refuse_unsupported(engine, params)
        settings = self.settings_of.get(model, self.settings)
        chat = await offload(size, partial(_chat_format, engine, request))
        self.counters.tools_in_messages += bool(request.tools) and chat.tools_in_messages
        if not request.prefill:  # A grammar describes whole answers.
            constrain = partial(constrain_sampling, tools=request.tools, trainable=trainable, size=size)
            params = await constrain(engine, chat, params, request.constraint, mode=settings.structured_output)
        if trainable and params.truncates:
            params = replace(params, record_kept=True)
        prompts = await offload(size, partial(self._build_prompts, call, request, chat))
        self.counters.unattributed += caller.attempt is None
        self.counters.continued += sum(prompt.continues is not None for prompt in prompts)
        self.counters.drift += sum(prompt.drift for prompt in prompts)
        again, differs = await self._replay(context, model, prompts, params, request.n)
        if begun := again and again.begun:
            prompts = [replace(prompts[0], token_ids=[*prompts[0].token_ids, *begun])]
        shown, recorded = params.top_logprobs, settings.record_top_logprobs if caller.attempt else 0
        params = replace(params, top_logprobs=max(shown, recorded))
        tokens = sum(len(prompt.token_ids) for prompt in prompts)
        head = ReplyMetadata(dialect.id_prefix + secrets.token_hex(12), model, int(time.time()), tokens)
        make = partial(_answer, dialect, request, chat, params, shown, again.call_ids if again else ())
        messages = _input_messages(request, engine)
        asked = [each for each in zip(prompts, messages, strict=True) for _ in range(request.n)]
        local_call = LocalCall(
            engine,
            request,
            operation := OPERATIONS[call.path],
            params,
            CallRecord(f"{operation} {model}", caller, trace_id),
            head.id,
            model,
            [Choice(prompt, said, make(index, prompt)) for index, (prompt, said) in enumerate(asked)],
            overridden,
            again,
            differs,
        )
        reply = dialect.reply(request, head)
        if context is not None:
            local_call.turn_limit = context.begin_turn(model)
        return partial(self._serve, local_call, reply, context)

    async def _replay(
        self, context: AttemptContext | None, model: str, prompts: Sequence[Prompt], params: SamplingParams, n: int
    ) -> tuple[RecordedAnswer | None, bool]:
        """See `Replay.take`."""
        if context is None or context.branch is None:
            return None, False
        if context.replay is None:
            loaded = await load_replay(self.store, context.branch)
            context.replay = context.replay or loaded  # Another call may have loaded it meanwhile.
        return context.replay.take(model, [prompt.token_ids for prompt in prompts], n, params)

    async def _read_request(self, call: ResolvedCall, size: int) -> Request:
        lookup = self.responses.lookup(call.caller.attempt)
        request = await offload(size, partial(DIALECTS[call.path].read, call.body, lookup))
        self.counters.count_unknown(request.ignored_fields)
        return request

    def _params(
        self, caller: Caller, context: AttemptContext, model: str, requested: SamplingParams
    ) -> tuple[SamplingParams, tuple[str, ...]]:
        """(parameters to sample with, names of the requested parameters that are overridden)."""
        training = is_training(context, caller.mode, model)
        params = self.on_policy.neutral_params(requested) if training else requested
        if caller.temperature is not None and is_policy(context, model):
            params = replace(params, temperature=caller.temperature)
        params = apply_resource_params(params, *context.sampling_parameters(model))
        return params, self.on_policy.report_overridden(requested, params) if training else ()

    def _build_prompts(self, call: ResolvedCall, request: Request, chat: ChatFormat) -> list[Prompt]:
        """The prompts of a request. Slow for long conversations; may be called from any thread. Raises ConfigError if
        the template cannot render them, ContextLengthError if they certainly exceed the context."""
        conversations, attempt, model = self.conversations, call.caller.attempt, call.route.name
        limit = _engine_of(call.route).context_length
        if attempt and request.prompts:
            return [conversations.raw_prompt(attempt, model, chat, prompt, limit) for prompt in request.prompts]
        if attempt:
            messages, tools = request.messages, request.tools
            return [conversations.prompt(attempt, model, chat, messages, tools, limit, request.prefill)]
        if request.prompts:
            return [
                Prompt(encode_within(chat, prompt, limit) if isinstance(prompt, str) else prompt)
                for prompt in request.prompts
            ]
        text = chat.render(request.messages, request.tools) + chat.escape(request.prefill)
        return [Prompt(encode_within(chat, text, limit))]

    # -- sampling and after it -------------------------------------------------------------------------------------

    async def _serve(
        self, call: LocalCall, reply: ReplyWriter, context: AttemptContext | None, writer: ResponseWriter
    ) -> None:
        try:
            await send_reply(call, self._run, reply, partial(self._store_response, call, reply), writer)
        finally:
            # A call that failed does not count against the limit on turns.
            if context is not None and call.turn_limit is not None and not call.is_sampled:
                context.undo_turn()

    async def _run(self, call: LocalCall, on_event: OnEvent | None) -> None:
        spans = await call.run(self.store, self.gates.of(call.engine), on_event)
        self._remember_answers(call)
        self.counters.violated += sum(span.attributes.get(names.CONSTRAINT) == "violated" for span in spans)
        self.attempts.recheck_superseded(spans)

    def _remember_answers(self, call: LocalCall) -> None:
        """Count the tokens, and let later calls of the attempt continue the answers."""
        chat, attempt = call.engine.chat, call.attempt
        prompts = {id(choice.prompt): choice.prompt for choice in call.choices}
        self.counters.prompt_tokens += sum(len(prompt.token_ids) for prompt in prompts.values())
        for choice in call.choices:
            answer, prompt, span_id = choice.answer, choice.prompt, choice.span_id
            if (sample := answer.sample) is None:
                continue
            self.counters.response_tokens += len(sample.token_ids)
            if attempt is None:
                continue
            if prompt.raw is not None:
                self.conversations.add_raw_answer(attempt, prompt, chat, answer.content, sample, span_id)
            else:
                self.conversations.add_answer(attempt, prompt, answer.message, sample, chat.eos_token_ids, span_id)

    def _store_response(self, call: LocalCall, reply: ReplyWriter) -> None:
        """Store a reply of the Responses API, to which later requests may refer."""
        if isinstance(reply, ResponsesReplyWriter) and call.attempt:
            (choice,) = call.choices
            reply.store(self.responses, call.attempt, choice.prompt.digests, choice.answer)


def _answer(
    dialect: Dialect,
    request: Request,
    chat: ChatFormat,
    params: SamplingParams,
    top_logprobs: int,
    call_ids: Sequence[str],
    index: int,
    prompt: Prompt,
) -> SampledAnswer:
    return SampledAnswer(
        index,
        params.stop,
        dialect.call_prefix,
        prefill=request.prefill,
        is_constrained=params.constraint is not None,
        prompt_token_ids=prompt.token_ids,
        chat=chat,
        stop_tokens=params.stop_token_ids,
        reads_tool_calls=request.tools is not None,
        single_tool_call=request.constraint.single_tool_call,
        tools=request.tools,
        uses_functions=request.uses_functions,
        top_logprobs=top_logprobs,
        call_ids=call_ids,
        reasoning_markers=None if request.prompts or request.prefill else find_reasoning_markers(chat),
    )


def _engine_of(route: ModelRoute) -> Engine:
    assert route.engine is not None, route
    return route.engine


def _input_messages(request: Request, engine: Engine) -> list[list[Message]]:
    """The messages of each prompt, for its span. A raw prompt is one message of the user."""
    if not request.prompts:
        prefill: list[Message] = [{"role": "assistant", "content": request.prefill}] if request.prefill else []
        return [request.messages + prefill]
    texts = [prompt if isinstance(prompt, str) else engine.chat.decode(prompt) for prompt in request.prompts]
    return [[{"role": "user", "content": text}] for text in texts]


def _chat_format(engine: Engine, request: Request) -> ChatFormat:
    """The chat format with the template variables of a request. Raises ApiError 400 if the template rejects them."""
    if request.template:
        try:
            chat = engine.chat.with_template_kwargs(request.template)
        except ConfigError as error:
            raise bad_request("chat_template_kwargs", str(error)) from None
    else:
        chat = engine.chat
    if request.prefill and (markers := find_reasoning_markers(chat)) is not None and markers.opened:
        raise bad_request(
            "messages", f"answers of {engine.model} begin with reasoning, so they cannot continue the last message"
        )
    return chat
