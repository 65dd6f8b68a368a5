"""Decodes OTLP trace requests, in protobuf and in JSON. Pure.

Fields that a `Span` lacks become the attributes named in `otel_span.py`. Numbers that JSON cannot represent become
text, as in OTLP's JSON: "NaN", "Infinity", "-Infinity".
"""

from __future__ import annotations

import base64
import binascii
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, cast

import orjson
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from agentlightning.errors import ConfigError
from agentlightning.span import SpanEvent
from agentlightning.tracing import conventions
from agentlightning.tracing.otlp.otel_span import KIND, LINKS, SCOPE_NAME, SCOPE_VERSION, TRACE_STATE
from agentlightning.tracing.sanitize import number
from agentlightning.util.json_values import dumps, loads

SEQUENCE_ID: Final = "agentlightning.span_sequence_id"
"""Attribute with the sequence number of a span that its writer got from the store (as 0.x clients do)."""

KINDS: Final = ("unspecified", "internal", "server", "client", "producer", "consumer")
STATUS: Final = ("UNSET", "OK", "ERROR")
MAX_DEPTH: Final = 64
"""Maximum nesting of attributes; spans with deeper ones are rejected."""
MAX_SEQUENCE_ID: Final = 2**31 - 1
NANOSECONDS: Final = 1e9


class OtlpError(ConfigError):
    """The body is not a valid OTLP trace request."""


class Decoded(NamedTuple):
    """A span without its rollout and attempt: the fields of `Span` from `name` on, in order."""

    name: str
    start_time: float
    end_time: float | None
    sequence_id: int
    trace_id: str
    span_id: str
    parent_id: str | None
    status_code: str
    status_message: str | None
    attributes: dict[str, Any]
    events: tuple[SpanEvent, ...]
    resource: dict[str, Any]


@dataclass(slots=True)
class Request:
    """The spans of one request, in order."""

    spans: list[Decoded] = field(default_factory=list[Decoded])
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
            repaired = _repair_protobuf(body, ExportTraceServiceRequest.DESCRIPTOR)
            message = ExportTraceServiceRequest.FromString(repaired)
    except (DecodeError, RecursionError) as error:
        raise OtlpError(f"the body is not an OTLP trace request in protobuf: {error}") from None
    request = Request(repaired=_replaced(body, repaired))
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


