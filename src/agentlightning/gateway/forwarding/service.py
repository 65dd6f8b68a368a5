"""Serves calls that are routed to providers: forwards or translates them, counts their usage and records them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast

from agentlightning import span as names
from agentlightning.errors import ConfigError, ConflictError, NotFoundError, StoreError
from agentlightning.gateway.answer import Usage
from agentlightning.gateway.callers.attempts import AttemptIds, AttemptTable
from agentlightning.gateway.dialects.base import ApiPath
from agentlightning.gateway.dialects.messages import count_reply
from agentlightning.gateway.dialects.response_store import ResponseStore
from agentlightning.gateway.dialects.sse import loads
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.forwarding.call import ForwardedCall, ProviderRecord
from agentlightning.gateway.forwarding.translated import translate
from agentlightning.gateway.http import PASSED, ResponseWriter, offload, run_to_completion
from agentlightning.gateway.record import Counters
from agentlightning.gateway.routing import ModelRoute, ResolvedCall
from agentlightning.gateway.sampling import OnPolicySampling, is_training
from agentlightning.gateway.upstream.call import UpstreamCall, UpstreamRequest
from agentlightning.gateway.upstream.provider import COUNT_TOKENS_PATH, Price
from agentlightning.gateway.upstream.servers import ServerPool
from agentlightning.gateway.upstream.token_bound import estimate_prompt_tokens
from agentlightning.span import Span
from agentlightning.store import durability
from agentlightning.store.base import LightningStoreBase
from agentlightning.transport import TransportError
from agentlightning.util.json_values import dumps

# -- token count -----------------------------------------------------------------------------------------------------

# Counts the prompt tokens of `/v1/messages/count_tokens` for providers without this endpoint.
#
# Claude Code and others decide by this number when to shorten a conversation, and some do not work without it. Servers
# like vLLM count exactly at `/tokenize`; for others the number is an estimate, which a response header says.

logger = logging.getLogger(__name__)

HEADER: Final = b"x-agentlightning-count"
"""Response header: `tokenizer` or `estimate`."""
SKIP_SECONDS: Final = 300.0
"""Seconds until `/tokenize` of a provider that lacks it is tried again."""
TIMEOUT_SECONDS: Final = 5.0
_REQUEST_ERRORS: Final = frozenset({400, 413, 422})
_UNSUPPORTED: Final = frozenset({404, 405, 501})


class TokenCounter:
    """Counts tokens for all providers, and caches which of them have no tokenizer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._skipped_until: dict[str, float] = {}
        """Names of providers without a tokenizer -> when to try again."""

    async def count(self, pool: ServerPool, request: Mapping[str, Any], size: int) -> int | None:
        """Count for a request of chat completions or responses of about `size` bytes; the tokenizer serves only the
        former. None if it cannot."""
        name = pool.provider.name
        if "messages" not in request or self._clock() < self._skipped_until.get(name, 0.0):
            return None
        try:
            status, tokens = await _tokenize(pool, request, size)
        except (TransportError, ConfigError) as error:
            logger.info("the provider %r does not count tokens: %s", name, error)
            status, tokens = 0, None
        if tokens is None and status not in _REQUEST_ERRORS:
            self._skipped_until[name] = self._clock() + SKIP_SECONDS
        return tokens


