"""Serves calls that are routed to providers: forwards or translates them, counts their usage and records them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from starlette.types import Receive, Scope

from agentlightning import span as names
from agentlightning.gateway.asgi import ResponseWriter
from agentlightning.gateway.callers.attempts import AttemptCache, AttemptContext
from agentlightning.gateway.callers.attribution import Caller
from agentlightning.gateway.callers.on_policy import OnPolicySampling, is_training
from agentlightning.gateway.dialects.provider_events import Usage
from agentlightning.gateway.dialects.response_store import ResponseStore
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.forwarding.disconnect import cancel_on_disconnect
from agentlightning.gateway.forwarding.passthrough import ForwardedCall, can_forward
from agentlightning.gateway.forwarding.token_count import TokenCounter, estimate_if_unsupported
from agentlightning.gateway.json_body import MAX_CHUNK_BYTES, parse_object
from agentlightning.gateway.metrics import Counters
from agentlightning.gateway.routing import CallResolver, ModelRoute, ResolvedCall
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
    """Serves calls to providers, as they are or translated.

    `plan` may query the store for the attempt; its twin `try_plan`, for the callback-only fast path, never does.
    """

    def __init__(
        self,
        resolver: CallResolver,
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
        self._resolver = resolver
        self._store = store
        self._contexts = contexts
        self._find_context = find_context
        self._counters = counters
        self._token_counter = TokenCounter()
        self.record = self._await_store
        self.record_raw: Callable[[bytes], Awaitable[None] | None] | None = None
        """Records an exchange as raw bytes (`recording.raw_exchange`); None if the store cannot read them."""
        if isinstance(store, JournaledStore):
            self.record = store.append
            self.record_raw = store.append_record if store.takes_records else None
            store.on_superseded = contexts.invalidate

    async def plan(self, call: ResolvedCall) -> ForwardedCall:
        """The call to the provider. Raises ApiError if it cannot be made."""
        context = None if call.caller.attempt is None else await self._find_context(call.caller)
        return self._prepare(call, context).prepare()

    def try_plan(
        self, path: ApiPath, headers: Mapping[str, str], caller: Caller, body: bytes
    ) -> tuple[ResolvedCall | None, ForwardedCall | None]:
        """(the call, the call to the provider), as far as both can be had without waiting. The call is resolved if its
        attempt is cached and its body small; the second is for a provider that serves it as it is and in one piece."""
        attempt = caller.attempt
        if attempt is None or (context := self._contexts.try_get(*attempt)) is None:
            return None, None
        data = parse_object(body) if len(body) <= MAX_CHUNK_BYTES else None
        if data is None or (call := self._resolver.resolve(path, headers, caller, data, context.given)) is None:
            return None, None
        if call.route.servers is None or data.get("stream") or not can_forward(path, call.route):
            return call, None
        return call, self._prepare(call, context)

    async def run(
        self,
        forward: ForwardedCall,
        scope: Scope,
        receive: Receive,
        writer: ResponseWriter,
        call: UpstreamCall | None = None,
    ) -> None:
        """Forward a call. Failures are recorded as well. `call` is one that was started already. Raises ApiError,
        StoreError, and ClientDisconnected if the client disconnects."""
        with cancel_on_disconnect(scope, receive):
            await forward.run(self.record, writer, call)
        self.count_usage(forward)

    def count_usage(self, forward: ForwardedCall) -> None:
        """Count the usage of a complete response, and note the provider that stores it."""
        if (usage := forward.response.usage) is not None:
            self._counters.prompt_tokens += usage.input_tokens
            self._counters.response_tokens += usage.output_tokens
        attempt, provider = forward.caller.attempt, forward.route.provider
        if forward.is_stored and attempt is not None and provider is not None and forward.response.id:
            self._response_store.note_provider(attempt, forward.response.id, provider.name)

    async def count(self, call: ResolvedCall, writer: ResponseWriter) -> None:
        """Reply with the number of tokens of a prompt: counted by the provider or its tokenizer, or estimated. Costs
        nothing, and is not recorded."""
        caller, data, route = call.caller, call.body, call.route
        assert route.servers is not None
        if caller.attempt is not None:
            await self._find_context(caller)
        if not can_forward("messages", route):
            translated = self._translator.translate("messages", route, caller, {"max_tokens": 1} | data, "")
            await (await self._token_counter.count(route.servers, translated.data)).send(writer)
            return
        body = dumps(data | {"model": route.send_model})
        affinity = "/".join(caller.attempt or ())
        request = UpstreamRequest(
            COUNT_TOKENS_PATH, body, affinity=affinity, max_output_tokens=0, price=Price(), model=route.send_model
        )
        try:
            async with UpstreamCall(route.servers, request) as upstream:
                upstream.settle(Usage())
        except ApiError as api_error:
            await estimate_if_unsupported(api_error, data).send(writer)
        else:
            await writer.send_json(200, upstream.body)

    def _prepare(self, call: ResolvedCall, context: AttemptContext | None) -> ForwardedCall:
        path, headers, caller, data, route = call
        resource, forced, trace_id = "", dict[str, Any](), ""
        if context is None:
            self._counters.unattributed += 1
        else:
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
