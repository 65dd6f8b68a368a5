"""The journal record of an exchange with a provider: request and answer unparsed, to be turned into spans later.

`forwarding.fast_path` writes records; the journal reads them, in this process or in the packer process. Spans are made
from the record alone, so that they are the same wherever and whenever they are made.
"""

from __future__ import annotations

import logging
from typing import Any, Final, cast

import msgspec
from msgspec import Struct

from agentlightning import span as names
from agentlightning.gateway.callers.attribution import Caller
from agentlightning.gateway.dialects.sse import loads
from agentlightning.gateway.recording.forwarded_span import ForwardedExchange
from agentlightning.gateway.routing import ModelRoute
from agentlightning.gateway.upstream.call import UpstreamCall
from agentlightning.gateway.upstream.provider import ApiPath
from agentlightning.span import Span, new_span_id

logger = logging.getLogger(__name__)


class RawExchange(Struct, frozen=True, array_like=True):
    """One exchange whose answer was not streamed."""

    path: ApiPath
    model: str
    """The served model."""
    sent_model: str
    """Its name at the provider."""
    caller: Caller
    forced: dict[str, Any]
    trace_id: str
    span_id: str
    """The id of its first span: a record that is read twice makes the same spans."""
    started: float
    ended: float
    call: dict[str, Any]
    """`UpstreamCall.attributes`."""
    request: bytes
    answer: bytes


VERSION: Final = 1
"""The first byte of a record. To be raised when older readers could not read new records, or would misread them."""
_UNVERSIONED: Final = range(0x90, 0xA0)
"""First bytes of records without a version, which are MessagePack arrays. They are read as version 1."""
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(RawExchange)
_ERROR: Final = b'"error"'


def may_defer(answer: bytes) -> bool:
    """Whether an answer can be read later. Errors are read at once, while the secrets to redact from them are known."""
    return _ERROR not in answer


def write(forward: ForwardedExchange, call: UpstreamCall, request: bytes, ended: float) -> bytes:
    """The record of a forwarded call."""
    route = forward.route
    record = bytearray((VERSION,))
    _encoder.encode_into(
        RawExchange(
            forward.path,
            route.name,
            route.send_model,
            forward.caller,
            dict(forward.forced),
            forward.trace_id,
            new_span_id(),
            forward.started,
            ended,
            call.attributes(),
            request,
            call.body,
        ),
        record,
        1,
    )
    return bytes(record)


def read(record: bytes) -> list[Span]:
    """The spans of a record; if it cannot be parsed, one span with request and answer as they are. Raises ValueError
    for a record of another version."""
    first = record[0] if record else 0
    if first != VERSION and first not in _UNVERSIONED:
        raise ValueError(f"an exchange recorded by another version: it has version {first}, this one reads {VERSION}")
    try:
        exchange = _decoder.decode(record if first in _UNVERSIONED else memoryview(record)[1:])
    except msgspec.MsgspecError as error:
        raise ValueError(f"an exchange recorded by another version: {error}") from error
    try:
        return _spans(exchange)
    except Exception:
        logger.exception(
            "an exchange of rollout %s could not be read; its span has it unparsed", exchange.caller.rollout_id
        )
        return [_unparsed_span(exchange)]


def _spans(exchange: RawExchange) -> list[Span]:
    route = ModelRoute(exchange.model, send_model=exchange.sent_model)
    data = loads(exchange.request)
    forward = ForwardedExchange(
        exchange.path, route, exchange.caller, data, {}, exchange.trace_id, exchange.forced, exchange.started
    )
    forward.response.read(loads(exchange.answer))
    return forward.spans(exchange.call, exchange.ended, exchange.span_id)


def _unparsed_span(exchange: RawExchange) -> Span:
    caller = exchange.caller
    return Span(
        rollout_id=cast("str", caller.rollout_id),
        attempt_id=cast("str", caller.attempt_id),
        name=f"unread {exchange.model}",
        start_time=exchange.started,
        end_time=exchange.ended,
        trace_id=caller.trace_id or exchange.trace_id,
        span_id=exchange.span_id,
        parent_id=caller.parent_id,
        status_code="ERROR",
        status_message="the exchange could not be read",
        attributes={
            names.REQUEST_MODEL: exchange.model,
            names.ERROR_TYPE: "unread",
            names.TOKENS: "none",
            names.INPUT_MESSAGES: exchange.request.decode(errors="replace"),
            names.OUTPUT_MESSAGES: exchange.answer.decode(errors="replace"),
        },
    )
