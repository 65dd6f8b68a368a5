"""A call that its provider can read as it came: passed on nearly unread, answered as it comes, and recorded.

The model's name is replaced, what the record needs is asked for, and what the caller did not ask for is taken out of
the answer again; all else, images and fields nobody here knows among them, passes as it is. An answer is recorded
before its last bytes go out, so that nothing an agent has heard is lost. Who is asked, and how often, is
`gateway.sending`; calls in another dialect than the provider's are `gateway.translate`.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self, cast

import orjson

from agentlightning import span as names
from agentlightning.gateway.asgi import ResponseWriter
from agentlightning.gateway.callers.attribution import Caller
from agentlightning.gateway.dialects.sse import encode_event, event_data, loads
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.recording.otel_messages import (
    OPERATIONS,
    as_json,
    distribution_changes,
    input_messages,
    request_attributes,
)
from agentlightning.gateway.recording.provider_response import Choice, ProviderResponse
from agentlightning.gateway.routing import ModelRoute
from agentlightning.gateway.upstream.call import UpstreamCall, UpstreamRequest
from agentlightning.gateway.upstream.failures import display_text
from agentlightning.gateway.upstream.provider import ApiPath
from agentlightning.span import Span, new_span_id

Json = dict[str, Any]
RecordSpans = Callable[[list[Span]], Awaitable[None] | None]
"""What it was given survives the end of this process when it returns None, or else once that was awaited. Raises
StoreError."""

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
class ForwardedCall:
    """One call to a provider in its own dialect. `run` it once."""

    path: ApiPath
    route: ModelRoute
    caller: Caller
    data: Json
    """The request."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of the request, by lower-case name."""
    trace_id: str = ""
    forced: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the attempt's resources say of the sampling, whatever the agent asks for."""
    started: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    response: ProviderResponse = field(init=False)
    _added: AddedFields = field(default_factory=lambda: AddedFields(), init=False)
    recorded: bool = field(default=False, init=False)
    _request: UpstreamRequest | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.response = ProviderResponse(self.path)

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
                await (self._send_stream if self.stream else self._send_whole)(call, keep, writer)
        except BaseException as error:
            await run_to_completion(self.record_failure(keep, call, error))
            raise

    def record_failure(self, keep: RecordSpans, call: UpstreamCall, error: BaseException) -> Awaitable[None] | None:
        """Record that it failed, unless it is recorded already. Is kept as `keep` has it."""
        if self.recorded or not self.caller.attempt:
            return None
        self.recorded = True
        return keep(self._failed(call, error))

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
        await self._record(keep, call)
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
        self._check_ended(bool(last))
        call.settle(self.response.usage)
        await self._record(keep, call)
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

    def _check_ended(self, ended: bool) -> None:
        """Raises ApiError where a stream ended without its end."""
        if not ended and not any(choice.finish_reason for choice in self.response.choices.values()):
            raise self._protocol_error("ended its stream before the answer was whole")

    def _protocol_error(self, what: str) -> ApiError:
        name = self.route.provider.name if self.route.provider else ""
        return ApiError(502, f"the provider {name!r} {what}", code="provider_protocol", retry=False)

    # -- the record ------------------------------------------------------------------------------------------------

    async def _record(self, keep: RecordSpans, call: UpstreamCall) -> None:
        await run_to_completion(self.record(keep, call))

    def record(self, keep: RecordSpans, call: UpstreamCall) -> Awaitable[None] | None:
        """Record what was answered. Is kept as `keep` has it."""
        self.recorded = True
        return keep(self.spans(call.attributes(), time.time())) if self.caller.attempt else None

    def spans(self, of_call: Json, now: float, first_id: str = "") -> list[Span]:
        """One for each answer. What the call cost is said once. `of_call`: `Call.attributes`; `first_id`: the id of the
        first, from which those of the others follow."""
        response = self.response
        choices = [response.choices[index] for index in sorted(response.choices)] or [Choice()]
        shared = self._attributes() | of_call
        status = ("ERROR", self._redacted(response.error)) if response.error else ("OK", None)
        spans: list[Span] = []
        for choice in choices:
            attributes = shared | self._choice_attributes(choice)
            if spans:
                attributes.pop(names.COST, None)
                if choice.token_ids is None:
                    attributes.pop(names.OUTPUT_TOKENS, None)
            span_id = f"{(int(first_id, 16) + len(spans)) % 2**64:016x}" if first_id else new_span_id()
            spans.append(self._span(attributes, now, *status, span_id=span_id))
        return spans

    def _redacted(self, text: str) -> str:
        """A text of the provider's, never with its key in it."""
        return display_text(self.route.provider, text) if self.route.provider else text

    def _choice_attributes(self, choice: Choice) -> Json:
        said = input_messages(self.path, self.data, choice.index // _num_choices(self.data))
        attributes: Json = {names.INPUT_MESSAGES: said}
        if self.path == "embeddings":
            return attributes
        attributes[names.OUTPUT_MESSAGES] = as_json([choice.message()])
        attributes[names.FINISH_REASONS] = [choice.finish_reason or "error"]
        prompt = choice.prompt_token_ids or self.response.prompt_token_ids
        drawn, logprobs = choice.token_ids, choice.logprobs
        if not (
            prompt and drawn and logprobs and len(drawn) == len(logprobs) and _are_numbers(prompt, drawn, logprobs)
        ):
            return attributes | {names.TOKENS: "none"}
        if changed := distribution_changes({**self.data, **self.forced}):
            attributes[names.RESHAPED] = changed
        return attributes | {
            names.TOKENS: "provider",
            names.OUTPUT_TOKENS: len(drawn),
            names.PROMPT_TOKEN_IDS: prompt,
            names.RESPONSE_TOKEN_IDS: drawn,
            names.LOGPROBS: logprobs,
        }

    def _failed(self, call: UpstreamCall, error: BaseException) -> list[Span]:
        """What was heard before it failed. It holds no tokens: there is nothing to learn from them."""
        cancelled = isinstance(error, asyncio.CancelledError)
        if cancelled and error.args and isinstance(error.args[0], ApiError):  # its attempt has ended
            error, cancelled = error.args[0], False
        kind = "client_disconnected" if cancelled else getattr(error, "code", None) or type(error).__qualname__
        message = "the caller hung up before the answer was whole" if cancelled else str(error)
        choice = self.response.choices.get(0) or Choice()
        choice.finish_reason = None
        attributes = self._attributes() | call.attributes()
        attributes[names.ERROR_TYPE] = kind
        attributes[names.INPUT_MESSAGES] = input_messages(self.path, self.data)
        attributes[names.OUTPUT_MESSAGES] = as_json([choice.message()])
        return [self._span(attributes, time.time(), "ERROR", message)]

    def _attributes(self) -> Json:
        response, asked = self.response, self.data.get("model")
        attributes: Json = {
            names.OPERATION_NAME: OPERATIONS[self.path],
            names.REQUEST_MODEL: asked if isinstance(asked, str) else self.route.name,
            names.RESPONSE_MODEL: response.model or self.route.send_model,
            **request_attributes({**self.data, **self.forced} if self.forced else self.data),
            **self.caller.attributes(),
        }
        if response.id:
            attributes[names.RESPONSE_ID] = response.id
        return attributes

    def _span(
        self, attributes: Json, end_time: float, status: str, message: str | None, span_id: str | None = None
    ) -> Span:
        caller = self.caller
        return Span(
            rollout_id=caller.rollout_id or "",
            attempt_id=caller.attempt_id or "",
            name=f"{OPERATIONS[self.path]} {self.route.name}",
            start_time=self.started,
            end_time=end_time,
            trace_id=caller.trace_id or self.trace_id,
            span_id=span_id or new_span_id(),
            parent_id=caller.parent_id,
            status_code=status,
            status_message=message,
            attributes=attributes,
        )


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


def _num_choices(asked: Json) -> int:
    """How many answers a request asks for to each of its prompts."""
    several = asked.get("n")
    return max(1, several) if isinstance(several, int) else 1


def _num_sampled(asked: Json) -> int:
    """How many answers a provider draws for each prompt, and charges for."""
    best = asked.get("best_of")
    return max(_num_choices(asked), best) if isinstance(best, int) else _num_choices(asked)


def _are_numbers(prompt: Any, drawn: Any, logprobs: Any) -> bool:
    """Whether what a provider calls tokens and log-probabilities can be kept as such."""
    try:
        _ = array("i", prompt), array("i", drawn), array("f", logprobs)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


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
