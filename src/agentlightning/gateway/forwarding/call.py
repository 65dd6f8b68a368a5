"""Forwards a call in the dialect of its provider: rewrites the request, passes the response on and records it.

The request gets the provider's name of the model, the parameters of the attempt's resources, and the fields that the
record needs; fields that the caller did not request are removed from the response again. All other fields pass
unchanged, unknown ones included. The response is recorded before its last bytes are sent, so that everything an agent
received is recorded. `forwarding.translated` serves callers whose dialect the provider does not speak.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, cast

import msgspec
from msgspec import structs

from agentlightning import span as names
from agentlightning.gateway.answer import PENDING, Answer, Json, ProviderResponse, Usage, objects
from agentlightning.gateway.callers.attribution import Caller
from agentlightning.gateway.dialects import DIALECTS
from agentlightning.gateway.dialects.base import ApiPath
from agentlightning.gateway.dialects.content_parts import object_of
from agentlightning.gateway.dialects.output_constraint import Constraint
from agentlightning.gateway.dialects.raw_request import (
    LIMITS,
    OPERATIONS,
    distribution_changes,
    input_messages,
    num_choices,
    num_sampled,
    request_attributes,
)
from agentlightning.gateway.dialects.sse import encode_event, event_data, loads
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.http import PASSED, ResponseWriter, offload, run_to_completion
from agentlightning.gateway.record import CallRecord, failure_of, output_attributes
from agentlightning.gateway.routing import ModelRoute
from agentlightning.gateway.upstream.call import UpstreamCall, UpstreamRequest
from agentlightning.gateway.upstream.failures import display_text, unreadable_response
from agentlightning.gateway.upstream.provider import Price, Provider
from agentlightning.gateway.upstream.servers import ServerPool
from agentlightning.span import Span
from agentlightning.util.json_values import dumps

RecordSpans = Callable[[list[Span]], Awaitable[None]]
"""Records spans: they survive a crash of this process once it is done. Raises StoreError."""

_FINAL_EVENTS: Final = frozenset(
    {"response.completed", "response.incomplete", "response.failed", "message_stop", "error"}
)
"""Types of the events that end a stream."""
_READ_NOW: Final = re.compile(rb'\[DONE\]|"usage"\s*:\s*\{|' + "|".join(map(re.escape, sorted(_FINAL_EVENTS))).encode())
"""In events that may end a stream, or may not be for the caller."""
_MAX_UNREAD: Final = 256
"""Reading more events at once would hold up other calls."""
BACKGROUND: Final = "background_response"
"""Operation of the span of a call that its provider answers later."""
UNFINISHED: Final = "unfinished_answer"
"""Type of the error of an answer without an end: the provider broke it off, or does not say why it ended."""
_PASSED_HEADERS: Final = frozenset({"anthropic-beta", "openai-beta", "openai-organization", "openai-project"})

# -- the record --------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class ProviderRecord(CallRecord):
    """Makes the spans of one request to a provider and its response."""

    name: str = ""
    path: ApiPath
    route: ModelRoute
    data: Json
    """The request."""
    forced: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the attempt's resources say of the sampling, whatever the agent asks for."""
    extra_attributes: Json = field(default_factory=dict[str, Any])
    """Attributes of every span, which replace those read from the request and the response."""
    constraint: Constraint | None = None
    """What the caller demands of the answer, if that is known."""
    span_id: str = field(default="", init=False)
    """Of its first span, once it has one."""
    response: ProviderResponse = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"{OPERATIONS[self.path]} {self.route.name}"
        self.response = DIALECTS[self.path].response()

    def to_json(self) -> Json:
        """What `of_poll` needs, in whichever process of the server the poll comes."""
        route, price = self.route, self.route.price
        return {
            "caller": msgspec.to_builtins(structs.replace(self.caller, parent_id=self.span_id)),
            "route": [route.name, route.send_model, price and price.model_dump()],
            "call": [self.trace_id, self.started, self.path, self.data, dict(self.forced)],
        }

    @classmethod
    def of_poll(cls, call: Json, servers: ServerPool) -> ProviderRecord:
        """The record of the answer that a poll of a call (`to_json`) brings: below the span of the call."""
        name, send_model, price = call["route"]
        trace_id, started, path, data, forced = call["call"]
        return cls(
            caller=msgspec.convert(call["caller"], Caller),
            trace_id=trace_id,
            started=started,
            path=path,
            route=ModelRoute(name, None, servers, send_model, price and Price.model_validate(price)),
            data=data,
            forced=forced,
        )

    @property
    def is_pending(self) -> bool:
        """Whether polls bring the answer: its provider works on it in the background, even if its stream broke."""
        reasons = {choice.given_reason for choice in self.response.choices.values()}
        if not PENDING.isdisjoint(reasons):
            return True
        is_cut = self.response.id and not self.response.error and not any(reasons)
        return self.path == "responses" and self.data.get("background") is True and bool(is_cut)

    def spans(self, of_call: Json) -> list[Span]:
        """One span for each choice; the first has the cost of the call. `of_call` are `UpstreamCall.attributes`."""
        response = self.response
        choices = [response.choices[index] for index in sorted(response.choices)] or [Answer()]
        shared = self._attributes() | of_call
        spans: list[Span] = []
        for choice in choices:
            attributes = shared | self._choice_attributes(choice)
            if spans:
                attributes.pop(names.COST, None)
                if not choice.token_ids:
                    attributes.pop(names.OUTPUT_TOKENS, None)
            spans.append(self._choice_span(choice, attributes))
        self.span_id = spans[0].span_id
        return spans

    def failed_span(self, of_call: Json, error: BaseException) -> Span:
        """The span of a call that failed, with the response up to then. It has no tokens: nothing is learned from
        it."""
        choice = self.response.choices.get(0) or Answer()
        choice.take_new(done=True)
        attributes = self._attributes() | of_call
        attributes |= output_attributes(choice, "error" if choice.is_finished else choice.recorded_reason)
        attributes[names.INPUT_MESSAGES] = input_messages(self.path, self.data)
        if self.is_pending:
            attributes[names.OPERATION_NAME] = BACKGROUND
        span = self.span(attributes, failure_of(error))
        self.span_id = span.span_id
        return span

    def _choice_span(self, choice: Answer, attributes: Json) -> Span:
        """What is not finished is a failure, unless polls will bring the answer: then the span is no model call, since
        theirs will be."""
        if self.response.error:
            return self.span(attributes, ("provider_error", self._redacted(self.response.error)))
        if choice.is_finished or self.path == "embeddings":
            return self.span(attributes)
        if self.is_pending:
            return self.span(attributes | {names.OPERATION_NAME: BACKGROUND}, status="UNSET")
        reason = self._redacted(choice.recorded_reason)
        return self.span(attributes, (UNFINISHED, f"the provider did not finish its answer: {reason}"))

    def _redacted(self, text: str) -> str:
        """A provider's text without its secrets."""
        return display_text(self.route.provider, text) if self.route.provider else text

    def _choice_attributes(self, choice: Answer) -> Json:
        messages = input_messages(self.path, self.data, choice.index // num_choices(self.data))
        attributes: Json = {names.INPUT_MESSAGES: messages}
        if self.path == "embeddings":
            return attributes
        choice.take_new(done=True)
        attributes |= output_attributes(choice, choice.recorded_reason, self.constraint)
        prompt = choice.prompt_token_ids or self.response.prompt_token_ids
        token_ids, logprobs = choice.token_ids, choice.logprobs
        if not (
            choice.is_finished
            and prompt
            and token_ids
            and logprobs
            and len(token_ids) == len(logprobs)
            and _are_numbers(prompt, token_ids, logprobs)
        ):
            return attributes | {names.TOKENS: "none"}
        if changed := distribution_changes({**self.data, **self.forced}):
            attributes[names.RESHAPED] = changed
        return attributes | {
            names.TOKENS: "provider",
            names.OUTPUT_TOKENS: len(token_ids),
            names.PROMPT_TOKEN_IDS: prompt,
            names.RESPONSE_TOKEN_IDS: token_ids,
            names.LOGPROBS: logprobs,
        }

    def _attributes(self) -> Json:
        response, model = self.response, self.data.get("model")
        attributes: Json = {
            names.OPERATION_NAME: OPERATIONS[self.path],
            names.REQUEST_MODEL: model if isinstance(model, str) else self.route.name,
            names.RESPONSE_MODEL: response.model or self.route.send_model,
            **request_attributes({**self.data, **self.forced} if self.forced else self.data),
        }
        if response.id:
            attributes[names.RESPONSE_ID] = response.id
        return attributes | self.extra_attributes


def _are_numbers(prompt: Any, token_ids: Any, logprobs: Any) -> bool:
    """Whether the token ids and log-probabilities of a provider are numbers of the recorded types."""
    try:
        _ = array("i", prompt), array("i", token_ids), array("f", logprobs)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


# -- the request -------------------------------------------------------------------------------------------------------


def encode_request(request: Mapping[str, Any]) -> bytes:
    """Serialize a request. Raises ApiError 400 if it is nested too deeply."""
    try:
        return dumps(request)
    except TypeError as error:
        raise ApiError(400, f"the request cannot be passed on: {error}", code="invalid_json") from None


@dataclass(slots=True)
class AddedFields:
    """Fields that were requested for the record, and are removed from the response."""

    usage: bool = False
    token_ids: bool = False
    logprobs: bool = False

    def __bool__(self) -> bool:
        return self.usage or self.token_ids or self.logprobs

    def request(self, path: ApiPath, body: Json, provider: Provider) -> None:
        """Add them to a request for completions, as far as it has none."""
        options = object_of(body, "stream_options")
        if body.get("stream") is True and not options.get("include_usage"):
            body["stream_options"] = options | {"include_usage": True}
            self.usage = True
        if not provider.token_ids:
            return
        if not body.get("return_token_ids"):
            self.token_ids = body["return_token_ids"] = True
        chat = path == "chat/completions"
        if body.get("logprobs") in (None, False) and (chat or body.get("logprobs") is None):
            body["logprobs"] = True if chat else 0
            self.logprobs = True

    def remove_from(self, response: Any) -> bool:
        """Remove the fields from a response or an event in place. Returns whether it had any."""
        if not isinstance(response, dict) or not (self.token_ids or self.logprobs):
            return False
        body = cast("Json", response)
        changed = self.token_ids and body.pop("prompt_token_ids", None) is not None
        for choice in objects(body.get("choices")):
            if self.token_ids:
                changed |= choice.pop("token_ids", None) is not None
                changed |= choice.pop("prompt_token_ids", None) is not None
            if self.logprobs and choice.get("logprobs") is not None:
                choice["logprobs"] = None
                changed = True
        return changed

    def filter_event(self, event: bytes, data: Any) -> bytes:
        """An event for the caller; b"" for one that only has the usage."""
        if self.usage and isinstance(data, dict) and data.get("usage") and not data.get("choices"):
            return b""
        return encode_event(data) if self.remove_from(data) else event


def upstream_request(record: ProviderRecord, headers: Mapping[str, str], added: AddedFields) -> UpstreamRequest:
    """The request of a call. Raises ApiError 400 for one that cannot be sent."""
    path, route, attempt = record.path, record.route, record.caller.attempt
    assert route.provider is not None
    body = record.data | {"model": route.send_model}
    for name, value in record.forced.items():
        if name == "max_tokens":  # A request with two limits is rejected.
            body = {key: own for key, own in body.items() if key not in LIMITS}
        body[_name_of(name, path, record.data, route.provider)] = value
    if path in ("chat/completions", "completions"):
        added.request(path, body, route.provider)
    passed = [(name, value) for name, value in headers.items() if name in _PASSED_HEADERS and value]
    limits = [limit for name in LIMITS if isinstance(limit := body.get(name), int) and limit > 0]
    longest = max(limits, default=route.provider.max_output_tokens)
    return UpstreamRequest(
        path,
        encode_request(body),
        body.get("stream") is True,
        [(name.encode(), value.encode("latin-1")) for name, value in passed],
        "/".join(attempt) if attempt else "",
        attempt[0] if attempt else "",
        0 if path == "embeddings" else longest * num_sampled(body),
        route.price,
        route.send_model,
    )


def _name_of(name: str, path: ApiPath, data: Json, provider: Provider) -> str:
    """The name of a sampling parameter in a request."""
    if name == "stop" and path == "messages":
        return "stop_sequences"
    if name != "max_tokens":
        return name
    if path == "responses":
        return "max_output_tokens"
    if path != "chat/completions":
        return name
    return "max_completion_tokens" if "max_completion_tokens" in data else provider.limit_name


# -- the call ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ForwardedCall:
    """One call to a provider in its own dialect. `run` it once. Raises ApiError 400 for a request that cannot be
    sent."""

    record: ProviderRecord
    headers: Mapping[str, str]
    """Of the request, by lower-case name."""
    is_recorded: bool = field(default=False, init=False)
    _request: UpstreamRequest = field(init=False)
    _added: AddedFields = field(default_factory=AddedFields, init=False)
    _unread: list[bytes] = field(default_factory=list[bytes], init=False)
    """Events that were passed on and are not read yet."""
    _final_events: list[bytes] = field(default_factory=list[bytes], init=False)
    """The end of a stream, which waits until the response is recorded."""

    def __post_init__(self) -> None:
        self._request = upstream_request(self.record, self.headers, self._added)

    async def run(self, keep: RecordSpans, writer: ResponseWriter) -> None:
        """Send the request, pass the response on and record it. Failures are recorded as well. Raises ApiError if the
        provider fails, and the errors of `keep`."""
        assert self.record.route.servers is not None
        call = UpstreamCall(self.record.route.servers, self._request)

        def may_start() -> bool:  # Before its head the provider may still fail, which the caller's SDK would retry.
            if answered := 200 <= call.status < 300:
                writer.extra_headers = call.visible_headers()
            return answered

        try:
            with writer.kept_alive(may_start) if self._request.stream else nullcontext():
                async with call:
                    writer.extra_headers = call.visible_headers()
                    try:
                        await (self._send_stream if self._request.stream else self._send_whole)(call, keep, writer)
                    finally:
                        self._read_unread()
                        self._settle(call, is_end=False)
        except BaseException as error:
            if call.status and not writer.started:
                writer.extra_headers = call.visible_headers()
            if not self.is_recorded:
                failed = error
                await self._keep(keep, call, lambda of_call: [self.record.failed_span(of_call, failed)])
            raise

    # -- the response ----------------------------------------------------------------------------------------------

    async def _send_whole(self, call: UpstreamCall, keep: RecordSpans, writer: ResponseWriter) -> None:
        try:
            data = loads(call.body)
        except ValueError as error:
            raise unreadable_response(self._provider, f"it is not JSON: {error}") from None
        self.record.response.read(data)
        self._settle(call)
        body = self._whole(call, data)
        await self._keep(keep, call, self.record.spans)
        self._remember(body)
        await writer.send_json(200, body)

    async def _send_stream(self, call: UpstreamCall, keep: RecordSpans, writer: ResponseWriter) -> None:
        async for events in call.events():
            if chunk := self._read_events(events):
                await writer.send_events(chunk)
        self._read_unread()
        if not self._final_events and not any(choice.given_reason for choice in self.record.response.choices.values()):
            raise unreadable_response(self._provider, "its stream ended before the response was complete")
        self._settle(call)
        ending = self._ending(call)
        await self._keep(keep, call, self.record.spans)
        self._remember(b"")
        await writer.send_events(ending)
        await writer.close()

    def _settle(self, call: UpstreamCall, is_end: bool = True) -> None:
        """Account for the usage. What is answered in the background costs what the last poll says."""
        if self.record.is_pending:
            call.settle(Usage())
        elif is_end:
            call.settle(self.record.response.usage)

    async def _keep(self, keep: RecordSpans, call: UpstreamCall, make: Callable[[Json], list[Span]]) -> None:
        """Record the call if it has an attempt, even if this task is cancelled meanwhile."""
        if self.record.caller.attempt is None:
            return
        self.is_recorded, of_call, size = True, call.attributes(), len(self._request.body) // PASSED

        async def record() -> None:
            await keep(await offload(size, lambda: make(of_call)))

        await run_to_completion(record())

    @property
    def _provider(self) -> Provider:
        assert self.record.route.provider is not None
        return self.record.route.provider

    # -- what the caller gets; a translated call does all this in its own way ----------------------------------------

    def _whole(self, call: UpstreamCall, data: Any) -> bytes:
        """The body for the caller."""
        return dumps(data) if self._added and self._added.remove_from(data) else call.body

    def _read_events(self, events: list[bytes]) -> bytes:
        """Read events, and return the bytes to send now. What can be passed on as it is waits to be read with others,
        which costs a fraction."""
        if self._final_events or any(map(_READ_NOW.search, events)):
            return b"".join([self._read_event(event) for event in events])
        if self._added.token_ids or self._added.logprobs:
            read = [event_data(event) for event in events]
            self.record.response.read_all(read)
            return b"".join(map(self._added.filter_event, events, read))
        self._unread += events
        if len(self._unread) >= _MAX_UNREAD:
            self._read_unread()
        return b"".join(events)

    def _read_unread(self) -> None:
        if self._unread:
            self.record.response.read_all([event_data(event) for event in self._unread])
            self._unread = []

    def _read_event(self, event: bytes) -> bytes:
        """Read an event, and return the bytes to send now."""
        self._read_unread()
        data = event_data(event)
        self.record.response.read(data)
        event = self._added.filter_event(event, data)
        if not self._final_events and not is_final(event, data):
            return event
        self._final_events.append(event)
        return b""

    def _ending(self, call: UpstreamCall) -> bytes:
        """The bytes that end the stream."""
        return b"".join(self._final_events) + call.trailing_bytes

    def _remember(self, body: bytes) -> None:
        """Remember the answer, once it is recorded. `body`: what is sent of one that is not streamed."""


def is_final(event: bytes, data: Any) -> bool:
    """Whether an event, and its data, end a stream."""
    if data is None:
        return b"[DONE]" in event
    kind = cast("Json", data).get("type") if isinstance(data, dict) else None
    return isinstance(kind, str) and kind in _FINAL_EVENTS
