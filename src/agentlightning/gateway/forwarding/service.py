"""The part of the gateway that passes calls on to providers: finds the route, and sees to it that a caller that hangs
up ends the call.

Called by the gateway for each call, before its body is read as a request to our own engines.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import orjson
from starlette.types import Receive, Scope

from agentlightning import span as names
from agentlightning.gateway.asgi import ResponseWriter
from agentlightning.gateway.callers.agents import AgentMatcher
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
from agentlightning.gateway.routing import ModelRoute, Router
from agentlightning.gateway.upstream.call import UpstreamCall
from agentlightning.gateway.upstream.pricing import Price
from agentlightning.gateway.upstream.provider import COUNT_TOKENS_PATH, ApiPath
from agentlightning.gateway.upstream.request import UpstreamRequest
from agentlightning.span import Span, new_trace_id
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.journal.store import JournaledStore

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


class _ResolvedCall(NamedTuple):
    """A call for which it is known where it goes."""

    asked: dict[str, Any]
    caller: Caller
    route: ModelRoute


class ForwardingService:
    """Serves the calls that go to a provider, as they are or translated; leaves all others alone."""

    def __init__(
        self,
        table: Router,
        store: LightningStoreBase,
        contexts: AttemptCache,
        find_context: Callable[[Caller], Awaitable[AttemptContext]],
        agents: AgentMatcher,
        counters: Counters,
        translator: Translator,
        on_policy: OnPolicySampling,
        kept: ResponseStore,
    ) -> None:
        self._kept = kept
        self._translator = translator
        self._on_policy = on_policy
        self._table = table
        self._store = store
        self._contexts = contexts
        self._find_context = find_context
        self._agents = agents
        self._counters = counters
        self._counting = TokenCounter()
        self.record = self._await_store
        self.record_raw: Callable[[bytes], Awaitable[None] | None] | None = None
        """Where the store can read them: keeps an exchange as it was said (`recording.raw_exchange`)."""
        if isinstance(store, JournaledStore):
            self.record = store.append
            self.record_raw = store.append_record if store.takes_records else None
            store.on_superseded = contexts.invalidate

    async def plan(
        self, path: ApiPath, caller: Caller, headers: Mapping[str, str], asked: dict[str, Any] | None
    ) -> ForwardedCall | None:
        """The call to make, where it goes to a provider. `asked` is its body, None where that is no object. Raises
        ApiError where it cannot be made."""
        if (led := self._resolve(path, caller, headers, asked)) is None:
            return None
        context = None if caller.attempt is None else await self._find_context(caller)
        return self._prepare(path, headers, led, context).prepare()

    def try_plan(self, path: ApiPath, caller: Caller, headers: Mapping[str, str], body: bytes) -> ForwardedCall | None:
        """The same, for a call that a provider reads and answers as it is and in one piece, where all that is to be
        known is at hand; else None."""
        attempt = caller.attempt
        if attempt is None or (context := self._contexts.try_get(*attempt)) is None:
            return None
        led = self._resolve(path, caller, headers, parse_object(body)) if len(body) <= MAX_CHUNK_BYTES else None
        if led is None or led.asked.get("stream") or not can_forward(path, led.route):
            return None
        return self._prepare(path, headers, led, context)

    def _resolve(
        self, path: ApiPath, caller: Caller, headers: Mapping[str, str], asked: dict[str, Any] | None
    ) -> _ResolvedCall | None:
        if asked is None:
            return None
        caller = caller.with_agent(self._agents.identify(headers, asked, self._table), self._table)
        model = caller.agent.model
        if model is None and "model" in asked and not isinstance(asked["model"], str):
            return None
        route = self._table.resolve(model, caller.agent.name, path)
        return _ResolvedCall(asked, caller, route) if route.servers is not None else None

    async def run(
        self,
        forward: ForwardedCall,
        scope: Scope,
        receive: Receive,
        writer: ResponseWriter,
        call: UpstreamCall | None = None,
    ) -> None:
        """Make it and answer. Raises ApiError, StoreError, and ClientDisconnected where the caller hung up; a failure
        is recorded as well. `call` is one that was started and has to be gone on with."""
        with cancel_on_disconnect(scope, receive):
            await forward.run(self.record, writer, call)
        self.count_usage(forward)

    def count_usage(self, forward: ForwardedCall) -> None:
        """An answer is whole: count what it used, and note who keeps it."""
        if (usage := forward.response.usage) is not None:
            self._counters.prompt_tokens += usage.input_tokens
            self._counters.response_tokens += usage.output_tokens
        attempt, provider = forward.caller.attempt, forward.route.provider
        if forward.is_stored and attempt is not None and provider is not None and forward.response.id:
            self._kept.note_provider(attempt, forward.response.id, provider.name)

    async def count(
        self, caller: Caller, headers: Mapping[str, str], asked: dict[str, Any] | None, writer: ResponseWriter
    ) -> bool:
        """Whether it was a question how many tokens a prompt has for a provider, and is answered: by the provider, by
        its tokenizer or by an estimate. Costs nothing, and is not recorded."""
        if asked is None:
            return False
        agent = self._agents.identify(headers, asked, self._table)
        route = self._table.resolve(agent.model, agent.name, "messages")
        if route.servers is None:
            return False
        if caller.attempt is not None:
            await self._find_context(caller)
        if not can_forward("messages", route):
            meant = self._translator.translate("messages", route, caller, {"max_tokens": 1} | asked, "")
            await (await self._counting.count(route.servers, meant.data)).send(writer)
            return True
        sent = orjson.dumps(asked | {"model": route.send_model})
        affinity = "/".join(caller.attempt or ())
        ask = UpstreamRequest(
            COUNT_TOKENS_PATH, sent, affinity=affinity, max_output_tokens=0, price=Price(), model=route.send_model
        )
        try:
            async with UpstreamCall(route.servers, ask) as call:
                call.settle(Usage())
        except ApiError as api_error:
            await estimate_if_unsupported(api_error, asked).send(writer)
        else:
            await writer.send_json(200, call.body)
        return True

    def _prepare(
        self, path: ApiPath, headers: Mapping[str, str], led: _ResolvedCall, context: AttemptContext | None
    ) -> ForwardedCall:
        asked, caller, route = led
        resource, forced, trace_id = "", dict[str, Any](), ""
        if context is None:
            self._counters.unattributed += 1
        else:
            resource, forced = context.sampling_parameters(route.name)
            trace_id = context.trace_id
            # A provider that reports tokens may serve what is trained; any other is a third party.
            reports = route.provider is not None and route.provider.token_ids
            if caller.temperature is not None and (reports or route.name in context.llms):
                forced = {"temperature": caller.temperature, **forced}
            if reports and is_training(context, caller.mode, route.name):
                asked = self._on_policy.strip_request(asked, forced)
        trace_id = trace_id or new_trace_id()
        if can_forward(path, route):
            return ForwardedCall(path, route, caller, asked, headers, trace_id, forced)
        translated = self._translator.translate(path, route, caller, asked, trace_id, resource, forced)
        if route.provider is not None:  # betas that the caller asks of the provider by its own name for them
            translated.headers = {f"{route.provider.dialect}-beta": headers.get(f"{route.provider.dialect}-beta", "")}
        return translated

    # -- the record ------------------------------------------------------------------------------------------------

    async def _await_store(self, spans: Sequence[Span]) -> None:
        """For a store without a journal: what it returned from is on the disk. An attempt that was superseded takes no
        more calls."""
        for span in await self._store.add_many_spans(spans):
            if names.SUPERSEDED in span.attributes:
                self._contexts.invalidate(span.rollout_id, span.attempt_id)
