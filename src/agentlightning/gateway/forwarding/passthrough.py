"""A call that its provider reads in the caller's dialect: rewrite the request, pass the response on, record it.

The request gets the provider's name of the model, the parameters of the attempt's resources, and the fields that the
record needs; what the caller did not ask for is removed from the response again. Everything else passes unchanged,
unknown fields among them. The response is recorded before its last bytes are sent, so nothing an agent received is
lost. `upstream.call` sends and retries; `translation.call` serves callers whose dialect the provider does not speak.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self, cast

import orjson

from agentlightning.gateway.asgi import ResponseWriter
from agentlightning.gateway.dialects.sse import encode_event, event_data, loads
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.recording.forwarded_span import ForwardedExchange, num_choices
from agentlightning.gateway.routing import ModelRoute
from agentlightning.gateway.upstream.call import UpstreamCall
from agentlightning.gateway.upstream.provider import ApiPath
from agentlightning.gateway.upstream.request import UpstreamRequest
from agentlightning.span import Span

Json = dict[str, Any]
RecordSpans = Callable[[list[Span]], Awaitable[None] | None]
"""What it was given survives the end of this process when it returns None, or else once that was awaited. Raises
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
    """A request as it is sent. Raises ApiError 400 for one that is nested deeper than can be written."""
    try:
        return orjson.dumps(request)
    except TypeError as error:
        raise ApiError(400, f"the request cannot be passed on: {error}", code="invalid_json") from None


def can_forward(path: ApiPath, route: ModelRoute) -> bool:
    """Whether the provider of a route reads calls of this path as they are."""
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
    def adds_fields(self) -> bool:
        """Whether something was asked of the provider that is no business of the caller's."""
        return bool(self._added)

    @property
    def stream(self) -> bool:
        return self.data.get("stream") is True

    @property
    def is_stored(self) -> bool:
        """Whether its answer is one that its provider keeps, and its caller may retrieve."""
        return self.path == "responses" and self.data.get("store") is not False

    def upstream_call(self) -> UpstreamCall:
        """The call to the provider, not sent yet."""
        assert self.route.servers is not None
        return UpstreamCall(self.route.servers, self._request or self._build_request())

    def prepare(self) -> Self:
        """Write the request, so that one that cannot be sent is refused before it is run. Raises ApiError 400."""
        self._request = self._build_request()
        return self

    async def run(self, keep: RecordSpans, writer: ResponseWriter, call: UpstreamCall | None = None) -> None:
        """Ask, answer, record. Raises ApiError where the provider fails, and what `keep` raises; a failure is recorded
        as well. `call` is one that was started and has to be gone on with."""
        call = call or self.upstream_call()
        try:
            async with call:
                writer.extra_headers = call.visible_headers()
                if self.respond is not None:
                    await self.respond(self, call, keep, writer)
                else:
                    await (self._send_stream if self.stream else self._send_whole)(call, keep, writer)
        except BaseException as error:
            await run_to_completion(self.record_failure(keep, call, error))
            raise

    def record_failure(self, keep: RecordSpans, call: UpstreamCall, error: BaseException) -> Awaitable[None] | None:
        """Record that it failed, unless it is recorded already. Is kept as `keep` has it."""
        if self.recorded or not self.caller.attempt:
            return None
        self.recorded = True
        return keep([self.failed_span(call.attributes(), error)])

    # -- the request -----------------------------------------------------------------------------------------------

    def _build_request(self) -> UpstreamRequest:
        sent, attempt = self._rewritten_body(), self.caller.attempt
        headers = [
            (name.encode(), value.encode("latin-1"))
            for name, value in self.headers.items()
            if name in _PASSED_HEADERS and value
        ]
        return UpstreamRequest(
            self.path,
            encode_request(sent),
            self.stream,
            headers,
            "/".join(attempt) if attempt else "",
            attempt[0] if attempt else "",
            self._most_tokens(sent),
            self.route.price,
            self.route.send_model,
        )

    def _most_tokens(self, sent: Json) -> int | None:
        """How long all answers together can be; None where nobody says."""
        if self.path == "embeddings":
            return 0
        limits = [limit for name in _LIMITS if isinstance(limit := sent.get(name), int) and limit > 0]
        longest = max(limits, default=self.route.provider.max_output_tokens if self.route.provider else 0)
        prompts = sent.get("prompt")
        several = len(prompts) if isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list) else 1
        return longest * several * _num_sampled(sent)

    def _rewritten_body(self) -> Json:
        """The request as the provider gets it."""
        sent = self.data | {"model": self.route.send_model}
        for name, value in self.forced.items():
            sent[self._name_of(name)] = value
        provider = self.route.provider
        if self.path in ("chat/completions", "completions"):
            if self.stream:
                self._add_usage(sent)
            if provider is not None and provider.token_ids:
                self._add_token_ids(sent)
        return sent

    def _name_of(self, name: str) -> str:
        """How this request calls a parameter of the sampling."""
        if name == "stop" and self.path == "messages":
            return "stop_sequences"
        if name != "max_tokens":
            return name
        if self.path == "responses":
            return "max_output_tokens"
        return "max_completion_tokens" if "max_completion_tokens" in self.data else name

    def _add_usage(self, sent: Json) -> None:
        options = sent.get("stream_options")
        options = cast("Json", options) if isinstance(options, dict) else {}
        if not options.get("include_usage"):
            sent["stream_options"] = options | {"include_usage": True}
            self._added.usage = True

    def _add_token_ids(self, sent: Json) -> None:
        if not sent.get("return_token_ids"):
            sent["return_token_ids"] = True
            self._added.token_ids = True
        chat = self.path == "chat/completions"
        if sent.get("logprobs") in (None, False) and (chat or sent.get("logprobs") is None):
            sent["logprobs"] = True if chat else 0
            self._added.logprobs = True

    # -- the answer ------------------------------------------------------------------------------------------------

    async def _send_whole(self, call: UpstreamCall, keep: RecordSpans, writer: ResponseWriter) -> None:
        body = self.read_body(call)
        await run_to_completion(self.record(keep, call))
        await writer.send_json(200, body)

    def read_body(self, call: UpstreamCall) -> bytes:
        """Read a whole answer; returns what the caller is shown of it. Raises ApiError where it cannot be read."""
        body = call.body
        try:
            answer = loads(body)
        except ValueError:
            raise self._protocol_error("sent an answer that is not JSON") from None
        self.response.read(answer)
        call.settle(self.response.usage)
        if self._added and self._added.remove_from(answer):
            body = orjson.dumps(answer)
        return body

    async def _send_stream(self, call: UpstreamCall, keep: RecordSpans, writer: ResponseWriter) -> None:
        last = list[bytes]()
        async for events in call.events():
            shown = [self._read_event(event, last) for event in events]
            if passed := b"".join(shown):
                await writer.send_events(passed)
        self.check_ended(bool(last))
        call.settle(self.response.usage)
        await run_to_completion(self.record(keep, call))
        await writer.send_events(b"".join(last) + call.trailing_bytes)
        await writer.close()

    def _read_event(self, event: bytes, last: list[bytes]) -> bytes:
        """What to show of an event now; `last` gathers what is shown when all is recorded."""
        data = event_data(event)
        self.response.read(data)
        if self._added and isinstance(data, dict):
            event = self._added.filter_event(event, cast("Json", data))
        kind = cast("Json", data).get("type") if isinstance(data, dict) else None
        if last or (data is None and b"[DONE]" in event) or (isinstance(kind, str) and kind in _FINAL_EVENTS):
            last.append(event)
            return b""
        return event

    def check_ended(self, ended: bool) -> None:
        """Raises ApiError where a stream ended without its end."""
        if not ended and not any(choice.finish_reason for choice in self.response.choices.values()):
            raise self._protocol_error("ended its stream before the answer was whole")

    def _protocol_error(self, what: str) -> ApiError:
        name = self.route.provider.name if self.route.provider else ""
        return ApiError(502, f"the provider {name!r} {what}", code="provider_protocol", retry=False)

    # -- the record ------------------------------------------------------------------------------------------------

    def record(self, keep: RecordSpans, call: UpstreamCall) -> Awaitable[None] | None:
        """Record what was answered. Is kept as `keep` has it."""
        self.recorded = True
        return keep(self.spans(call.attributes(), time.time())) if self.caller.attempt else None