def _read_span(span: trace_pb2.Span, scope: tuple[str, str], resource: dict[str, Any], now: float) -> Decoded:
    trace_id, span_id, parent = span.trace_id, span.span_id, span.parent_span_id
    if len(trace_id) != 16 or len(span_id) != 8 or not any(trace_id) or not any(span_id):
        raise _SpanRejected("a trace id needs 16 bytes and a span id 8, not all zero")
    attributes = _read_attributes(span.attributes)
    events = tuple(map(_read_event, span.events)) if span.events else ()
    links = [_read_link(link) for link in span.links] if span.links else None
    _add_extra_fields(attributes, scope, span.kind, span.trace_state, links)
    code, message = "UNSET", None
    if span.HasField("status") and 0 < span.status.code < len(STATUS):
        code, message = STATUS[span.status.code], span.status.message or None
    start, end = span.start_time_unix_nano, span.end_time_unix_nano
    return Decoded(
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


def _read_attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for pair in pairs:
        value = pair.value
        # Reading a field costs less than asking which field is set.
        attributes[pair.key] = value.string_value or value.int_value or _read_value(value, 0)
    return attributes


def _read_value(value: AnyValue, depth: int) -> Any:
    which = value.WhichOneof("value")
    if which == "string_value":
        return value.string_value
    if which == "int_value":
        return value.int_value
    if which == "bool_value":
        return value.bool_value
    if which == "double_value":
        return number(value.double_value)
    if which == "bytes_value":
        return base64.b64encode(value.bytes_value).decode()
    if depth > MAX_DEPTH:
        raise _SpanRejected(f"an attribute is nested more than {MAX_DEPTH} deep")
    if which == "array_value":
        return [_read_value(item, depth + 1) for item in value.array_value.values]
    if which == "kvlist_value":
        return {pair.key: _read_value(pair.value, depth + 1) for pair in value.kvlist_value.values}
    return None


def _read_event(event: trace_pb2.Span.Event) -> SpanEvent:
    return SpanEvent(event.name, event.time_unix_nano / NANOSECONDS, _read_attributes(event.attributes))


def _read_link(link: trace_pb2.Span.Link) -> dict[str, Any]:
    return _link(link.trace_id.hex(), link.span_id.hex(), link.trace_state, _read_attributes(link.attributes))


# -- text that is not Unicode: an emoji that was cut in half, say. It is replaced, and nothing else is lost ------------


_REPLACEMENT: Final = "\ufffd".encode()
_ESCAPE: Final = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
"""An escape in a JSON text; half a surrogate pair is group 1."""


def _utf8(text: bytes) -> bytes:
    return text.decode(errors="replace").encode()


def _replaced(body: bytes, repaired: bytes) -> int:
    return sum(repaired.count(mark) - body.count(mark) for mark in (_REPLACEMENT, rb"\ufffd"))


def _repair_protobuf(data: bytes, kind: Descriptor) -> bytes:
    """An encoded message of this kind, with its texts in UTF-8. Raises DecodeError if it is malformed."""
    parts: list[bytes] = []
    at = 0
    while at < len(data):
        start = at
        tag, at = _varint(data, at)
        if tag & 7 != 2:  # a number: a varint, or of 8 or 4 bytes
            at = _varint(data, at)[1] if tag & 7 == 0 else at + (8 if tag & 7 == 1 else 4)
            parts.append(data[start:at])
            continue
        field, head = kind.fields_by_number.get(tag >> 3), data[start:at]
        size, at = _varint(data, at)
        value, at = data[at : at + size], at + size
        if at > len(data):
            raise DecodeError("it is truncated")
        if field is not None and field.message_type is not None:
            value = _repair_protobuf(value, field.message_type)
        elif field is not None and field.type == field.TYPE_STRING:
            value = _utf8(value)
        size, length = len(value), bytearray()
        while size > 0x7F:
            length.append(size & 0x7F | 0x80)
            size >>= 7
        parts += [head, bytes([*length, size]), value]
    return b"".join(parts)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(number, position after it)."""
    number = 0
    for shift, byte in enumerate(data[at : at + 10]):
        number |= (byte & 0x7F) << 7 * shift
        if byte <= 0x7F:
            return number, at + shift + 1
    raise DecodeError("it is truncated")


# -- common to both encodings ----------------------------------------------------------------------------------------


def _add_extra_fields(
    attributes: dict[str, Any], scope: tuple[str, str], kind: int, state: str, links: list[dict[str, Any]] | None
) -> None:
    """Add the fields that a `Span` lacks as attributes."""
    name, version = scope
    if name:
        attributes[SCOPE_NAME] = name
    if version:
        attributes[SCOPE_VERSION] = version
    if 2 <= kind < len(KINDS):
        attributes[KIND] = KINDS[kind]
    if state:
        attributes[TRACE_STATE] = state
    if links:
        attributes[LINKS] = links


def _requested_sequence_id(attributes: dict[str, Any], resource: dict[str, Any]) -> int:
    """The requested sequence number, or 0."""
    given = attributes.get(SEQUENCE_ID) or resource.get(SEQUENCE_ID)
    return 0 if given is None else _sequence_id(given)


def _sequence_id(value: Any) -> int:
    """The value as a sequence number; 0 (assigned by the store) if it is not a valid one."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return 0
    text = str(value)
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= 10 else 0
    return number if number <= MAX_SEQUENCE_ID else 0


def _link(trace_id: str, span_id: str, state: str, attributes: dict[str, Any]) -> dict[str, Any]:
    link = {"trace_id": trace_id, "span_id": span_id, "attributes": attributes}
    return link | {"trace_state": state} if state else link


# -- JSON ------------------------------------------------------------------------------------------------------------


def decode_json(body: bytes, now: float) -> Request:
    """`decode_protobuf` for OTLP's JSON: hexadecimal ids, names in lowerCamelCase (snake_case is accepted too). Unknown
    fields are ignored. Raises OtlpError that names the invalid field."""
    repaired = body
    try:
        try:
            message = loads(body)
        except orjson.JSONDecodeError:  # of half an emoji, perhaps
            repaired = _ESCAPE.sub(lambda found: rb"\ufffd" if found[1] else found[0], _utf8(body))
            message = loads(repaired)
    except orjson.JSONDecodeError as error:
        raise OtlpError(f"the body is not JSON: {error}") from None
    request = Request(repaired=_replaced(body, repaired))
    for group in _objects(message, "the body", "resourceSpans", "resource_spans"):
        resource = _json_attributes(_object(group, "a resourceSpans", "resource"))
        for scope_spans in _objects(group, "a resourceSpans", "scopeSpans", "scope_spans"):
            found = _object(scope_spans, "a scopeSpans", "scope")
            scope = (_text(found, "name"), _text(found, "version"))
            for span in _objects(scope_spans, "a scopeSpans", "spans"):
                try:
                    request.spans.append(_json_span(span, scope, resource, now))
                except _SpanRejected as error:
                    request.refused[str(error)] += 1
    return request


def _json_span(span: dict[str, Any], scope: tuple[str, str], resource: dict[str, Any], now: float) -> Decoded:
    trace_id, span_id = _hex(span, 32, "traceId", "trace_id"), _hex(span, 16, "spanId", "span_id")
    if not trace_id or not span_id:
        raise _SpanRejected("a traceId needs 32 hexadecimal digits and a spanId 16, not all zero")
    status = _object(span, "a span", "status")
    code = _enumerated(status, STATUS, "STATUS_CODE_", "code")
    attributes = _json_attributes(span)
    events = tuple(_json_event(event) for event in _objects(span, "a span", "events"))
    links = [_json_link(link) for link in _objects(span, "a span", "links")]
    kind, state = _enumerated(span, KINDS, "SPAN_KIND_", "kind"), _text(span, "traceState", "trace_state")
    _add_extra_fields(attributes, scope, kind, state, links)
    start = _integer(span, "startTimeUnixNano", "start_time_unix_nano")
    end = _integer(span, "endTimeUnixNano", "end_time_unix_nano")
    return Decoded(
        conventions.complete(_text(span, "name"), attributes, events),
        (start or end) / NANOSECONDS or now,
        end / NANOSECONDS if end else None,
        _requested_sequence_id(attributes, resource),
        trace_id,
        span_id,
        _hex(span, 16, "parentSpanId", "parent_span_id") or None,
        STATUS[code],
        _text(status, "message") or None if code else None,
        attributes,
        events,
        resource,
    )


def _json_event(event: dict[str, Any]) -> SpanEvent:
    time = _integer(event, "timeUnixNano", "time_unix_nano") / NANOSECONDS
    return SpanEvent(_text(event, "name"), time, _json_attributes(event))


def _json_link(link: dict[str, Any]) -> dict[str, Any]:
    trace_id, span_id = _hex(link, 32, "traceId", "trace_id"), _hex(link, 16, "spanId", "span_id")
    return _link(trace_id, span_id, _text(link, "traceState", "trace_state"), _json_attributes(link))


def _json_attributes(owner: dict[str, Any]) -> dict[str, Any]:
    pairs = _objects(owner, "its owner", "attributes")
    return {_text(pair, "key"): _json_value(pair.get("value"), 0) for pair in pairs}


def _json_value(value: Any, depth: int) -> Any:
    if value is None or value == {}:
        return None
    if not isinstance(value, dict):
        raise OtlpError(f'{_shorten(value)} is not an attribute value; send one such as {{"stringValue": "text"}}')
    if depth > MAX_DEPTH:
        raise _SpanRejected(f"an attribute is nested more than {MAX_DEPTH} deep")
    for name, item in cast("dict[str, Any]", value).items():
        read = _VALUES.get(name)
        if read is not None:
            return read(item, name, depth)
    raise OtlpError(f"{_shorten(value)} is not an attribute value; it has none of: {', '.join(_VALUES)}")


def _json_string(item: Any, name: str, depth: int) -> str:
    return _checked(item, str, name)


def _json_bool(item: Any, name: str, depth: int) -> bool:
    return _checked(item, bool, name)


def _json_int(item: Any, name: str, depth: int) -> int:
    return _as_integer(item, name)


def _json_double(item: Any, name: str, depth: int) -> float | str:
    if item in ("NaN", "Infinity", "-Infinity"):
        return item
    try:
        return number(float(item))
    except (TypeError, ValueError):
        raise OtlpError(f"{name} is {_shorten(item)}; send a number") from None


def _json_bytes(item: Any, name: str, depth: int) -> str:
    text = _checked(item, str, name)
    try:
        return base64.b64encode(base64.b64decode(text, validate=True)).decode()
    except (binascii.Error, ValueError):
        raise OtlpError(f"{name} is {_shorten(item)}; send base64") from None


def _json_array(item: Any, name: str, depth: int) -> list[Any]:
    values = _checked(item, dict, name).get("values") or []
    return [_json_value(value, depth + 1) for value in _checked(values, list, f"{name}.values")]


def _json_object(item: Any, name: str, depth: int) -> dict[str, Any]:
    pairs = _objects(_checked(item, dict, name), name, "values")
    return {_text(pair, "key"): _json_value(pair.get("value"), depth + 1) for pair in pairs}


_READERS: Final[dict[str, Callable[[Any, str, int], Any]]] = {
    "stringValue": _json_string,
    "intValue": _json_int,
    "boolValue": _json_bool,
    "doubleValue": _json_double,
    "arrayValue": _json_array,
    "kvlistValue": _json_object,
    "bytesValue": _json_bytes,
}
_VALUES: Final = _READERS | {
    re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", name): read for name, read in _READERS.items()
}


# -- fields of JSON objects; the first present name of `names` ---------------------------------------------------------


def _get(owner: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((owner[name] for name in names if name in owner), None)


def _checked(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        wanted = {str: "text", bool: "true or false", dict: "an object", list: "a list"}[kind]
        raise OtlpError(f"{what} is {_shorten(value)}; send {wanted}")
    return value


def _objects(owner: Any, what: str, *names: str) -> list[dict[str, Any]]:
    found: Any = _get(_checked(owner, dict, what), names)
    items: list[Any] = [] if found is None else _checked(found, list, names[0])
    return [_checked(item, dict, f"an item of {names[0]}") for item in items]


def _object(owner: dict[str, Any], what: str, *names: str) -> dict[str, Any]:
    found = _get(owner, names)
    return {} if found is None else _checked(found, dict, f"{names[0]} of {what}")


def _text(owner: dict[str, Any], *names: str) -> str:
    found = _get(owner, names)
    return "" if found is None else _checked(found, str, names[0])


def _integer(owner: dict[str, Any], *names: str) -> int:
    found = _get(owner, names)
    number = 0 if found is None else _as_integer(found, names[0])
    if number < 0:
        raise OtlpError(f"{names[0]} is {number}; send nanoseconds since the epoch")
    return number


def _as_integer(value: Any, what: str) -> int:
    try:
        if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
            raise ValueError
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        raise OtlpError(f"{what} is {_shorten(value)}; send a whole number, as text where it is large") from None
    if not -(2**63) <= number < 2**64:
        raise OtlpError(f"{what} is {_shorten(value)}; it has to fit into 64 bits")
    return number


def _hex(owner: dict[str, Any], digits: int, *names: str) -> str:
    """An id in lower case; "" if it is missing, all zero or not hexadecimal of the right length."""
    text = _text(owner, *names).lower()
    fits = len(text) == digits and text.strip("0123456789abcdef") == "" and text.strip("0") != ""
    return text if fits else ""


def _enumerated(owner: dict[str, Any], values: tuple[str, ...], prefix: str, name: str) -> int:
    """Index of an enum value, given by number or name; 0 if unknown."""
    found = owner.get(name)
    if isinstance(found, str) and not found.isdecimal():
        known = [prefix + value.upper() for value in values]
        return known.index(found) if found in known else 0
    number = 0 if found is None else _as_integer(found, name)
    return number if 0 <= number < len(values) else 0


def _shorten(value: Any) -> str:
    try:
        text = dumps(value).decode()
    except orjson.JSONEncodeError:
        return "nested too deeply"
    return text if len(text) <= 80 else text[:77] + "..."
