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
from agentlightning.engine.base import Engine, SamplingParams
from agentlightning.errors import ContextLengthError
from agentlightning.gateway.asgi import ResponseWriter
from agentlightning.gateway.callers.attempts import AttemptCache, AttemptContext
from agentlightning.gateway.callers.attribution import Caller
from agentlightning.gateway.callers.on_policy import OnPolicySampling, is_policy, is_training
from agentlightning.gateway.dialects.base import Dialect, ReplyMetadata, ReplyWriter, Request
from agentlightning.gateway.dialects.openai.responses_reply import ResponsesReplyWriter
from agentlightning.gateway.dialects.response_store import ResponseStore
from agentlightning.gateway.dialects.sampling import apply_resource_params, refuse_unsupported
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.local.call import LocalCall, OnEvent
from agentlightning.gateway.local.call_builders import answer_of, asked_messages, chat_of, prompts_of, record_of
from agentlightning.gateway.local.constrained_sampling import EnforcementMode, hold
from agentlightning.gateway.local.conversation import Conversations, Prompt
from agentlightning.gateway.local.streaming import stream_reply
from agentlightning.gateway.local.update_gate import UpdateGates
from agentlightning.gateway.metrics import Counters
from agentlightning.gateway.offload import offload
from agentlightning.gateway.routing import Router
from agentlightning.gateway.upstream.token_bound import estimate_prompt_tokens
from agentlightning.span import new_trace_id
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
        chat = await offload(size, partial(chat_of, engine, request))
        try:
            room = engine.context_length
            read = partial(prompts_of, self.conversations, caller.attempt, request, model, chat, room)
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
        chat = await offload(size, partial(chat_of, engine, request))
        if not request.prefill:  # What is begun otherwise cannot be held.
            held = partial(hold, tools=request.tools, learned=learned, holding=self.holding, size=size)
            params = await held(engine, chat, params, request.constraint)
        read = partial(prompts_of, self.conversations, caller.attempt, request, model, chat, engine.context_length)
        prompts = await offload(size, read)
        self._count(caller, prompts)
        tokens = sum(len(prompt.token_ids) for prompt in prompts)
        response_id = dialect.id_prefix + secrets.token_hex(12)
        head = ReplyMetadata(response_id, model, int(time.time()), tokens)
        records = [
            record_of(dialect, caller, request, head, prompt, asked, trace_id or new_trace_id(), overridden)
            for prompt, asked in zip(prompts, asked_messages(request, engine), strict=True)
            for _ in range(request.n)
        ]
        answers = [
            answer_of(dialect, request, chat, params, index, record.prompt) for index, record in enumerate(records)
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