async def _send_count(writer: ResponseWriter, request: Mapping[str, Any], size: int, counted: int | None) -> None:
    """Send a number of tokens, or an estimate, in Anthropic's format."""
    writer.extra_headers = [(HEADER, b"estimate" if counted is None else b"tokenizer")]
    if counted is None:
        counted = await offload(size // PASSED, partial(estimate_prompt_tokens, request))
    await writer.send_json(200, count_reply(counted))


async def _tokenize(pool: ServerPool, request: Mapping[str, Any], size: int) -> tuple[int, int | None]:
    """(status, tokens); None if the server does not report them."""
    body = {name: request[name] for name in ("model", "messages", "tools") if request.get(name)}
    sent = await offload(size // PASSED, partial(dumps, body))
    status, _, data = await pool.fetch("POST", "/tokenize", sent, timeout_seconds=TIMEOUT_SECONDS)
    try:
        response = loads(data) if status == 200 else None
    except ValueError:
        response = None
    count = cast("dict[str, Any]", response).get("count") if isinstance(response, dict) else None
    return status, count if isinstance(count, int) and count >= 0 else None


def can_forward(path: ApiPath, route: ModelRoute) -> bool:
    """Whether the provider of a route serves this path without translation."""
    return route.provider is not None and route.provider.serves(path)


_REJECTIONS: Final = (ConfigError, ConflictError, NotFoundError)
"""What a store raises for a span that it will never take."""


@dataclass(slots=True)
class ForwardingService:
    """Serves calls to providers, as they are or translated."""

    store: LightningStoreBase
    attempts: AttemptTable
    counters: Counters
    on_policy: OnPolicySampling
    responses: ResponseStore
    _token_counter: TokenCounter = field(default_factory=TokenCounter, init=False)

    async def prepare(self, call: ResolvedCall, size: int) -> ForwardedCall:
        """The call to the provider, of a request of `size` bytes. Raises ApiError if it cannot be made."""
        self.counters.unattributed += call.context is None
        return await offload(size // PASSED, partial(self._prepare, call))

    async def run(self, forward: ForwardedCall, writer: ResponseWriter) -> None:
        """Forward a call. Failures are recorded as well. Raises ApiError and StoreError."""
        record = forward.record
        try:
            await forward.run(self.record, writer)
        finally:  # Note the provider that stores a response, whatever became of its stream.
            attempt, provider, response_id = record.caller.attempt, record.route.provider, record.response.id
            is_stored = record.path == "responses" and record.data.get("store") is not False
            if is_stored and attempt is not None and provider is not None and response_id:
                pending = record.to_json() if record.is_pending else None
                self.responses.note_provider(attempt, response_id, provider.name, pending)
        self._count_tokens(record.response.usage or Usage())

    def _count_tokens(self, usage: Usage) -> None:
        self.counters.prompt_tokens += usage.input_tokens
        self.counters.response_tokens += usage.output_tokens

    async def record_poll(self, pool: ServerPool, attempt: AttemptIds, response_id: str, body: bytes) -> None:
        """Record the end of a response that its provider worked on in the background, once: as a span below that of
        the call, with the answer, its usage and its cost. Raises StoreError."""
        call = self.responses.take_pending(attempt, response_id)
        if call is None:
            return
        ended = ProviderRecord.of_poll(call, pool)
        with suppress(ValueError):
            ended.response.read(loads(body))
        usage, price = ended.response.usage or Usage(), ended.route.price or pool.provider.price
        used: dict[str, Any] = {names.INPUT_TOKENS: usage.input_tokens, names.OUTPUT_TOKENS: usage.output_tokens}
        used |= {names.COST: price.dollars(usage)} if price else {}
        is_end = bool(ended.response.choices) and not ended.is_pending
        try:
            if is_end:
                await run_to_completion(self.record(ended.spans(used)))
        except StoreError:
            is_end = False
            raise
        finally:
            if not is_end:
                self.responses.note_provider(attempt, response_id, pool.provider.name, call)
        if is_end:
            pool.dollars += used.get(names.COST, 0.0)
            pool.budgets.spend(attempt[0], used.get(names.COST, 0.0), usage.tokens)
            self._count_tokens(usage)

    async def count(self, call: ResolvedCall, size: int, writer: ResponseWriter) -> None:
        """Reply with the number of tokens of a prompt of `size` bytes: counted by the provider or its tokenizer, or
        estimated. Costs nothing, and is not recorded."""
        data, route = call.body, call.route
        assert route.servers is not None
        if not can_forward("messages", route):
            limited = call._replace(path="messages", body={"max_tokens": 1} | data)
            work = partial(translate, limited, self.responses, self.counters)
            request = (await offload(size // PASSED, work)).record.data
            counted = await self._token_counter.count(route.servers, request, size)
            return await _send_count(writer, request, size, counted)
        body = await offload(size // PASSED, partial(dumps, data | {"model": route.send_model}))
        affinity = "/".join(call.caller.attempt or ())
        request = UpstreamRequest(
            COUNT_TOKENS_PATH, body, affinity=affinity, max_output_tokens=0, price=Price(), model=route.send_model
        )
        try:
            async with UpstreamCall(route.servers, request) as upstream:
                upstream.settle(Usage())
        except ApiError as api_error:  # It may speak Anthropic's dialect without this endpoint.
            if api_error.status not in _UNSUPPORTED or "model" in api_error.message.lower():
                raise
            await _send_count(writer, data, size, None)
        else:
            await writer.send_json(200, upstream.body)

    def _prepare(self, call: ResolvedCall) -> ForwardedCall:
        path, headers, caller, context, data, route = call
        resource, forced, trace_id = "", dict[str, Any](), ""
        if context is not None:
            resource, forced = context.sampling_parameters(route.name)
            trace_id = context.trace_id
            # A provider that reports tokens may serve a model in training; any other is a third party.
            reports = route.provider is not None and route.provider.token_ids
            if caller.temperature is not None and (reports or route.name in context.llms):
                forced = {"temperature": caller.temperature, **forced}
            if reports and is_training(context, caller.mode, route.name):
                data = self.on_policy.strip_request(data, forced)
        if not can_forward(path, route):
            call = call._replace(body=data)
            return translate(call, self.responses, self.counters, trace_id, resource, forced)
        record = ProviderRecord(caller=caller, trace_id=trace_id, path=path, route=route, data=data, forced=forced)
        return ForwardedCall(record, headers)

    # -- the record ------------------------------------------------------------------------------------------------

    async def record(self, spans: Sequence[Span]) -> None:
        """Record the spans of one call, and reject further calls of an attempt that was superseded. They survive the
        end of this process, and not a power failure. Raises StoreError if the store cannot be written."""
        try:
            with durability.relaxed():
                stored = await self.store.add_many_spans(spans)
        except _REJECTIONS as error:  # its rollout was deleted, say: the caller gets its answer
            logger.error("the store rejected %d spans: %s", len(spans), error)
            return
        self.attempts.recheck_superseded(stored)
