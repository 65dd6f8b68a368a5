"""Converts spans of the OpenTelemetry SDK to `Span`. Pure.

Fields that a `Span` lacks become attributes, so that a round trip loses nothing. Attributes in the convention of
another library are translated to our vocabulary (`conventions.py`).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.trace import Link, SpanKind, format_span_id, format_trace_id

from agentlightning.span import REWARD_VALUES, Span, SpanEvent
from agentlightning.tracing import conventions

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Event, ReadableSpan

INSTRUMENTATION: Final = "agentlightning"
"""Instrumentation scope of our own spans."""
SCOPE_NAME: Final = "otel.scope.name"
SCOPE_VERSION: Final = "otel.scope.version"
KIND: Final = "span.kind"
"""client, server, producer or consumer; absent for internal spans."""
LINKS: Final = "otel.links"
TRACE_STATE: Final = "w3c.tracestate"

NANOSECONDS = 1e9
JSON_TYPES = frozenset({str, bool, int, float, type(None)})


def to_span(span: ReadableSpan, rollout_id: str, attempt_id: str, resource: dict[str, Any] | None = None) -> Span:
    """Convert a span: times in seconds, hexadecimal ids, JSON-like attributes. Its `sequence_id` is 0, because the
    store assigns it. `resource` is the span's resource in plain form, if the caller has it already."""
    context, parent, status = span.get_span_context(), span.parent, span.status
    attributes = plain_attributes(span.attributes)
    if isinstance(values := attributes.get(REWARD_VALUES), str):
        attributes[REWARD_VALUES] = json.loads(values)
    name, events = span.name, tuple(map(_event, span.events))
    scope = span.instrumentation_scope
    if scope is None or scope.name != INSTRUMENTATION:
        kind = "" if span.kind is SpanKind.INTERNAL else span.kind.name.lower()
        own = ("", "") if scope is None else (scope.name, scope.version or "")
        state = "" if context is None else context.trace_state.to_header()
        add_extra_fields(attributes, own, kind, state, list(map(_link, span.links)))
        name = conventions.complete(name, attributes, events)
    return Span(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        name=name,
        start_time=(span.start_time or 0) / NANOSECONDS,
        end_time=None if span.end_time is None else span.end_time / NANOSECONDS,
        trace_id="" if context is None else format_trace_id(context.trace_id),
        span_id="" if context is None else format_span_id(context.span_id),
        parent_id=None if parent is None else format_span_id(parent.span_id),
        status_code=status.status_code.name,
        status_message=status.description,
        attributes=attributes,
        events=events,
        resource=plain_attributes(span.resource.attributes) if resource is None else resource,
    )


def add_extra_fields(
    attributes: dict[str, Any], scope: tuple[str, str], kind: str, state: str, links: list[dict[str, Any]]
) -> None:
    """Add the fields that a `Span` lacks as attributes. `scope`: its name and version."""
    if scope[0]:
        attributes[SCOPE_NAME] = scope[0]
    if scope[1]:
        attributes[SCOPE_VERSION] = scope[1]
    if kind:
        attributes[KIND] = kind
    if state:
        attributes[TRACE_STATE] = state
    if links:
        attributes[LINKS] = links


def _link(link: Link) -> dict[str, Any]:
    return {
        "trace_id": format_trace_id(link.context.trace_id),
        "span_id": format_span_id(link.context.span_id),
        "attributes": plain_attributes(link.attributes),
    }


def plain_attributes(attributes: Mapping[str, Any] | None) -> dict[str, Any]:
    """Attributes as JSON values: sequences become lists, bytes become base64 text (as in OTLP's JSON)."""
    return {key: _plain(value) for key, value in attributes.items()} if attributes else {}


def _plain(value: Any) -> Any:
    if type(value) in JSON_TYPES:
        return value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    return str(value)


def _event(event: Event) -> SpanEvent:
    return SpanEvent(event.name, event.timestamp / NANOSECONDS, plain_attributes(event.attributes))
