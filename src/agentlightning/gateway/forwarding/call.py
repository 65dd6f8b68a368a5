"""Serves the calls that are routed to providers: forwards or translates them, counts their usage and records them.

A call in the dialect of its provider gets the provider's name of the model, the parameters of the attempt's resources,
and the fields that the record needs; fields that the caller did not request are removed from the response again. All
other fields pass unchanged, unknown ones included. The response is recorded before its last bytes are sent, so that
everything an agent received is recorded.

A call whose provider speaks another dialect is translated, and its answer back: requests to `/v1/messages` and
`/v1/responses` for servers of chat completions, `/v1/chat/completions` and `/v1/responses` for Anthropic's,
`/v1/chat/completions` and `/v1/messages` for servers of responses only. Text and reasoning stream as they arrive, each
tool call once it is complete. `previous_response_id` works as with our own engines: the history is stored here and sent
whole, including reasoning that a provider wants back. The span shows the request and the response as the provider saw
them.

Requests to the other paths of a provider's API (files, moderations, audio, images and all else) are forwarded as they
are, and so are those for the responses that it stores. They are not calls of a policy: their spans have method, path,
status and usage, and no content. Limits, budgets and retries of the provider do not apply.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from array import array
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, cast
from urllib.parse import quote, unquote

import msgspec
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from agentlightning import span as names
from agentlightning.errors import ConfigError, ConflictError, NotFoundError
from agentlightning.gateway.answer import (
    MALFORMED,
    PENDING,
    Answer,
    ProviderResponse,
    Usage,
    needs_echo,
    object_of,
    objects,
)
from agentlightning.gateway.callers import AttemptIds, AttemptTable, Caller
from agentlightning.gateway.config import COUNT_TOKENS_PATH, Price, Provider
from agentlightning.gateway.dialects import DIALECTS
from agentlightning.gateway.dialects.base import (
    ApiPath,
    Constraint,
    ReplyWriter,
    apply_resource_params,
    encode_event,
    event_data,
    loads_tolerantly,
    read_json,
    split_events,
)
from agentlightning.gateway.dialects.chat import ChatResponse
from agentlightning.gateway.dialects.content_parts import turn_key
from agentlightning.gateway.dialects.messages import count_reply
from agentlightning.gateway.dialects.response_store import ResponseLookup, ResponseStore
from agentlightning.gateway.dialects.responses import LAST_EVENTS
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.forwarding.bodies import (
    body_of,
    given_params,
    own_stops,
    translation_target,
    turns_of,
    wire_name,
)
from agentlightning.gateway.http import PASSED, ResponseWriter, offload, run_to_completion
from agentlightning.gateway.record import (
    LIMITS,
    CallRecord,
    Counters,
    distribution_changes,
    failure_of,
    input_messages,
    num_choices,
    num_sampled,
    output_attributes,
    request_attributes,
)
from agentlightning.gateway.routing import ModelRoute, ResolvedCall
from agentlightning.gateway.sampling import OnPolicySampling
from agentlightning.gateway.upstream.call import (
    ServerPool,
    UpstreamCall,
    from_response,
    from_transport,
    unreadable_response,
)
from agentlightning.gateway.upstream.limits import estimate_prompt_tokens
from agentlightning.span import Span
from agentlightning.store import durability
from agentlightning.store.base import LightningStoreBase
from agentlightning.transport import Headers, TransportError
from agentlightning.util.json_values import Json, dumps

logger = logging.getLogger(__name__)

_FINAL_EVENTS: Final = frozenset({*LAST_EVENTS, "message_stop", "error"})
"""Types of the events that end a stream."""
_USED: Final = re.compile(rb'"usage"\s*:\s*\{')
"""In events that may not be for the caller."""
_END_MARKS: Final = (b"[DONE]", *(b'"%b"' % kind.encode() for kind in sorted(_FINAL_EVENTS)))
"""In events that may end a stream."""
_MAX_UNREAD: Final = 64 * 1024
"""Reading more bytes of events at once would hold up other calls."""
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
    forced: Json = field(default_factory=Json)
    """What the attempt's resources say of the sampling, whatever the agent asks for."""
    extra_attributes: Json = field(default_factory=Json)
    """Attributes of every span, which replace those read from the request and the response."""
    constraint: Constraint | None = None
    """What the caller demands of the answer, if that is known."""
    span_id: str = field(default="", init=False)
    """Of its first span, once it has one."""
    response: ProviderResponse = field(init=False)

    def __post_init__(self) -> None:
        dialect = DIALECTS[self.path]
        self.name, self.response = f"{dialect.operation} {self.route.name}", dialect.response()

    def to_json(self) -> Json:
        """What `of_poll` needs, in whichever process of the server the poll comes."""
        route, price = self.route, self.route.price
        caller = structs.replace(self.caller, parent_id=self.span_id, trace_id=self.caller.trace_id or self.trace_id)
        return {
            "caller": msgspec.to_builtins(caller),
            "route": [route.name, route.send_model, price and price.model_dump()],
            "call": [self.started, self.data | self.forced],
        }

    @classmethod
    def of_poll(cls, call: Json, servers: ServerPool) -> ProviderRecord:
        """The record of the answer that a poll of a call (`to_json`) brings: below the span of the call."""
        (name, send_model, price), (started, data) = call["route"], call["call"]
        route = ModelRoute(name, None, servers, send_model, price and Price.model_validate(price))
        caller = msgspec.convert(call["caller"], Caller)
        return cls(caller=caller, started=started, path="responses", route=route, data=data)

    @property
    def is_pending(self) -> bool:
        """Whether polls bring the answer: its provider works on it in the background, even if its stream broke."""
        if self.path != "responses":
            return False
        reasons = {choice.given_reason for choice in self.response.choices.values()}
        if not PENDING.isdisjoint(reasons):
            return True
        is_cut = bool(self.response.id) and not (self.response.error or any(reasons))
        return is_cut and self.data.get("background") is True

    def spans(self, of_call: Json, error: BaseException | None = None) -> list[Span]:
        """One span for each choice; the first has the cost of the call. `of_call` are `UpstreamCall.attributes`. After
        an `error` there is one, with the answer up to then and no tokens: nothing is learned from it."""
        choices = [self.response.choices[index] for index in sorted(self.response.choices)] or [Answer()]
        shared = self._attributes() | of_call
        if self.is_pending:  # The span is no model call, since those of the polls will be.
            shared[names.OPERATION_NAME] = BACKGROUND
        spans: list[Span] = []
        for choice in choices[:1] if error else choices:
            attributes = shared | self._choice_attributes(choice, is_failed=error is not None)
            if spans:
                attributes.pop(names.COST, None)
                if not choice.token_ids:
                    attributes.pop(names.OUTPUT_TOKENS, None)
            failure = self._failure(choice) if error is None else failure_of(error)
            spans.append(self.span(attributes, failure, status="UNSET" if self.is_pending else "OK"))
        self.span_id = spans[0].span_id
        return spans

    def _failure(self, choice: Answer) -> tuple[str, str] | None:
        """(type, message) of an error. What is not finished is a failure, unless polls will bring the answer."""
        if self.response.error:
            return "provider_error", self._redacted(self.response.error)
        if choice.is_finished or self.is_pending or self.path == "embeddings":
            return None
        return UNFINISHED, f"the provider did not finish its answer: {self._redacted(choice.recorded_reason)}"

    def _redacted(self, text: str) -> str:
        """A provider's text without its secrets."""
        return self.route.servers.redactor.text(text) if self.route.servers else text

    def _choice_attributes(self, choice: Answer, is_failed: bool) -> Json:
        messages = input_messages(self.data, choice.index // num_choices(self.data))
        attributes: Json = {names.INPUT_MESSAGES: messages}
        if self.path == "embeddings":
            return attributes
        choice.take_new(done=True)
        if is_failed:
            return attributes | output_attributes(choice, "error" if choice.is_finished else choice.recorded_reason)
        attributes |= output_attributes(choice, choice.recorded_reason, self.constraint)
        prompt = choice.prompt_token_ids or self.response.prompt_token_ids
        token_ids, logprobs = choice.token_ids, choice.logprobs
        attributes[names.TOKENS] = "none"
        if not (choice.is_finished and prompt and token_ids and len(token_ids) == len(logprobs)):
            return attributes
        with suppress(TypeError, ValueError, OverflowError):
            _ = array("i", prompt), array("i", token_ids), array("f", logprobs)  # as they are recorded
            if changed := distribution_changes(self.data | self.forced):
                attributes[names.RESHAPED] = changed
            attributes |= {
                names.TOKENS: "provider",
                names.OUTPUT_TOKENS: len(token_ids),
                names.PROMPT_TOKEN_IDS: prompt,
                names.RESPONSE_TOKEN_IDS: token_ids,
                names.LOGPROBS: logprobs,
            }
        return attributes

    def _attributes(self) -> Json:
        response, model = self.response, self.data.get("model")
        attributes: Json = {
            names.OPERATION_NAME: DIALECTS[self.path].operation,
            names.REQUEST_MODEL: model if isinstance(model, str) else self.route.name,
            names.RESPONSE_MODEL: response.model or self.route.send_model,
            **request_attributes(self.data | self.forced),
        }
        if response.id:
            attributes[names.RESPONSE_ID] = response.id
        return attributes | self.extra_attributes


# -- the request -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class AddedFields:
    """Fields that were requested for the record, and are removed from the response."""

    usage: bool = False
    fields: set[str] = field(default_factory=set)
    """Those of the response and its choices: `prompt_token_ids`, `token_ids`, `logprobs`."""

    def request(self, path: ApiPath, body: Json, provider: Provider) -> None:
        """Add them to a request for completions, as far as it has none."""
        options = object_of(body, "stream_options")
        if body.get("stream") is True and not options.get("include_usage"):
            body["stream_options"] = options | {"include_usage": True}
            self.usage = True
        if not provider.token_ids:
            return
        if not body.get("return_token_ids"):
            body["return_token_ids"] = True
            self.fields |= {"prompt_token_ids", "token_ids"}
        chat = path == "chat/completions"
        if body.get("logprobs") in (None, False) and (chat or body.get("logprobs") is None):
            body["logprobs"] = True if chat else 0
            self.fields.add("logprobs")

    def remove_from(self, response: Any) -> bool:
        """Remove the fields from a response or an event in place. Returns whether it had any."""
        if not isinstance(response, dict) or not self.fields:
            return False
        body, found = cast("Json", response), False
        for part in (body, *objects(body.get("choices"))):
            for name in self.fields & part.keys():
                found |= part.pop(name) is not None
                if name == "logprobs":  # A choice without them has null.
                    part[name] = None
        return found

    def filter_event(self, event: bytes, data: Any) -> bytes:
        """An event for the caller; b"" for one that only has the usage."""
        if self.usage and isinstance(data, dict) and data.get("usage") and not data.get("choices"):
            return b""
        return encode_event(data) if self.remove_from(data) else event


def upstream_call(record: ProviderRecord, headers: Mapping[str, str], added: AddedFields) -> UpstreamCall:
    """The call to the provider. Raises ApiError 400 for a request that cannot be sent."""
    path, route = record.path, record.route
    assert route.servers is not None
    provider, body = route.servers.provider, record.data | {"model": route.send_model}
    for name, value in record.forced.items():
        if name == "max_tokens":  # A request with two limits is rejected.
            body = {key: own for key, own in body.items() if key not in LIMITS}
            if path == "chat/completions" and "max_completion_tokens" in record.data:
                name = "max_completion_tokens"
        body[wire_name(name, path, provider)] = value
    if path in ("chat/completions", "completions"):
        added.request(path, body, provider)
    passed = [
        (name.encode(), value.encode("latin-1")) for name, value in headers.items() if name in _PASSED_HEADERS and value
    ]
    limits = [limit for name in LIMITS if isinstance(limit := body.get(name), int) and limit > 0]
    return UpstreamCall(
        route.servers,
        path,
        dumps(body),
        body.get("stream") is True,
        passed,
        record.caller.affinity,
        record.caller.rollout_id or "",
        0 if path == "embeddings" else max(limits, default=provider.max_output_tokens) * num_sampled(body),
        route.price,
        route.send_model,
    )


# -- the call ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ForwardedCall:
    """One call to a provider in its own dialect. `run` it once. Raises ApiError 400 for a request that cannot be
    sent."""

    service: ForwardingService
    record: ProviderRecord
    headers: Mapping[str, str]
    """Of the request, by lower-case name."""

    _call: UpstreamCall = field(init=False)
    _added: AddedFields = field(default_factory=AddedFields, init=False)
    _unread: bytearray = field(default_factory=bytearray, init=False)
    """Events that were passed on and are not read yet."""
    _final_events: list[bytes] = field(default_factory=list, init=False)
    """The end of a stream, which waits until the response is recorded."""

    def __post_init__(self) -> None:
        self._call = upstream_call(self.record, self.headers, self._added)

    async def run(self, writer: ResponseWriter) -> None:
        """Send the request, pass the response on and record it. Failures are recorded as well. Raises ApiError if the
        provider fails, and StoreError."""
        record, service, call = self.record, self.service, self._call

        def may_start() -> bool:  # Before its head the provider may still fail, which the caller's SDK would retry.
            if answered := 200 <= call.status < 300:
                writer.extra_headers = call.visible_headers()
            return answered

        try:
            with writer.kept_alive(may_start) if call.stream else nullcontext():
                async with call:
                    writer.extra_headers = call.visible_headers()
                    try:
                        await self._pass_on(writer)
                    finally:
                        self._read_unread()
                        if record.is_pending:
                            self._settle()
        except BaseException as error:
            if call.status and not writer.started:
                writer.extra_headers = call.visible_headers()
            if not record.span_id:
                await self._record(error)
            raise
        finally:  # Note the provider that stores a response, whatever became of its stream.
            attempt, response_id = record.caller.attempt, record.response.id
            if record.path == "responses" and record.data.get("store") is not False and attempt and response_id:
                pending = record.to_json() if record.is_pending else None
                service.responses.note_provider(attempt, response_id, call.pool.provider.name, pending)
        service.count_tokens(record.response.usage)

    async def _pass_on(self, writer: ResponseWriter) -> None:
        """Send the response, and record it before its end."""
        call, response, data = self._call, self.record.response, None
        if call.stream:
            async for events in call.events():
                for chunk in self._shown(events):
                    if chunk:
                        await writer.send_events(chunk)
            self._read_unread()
            if not self._final_events and not any(choice.given_reason for choice in response.choices.values()):
                raise unreadable_response(call.pool, "its stream ended before the response was complete")
        else:
            try:
                data = loads_tolerantly(call.body)
            except ValueError as error:
                raise unreadable_response(call.pool, f"it is not JSON: {error}") from None
            response.read(data)
        self._settle()
        end = self._ending() if call.stream else self._whole(data)
        await self._record()
        self._remember(b"" if call.stream else end)
        await writer.finish(end, call.stream)

    def _settle(self) -> None:
        """Account for the usage. What is answered in the background costs what the last poll says."""
        self._call.settle(Usage() if self.record.is_pending else self.record.response.usage)

    async def _record(self, error: BaseException | None = None) -> None:
        """Record the call if it has an attempt, even if this task is cancelled meanwhile."""
        if self.record.caller.attempt is None:
            return
        make = partial(self.record.spans, self._call.attributes(), error)

        async def keep() -> None:
            await self.service.record(await offload(len(self._call.content) // PASSED, make))

        await run_to_completion(keep())

    # -- what the caller gets; a translated call does all this in its own way ----------------------------------------

    def _whole(self, data: Any) -> bytes:
        """The body for the caller."""
        return dumps(data) if self._added.remove_from(data) else self._call.body

    def _shown(self, events: bytes) -> Iterator[bytes]:
        """Read events, and yield what to send of them now. What can be passed on as it is waits to be read with others,
        which costs a fraction. Raises ApiError."""
        waits = self.record.response.id and not (self._final_events or self._added.fields)
        if waits and not _USED.search(events) and not any(mark in events for mark in _END_MARKS):
            self._unread += events
            if len(self._unread) >= _MAX_UNREAD:
                self._read_unread()
            yield events
            return
        self._read_unread()
        passed = list[bytes]()
        for event, data in self._read(events):
            shown = self._added.filter_event(event, data)
            (self._final_events if self._final_events or is_final(event, data) else passed).append(shown)
        yield b"".join(passed)

    def _read(self, events: bytes) -> Sequence[tuple[bytes, Any]]:
        """Read events, and return them with their data; as one where that says the same."""
        merged = self.record.response.merge(events)
        read = [(event, event_data(event)) for event in split_events(events)] if merged is None else [(events, merged)]
        for _, data in read:
            self.record.response.read(data)
        return read

    def _read_unread(self) -> None:
        unread, self._unread = bytes(self._unread), bytearray()
        self._read(unread)

    def _ending(self) -> bytes:
        """The bytes that end the stream."""
        return b"".join(self._final_events) + self._call.trailing_bytes

    def _remember(self, body: bytes) -> None:
        """Remember the answer, once it is recorded. `body`: what is sent of one that is not streamed."""


def is_final(event: bytes, data: Any) -> bool:
    """Whether an event, and its data, end a stream."""
    if data is None:
        return b"[DONE]" in event
    kind = cast("Json", data).get("type") if isinstance(data, dict) else None
    return isinstance(kind, str) and kind in _FINAL_EVENTS


# -- translation -------------------------------------------------------------------------------------------------------

_LOST_FIELDS: Final = (b'"cache_control":', b'"citations":')
"""Fields other dialects cannot express, as JSON keys to search for (string values are escaped, so cannot match)."""
_FAILED_REASONS: Final = {"insufficient_system_resource": 503, "overloaded": 503, "timeout": 504}
"""Finish reasons that finish nothing -> the status of the error that the caller gets; 502 for any other."""


def translate(service: ForwardingService, call: ResolvedCall, resource: str, forced: Json) -> TranslatedCall:
    """The call to a provider of another dialect. `forced`: the sampling parameters of the LLM resource `resource`.
    Raises ApiError 400 for an invalid request, and for what the provider's dialect cannot express."""
    route, caller, raw = call.route, call.caller, call.body
    assert route.servers is not None
    provider = route.servers.provider
    target, dialect = translation_target(call.path, provider), DIALECTS[call.path]
    lookup, sent = ResponseLookup(service.responses, caller.attempt), dumps(raw)
    request = dialect.read(raw, lookup, attachments=True)
    request = replace(request, params=apply_resource_params(request.params, resource, forced))
    given = given_params(raw, request.params, forced)
    body, lost = body_of(target, request, provider, route.send_model, given, lookup.turn)
    service.counters.unknown_fields += len(lost) + sum(mark in sent for mark in _LOST_FIELDS)
    reply = dialect.new_reply(request, route.name, Usage())
    answer = Answer(0, own_stops(target, request.params.stop), dialect.call_prefix, provider.name)
    record = ProviderRecord(
        caller=caller,
        trace_id=call.trace_id,
        path=target,
        route=route,
        data=body,
        extra_attributes={names.REQUEST_MODEL: request.model or route.name, names.RESPONSE_ID: reply.id},
        constraint=request.constraint,
    )
    record.response.choices[0] = answer
    beta = f"{provider.dialect}-beta"  # What the caller enables in this provider's header.
    headers = {beta: call.headers.get(beta, "")}
    return TranslatedCall(service, record, headers, reply, answer)


@dataclass(slots=True)
class TranslatedCall(ForwardedCall):
    """A call whose response is read, and written in the dialect of the caller."""

    reply: ReplyWriter
    answer: Answer

    def _whole(self, data: Any) -> bytes:
        self._check_failed()
        self.answer.take_new(done=True)
        self._finish()
        return self.reply.body([self.answer])

    def _shown(self, events: bytes) -> Iterator[bytes]:
        """The text of one read of the network is one delta for the caller."""
        read = self._read(events)
        yield self._write()
        self._check_failed()
        for event, data in read:
            if data is None and b"data:" in event and b"[DONE]" not in event:
                raise unreadable_response(self._call.pool, "an event of its stream is not JSON")
            if is_final(event, data):
                self._final_events.append(event)

    def _ending(self) -> bytes:
        self._finish()
        return self._write(done=True) + self.reply.end([self.answer])

    def _remember(self, body: bytes) -> None:
        """Store the reply for later requests, and the turn if its provider wants it back."""
        attempt, messages, answer = self.record.caller.attempt, self.reply.request.messages, self.answer
        if attempt is None:
            return
        if any(needs_echo(block) for block in answer.blocks):
            answered = turns_of(messages)[-1]
            self.service.responses.add_turn(attempt, turn_key(answered, answer.message), answer.blocks)
        self.reply.store(self.service.responses, attempt, answer, body)

    def _write(self, done: bool = False) -> bytes:
        """The new events as bytes, after the start of the reply if they are the first."""
        events = [(self.answer, event) for event in self.answer.take_new(done)]
        return self.reply.more([self.answer], events) if events or done else b""

    def _finish(self) -> None:
        """Report the usage. Raises ApiError for an answer that its provider did not finish: the caller may ask
        again."""
        self.reply.usage = self._call.usage or Usage()
        self.answer.num_tokens = self.reply.usage.output_tokens
        if self.answer.is_finished:
            return
        pool, reason = self._call.pool, self.answer.given_reason or "it holds no choice with a finish reason"
        message = f"the provider {pool.provider.name!r} did not finish its answer: {pool.redactor.text(reason)}"
        raise ApiError(_FAILED_REASONS.get(reason.lower(), 502), message, code=UNFINISHED)

    def _check_failed(self) -> None:
        """Raises ApiError if the provider reported an error instead of an answer, or broke the protocol."""
        pool = self._call.pool
        if (error := self.record.response.error) is not None:
            message = pool.redactor.text(f"the provider {pool.provider.name!r} failed: {error}")
            raise ApiError(502, message, code="provider_error", retry=pool.provider.final)
        if problem := self.answer.protocol_error:
            raise unreadable_response(pool, problem)


# -- token count -------------------------------------------------------------------------------------------------------

# Counts the prompt tokens of `/v1/messages/count_tokens` for providers without this endpoint.
#
# Claude Code and others decide by this number when to shorten a conversation, and some do not work without it. Servers
# like vLLM count exactly at `/tokenize`; for others the number is an estimate, which a response header says.

HEADER: Final = b"x-agentlightning-count"
"""Response header: `tokenizer` or `estimate`."""
SKIP_SECONDS: Final = 300.0
"""Seconds until `/tokenize` of a provider that lacks it is tried again."""
TIMEOUT_SECONDS: Final = 5.0
_REQUEST_ERRORS: Final = frozenset({400, 413, 422})
_UNSUPPORTED: Final = frozenset({404, 405, 501})


# -- other paths -------------------------------------------------------------------------------------------------------

MAX_UPLOAD_BYTES: Final = 512 * 1024 * 1024
"""The largest file that OpenAI accepts."""
_MAX_READ_BYTES: Final = 1024 * 1024
"""A longer response is not searched for its usage."""
_OWN_HEADERS: Final = (b"content-type", b"content-disposition", b"x-should-retry")
_DROPPED: Final = frozenset(
    {
        *(b"host", b"content-length", b"content-encoding", b"transfer-encoding", b"connection", b"keep-alive", b"te"),
        *(b"expect", b"upgrade", b"http2-settings", b"accept-encoding"),
        *(b"authorization", b"x-api-key", b"api-key", b"cookie"),
    }
)
"""Headers of the caller's connection, and its credentials."""


def _headers(requested: Headers, configured: Headers) -> Headers:
    """The caller's headers, with the credentials of the provider."""
    passed = [
        (name, value) for name, value in requested if name not in _DROPPED and not name.startswith(b"x-agentlightning-")
    ]
    given = {b"content-type", *(name for name, _ in passed)}
    return [*passed, *(header for header in configured if header[0] not in given)]


def _usage(body: bytes) -> Json:
    response = ChatResponse()
    with suppress(ValueError):
        response.read(loads_tolerantly(body))
    used = response.usage
    return {names.INPUT_TOKENS: used.input_tokens, names.OUTPUT_TOKENS: used.output_tokens} if used else {}


# -- the service -------------------------------------------------------------------------------------------------------

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
    """What later requests may refer to."""
    _skipped_until: dict[str, float] = field(default_factory=dict, init=False)
    """Names of providers without a tokenizer -> when to try it again."""

    async def prepare(self, call: ResolvedCall, size: int) -> ForwardedCall:
        """The call to the provider, of a request of `size` bytes. Raises ApiError if it cannot be made."""
        self.counters.unattributed += call.context is None
        return await offload(size // PASSED, partial(self._prepare, call))

    def count_tokens(self, usage: Usage | None) -> None:
        if usage is not None:
            self.counters.prompt_tokens += usage.input_tokens
            self.counters.response_tokens += usage.output_tokens

    async def request_stored(self, pool: ServerPool, method: str, attempt: AttemptIds, response_id: str) -> bytes:
        """The body of a response that its provider stores; POST cancels. `responses` records the attempt and the
        provider of each while the attempt runs, since the provider's key alone would give access to those of all
        attempts. Raises ApiError and StoreError."""
        path = f"responses/{quote(response_id, safe='')}{'/cancel' if method == 'POST' else ''}"
        seconds = pool.provider.timeout_seconds
        try:
            status, headers, body = await pool.fetch(method, path, timeout_seconds=seconds, affinity="/".join(attempt))
        except TransportError as error:
            raise from_transport(pool, error) from error
        if not 200 <= status < 300:
            raise from_response(pool, status, headers, body)
        if method != "DELETE":
            await self._record_poll(pool, attempt, response_id, body)
        return body

    async def _record_poll(self, pool: ServerPool, attempt: AttemptIds, response_id: str, body: bytes) -> None:
        """Record the end of a response that its provider worked on in the background, once: as a span below that of
        the call, with the answer, its usage and its cost. Raises StoreError."""
        call = self.responses.take_pending(attempt, response_id)
        if call is None:
            return
        ended = ProviderRecord.of_poll(call, pool)
        with suppress(ValueError):
            ended.response.read(loads_tolerantly(body))
        usage, price = ended.response.usage or Usage(), ended.route.price
        dollars = price.dollars(usage) if price else 0.0
        used: Json = {names.INPUT_TOKENS: usage.input_tokens, names.OUTPUT_TOKENS: usage.output_tokens}
        used |= {names.COST: dollars} if price else {}
        with ExitStack() as undo:
            undo.callback(self.responses.note_provider, attempt, response_id, pool.provider.name, call)
            if not ended.response.choices or ended.is_pending:
                return
            await run_to_completion(self.record(ended.spans(used)))
            undo.pop_all()
        pool.dollars += dollars
        pool.budgets.spend(attempt[0], dollars, usage.tokens)
        self.count_tokens(usage)

    async def forward_as_is(self, pool: ServerPool, request: Request, caller: Caller, body: bytes) -> Response:
        """The provider's response to a request, as it arrives, recorded before its last bytes. Raises ApiError."""
        provider, server = pool.provider, pool.choose(caller.affinity)
        path = request.scope["raw_path"].decode("latin-1").partition("/v1/")[2]
        if ".." in unquote(path).split("/"):
            raise ApiError(404, f"/v1/{path} is no path of the provider {provider.name!r}")
        attributes: Json = {
            names.PROVIDER_NAME: provider.name,
            names.HTTP_METHOD: request.method,
            names.URL_PATH: f"/v1/{path}",
        }
        with suppress(ApiError):
            model = read_json(body).get("model") if body.startswith(b"{") else None  # files are large, and no JSON
            attributes |= {names.REQUEST_MODEL: model} if isinstance(model, str) else {}
        record = CallRecord(f"{request.method} /v1/{path}", caller)

        async def keep_span(error: BaseException | None) -> None:
            if caller.attempt is not None:
                await run_to_completion(self.record([record.span(attributes, error and failure_of(error))]))

        target = "?".join(filter(None, (path, request.url.query)))
        try:
            response = await pool.transport.send(
                request.method,
                provider.url(server.url, target),
                _headers(request.headers.raw, server.headers),
                body,
                connect_seconds=provider.connect_seconds,
                timeout_seconds=provider.timeout_seconds,
            )
        except TransportError as error:
            await keep_span(failure := from_transport(pool, error))
            raise failure from error
        status = attributes[names.HTTP_STATUS] = response.status

        async def chunks() -> AsyncGenerator[bytes]:
            start, last, failure = b"", b"", None
            error: BaseException | None = asyncio.CancelledError()
            try:
                async with response:
                    async for chunk in response.chunks():
                        if last:
                            yield last
                        last = pool.redactor.redact_body(chunk)
                        start += last if len(start) < _MAX_READ_BYTES else b""
                error = None
                if status >= 400:
                    error = ApiError(status, pool.redactor.text(start.decode(errors="replace")), code=str(status))
            except TransportError as broken:
                error = failure = from_transport(pool, broken)
            finally:
                attributes.update(_usage(start))
                await keep_span(error)
            yield last
            if failure is not None:
                raise failure  # The caller must not take the response for complete.

        streamed = StreamingResponse(chunks(), status)
        own = [header for header in response.headers if header[0] in _OWN_HEADERS]
        streamed.raw_headers = [*own, *pool.redactor.visible_headers(response.headers)]
        return streamed

    async def count(self, call: ResolvedCall, size: int, writer: ResponseWriter) -> None:
        """Reply with the number of tokens of a prompt of `size` bytes: counted by the provider or its tokenizer, or
        estimated. Costs nothing, and is not recorded."""
        request, route, counted = call.body, call.route, None
        assert route.servers is not None
        if route.servers.provider.serves("messages"):
            body = await offload(size // PASSED, partial(dumps, request | {"model": route.send_model}))
            path, affinity = COUNT_TOKENS_PATH, call.caller.affinity
            upstream = UpstreamCall(route.servers, path, body, affinity=affinity, model=route.send_model)
            try:
                async with upstream:
                    upstream.settle(Usage())
                return await writer.send_json(200, upstream.body)
            except ApiError as api_error:  # It may speak Anthropic's dialect without this endpoint.
                if api_error.status not in _UNSUPPORTED or "model" in api_error.message.lower():
                    raise
        else:
            limited = call._replace(path="messages", body={"max_tokens": 1} | request)
            request = (await offload(size // PASSED, partial(translate, self, limited, "", {}))).record.data
            counted = await self._count_tokens(route.servers, request, size)
        writer.extra_headers = [(HEADER, b"estimate" if counted is None else b"tokenizer")]
        if counted is None:
            counted = await offload(size // PASSED, partial(estimate_prompt_tokens, request))
        await writer.send_json(200, count_reply(counted))

    async def _count_tokens(self, pool: ServerPool, request: Json, size: int) -> int | None:
        """The tokens of a request of about `size` bytes by the provider's tokenizer, which counts those for chat
        completions only; None if it cannot."""
        name, now = pool.provider.name, time.monotonic()
        if "messages" not in request or now < self._skipped_until.get(name, 0.0):
            return None
        body = {key: request[key] for key in ("model", "messages", "tools") if request.get(key)}
        status = 0
        try:
            sent = await offload(size // PASSED, partial(dumps, body))
            status, _, data = await pool.fetch("POST", "/tokenize", sent, timeout_seconds=TIMEOUT_SECONDS)
            count = loads_tolerantly(data)["count"]
            if status == 200 and isinstance(count, int) and count >= 0:
                return count
        except (TransportError, ConfigError, *MALFORMED) as error:
            logger.info("the provider %r does not count tokens: %s", name, error)
        if status not in _REQUEST_ERRORS:
            self._skipped_until[name] = now + SKIP_SECONDS
        return None

    def _prepare(self, call: ResolvedCall) -> ForwardedCall:
        path, headers, caller, _, data, route = call
        assert route.servers is not None
        # A provider that reports tokens may serve a model in training; any other is a third party.
        resource, forced, overridden = self.on_policy.forced_params(call, learns=route.servers.provider.token_ids)
        if overridden:
            data = {name: value for name, value in data.items() if name not in overridden}
        if route.servers.provider.serves(path):
            record = ProviderRecord(
                caller=caller, trace_id=call.trace_id, path=path, route=route, data=data, forced=forced
            )
            forwarded = ForwardedCall(self, record, headers)
        else:
            forwarded = translate(self, call._replace(body=data), resource, forced)
        if overridden:
            forwarded.record.extra_attributes[names.OVERRIDDEN] = overridden
        return forwarded

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
