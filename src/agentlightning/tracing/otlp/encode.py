"""Encodes spans as an OTLP trace request. Pure; `decode.py` is the inverse.

Spans are grouped by attempt: the resource names the rollout, the attempt and a service. Attributes without an
OpenTelemetry type (objects, mixed lists) become JSON text. Token ids and log-probabilities are omitted: they
are most of a span's size and of no use in a trace viewer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, cast

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from agentlightning.attempt_address import trace_id_of
from agentlightning.span import KEPT_SETS, TOKEN_ATTRIBUTES, TOP_LOGPROBS, Span
from agentlightning.tracing.otlp.decode import KINDS, SEQUENCE_ID, STATUS
from agentlightning.tracing.otlp.otel_span import KIND, LINKS, SCOPE_NAME, SCOPE_VERSION, TRACE_STATE
from agentlightning.util.json_values import dumps

SERVICE: Final = "agentlightning"
_OWN_FIELDS: Final = (KIND, LINKS, SCOPE_NAME, SCOPE_VERSION, TRACE_STATE, SEQUENCE_ID)
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
            group = request.resource_spans.add()
            _put_resource(group, span)
            groups[key] = (group, {})
        group, scopes = groups[key]
        scope = (str(span.attributes.get(SCOPE_NAME, SERVICE)), str(span.attributes.get(SCOPE_VERSION, "")))
        if scope not in scopes:
            scopes[scope] = group.scope_spans.add()
            scopes[scope].scope.name, scopes[scope].scope.version = scope
        _put_span(scopes[scope].spans.add(), span)
    return request


def _put_resource(group: trace_pb2.ResourceSpans, span: Span) -> None:
    attributes = {
        "service.name": SERVICE,
        **span.resource,
        "agentlightning.rollout_id": span.rollout_id,
        "agentlightning.attempt_id": span.attempt_id,
    }
    _put_attributes(group.resource.attributes, attributes)


def _put_span(target: trace_pb2.Span, span: Span) -> None:
    attributes = span.attributes
    target.name = span.name
    target.trace_id = _bytes(span.trace_id or trace_id_of(span.attempt_id) or span.attempt_id, 16)
    target.span_id = _bytes(span.span_id, 8)
    if span.parent_id:
        target.parent_span_id = _bytes(span.parent_id, 8)
    target.start_time_unix_nano = _nanoseconds(span.start_time)
    target.end_time_unix_nano = _nanoseconds(span.start_time if span.end_time is None else span.end_time)
    kind = attributes.get(KIND)
    target.kind = cast("trace_pb2.Span.SpanKind.ValueType", KINDS.index(kind) if kind in KINDS else 1)
    target.trace_state = str(attributes.get(TRACE_STATE, ""))
    if span.status_code != "UNSET" and span.status_code in STATUS:
        target.status.code = cast("trace_pb2.Status.StatusCode.ValueType", STATUS.index(span.status_code))
        target.status.message = span.status_message or ""
    _put_attributes(target.attributes, {key: value for key, value in attributes.items() if key not in _OMITTED})
    _put_attributes(target.attributes, {SEQUENCE_ID: span.sequence_id} if span.sequence_id else {})
    for event in span.events:
        put = target.events.add()
        put.name, put.time_unix_nano = event.name, _nanoseconds(event.timestamp)
        _put_attributes(put.attributes, event.attributes)
    _put_links(target, attributes.get(LINKS))


def _put_links(target: trace_pb2.Span, links: Any) -> None:
    for link in cast("list[Any]", links) if isinstance(links, list) else []:
        if isinstance(link, dict):
            given = cast("dict[str, Any]", link)
            put = target.links.add()
            put.trace_id = _bytes(str(given.get("trace_id", "")), 16)
            put.span_id = _bytes(str(given.get("span_id", "")), 8)
            put.trace_state = str(given.get("trace_state", ""))
            attributes = given.get("attributes")
            _put_attributes(put.attributes, cast("dict[str, Any]", attributes) if isinstance(attributes, dict) else {})


def _put_attributes(target: Any, attributes: Mapping[str, Any]) -> None:
    target.extend([KeyValue(key=key, value=_value(value)) for key, value in attributes.items() if value is not None])


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