@dataclass(slots=True)
class AddedFields:
    """What was asked of the provider for the record, and is no business of the caller's."""

    usage: bool = False
    token_ids: bool = False
    logprobs: bool = False

    def __bool__(self) -> bool:
        return self.usage or self.token_ids or self.logprobs

    def remove_from(self, answer: Any) -> bool:
        """Of an answer or an event, in place; whether there was anything."""
        if not isinstance(answer, dict) or not (self.token_ids or self.logprobs):
            return False
        found = cast("Json", answer)
        changed = self.token_ids and found.pop("prompt_token_ids", None) is not None
        choices = found.get("choices")
        for choice in cast("list[Any]", choices) if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                continue
            given = cast("Json", choice)
            if self.token_ids:
                changed |= given.pop("token_ids", None) is not None
                changed |= given.pop("prompt_token_ids", None) is not None
            if self.logprobs and given.get("logprobs") is not None:
                given["logprobs"] = None
                changed = True
        return changed

    def filter_event(self, event: bytes, data: Json) -> bytes:
        """An event as the caller sees it; nothing of the one that only says what was used."""
        if self.usage and data.get("usage") and not data.get("choices"):
            return b""
        return encode_event(data) if self.remove_from(data) else event


def _num_sampled(asked: Json) -> int:
    """How many answers a provider draws for each prompt, and charges for."""
    best = asked.get("best_of")
    return max(num_choices(asked), best) if isinstance(best, int) else num_choices(asked)


async def run_to_completion(work: Awaitable[None] | None) -> None:
    """Wait for work that is finished even where its caller is cancelled meanwhile."""
    if work is None:
        return
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
