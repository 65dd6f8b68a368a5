"""Serves a call whose provider speaks another dialect: translates the request, and the answer back.

Requests to `/v1/messages` and `/v1/responses` can be translated for servers of chat completions, `/v1/chat/completions`
and `/v1/responses` for Anthropic's, `/v1/chat/completions` and `/v1/messages` for servers of responses only. Text,
reasoning and tool calls stream as they arrive. `previous_response_id` works as with our own engines: the history is
stored here and sent whole, including reasoning that a provider wants back (`signed_reasoning`). The span shows the
request and the response as the provider saw them. `forwarding.passthrough` sends the request and records failures.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from agentlightning import span as names
from agentlightning.gateway.asgi import ResponseWriter
from agentlightning.gateway.callers.attribution import Caller
from agentlightning.gateway.dialects.anthropic.signed_reasoning import needs_echo
from agentlightning.gateway.dialects.base import Dialect, ReplyMetadata, ReplyWriter, Request
from agentlightning.gateway.dialects.message_digest import message_digests, turn_key
from agentlightning.gateway.dialects.openai import responses_events
from agentlightning.gateway.dialects.openai.responses_reply import ResponsesReplyWriter
from agentlightning.gateway.dialects.output import OutputEvent
from agentlightning.gateway.dialects.provider_events import UsageReport
from agentlightning.gateway.dialects.response_store import ResponseStore
from agentlightning.gateway.dialects.sampling import apply_resource_params
from agentlightning.gateway.dialects.sse import event_data, loads
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.forwarding.passthrough import ForwardedCall, RecordSpans, encode_request, run_to_completion
from agentlightning.gateway.metrics import Counters
from agentlightning.gateway.recording.forwarded_span import UNFINISHED
from agentlightning.gateway.recording.provider_response import ProviderAnswer
from agentlightning.gateway.routing import ModelRoute
from agentlightning.gateway.translation.requests import body_of
from agentlightning.gateway.translation.requests.base import given_params, split_stops, turns_of
from agentlightning.gateway.upstream.call import UpstreamCall
from agentlightning.gateway.upstream.failures import display_text, unreadable_response
from agentlightning.gateway.upstream.provider import ApiPath, Provider

_TARGET_PATHS: Final[tuple[ApiPath, ...]] = ("chat/completions", "messages", "responses")
_LAST_EVENTS: Final = ("message_stop", *responses_events.LAST_EVENTS)
"""Types of the events that end a stream."""
_LOST_FIELDS: Final = {name: b'"%b":' % name.encode() for name in ("cache_control", "citations")}
"""Fields other dialects cannot express -> JSON key bytes to search for (string values are escaped, so cannot match)."""
_FAILED_REASONS: Final = {"insufficient_system_resource": 503, "overloaded": 503, "timeout": 504}
"""Finish reasons that finish nothing -> the status of the error that the caller gets; 502 for any other."""
_UNTRANSLATED: Final = frozenset({"completions", "embeddings"})


class Translator:
    """Makes translated calls. `responses` stores what later requests may refer to."""

    def __init__(self, dialects: Mapping[ApiPath, Dialect], responses: ResponseStore, counters: Counters) -> None:
        self._dialects = dialects
        self._responses = responses
        self._counters = counters

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
        """`forced`: the sampling parameters of the LLM resource `resource`. Raises ApiError 400 for an invalid request,
        and for what the provider's dialect cannot express."""
        provider = route.provider
        assert provider is not None
        target = _path_for(path, provider)
        dialect = self._dialects[path]
        lookup = self._responses.lookup(caller.attempt)
        sent = encode_request(body)
        request = replace(dialect.read(dict(body), lookup, attachments=True), raw=body)
        params = apply_resource_params(request.params, resource, forced or {})
        given = given_params(body, params, forced or {})
        target_body, lost = body_of(target, request, provider, route.send_model, given, lookup.turn)
        self._counters.count_unknown(lost + tuple(name for name, mark in _LOST_FIELDS.items() if mark in sent))
        request = replace(request, params=params)
        head = ReplyMetadata(dialect.id_prefix + secrets.token_hex(12), route.name, int(time.time()), 0)
        reply = dialect.reply(request, head)

        def respond(
            forwarded: ForwardedCall, call: UpstreamCall, record: RecordSpans, writer: ResponseWriter
        ) -> Awaitable[None]:
            return Translation(forwarded, request, head, reply, answer, self._responses).respond(call, record, writer)

        forwarded = ForwardedCall(
            target,
            route,
            caller,
            target_body,
            trace_id=trace_id,
            extra_attributes={names.REQUEST_MODEL: request.model or route.name, names.RESPONSE_ID: head.id},
            respond=respond,
        )
        stops = split_stops(target, params.stop)[1]
        answer = forwarded.response.choices[0] = ProviderAnswer(0, stops, dialect.call_prefix, provider.name)
        return forwarded


