"""OTLP trace requests: decoded, in protobuf and in JSON, and encoded. Pure.

Fields that a `Span` lacks become attributes (`conventions.add_extra_fields`), and fields again where a span is encoded.
Numbers that JSON cannot represent become text, as in OTLP's JSON: "NaN", "Infinity", "-Infinity".

Spans are encoded in groups by attempt: the resource names the rollout, the attempt and a service. Attributes without
an OpenTelemetry type (objects, mixed lists) become JSON text. Token ids and log-probabilities are omitted: they are
most of a span's size and of no use in a trace viewer.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, cast

import orjson
from google.protobuf import json_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2

from agentlightning.attempt_address import trace_id_of
from agentlightning.errors import ConfigError
from agentlightning.span import KEPT_SETS, TOKEN_ATTRIBUTES, TOP_LOGPROBS, Span, SpanEvent
from agentlightning.tracing import conventions
from agentlightning.tracing.agent_spans import number
from agentlightning.util.json_values import Json, dumps, loads

SEQUENCE_ID: Final = "agentlightning.span_sequence_id"
"""Attribute with the sequence number of a span that its writer got from the store (as 0.x clients do)."""

EXPORTER_HEADER: Final = "agentlightning-exporter"
"""Request header with the id of the exporting process."""
PROCESS_ID: Final = secrets.token_hex(8)
KINDS: Final = ("unspecified", "internal", "server", "client", "producer", "consumer")
STATUS: Final = ("UNSET", "OK", "ERROR")
MAX_DEPTH: Final = 64
"""Maximum nesting of attributes; spans with deeper ones are rejected."""
MAX_MESSAGES: Final = 3 * MAX_DEPTH
"""Maximum nesting of the messages that hold them, in JSON."""
_SEQUENCE: Final = re.compile("[0-9]{1,9}")
"""Longer sequence numbers are taken for none."""
NANOSECONDS: Final = 1e9


class OtlpError(ConfigError):
    """The body is not a valid OTLP trace request."""


@dataclass(slots=True)
class Request:
    """The spans of one request, in order, each without the ids of its rollout and attempt."""

    spans: list[Span] = field(default_factory=list[Span])
    refused: Counter[str] = field(default_factory=Counter[str])
    """Reason -> number of spans rejected for it."""
    repaired: int = 0
    """Characters that were replaced, as they were not Unicode."""


class _SpanRejected(Exception):
    """One span is rejected; the others of the request are not."""


# -- protobuf --------------------------------------------------------------------------------------------------------


def decode_protobuf(body: bytes, now: float) -> Request:
    """Decode a request; `now` (seconds since the epoch) is the start of spans without one. Raises OtlpError."""
    repaired = body
    try:
        try:
            message = ExportTraceServiceRequest.FromString(body)
        except DecodeError:  # of a text that is not UTF-8, perhaps
            lenient = _lenient_type().FromString(body)
            _repair(lenient)
            repaired = lenient.SerializeToString()
            message = ExportTraceServiceRequest.FromString(repaired)
    except (DecodeError, RecursionError) as error:
        raise OtlpError(f"the body is not an OTLP trace request in protobuf: {error}") from None
    return _read_request(message, _replaced(body, repaired), now)


def _read_request(message: ExportTraceServiceRequest, repaired: int, now: float) -> Request:
    request = Request(repaired=repaired)
    for group in message.resource_spans:
        resource = _read_attributes(group.resource.attributes)
        for scope_spans in group.scope_spans:
            scope = (scope_spans.scope.name, scope_spans.scope.version)
            for span in scope_spans.spans:
                try:
                    request.spans.append(_read_span(span, scope, resource, now))
                except _SpanRejected as error:
                    request.refused[str(error)] += 1
    return request


def _read_span(span: trace_pb2.Span, scope: tuple[str, str], resource: Json, now: float) -> Span:
    trace_id, span_id, parent = span.trace_id, span.span_id, span.parent_span_id
    if len(trace_id) != 16 or len(span_id) != 8 or not any(trace_id) or not any(span_id):
        raise _SpanRejected("a trace id needs 16 bytes and a span id 8, not all zero")
    attributes = _read_attributes(span.attributes)
    events = tuple(
        [
            SpanEvent(each.name, each.time_unix_nano / NANOSECONDS, _read_attributes(each.attributes))
            for each in span.events
        ]
    )
    kind = KINDS[span.kind] if 2 <= span.kind < len(KINDS) else ""
    conventions.add_extra_fields(attributes, scope, kind, span.trace_state, list(map(_read_link, span.links)))
    code, message = "UNSET", None
    if 0 < span.status.code < len(STATUS):
        code, message = STATUS[span.status.code], span.status.message or None
    start, end = span.start_time_unix_nano, span.end_time_unix_nano
    return Span(
        "",
        "",
        conventions.complete(span.name, attributes, events),
        (start or end) / NANOSECONDS or now,
        end / NANOSECONDS if end else None,
        _requested_sequence_id(attributes, resource),
        trace_id.hex(),
        span_id.hex(),
        parent.hex() if any(parent) else None,
        code,
        message,
        attributes,
        events,
        resource,
    )


def _read_attributes(pairs: Iterable[KeyValue]) -> Json:
    attributes: Json = {}
    for pair in pairs:
        value = pair.value
        # Reading a field costs less than asking which field is set.
        attributes[pair.key] = value.string_value or value.int_value or _read_value(value, 0)
    return attributes


def _read_value(value: AnyValue, depth: int) -> Any:
    which = value.WhichOneof("value")
    if which == "double_value":
        return number(value.double_value)
    if which == "bytes_value":
        return base64.b64encode(value.bytes_value).decode()
    if which not in ("array_value", "kvlist_value"):
        return which and getattr(value, which)
    if depth > MAX_DEPTH:
        raise _SpanRejected(f"an attribute is nested more than {MAX_DEPTH} deep")
    if which == "array_value":
        return [_read_value(item, depth + 1) for item in value.array_value.values]
    return {pair.key: _read_value(pair.value, depth + 1) for pair in value.kvlist_value.values}


def _read_link(link: trace_pb2.Span.Link) -> Json:
    attributes = _read_attributes(link.attributes)
    return conventions.link(link.trace_id.hex(), link.span_id.hex(), attributes, link.trace_state)


# -- text that is not Unicode: an emoji that was cut in half, say. It is replaced, and nothing else is lost ------------


_ESCAPE: Final = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
"""An escape in a JSON text; half a surrogate pair is group 1."""


def _replaced(body: bytes, repaired: bytes) -> int:
    return sum(repaired.count(mark) - body.count(mark) for mark in ("\ufffd".encode(), rb"\ufffd"))


@cache
def _lenient_type() -> type[Message]:
    """The type of requests as proto2 reads them: a text that is not UTF-8 stays as bytes."""
    pool, modules = DescriptorPool(), (common_pb2, resource_pb2, trace_pb2, trace_service_pb2)
    for file in [FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb) for module in modules]:
        file.ClearField("syntax")
        pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName(ExportTraceServiceRequest.DESCRIPTOR.full_name))


def _repair(message: Message) -> None:
    """Replace what is not Unicode in a lenient message."""
    for kind, value in message.ListFields():
        if kind.message_type is not None:
            for each in [value] if isinstance(value, Message) else value:
                _repair(each)
        elif kind.type == kind.TYPE_STRING and isinstance(value, str | bytes):
            setattr(message, kind.name, _text(value))
        elif kind.type == kind.TYPE_STRING:
            value[:] = list(map(_text, value))


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")


# -- sequence numbers --------------------------------------------------------------------------------------------------


def _requested_sequence_id(attributes: Json, resource: Json) -> int:
    """The requested sequence number; 0 (assigned by the store) if there is no valid one."""
    found = _SEQUENCE.fullmatch(str(attributes.get(SEQUENCE_ID) or resource.get(SEQUENCE_ID)))
    return int(found[0]) if found else 0


# -- JSON ------------------------------------------------------------------------------------------------------------


def decode_json(body: bytes, now: float) -> Request:
    """`decode_protobuf` for OTLP's JSON: hexadecimal ids, names in lowerCamelCase (snake_case is accepted too). Unknown
    fields are ignored. Raises OtlpError that names the invalid field."""
    repaired = body
    try:
        try:
            given = loads(body)
        except orjson.JSONDecodeError:  # of half an emoji, perhaps
            valid = body.decode(errors="replace").encode()
            repaired = _ESCAPE.sub(lambda found: rb"\ufffd" if found[1] else found[0], valid)
            given = loads(repaired)
    except orjson.JSONDecodeError as error:
        raise OtlpError(f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise OtlpError("the body is not an OTLP trace request in JSON: it is no object")
    try:
        _encode_ids(given)
        options: Json = {"ignore_unknown_fields": True, "max_recursion_depth": MAX_MESSAGES}
        message = json_format.ParseDict(given, ExportTraceServiceRequest(), **options)
    except (json_format.ParseError, RecursionError, TypeError, ValueError) as error:
        problem = "".join(str(error).rpartition("Failed to parse ")[1:]).rstrip(".")  # without the fields around it
        raise OtlpError(f"the body is not an OTLP trace request in JSON: {problem}") from None
    return _read_request(message, _replaced(body, repaired), now)


_IDS: Final = frozenset({"traceId", "trace_id", "spanId", "span_id", "parentSpanId", "parent_span_id"})
_ABOVE_IDS: Final = frozenset({"resourceSpans", "resource_spans", "scopeSpans", "scope_spans", "spans", "links"})


def _encode_ids(value: Any) -> None:
    """Make the hexadecimal ids base64, as protobuf's own JSON has bytes; what is not hexadecimal is no id."""
    for item in value if isinstance(value, list) else [value]:
        for name, found in item.items() if isinstance(item, dict) else ():
            if name in _ABOVE_IDS:
                _encode_ids(found)
            elif name in _IDS and isinstance(found, str):
                is_hex = len(found) % 2 == 0 and not found.lower().strip("0123456789abcdef")
                item[name] = base64.b64encode(bytes.fromhex(found) if is_hex else b"").decode()


