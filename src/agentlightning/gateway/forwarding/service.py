"""Serves calls that are routed to providers: forwards or translates them, counts their usage and records them."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from msgspec import structs
from starlette.types import Receive, Scope

from agentlightning import span as names
from agentlightning.errors import StoreError
from agentlightning.gateway.asgi import ResponseWriter
from agentlightning.gateway.callers.attempts import AttemptCache, AttemptContext, AttemptIds
from agentlightning.gateway.callers.attribution import Caller
from agentlightning.gateway.callers.on_policy import OnPolicySampling, is_training
from agentlightning.gateway.dialects.provider_events import Usage
from agentlightning.gateway.dialects.response_store import ResponseStore
from agentlightning.gateway.dialects.sse import loads
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.forwarding.disconnect import cancel_on_disconnect
from agentlightning.gateway.forwarding.passthrough import ForwardedCall, can_forward, run_to_completion
from agentlightning.gateway.forwarding.token_count import TokenCounter, estimate_if_unsupported
from agentlightning.gateway.metrics import Counters
from agentlightning.gateway.offload import PASSED, offload
from agentlightning.gateway.routing import ModelRoute, ResolvedCall
from agentlightning.gateway.upstream.call import UpstreamCall
from agentlightning.gateway.upstream.pricing import Price
from agentlightning.gateway.upstream.provider import COUNT_TOKENS_PATH, ApiPath
from agentlightning.gateway.upstream.request import UpstreamRequest
from agentlightning.span import Span, new_trace_id
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.journal.store import JournaledStore
from agentlightning.util.json_values import dumps

logger = logging.getLogger(__name__)


class Translator(Protocol):
    """Makes calls for providers that do not speak the caller's dialect (`translation.call.Translator`)."""

    def translate(
        self,
        path: ApiPath,
        route: ModelRoute,
        caller: Caller,
        body: Mapping[str, Any],
        trace_id: str,
        resource: str = "",
        forced: Mapping[str, Any] | None = None,
    ) -> ForwardedCall:
        """Raises ApiError 400 for a request that cannot be translated."""
        ...