@dataclass(slots=True)
class Translation:
    """The response to a forwarded call, for a caller of another dialect than its provider's."""

    forwarded: ForwardedCall
    request: Request
    """As the caller sent it."""
    head: ReplyMetadata
    reply: ReplyWriter
    answer: ProviderAnswer
    responses: ResponseStore
    _opened: bool = field(default=False, init=False)

    async def respond(self, call: UpstreamCall, record: RecordSpans, writer: ResponseWriter) -> None:
        """Read the provider's response, record it and send it translated. Raises ApiError if it cannot be read."""
        await (self._send_stream if self.forwarded.stream else self._send_whole)(call, record, writer)

    async def _send_whole(self, call: UpstreamCall, record: RecordSpans, writer: ResponseWriter) -> None:
        self._read_body(call.body)
        self._settle(call)
        self._check_finished()
        body = self.reply.body([self.answer])
        await self._record(call, record)
        self._store(body)
        await writer.send_json(200, body)

    async def _send_stream(self, call: UpstreamCall, record: RecordSpans, writer: ResponseWriter) -> None:
        ended = False
        async for chunks in call.events():
            for chunk in chunks:
                ended |= self._read_chunk(chunk)
            if events := self._take_events():
                await writer.send_events(self._write(events))
        self.forwarded.check_ended(ended)
        self._settle(call)
        self._check_finished()
        ending = self._write(self._take_events(done=True)) + self.reply.end([self.answer])
        await self._record(call, record)
        self._store(None)
        await writer.send_events(ending)
        await writer.close()

    # -- reading ---------------------------------------------------------------------------------------------------

    def _read_body(self, body: bytes) -> None:
        try:
            answer = loads(body)
        except ValueError as error:
            raise unreadable_response(self._provider, f"its answer is not JSON: {error}") from None
        self._read(answer)
        self.answer.take_new(done=True)

    def _read_chunk(self, event: bytes) -> bool:
        """Whether it was the last event. Raises ApiError if the provider reports a failure."""
        data = event_data(event)
        if data is None:
            if b"data:" in event and b"[DONE]" not in event:
                raise unreadable_response(self._provider, "an event of its stream is not JSON")
            return b"[DONE]" in event
        self._read(data)
        return isinstance(data, dict) and data.get("type") in _LAST_EVENTS

    def _read(self, data: Any) -> None:
        events = self.forwarded.response.read(data)
        self._check_failed()
        for event in events:
            if isinstance(event, UsageReport):
                self.head.add_usage(event)

    def _take_events(self, done: bool = False) -> list[OutputEvent]:
        """The new events. Raises ApiError if the provider broke the protocol."""
        events = self.answer.take_new(done)
        if self.answer.protocol_error:
            raise unreadable_response(self._provider, self.answer.protocol_error)
        return events

    def _write(self, events: Sequence[OutputEvent]) -> bytes:
        """Some events as bytes, after the start of the reply if they are the first."""
        opening = b"" if self._opened else self.reply.start([self.answer])
        self._opened = True
        return opening + b"".join([self.reply.event(self.answer, event) for event in events])

    def _check_failed(self) -> None:
        """Raises ApiError if the provider reported an error instead of an answer."""
        if self.forwarded.response.error is not None:
            message = f"the provider {self._provider.name!r} failed: {self.forwarded.response.error}"
            raise ApiError(
                502, display_text(self._provider, message), code="provider_error", retry=self._provider.final
            )

    def _check_finished(self) -> None:
        """Raises ApiError for an answer that its provider did not finish: the caller may ask again."""
        if self.answer.is_finished:
            return
        reason = display_text(self._provider, self.answer.given_reason or "it holds no choice with a finish reason")
        status = _FAILED_REASONS.get(reason.lower(), 502)
        message = f"the provider {self._provider.name!r} did not finish its answer: {reason}"
        raise ApiError(status, message, code=UNFINISHED)

    @property
    def _provider(self) -> Provider:
        assert self.forwarded.route.provider is not None
        return self.forwarded.route.provider

    def _settle(self, call: UpstreamCall) -> None:
        call.settle(self.forwarded.response.usage)
        if call.usage is not None:
            self.head.prompt_tokens = call.usage.input_tokens
            self.answer.num_tokens = call.usage.output_tokens

    # -- recording -----------------------------------------------------------------------------------------------

    async def _record(self, call: UpstreamCall, record: RecordSpans) -> None:
        constraint = self.request.constraint
        if constraint:
            verdict, violations = constraint.evaluate(self.answer)
            found = {names.CONSTRAINT: verdict} | ({names.VIOLATIONS: violations} if violations else {})
            self.answer.extra_attributes = found
        await run_to_completion(self.forwarded.record(record, call))

    def _store(self, body: bytes | None) -> None:
        """Store the reply for later requests, and the turn if its provider wants it back."""
        attempt, reply, answer = self.forwarded.caller.attempt, self.reply, self.answer
        if attempt is None:
            return
        if any(needs_echo(block) for block in answer.blocks):
            answered = turns_of(self.request.messages)[-1]
            self.responses.add_turn(attempt, turn_key(answered, answer.message), answer.blocks)
        if not isinstance(reply, ResponsesReplyWriter):
            return
        stored = self.request.raw.get("store") is not False
        body = reply.body([answer]) if body is None else body
        self.responses.add(
            attempt,
            self.head.id,
            message_digests(self.request.messages),
            self.request.messages,
            answer.message,
            body if stored else None,
            reply.items if stored else (),
            self.request.num_instructions,
        )


def _path_for(path: ApiPath, provider: Provider) -> ApiPath:
    """The path at the provider. Raises ApiError 400 if there is none."""
    for target in _TARGET_PATHS:
        if path not in _UNTRANSLATED and provider.serves(target):
            return target
    message = f"the provider {provider.name!r} serves no /v1/{path}, and calls to it cannot be translated"
    raise ApiError(400, message, code="path_not_supported", param="model")