def rejected_spans(answer: bytes) -> tuple[int, str] | None:
    """Number of spans that a server did not take of a request, by its answer in protobuf, and the reason; None for
    what is no such answer."""
    try:
        partial = ExportTraceServiceResponse.FromString(answer).partial_success
    except DecodeError:
        return None
    return partial.rejected_spans, partial.error_message


# -- encoding ----------------------------------------------------------------------------------------------------------

SERVICE: Final = "agentlightning"
_OWN_FIELDS: Final = (
    conventions.SPAN_KIND,
    conventions.LINKS,
    conventions.SCOPE_NAME,
    conventions.SCOPE_VERSION,
    conventions.TRACE_STATE,
    SEQUENCE_ID,
)
"""Attributes that OTLP has fields for, or that are written separately."""
_OMITTED: Final = frozenset((*_OWN_FIELDS, *TOKEN_ATTRIBUTES, KEPT_SETS, TOP_LOGPROBS))
_INT64: Final = 2**63
_MAX_SECONDS: Final = 2.0**64 / 1e9

Scope = tuple[str, str]


def encode(spans: Iterable[Span]) -> ExportTraceServiceRequest:
    """A request with the spans."""
    request = ExportTraceServiceRequest()
    groups: dict[tuple[str, int], tuple[trace_pb2.ResourceSpans, dict[Scope, trace_pb2.ScopeSpans]]] = {}
    for span in spans:
        key = (span.attempt_id, id(span.resource))
        if key not in groups:
            resource = {
                "service.name": SERVICE,
                **span.resource,
                "agentlightning.rollout_id": span.rollout_id,
                "agentlightning.attempt_id": span.attempt_id,
            }
            groups[key] = request.resource_spans.add(resource=Resource(attributes=_pairs(resource))), {}
        group, scopes = groups[key]
        scope = (
            str(span.attributes.get(conventions.SCOPE_NAME, SERVICE)),
            str(span.attributes.get(conventions.SCOPE_VERSION, "")),
        )
        if scope not in scopes:
            name, version = scope
            scopes[scope] = group.scope_spans.add(scope=InstrumentationScope(name=name, version=version))
        _add_span(scopes[scope], span)
    return request