class ForwardingService:
    """Serves calls to providers, as they are or translated."""

    def __init__(
        self,
        store: LightningStoreBase,
        contexts: AttemptCache,
        find_context: Callable[[Caller], Awaitable[AttemptContext]],
        counters: Counters,
        translator: Translator,
        on_policy: OnPolicySampling,
        response_store: ResponseStore,
    ) -> None:
        self._response_store = response_store
        self._translator = translator
        self._on_policy = on_policy
        self._store = store
        self._contexts = contexts
        self._find_context = find_context
        self._counters = counters
        self._token_counter = TokenCounter()
        self.record = self._await_store
        if isinstance(store, JournaledStore):
            self.record = store.append
            store.on_superseded = contexts.invalidate

    async def plan(self, call: ResolvedCall, size: int) -> ForwardedCall:
        """The call to the provider, of a request of `size` bytes. Raises ApiError if it cannot be made."""
        context = None if call.caller.attempt is None else await self._find_context(call.caller)
        self._counters.unattributed += context is None
        return await offload(size // PASSED, lambda: self._prepare(call, context).prepare())

    async def run(self, forward: ForwardedCall, scope: Scope, receive: Receive, writer: ResponseWriter) -> None:
        """Forward a call. Failures are recorded as well. Raises ApiError, StoreError, and ClientDisconnected if the
        client disconnects."""
        try:
            with cancel_on_disconnect(receive):
                await forward.run(self.record, writer)
        finally:
            self._note_provider(forward)
        self._count_tokens(forward.response.usage or Usage())

    def _note_provider(self, forward: ForwardedCall) -> None:
        """Note the provider that stores a response, whatever became of its stream."""
        attempt, provider = forward.caller.attempt, forward.route.provider
        if forward.is_stored and attempt is not None and provider is not None and forward.response.id:
            pending = forward if forward.is_pending else None
            self._response_store.note_provider(attempt, forward.response.id, provider.name, pending)

    def _count_tokens(self, usage: Usage) -> None:
        self._counters.prompt_tokens += usage.input_tokens
        self._counters.response_tokens += usage.output_tokens

    async def record_poll(self, attempt: AttemptIds, response_id: str, body: bytes) -> None:
        """Record the end of a response that its provider worked on in the background, once: as a span below that of
        the call, with the answer, its usage and its cost. Raises StoreError."""
        if (call := self._response_store.take_pending(attempt, response_id)) is None:
            return
        ended = replace(call, caller=structs.replace(call.caller, parent_id=call.span_id))
        with suppress(ValueError):
            ended.response.read(loads(body))
        pool, usage, price = call.route.servers, ended.response.usage or Usage(), call.route.price
        price = price or pool.provider.price
        used = {names.INPUT_TOKENS: usage.input_tokens, names.OUTPUT_TOKENS: usage.output_tokens}
        used |= {names.COST: price.dollars(usage)} if price else {}
        is_end = bool(ended.response.choices) and not ended.is_pending
        try:
            await run_to_completion(self.record(ended.spans(used, time.time())) if is_end else None)
        except StoreError:
            self._response_store.note_provider(attempt, response_id, pool.provider.name, call)
            raise
        if not is_end:
            self._response_store.note_provider(attempt, response_id, pool.provider.name, call)
            return
        pool.dollars += used.get(names.COST, 0.0)
        pool.budgets.spend(attempt[0], used.get(names.COST, 0.0), usage.tokens)
        self._count_tokens(usage)

    async def count(self, call: ResolvedCall, size: int, writer: ResponseWriter) -> None:
        """Reply with the number of tokens of a prompt of `size` bytes: counted by the provider or its tokenizer, or
        estimated. Costs nothing, and is not recorded."""
        caller, data, route = call.caller, call.body, call.route
        assert route.servers is not None
        if caller.attempt is not None:
            await self._find_context(caller)
        if not can_forward("messages", route):
            translate = partial(self._translator.translate, "messages", route, caller, {"max_tokens": 1} | data, "")
            translated = await offload(size // PASSED, translate)
            await (await self._token_counter.count(route.servers, translated.data, size)).send(writer)
            return
        body = await offload(size // PASSED, partial(dumps, data | {"model": route.send_model}))
        affinity = "/".join(caller.attempt or ())
        request = UpstreamRequest(
            COUNT_TOKENS_PATH, body, affinity=affinity, max_output_tokens=0, price=Price(), model=route.send_model
        )
        try:
            async with UpstreamCall(route.servers, request) as upstream:
                upstream.settle(Usage())
        except ApiError as api_error:
            await (await estimate_if_unsupported(api_error, data, size)).send(writer)
        else:
            await writer.send_json(200, upstream.body)

    def _prepare(self, call: ResolvedCall, context: AttemptContext | None) -> ForwardedCall:
        path, headers, caller, data, route = call
        resource, forced, trace_id = "", dict[str, Any](), ""
        if context is not None:
            resource, forced = context.sampling_parameters(route.name)
            trace_id = context.trace_id
            # A provider that reports tokens may serve a model in training; any other is a third party.
            reports = route.provider is not None and route.provider.token_ids
            if caller.temperature is not None and (reports or route.name in context.llms):
                forced = {"temperature": caller.temperature, **forced}
            if reports and is_training(context, caller.mode, route.name):
                data = self._on_policy.strip_request(data, forced)
        trace_id = trace_id or new_trace_id()
        if can_forward(path, route):
            return ForwardedCall(path, route, caller, data, headers, trace_id, forced)
        translated = self._translator.translate(path, route, caller, data, trace_id, resource, forced)
        if route.provider is not None:  # betas that the caller enables in this provider's header
            translated.headers = {f"{route.provider.dialect}-beta": headers.get(f"{route.provider.dialect}-beta", "")}
        return translated

    # -- the record ------------------------------------------------------------------------------------------------

    async def _await_store(self, spans: Sequence[Span]) -> None:
        """Record spans in a store without a journal, and reject further calls of attempts that were superseded."""
        for span in await self._store.add_many_spans(spans):
            if names.SUPERSEDED in span.attributes:
                self._contexts.invalidate(span.rollout_id, span.attempt_id)
