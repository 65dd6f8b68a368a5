"""Serves a call whose provider speaks another dialect: translates the request, and the answer back.

Requests to `/v1/messages` and `/v1/responses` can be translated for servers of chat completions, `/v1/chat/completions`
and `/v1/responses` for Anthropic's, `/v1/chat/completions` and `/v1/messages` for servers of responses only. Text and
reasoning stream as they arrive, each tool call once it is complete. `previous_response_id` works as with our own
engines: the history is stored here and sent whole, including reasoning that a provider wants back. The span shows the
request and the response as the provider saw them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from agentlightning import span as names
from agentlightning.gateway.answer import Answer, Json, needs_echo
from agentlightning.gateway.dialects import DIALECTS
from agentlightning.gateway.dialects.base import ApiPath, ReplyMetadata, ReplyWriter, Request
from agentlightning.gateway.dialects.common import apply_resource_params
from agentlightning.gateway.dialects.content_parts import message_digests, object_of, turn_key
from agentlightning.gateway.dialects.response_store import ResponseStore
from agentlightning.gateway.dialects.responses import ResponsesReplyWriter
from agentlightning.gateway.dialects.sse import event_data
from agentlightning.gateway.errors import ApiError, bad_request
from agentlightning.gateway.forwarding.bodies import (
    Extras,
    TurnLookup,
    UnsupportedContentError,
    Write,
    given_params,
    split_stops,
    turns_of,
)
from agentlightning.gateway.forwarding.call import UNFINISHED, ForwardedCall, ProviderRecord, encode_request, is_final
from agentlightning.gateway.forwarding.messages_body import messages_body, messages_extras
from agentlightning.gateway.forwarding.openai_bodies import chat_body, chat_extras, responses_body, responses_extras
from agentlightning.gateway.record import Counters
from agentlightning.gateway.routing import ResolvedCall
from agentlightning.gateway.upstream.call import UpstreamCall
from agentlightning.gateway.upstream.failures import display_text, unreadable_response
from agentlightning.gateway.upstream.provider import Provider

_TARGETS: Final[Mapping[ApiPath, tuple[Write, Callable[[Request, str], Extras]]]] = {
    "chat/completions": (chat_body, chat_extras),
    "messages": (messages_body, messages_extras),
    "responses": (responses_body, responses_extras),
}
"""What writes the body for each path at a provider, and its other fields."""
_LOST_FIELDS: Final = {name: b'"%b":' % name.encode() for name in ("cache_control", "citations")}
"""Fields other dialects cannot express -> JSON key bytes to search for (string values are escaped, so cannot match)."""
_FAILED_REASONS: Final = {"insufficient_system_resource": 503, "overloaded": 503, "timeout": 504}
"""Finish reasons that finish nothing -> the status of the error that the caller gets; 502 for any other."""
_UNTRANSLATED: Final = frozenset({"completions", "embeddings"})


def translate(
    call: ResolvedCall,
    responses: ResponseStore,
    counters: Counters,
    trace_id: str = "",
    resource: str = "",
    forced: Mapping[str, Any] | None = None,
) -> TranslatedCall:
    """The call to a provider of another dialect. `responses` stores what later requests may refer to; `forced`: the
    sampling parameters of the LLM resource `resource`. Raises ApiError 400 for an invalid request, and for what the
    provider's dialect cannot express."""
    provider, route, caller, raw = call.route.provider, call.route, call.caller, call.body
    assert provider is not None
    target, dialect, lookup = _path_for(call.path, provider), DIALECTS[call.path], responses.lookup(caller.attempt)
    sent = encode_request(raw)
    request = replace(dialect.read(dict(raw), lookup, attachments=True), raw=raw)
    params = apply_resource_params(request.params, resource, forced or {})
    given = given_params(raw, params, forced or {})
    body, lost = body_of(target, request, provider, route.send_model, given, lookup.turn)
    counters.count_unknown(lost + tuple(name for name, mark in _LOST_FIELDS.items() if mark in sent))
    request = replace(request, params=params)
    head = ReplyMetadata(dialect.id_prefix + secrets.token_hex(12), route.name, int(time.time()), 0)
    answer = Answer(0, split_stops(target, params.stop)[1], dialect.call_prefix, provider.name)
    record = ProviderRecord(
        caller=caller,
        trace_id=trace_id,
        path=target,
        route=route,
        data=body,
        extra_attributes={names.REQUEST_MODEL: request.model or route.name, names.RESPONSE_ID: head.id},
        constraint=request.constraint,
    )
    record.response.choices[0] = answer
    beta = f"{provider.dialect}-beta"  # What the caller enables in this provider's header.
    headers = {beta: call.headers.get(beta, "")}
    return TranslatedCall(record, headers, request, head, dialect.reply(request, head), answer, responses)