def _add_span(target: trace_pb2.ScopeSpans, span: Span) -> None:
    attributes, kind = span.attributes, span.attributes.get(conventions.SPAN_KIND)
    own = {key: value for key, value in attributes.items() if key not in _OMITTED}
    if span.sequence_id:
        own[SEQUENCE_ID] = span.sequence_id
    put = target.spans.add(
        name=span.name,
        trace_id=_bytes(span.trace_id or trace_id_of(span.attempt_id) or span.attempt_id, 16),
        span_id=_bytes(span.span_id, 8),
        parent_span_id=_bytes(span.parent_id, 8) if span.parent_id else b"",
        start_time_unix_nano=_nanoseconds(span.start_time),
        end_time_unix_nano=_nanoseconds(span.start_time if span.end_time is None else span.end_time),
        kind=cast("trace_pb2.Span.SpanKind.ValueType", KINDS.index(kind) if kind in KINDS else 1),
        trace_state=str(attributes.get(conventions.TRACE_STATE, "")),
        attributes=_pairs(own),
    )
    if span.status_code != "UNSET" and span.status_code in STATUS:
        put.status.code = cast("trace_pb2.Status.StatusCode.ValueType", STATUS.index(span.status_code))
        put.status.message = span.status_message or ""
    for event in span.events:
        time = _nanoseconds(event.timestamp)
        put.events.add(name=event.name, time_unix_nano=time, attributes=_pairs(event.attributes))
    for link in conventions.links_of(attributes):
        put.links.add(
            trace_id=_bytes(link["trace_id"], 16),
            span_id=_bytes(link["span_id"], 8),
            trace_state=link["trace_state"],
            attributes=_pairs(link["attributes"]),
        )


