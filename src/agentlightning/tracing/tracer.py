"""The OpenTelemetry tracer provider: created on first use, installed globally only on request.

Its processor passes each span, when it ends and in the thread that ended it, to the sink of the scope it was started
in. There is no queue: an intermediate reward reaches its sink before the agent makes its next call, no thread is lost
in a fork, and nothing is lost when the process dies. Batching is up to the sink. Spans without a scope are dropped,
with one warning.

What `emit_*` records starts and ends at once, so it is written as our `Span` directly, at a third of the cost of an
OpenTelemetry span; processors of others see `operation` and what libraries trace.

A span without a parent belongs to the trace of its attempt (`attempt_address.trace_id_of`). Ids are drawn
apart from the `random` module: agents seed it and hosts fork, and the store would merge spans with equal ids.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from inspect import signature
from typing import Any, Final, TypeGuard
from weakref import WeakValueDictionary

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as RecordingSpan
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, SpanKind, format_span_id, format_trace_id

from agentlightning.span import AGENT_NAME, Span, SpanEvent, new_span_id
from agentlightning.tracing import conventions
from agentlightning.tracing import scope as scopes
from agentlightning.tracing.outbox import counters
from agentlightning.util.json_values import Json
from agentlightning.util.random_ids import random_bits

INSTRUMENTATION: Final = "agentlightning"
"""Instrumentation scope of our own spans."""
NANOSECONDS = 1e9
JSON_TYPES = frozenset({str, bool, int, float, type(None)})

_RESOURCE: Json = {SERVICE_NAME: INSTRUMENTATION}

UNLIMITED = SpanLimits(**dict.fromkeys(signature(SpanLimits).parameters, SpanLimits.UNSET))
"""Set explicitly: limits in the environment are meant for telemetry and would truncate messages."""


def _open_scope() -> scopes.Scope | None:
    return scopes.current_scope() or scopes.implicit_sessions.get(scopes.current_speaker())


class SpanIdGenerator(IdGenerator):
    """Ids that are unique despite seeds and forks. Within a scope, the trace id is the attempt's."""

    def generate_span_id(self) -> int:
        return random_bits(64) or 1

    def generate_trace_id(self) -> int:
        scope = _open_scope()
        return (random_bits(128) or 1) if scope is None else int(scope.trace_id, 16)


class ScopeProcessor(SpanProcessor):
    """Passes each span to the sink of the scope it was started in, when it ends."""

    def __init__(self) -> None:
        self._open = WeakValueDictionary[tuple[int, int], scopes.Scope]()
        # Weak, so that spans that never end do not accumulate.
        self._resource: tuple[Resource, Json] = (Resource.get_empty(), {})

    def on_start(self, span: RecordingSpan, parent_context: Context | None = None) -> None:
        scope = _open_scope()
        if scope is None:
            return
        context = span.get_span_context()
        self._open[context.trace_id, context.span_id] = scope
        agent = scopes.current_agent()
        if agent is not None and AGENT_NAME not in (span.attributes or {}):
            span.set_attribute(AGENT_NAME, agent)

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        scope = None if context is None else self._open.pop((context.trace_id, context.span_id), None)
        if _is_recorded(scope, span.name):
            if span.resource is not self._resource[0]:
                self._resource = (span.resource, plain_attributes(span.resource.attributes))
            scope.sink.put((to_span(span, scope.rollout_id, scope.attempt_id, self._resource[1]),))


def _is_recorded(scope: scopes.Scope | None, name: str) -> TypeGuard[scopes.Scope]:
    """Whether a span of this name is recorded there; what is not is counted."""
    if scope is None:
        counters.note(
            "outside",
            f"Span {name!r} was emitted outside of any rollout and is dropped; later ones are dropped without a"
            " warning. Spans are recorded within `agl.track_session()`, and in agents that a runner or `agl run`"
            " executes; a thread that inherits no session is given one by `agl.carry_session(function)`.",
        )
    elif scopes.is_left_out(scope, name):
        counters.add("spans_unmarked")
    else:
        return True
    return False