@dataclass(slots=True)
class TranslatedCall(ForwardedCall):
    """A call whose response is read, and written in the dialect of the caller."""

    request: Request
    """As the caller sent it."""
    head: ReplyMetadata
    reply: ReplyWriter
    answer: Answer
    responses: ResponseStore
    _is_open: bool = field(default=False, init=False)
    """Whether the start of the reply was sent."""

    def _whole(self, call: UpstreamCall, data: Any) -> bytes:
        self._check_failed()
        self.answer.take_new(done=True)
        self._finish(call)
        return self.reply.body([self.answer])

    def _read_events(self, events: list[bytes]) -> bytes:
        return b"".join([self._read_event(event) for event in events])

    def _read_event(self, event: bytes) -> bytes:
        data = event_data(event)
        if data is None and b"data:" in event and b"[DONE]" not in event:
            raise unreadable_response(self._provider, "an event of its stream is not JSON")
        self.record.response.read(data)
        self._check_failed()
        if is_final(event, data):
            self._final_events.append(event)
        return self._write()

    def _ending(self, call: UpstreamCall) -> bytes:
        self._finish(call)
        return self._write(done=True) + self.reply.end([self.answer])

    def _remember(self, body: bytes) -> None:
        """Store the reply for later requests, and the turn if its provider wants it back."""
        attempt, reply, answer = self.record.caller.attempt, self.reply, self.answer
        if attempt is None:
            return
        if any(needs_echo(block) for block in answer.blocks):
            answered = turns_of(self.request.messages)[-1]
            self.responses.add_turn(attempt, turn_key(answered, answer.message), answer.blocks)
        if isinstance(reply, ResponsesReplyWriter):
            reply.store(self.responses, attempt, message_digests(self.request.messages), answer, body)

    def _write(self, done: bool = False) -> bytes:
        """The new events as bytes, after the start of the reply if they are the first. Raises ApiError if the provider
        broke the protocol."""
        events = self.answer.take_new(done)
        if self.answer.protocol_error:
            raise unreadable_response(self._provider, self.answer.protocol_error)
        if not (events or done):
            return b""
        opening = b"" if self._is_open else self.reply.start([self.answer])
        self._is_open = True
        return opening + b"".join([self.reply.event(self.answer, event) for event in events])

    def _finish(self, call: UpstreamCall) -> None:
        """Report the usage. Raises ApiError for an answer that its provider did not finish: the caller may ask
        again."""
        head, details = self.head, self.record.response.details
        head.cached_tokens, head.cache_write_tokens, head.reasoning_tokens = details
        if call.usage is not None:
            head.prompt_tokens, self.answer.num_tokens = call.usage.input_tokens, call.usage.output_tokens
        if self.answer.is_finished:
            return
        reason = display_text(self._provider, self.answer.given_reason or "it holds no choice with a finish reason")
        status = _FAILED_REASONS.get(reason.lower(), 502)
        message = f"the provider {self._provider.name!r} did not finish its answer: {reason}"
        raise ApiError(status, message, code=UNFINISHED)

    def _check_failed(self) -> None:
        """Raises ApiError if the provider reported an error instead of an answer."""
        if (error := self.record.response.error) is not None:
            message = display_text(self._provider, f"the provider {self._provider.name!r} failed: {error}")
            raise ApiError(502, message, code="provider_error", retry=self._provider.final)


def _path_for(path: ApiPath, provider: Provider) -> ApiPath:
    """The path at the provider. Raises ApiError 400 if there is none."""
    for target in _TARGETS:
        if path not in _UNTRANSLATED and provider.serves(target):
            return target
    message = f"the provider {provider.name!r} serves no /v1/{path}, and calls to it cannot be translated"
    raise ApiError(400, message, code="path_not_supported", param="model")


# -- the body ----------------------------------------------------------------------------------------------------------


def body_of(
    path: ApiPath, request: Request, provider: Provider, model: str, params: Json, find_turn: TurnLookup
) -> tuple[Json, tuple[str, ...]]:
    """(body for a path, names of the fields that were dropped). Raises ApiError 400 naming a field that must not be
    dropped."""
    write, write_extras = _TARGETS[path]
    extras, taken = write_extras(request, model)
    try:
        written = write(request, provider, model, params, find_turn)
    except UnsupportedContentError as error:
        raise bad_request("messages" if "messages" in request.raw else "input", str(error)) from None
    body = _merged(written, extras)
    if "max_tokens" not in params:  # Reasoning counts as output: its budget comes on top of our default limit.
        budget = object_of(body, "thinking").get("budget_tokens")
        body |= {"max_tokens": body["max_tokens"] + budget} if type(budget) is int and budget > 0 else {}
    dropped = tuple(name for name in request.ignored_fields if name not in taken)
    return body, dropped + _dropped_inside(path, request)


def _merged(body: Json, extras: Json) -> Json:
    """`body` with `extras`; objects with the same name are merged."""
    for name, value in extras.items():
        known = body.get(name)
        body[name] = {**value, **known} if isinstance(known, dict) else value
    return body


def _dropped_inside(path: str, request: Request) -> tuple[str, ...]:
    """Nested fields that were dropped from fields that were sent."""
    dropped: list[str] = []
    if path != "messages" and "effort" in object_of(request.raw, "output_config"):
        dropped.append("output_config.effort")
    if path != "chat/completions" and any("name" in message for message in request.messages):
        dropped.append("messages.name")
    return tuple(dropped)
