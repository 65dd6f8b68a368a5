"""Serves the calls that our own engines answer: reads the request, prepares its prompts, and remembers the answers.

`call` samples and records, `streaming` replies. Called by the gateway's endpoints for each call that goes to no
provider.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from starlette.types import Receive, Scope

from agentlightning import span as names
from agentlightning.chat.base import ChatFormat, Message
from agentlightning.chat.reasoning import find_reasoning_markers
from agentlightning.engine.base import Engine, SamplingParams
from agentlightning.errors import ConfigError, ContextLengthError
from agentlightning.gateway.asgi import ResponseWriter
from agentlightning.gateway.callers.attempts import AttemptCache, AttemptContext
from agentlightning.gateway.callers.attribution import Caller
from agentlightning.gateway.callers.on_policy import OnPolicySampling, is_policy, is_training
from agentlightning.gateway.callers.replay import RecordedAnswer, load_replay
from agentlightning.gateway.dialects.base import Dialect, ReplyMetadata, ReplyWriter, Request
from agentlightning.gateway.dialects.openai.responses_reply import ResponsesReplyWriter
from agentlightning.gateway.dialects.response_store import ResponseStore
from agentlightning.gateway.dialects.sampling import apply_resource_params, refuse_unsupported
from agentlightning.gateway.errors import bad_request
from agentlightning.gateway.local.answer import Answer
from agentlightning.gateway.local.call import LocalCall, OnEvent
from agentlightning.gateway.local.constrained_sampling import EnforcementMode, constrain_sampling
from agentlightning.gateway.local.conversation import Conversations, Prompt, encode_within
from agentlightning.gateway.local.span import SpanDraft
from agentlightning.gateway.local.streaming import stream_reply
from agentlightning.gateway.local.update_gate import UpdateGates
from agentlightning.gateway.metrics import Counters
from agentlightning.gateway.offload import offload
from agentlightning.gateway.routing import ModelRoute, ResolvedCall
from agentlightning.gateway.upstream.token_bound import estimate_prompt_tokens
from agentlightning.span import new_span_id, new_trace_id
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
    attempts: AttemptCache
    find_attempt: Callable[[Caller], Awaitable[AttemptContext]]
    counters: Counters
    on_policy: OnPolicySampling
    settings: LocalSettings
    """Those of engines that have none of their own."""
    settings_of: dict[str, LocalSettings] = field(default_factory=dict[str, LocalSettings])
    """By model name, those of training runs elsewhere."""

    async def count(self, dialect: Dialect, call: ResolvedCall, size: int) -> int:
        """The number of prompt tokens of a request of `size` bytes. Nothing is sampled or recorded."""
        request, engine = await self._read_request(dialect, call, size), _engine_of(call.route)
        if call.caller.attempt:
            await self.find_attempt(call.caller)
        chat = await offload(size, partial(_chat_format, engine, request))
        try:
            (prompt,) = await offload(size, partial(self._build_prompts, call, request, chat))
        except ContextLengthError:  # Clients shorten their conversations by this number, so an estimate will do.
            return await offload(size, partial(estimate_prompt_tokens, request.raw))
        return len(prompt.token_ids)

    async def prepare(
        self, dialect: Dialect, call: ResolvedCall, size: int
    ) -> Callable[[Scope, Receive, ResponseWriter], Awaitable[None]]:
        """Prepare the prompts and parameters of a request of `size` bytes; returns what serves it. Raises ApiError."""
        request, engine = await self._read_request(dialect, call, size), _engine_of(call.route)
        caller, model = call.caller, call.route.name
        params, trace_id, trainable, overridden = request.params, "", False, tuple[str, ...]()
        context: AttemptContext | None = None
        if caller.attempt:
            context = await self.find_attempt(caller)
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
        drafts = [
            SpanDraft(
                rollout_id=caller.rollout_id or "",
                attempt_id=caller.attempt_id or "",
                trace_id=caller.trace_id or trace_id or new_trace_id(),
                parent_id=caller.parent_id,
                caller_attributes=caller.attributes(),
                operation=dialect.operation,
                response_id=head.id,
                requested_model=request.model or model,
                served_model=model,
                messages=messages,
                tools=request.tools,
                prompt=prompt,
                constraint=request.constraint,
                start_time=time.time(),
                span_id=new_span_id(),
                overridden=overridden,
                recorded=again,
                replay_mismatch=differs,
            )
            for prompt, messages in zip(prompts, _input_messages(request, engine), strict=True)
            for _ in range(request.n)
        ]
        answers = [
            Answer(
                index,
                chat,
                params.stop,
                draft.prompt.token_ids,
                params.stop_token_ids,
                reads_tool_calls=request.tools is not None,
                single_tool_call=request.constraint.single_tool_call,
                call_prefix=dialect.call_prefix,
                tools=request.tools,
                is_constrained=params.constraint is not None,
                call_ids=again.call_ids if again else (),
                reasoning_markers=None if request.prompts or request.prefill else find_reasoning_markers(chat),
                prefill=request.prefill,
                uses_functions=request.uses_functions,
                top_logprobs=shown,
            )
            for index, draft in enumerate(drafts)
        ]
        local_call = LocalCall(engine, params, drafts, answers, attributed=caller.attempt is not None)
        reply = dialect.reply(request, head)
        if context is not None and (turn_limit := context.begin_turn(model)) is not None:
            local_call.drafts = [replace(draft, turn_limit=turn_limit) for draft in drafts]
        return partial(self._serve, local_call, request, reply, context)

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

    async def _read_request(self, dialect: Dialect, call: ResolvedCall, size: int) -> Request:
        lookup = self.responses.lookup(call.caller.attempt)
        request = await offload(size, partial(dialect.read, call.body, lookup))
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
        self,
        call: LocalCall,
        request: Request,
        reply: ReplyWriter,
        context: AttemptContext | None,
        scope: Scope,
        receive: Receive,
        writer: ResponseWriter,
    ) -> None:
        try:
            await stream_reply(
                call,
                self._run,
                reply,
                stream=request.stream,
                finish=partial(self._store_response, call, request, reply),
                receive=receive,
                writer=writer,
            )
        finally:
            # A call that failed does not count against the limit on turns.
            if context is not None and call.drafts[0].turn_limit is not None and not call.is_sampled:
                context.undo_turn()

    async def _run(self, call: LocalCall, on_event: OnEvent | None) -> None:
        spans = await call.run(self.store, self.gates.of(call.engine), on_event)
        self._remember_answers(call)
        self.counters.violated += sum(span.attributes.get(names.CONSTRAINT) == "violated" for span in spans)
        if any(span.attributes.get(names.SUPERSEDED) for span in spans):
            self.attempts.invalidate(call.drafts[0].rollout_id, call.drafts[0].attempt_id)

    def _remember_answers(self, call: LocalCall) -> None:
        """Count the tokens, and let later calls of the attempt continue the answers."""
        chat = call.engine.chat
        prompts = {id(draft.prompt): draft.prompt for draft in call.drafts}
        self.counters.prompt_tokens += sum(len(prompt.token_ids) for prompt in prompts.values())
        for answer, draft in zip(call.answers, call.drafts, strict=True):
            if (sample := answer.sample) is None:
                continue
            self.counters.response_tokens += len(sample.token_ids)
            if not call.attributed:
                continue
            attempt, prompt, span_id = (draft.rollout_id, draft.attempt_id), draft.prompt, draft.span_id
            if prompt.raw is not None:
                self.conversations.add_raw_answer(attempt, prompt, chat, answer.content, sample, span_id)
            else:
                self.conversations.add_answer(attempt, prompt, answer.message, sample, chat.eos_token_ids, span_id)

    def _store_response(self, call: LocalCall, request: Request, reply: ReplyWriter) -> None:
        """Store a reply of the Responses API, to which later requests may refer."""
        if not (isinstance(reply, ResponsesReplyWriter) and call.attributed):
            return
        (answer,), (draft,) = call.answers, call.drafts
        stored = request.raw.get("store") is not False
        self.responses.add(
            (draft.rollout_id, draft.attempt_id),
            draft.response_id,
            draft.prompt.digests,
            request.messages,
            answer.message,
            reply.body([answer]) if stored else None,
            reply.items if stored else (),
            request.num_instructions,
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