@cache
def _record_spans_of(provider: TracerProvider) -> None:
    provider.add_span_processor(ScopeProcessor())


@cache
def tracer_provider() -> TracerProvider:
    """The provider of this process. Samples everything, whatever the environment says: rewards are not telemetry."""
    provider = TracerProvider(
        sampler=ALWAYS_ON,
        resource=Resource(_RESOURCE),
        id_generator=SpanIdGenerator(),
        span_limits=UNLIMITED,
        shutdown_on_exit=False,
    )
    # OTEL_SDK_DISABLED is meant for the telemetry of libraries; it would silently drop every reward.
    provider._disabled = False  # pyright: ignore[reportPrivateUsage]
    _record_spans_of(provider)
    return provider


@cache
def tracer() -> trace.Tracer:
    """The tracer of `emit_*` and `operation`."""
    return tracer_provider().get_tracer(INSTRUMENTATION)


def record(name: str, attributes: Mapping[str, Any], error: str | None = None, start_time: float | None = None) -> None:
    """Record a span that ends now, and starts now unless a time was given; with `error`, its status is ERROR."""
    scope = scopes.recording_scope()
    if not _is_recorded(scope, name):
        return
    now = time.time()
    parent = trace.get_current_span().get_span_context()
    own = dict(attributes)
    agent = scopes.agent_in(scope)
    if agent is not None:
        own.setdefault(AGENT_NAME, agent)
    span = Span(
        rollout_id=scope.rollout_id,
        attempt_id=scope.attempt_id,
        name=name,
        start_time=now if start_time is None else start_time,
        end_time=now,
        trace_id=format_trace_id(parent.trace_id) if parent.is_valid else scope.trace_id,
        span_id=new_span_id(),
        parent_id=format_span_id(parent.span_id) if parent.is_valid else None,
        status_code="UNSET" if error is None else "ERROR",
        status_message=error,
        attributes=own,
        resource=_RESOURCE,
    )
    scope.sink.put((span,))


_installing = threading.Lock()


def install_globally() -> None:
    """Also record what libraries trace with OpenTelemetry. If the application has installed its own provider, that
    stays and gets our processor. Idempotent."""
    with _installing:
        current = trace.get_tracer_provider()
        if isinstance(current, TracerProvider):
            _record_spans_of(current)
        else:
            trace.set_tracer_provider(tracer_provider())


def flush(timeout: float = 5.0) -> bool:
    """Wait up to `timeout` seconds for other processors of the provider; ours has no queue. False on timeout."""
    return tracer_provider().force_flush(int(timeout * 1000))


# -- spans of the SDK --------------------------------------------------------------------------------------------------


def to_span(span: ReadableSpan, rollout_id: str, attempt_id: str, resource: Json | None = None) -> Span:
    """Convert a span: times in seconds, hexadecimal ids, JSON-like attributes. Its `sequence_id` is 0, because the
    store assigns it. `resource` is the span's resource in plain form, if the caller has it already."""
    context, parent, status = span.get_span_context(), span.parent, span.status
    attributes = plain_attributes(span.attributes)
    events = tuple(
        SpanEvent(each.name, each.timestamp / NANOSECONDS, plain_attributes(each.attributes)) for each in span.events
    )
    name, scope = span.name, span.instrumentation_scope
    if scope is None or scope.name != INSTRUMENTATION:
        kind = "" if span.kind is SpanKind.INTERNAL else span.kind.name.lower()
        own = ("", "") if scope is None else (scope.name, scope.version or "")
        state = "" if context is None else context.trace_state.to_header()
        conventions.add_extra_fields(attributes, own, kind, state, list(map(_link, span.links)))
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


def _link(link: Link) -> Json:
    ids = format_trace_id(link.context.trace_id), format_span_id(link.context.span_id)
    return conventions.link(*ids, plain_attributes(link.attributes), link.context.trace_state.to_header())


def plain_attributes(attributes: Mapping[str, Any] | None) -> Json:
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
