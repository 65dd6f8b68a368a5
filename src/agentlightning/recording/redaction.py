"""Passes everything of a session through the user's redaction hook before it is written.

What the hook raises for, or returns no mapping for, is not written: a span is dropped, a task becomes None, a failure
loses its message. Each is counted, and the first is logged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from agentlightning.errors import ConfigError, Failure
from agentlightning.recording.settings import Redact
from agentlightning.span import EXCEPTION_MESSAGE, EXCEPTION_STACKTRACE, EXCEPTION_TYPE, Span, SpanEvent
from agentlightning.tracing.status import counters

STATUS_MESSAGE: Final = "status_message"


def redact_spans(redact: Redact, spans: Sequence[Span]) -> list[Span]:
    """The spans as they may be stored."""
    found = (_redact_span(redact, span) for span in spans)
    kept = [span for span in found if span is not None]
    if len(kept) < len(spans):
        counters.add("spans_dropped", len(spans) - len(kept))
    return kept


def redact_start(redact: Redact, task: Any, metadata: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The task and metadata of a session as they may be stored."""
    values = _redacted(redact, {"task": task, "metadata": metadata}, "the task of a session")
    values = {} if values is None else values
    allowed = values.get("metadata")
    return values.get("task"), dict(allowed) if isinstance(allowed, Mapping) else {}


def redact_failure(redact: Redact, failure: Failure) -> Failure:
    """A failure as it may be stored; its type stays."""
    given = {
        EXCEPTION_TYPE: failure.type,
        EXCEPTION_MESSAGE: failure.message,
        EXCEPTION_STACKTRACE: failure.traceback,
    }
    values = _redacted(redact, given, "the failure of a session") or {}
    message, traceback = values.get(EXCEPTION_MESSAGE, ""), values.get(EXCEPTION_STACKTRACE, "")
    return Failure(failure.type, str(message), str(traceback))


def _redact_span(redact: Redact, span: Span) -> Span | None:
    given = dict(span.attributes)
    if span.status_message is not None:
        given[STATUS_MESSAGE] = span.status_message
    attributes = _redacted(redact, given, f"a span {span.name!r}")
    if attributes is None:
        return None
    events: list[SpanEvent] = []
    for event in span.events:
        of_event = _redacted(redact, dict(event.attributes), f"an event of a span {span.name!r}")
        if of_event is None:
            return None
        events.append(replace(event, attributes=of_event))
    message = attributes.pop(STATUS_MESSAGE, None)
    return replace(
        span, attributes=attributes, events=tuple(events), status_message=None if message is None else str(message)
    )


def _redacted(redact: Redact, attributes: dict[str, Any], what: str) -> dict[str, Any] | None:
    try:
        allowed = redact(attributes)
        if not isinstance(allowed, Mapping):
            raise ConfigError(f"redact returned {type(allowed).__name__}; return a dict of attributes")
        return dict(allowed)
    except Exception as error:  # noqa: BLE001  the hook is the user's code
        counters.add("redactions_failed")
        counters.warn("redact", f"redact failed for {what}, which is not stored: {type(error).__name__}: {error}")
        return None
