"""An exchange with a provider as it was said, word for word: kept at once, read into spans when there is time.

Written by `gateway.direct`, which has none; read by the journal, here or in the process of `gateway.scribe`. What a
record says is all that its spans are made of, so that they are the same whoever makes them, and when.
"""

from __future__ import annotations

import logging
from typing import Any, Final, cast

import msgspec
import orjson
from msgspec import Struct

from agentlightning import span as names
from agentlightning.gateway.callers.attribution import Caller
from agentlightning.gateway.dialects.sse import loads
from agentlightning.gateway.forwarding.passthrough import Forward
from agentlightning.gateway.routing import ModelRoute
from agentlightning.gateway.upstream.call import UpstreamCall
from agentlightning.gateway.upstream.provider import ApiPath
from agentlightning.span import Span, new_span_id

logger = logging.getLogger(__name__)


class RawExchange(Struct, frozen=True, array_like=True):
    """One exchange whose answer came in one piece."""

    path: ApiPath
    model: str
    """The served model."""
    sent_model: str
    """What the provider calls it."""
    caller: Caller
    forced: dict[str, Any]
    trace_id: str
    span_id: str
    """Of its first span: a record that is read twice becomes the same spans."""
    started: float
    ended: float
    call: dict[str, Any]
    """`Call.attributes`."""
    request: bytes
    answer: bytes


VERSION: Final = 1
"""Of a record: its first byte. Raised where older readers could not read it, or would read something else."""
_UNVERSIONED: Final = range(0x90, 0xA0)
"""First bytes of records from before there were versions: a MessagePack array. They are read as version 1."""
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(RawExchange)
_ERROR: Final = b'"error"'


def may_defer(answer: bytes) -> bool:
    """Whether an answer can be read later. What a provider says went wrong is read while it is known what must not be
    repeated of it."""
    return _ERROR not in answer


def write(forward: Forward, call: UpstreamCall, request: bytes, ended: float) -> bytes:
    """The record of a call that was passed on as it is."""
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
    """Its spans. Where the words cannot be read after all, one that holds them as they are. Raises ValueError for a
    record of another version."""
    first = record[0] if record else 0
    if first != VERSION and first not in _UNVERSIONED:
        raise ValueError(
            f"an exchange that another version has kept: it is of version {first}, this one reads {VERSION}"
        )
    try:
        said = _decoder.decode(record if first in _UNVERSIONED else memoryview(record)[1:])
    except msgspec.MsgspecError as error:
        raise ValueError(f"an exchange that another version has kept: {error}") from error
    try:
        return _spans(said)
    except Exception:
        logger.exception(
            "an exchange of rollout %s could not be read; its span holds it as it was", said.caller.rollout_id
        )
        return [_unread(said)]


def _spans(said: RawExchange) -> list[Span]:
    route = ModelRoute(said.model, send_model=said.sent_model)
    data = orjson.loads(said.request)
    forward = Forward(said.path, route, said.caller, data, {}, said.trace_id, said.forced, said.started)
    forward.response.read(loads(said.answer))
    return forward.spans(said.call, said.ended, said.span_id)


def _unread(said: RawExchange) -> Span:
    caller = said.caller
    return Span(
        rollout_id=cast("str", caller.rollout_id),
        attempt_id=cast("str", caller.attempt_id),
        name=f"unread {said.model}",
        start_time=said.started,
        end_time=said.ended,
        trace_id=caller.trace_id or said.trace_id,
        span_id=said.span_id,
        parent_id=caller.parent_id,
        status_code="ERROR",
        status_message="the exchange could not be read",
        attributes={
            names.REQUEST_MODEL: said.model,
            names.ERROR_TYPE: "unread",
            names.TOKENS: "none",
            names.INPUT_MESSAGES: said.request.decode(errors="replace"),
            names.OUTPUT_MESSAGES: said.answer.decode(errors="replace"),
        },
    )