def _pairs(attributes: Mapping[str, Any]) -> list[KeyValue]:
    return [KeyValue(key=key, value=_value(value)) for key, value in attributes.items() if value is not None]


def _value(value: Any) -> AnyValue:
    kind = type(value)
    if kind is str:
        return AnyValue(string_value=value)
    if kind is bool:
        return AnyValue(bool_value=value)
    if kind is int and -_INT64 <= value < _INT64:
        return AnyValue(int_value=value)
    if kind is float:
        return AnyValue(double_value=value)
    if kind is list and _is_plain(value):
        found = AnyValue()
        found.array_value.values.extend(map(_value, value))
        return found
    return AnyValue(string_value=dumps(value, default=str).decode())


def _is_plain(items: Sequence[Any]) -> bool:
    """Whether OpenTelemetry has an array type for the items: all strings, booleans, integers or floats."""
    kinds = set(map(type, items))
    if kinds == {int}:
        return all(-_INT64 <= item < _INT64 for item in items)
    return len(kinds) <= 1 and kinds <= {str, bool, float}


def _bytes(text: str, size: int) -> bytes:
    """An id in bytes: decoded if it is hexadecimal and of the right size, else its digest."""
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    return found if len(found) == size and any(found) else hashlib.blake2b(text.encode(), digest_size=size).digest()


def _nanoseconds(seconds: float) -> int:
    """Nanoseconds since the epoch, clamped to 64 bits."""
    return min(round(min(max(0.0, seconds), _MAX_SECONDS) * 1e9), 2**64 - 1)
