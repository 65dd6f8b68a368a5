"""Forwards a call in the dialect of its provider: rewrites the request, passes the response on and records it.

The request gets the provider's name of the model, the parameters of the attempt's resources, and the fields that the
record needs; fields that the caller did not request are removed from the response again. All other fields pass
unchanged, unknown ones included. The response is recorded before its last bytes are sent, so that everything an agent
received is recorded. `translation.call` serves callers whose dialect the provider does not speak.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Self, cast

from agentlightning.gateway.asgi import ResponseWriter
from agentlightning.gateway.dialects.provider_events import Usage
from agentlightning.gateway.dialects.sse import encode_event, event_data, loads
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.offload import MAX_INLINE_BYTES, PASSED, offload
from agentlightning.gateway.recording.forwarded_span import ForwardedExchange, num_choices
from agentlightning.gateway.routing import ModelRoute
from agentlightning.gateway.upstream.call import UpstreamCall
from agentlightning.gateway.upstream.provider import ApiPath
from agentlightning.gateway.upstream.request import UpstreamRequest
from agentlightning.span import Span
from agentlightning.util.json_values import dumps

Json = dict[str, Any]
RecordSpans = Callable[[list[Span]], Awaitable[None] | None]
"""Records spans durably: they survive a crash once it returned None, or once its awaitable is done. Raises
StoreError."""

Respond = Callable[["ForwardedCall", UpstreamCall, RecordSpans, ResponseWriter], Awaitable[None]]
"""Reads the response of a call, records it and answers the caller."""

_PASSED_HEADERS: Final = frozenset({"anthropic-beta", "openai-beta", "openai-organization", "openai-project"})
_LIMITS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_FINAL_EVENTS: Final = frozenset(
    {"response.completed", "response.incomplete", "response.failed", "message_stop", "error"}
)
"""Types of the events that end a stream."""


def encode_request(request: Mapping[str, Any]) -> bytes:
    """Serialize a request. Raises ApiError 400 if it is nested too deeply."""
    try:
        return dumps(request)
    except TypeError as error:
        raise ApiError(400, f"the request cannot be passed on: {error}", code="invalid_json") from None


def can_forward(path: ApiPath, route: ModelRoute) -> bool:
    """Whether the provider of a route serves this path without translation."""
    return route.provider is not None and route.provider.serves(path)


@dataclass(slots=True)
class ForwardedCall(ForwardedExchange):
    """One call to a provider in its own dialect. `run` it once."""

    respond: Respond | None = field(default=None, kw_only=True)
    """What sends the response to the caller; by default it is passed through."""
    _added: AddedFields = field(default_factory=lambda: AddedFields(), init=False)
    recorded: bool = field(default=False, init=False)
    _request: UpstreamRequest | None = field(default=None, init=False)

    @property
    def stream(self) -> bool:
        return self.data.get("stream") is True

    @property
    def is_stored(self) -> bool:
        """Whether the provider stores the response for later retrieval."""
        return self.path == "responses" and self.data.get("store") is not False

    def prepare(self) -> Self:
        """Build the request ahead of `run`, to reject an invalid one early. Raises ApiError 400."""
        self._request = self._build_request()
        return self

    async def run(self, keep: RecordSpans, writer: ResponseWriter) -> None:
        """Send the request, pass the response on and record it. Failures are recorded as well. Raises ApiError if the
        provider fails, and the errors of `keep`."""
        assert self.route.servers is not None
        call = UpstreamCall(self.route.servers, self._request or self._build_request())

        def may_start() -> bool:  # Before its head the provider may still fail, which the caller's SDK would retry.
            if answered := self.stream and 200 <= call.status < 300:
                writer.extra_headers = call.visible_headers()
            return answered

        try:
            with writer.kept_alive(may_start):
                await self._exchange(keep, writer, call)
        except BaseException as error:
            if call.status and not writer.started:
                writer.extra_headers = call.visible_headers()
            await run_to_completion(self.record_failure(keep, call, error))
            raise

    async def _exchange(self, keep: RecordSpans, writer: ResponseWriter, call: UpstreamCall) -> None:
        async with call:
            writer.extra_headers = call.visible_headers()
            try:
                if self.respond is not None:
                    await self.respond(self, call, keep, writer)
                else:
                    await (self._send_stream if self.stream else self._send_whole)(call, keep, writer)
            finally:
                if self.is_pending:  # It costs what the last poll says.
                    call.settle(Usage())

    def record_failure(self, keep: RecordSpans, call: UpstreamCall, error: BaseException) -> Awaitable[None] | None:
        """Record a failure, unless the call is recorded already. Durable as `RecordSpans` says."""
        if self.recorded or not self.caller.attempt:
            return None
        return self._record(keep, call, lambda: [self.failed_span(call.attributes(), error)])

    # -- the request -----------------------------------------------------------------------------------------------

    def _build_request(self) -> UpstreamRequest:
        body, attempt = self._rewritten_body(), self.caller.attempt
        headers = [
            (name.encode(), value.encode("latin-1"))
            for name, value in self.headers.items()
            if name in _PASSED_HEADERS and value
        ]
        return UpstreamRequest(
            self.path,
            encode_request(body),
            self.stream,
            headers,
            "/".join(attempt) if attempt else "",
            attempt[0] if attempt else "",
            self._max_output_tokens(body),
            self.route.price,
            self.route.send_model,
        )

    def _max_output_tokens(self, body: Json) -> int | None:
        """The output limit for all choices together."""
        if self.path == "embeddings":
            return 0
        limits = [limit for name in _LIMITS if isinstance(limit := body.get(name), int) and limit > 0]
        longest = max(limits, default=self.route.provider.max_output_tokens if self.route.provider else 0)
        prompts = body.get("prompt")
        num_prompts = (
            len(prompts) if isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list) else 1
        )
        return longest * num_prompts * _num_sampled(body)

    def _rewritten_body(self) -> Json:
        """The request with the model, parameters and fields that the provider gets."""
        body, provider = self.data | {"model": self.route.send_model}, self.route.provider
        for name, value in self.forced.items():
            if name == "max_tokens":  # A request with two limits is rejected.
                body = {key: own for key, own in body.items() if key not in _LIMITS}
            body[self._name_of(name)] = value
        if self.path in ("chat/completions", "completions"):
            if self.stream:
                self._add_usage(body)
            if provider is not None and provider.token_ids:
                self._add_token_ids(body)
        return body

    def _name_of(self, name: str) -> str:
        """The name of a sampling parameter in this request."""
        if name == "stop" and self.path == "messages":
            return "stop_sequences"
        if name != "max_tokens":
            return name
        if self.path == "responses":
            return "max_output_tokens"
        if self.path != "chat/completions" or self.route.provider is None:
            return name
        return "max_completion_tokens" if "max_completion_tokens" in self.data else self.route.provider.limit_name

    def _add_usage(self, body: Json) -> None:
        options = body.get("stream_options")
        options = cast("Json", options) if isinstance(options, dict) else {}
        if not options.get("include_usage"):
            body["stream_options"] = options | {"include_usage": True}
            self._added.usage = True

    def _add_token_ids(self, body: Json) -> None:
        if not body.get("return_token_ids"):
            body["return_token_ids"] = True
            self._added.token_ids = True
        chat = self.path == "chat/completions"
        if body.get("logprobs") in (None, False) and (chat or body.get("logprobs") is None):
            body["logprobs"] = True if chat else 0
            self._added.logprobs = True

    # -- the response ----------------------------------------------------------------------------------------------

    async def _send_whole(self, call: UpstreamCall, keep: RecordSpans, writer: ResponseWriter) -> None:
        body = self.read_body(call)
        await run_to_completion(self.record(keep, call))
        await writer.send_json(200, body)

    def read_body(self, call: UpstreamCall) -> bytes:
        """Parse a whole response, and return the body for the caller. Raises ApiError if it is not JSON."""
        body = call.body
        try:
            response = loads(body)
        except ValueError:
            raise self._protocol_error("sent a response that is not JSON") from None
        self.response.read(response)
        call.settle(Usage() if self.is_pending else self.response.usage)
        if self._added and self._added.remove_from(response):
            body = dumps(response)
        return body

    async def _send_stream(self, call: UpstreamCall, keep: RecordSpans, writer: ResponseWriter) -> None:
        final_events = list[bytes]()
        async for events in call.events():
            visible = [self._read_event(event, final_events) for event in events]
            if chunk := b"".join(visible):
                await writer.send_events(chunk)
        self.check_ended(bool(final_events))
        call.settle(self.response.usage)
        await run_to_completion(self.record(keep, call))
        await writer.send_events(b"".join(final_events) + call.trailing_bytes)
        await writer.close()

    def _read_event(self, event: bytes, final_events: list[bytes]) -> bytes:
        """The bytes to pass on now; `final_events` collects those that wait until the response is recorded."""
        data = event_data(event)
        self.response.read(data)
        if self._added and isinstance(data, dict):
            event = self._added.filter_event(event, cast("Json", data))
        kind = cast("Json", data).get("type") if isinstance(data, dict) else None
        if final_events or (data is None and b"[DONE]" in event) or (isinstance(kind, str) and kind in _FINAL_EVENTS):
            final_events.append(event)
            return b""
        return event

    def check_ended(self, ended: bool) -> None:
        """Raises ApiError if a stream ended without a final event or finish reason."""
        if not ended and not any(choice.given_reason for choice in self.response.choices.values()):
            raise self._protocol_error("ended its stream before the response was complete")

    def _protocol_error(self, problem: str) -> ApiError:
        provider = self.route.provider
        assert provider is not None
        message = f"the provider {provider.name!r} {problem}"
        return ApiError(502, message, code="provider_protocol", retry=provider.final)

    # -- the record ------------------------------------------------------------------------------------------------

    def record(self, keep: RecordSpans, call: UpstreamCall) -> Awaitable[None] | None:
        """Record the response. Durable as `RecordSpans` says."""
        make = partial(self.spans, call.attributes(), time.time())
        return self._record(keep, call, make) if self.caller.attempt else None

    def _record(self, keep: RecordSpans, call: UpstreamCall, make: Callable[[], list[Span]]) -> Awaitable[None] | None:
        self.recorded, size = True, len(call.request.body) // PASSED
        if size <= MAX_INLINE_BYTES:
            return keep(make())

        async def record() -> None:
            if (pending := keep(await offload(size, make))) is not None:
                await pending

        return record()


@dataclass(slots=True)
class AddedFields:
    """Fields that were requested for the record, and are removed from the response."""

    usage: bool = False
    token_ids: bool = False
    logprobs: bool = False

    def __bool__(self) -> bool:
        return self.usage or self.token_ids or self.logprobs

    def remove_from(self, response: Any) -> bool:
        """Remove the fields from a response or an event in place. Returns whether it had any."""
        if not isinstance(response, dict) or not (self.token_ids or self.logprobs):
            return False
        body = cast("Json", response)
        changed = self.token_ids and body.pop("prompt_token_ids", None) is not None
        choices = body.get("choices")
        for choice in cast("list[Any]", choices) if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                continue
            fields = cast("Json", choice)
            if self.token_ids:
                changed |= fields.pop("token_ids", None) is not None
                changed |= fields.pop("prompt_token_ids", None) is not None
            if self.logprobs and fields.get("logprobs") is not None:
                fields["logprobs"] = None
                changed = True
        return changed

    def filter_event(self, event: bytes, data: Json) -> bytes:
        """An event for the caller; b"" for one that only has the usage."""
        if self.usage and data.get("usage") and not data.get("choices"):
            return b""
        return encode_event(data) if self.remove_from(data) else event


def _num_sampled(request: Json) -> int:
    """The number of choices that a provider samples for each prompt, and charges for."""
    best = request.get("best_of")
    return max(num_choices(request), best) if isinstance(best, int) else num_choices(request)


async def run_to_completion(work: Awaitable[None] | None) -> None:
    """Await work that must complete even if the current task is cancelled meanwhile."""
    if work is None:
        return
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
