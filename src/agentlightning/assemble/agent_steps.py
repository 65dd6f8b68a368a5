"""What an agent did between its model calls: tool calls, and errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agentlightning import span as names
from agentlightning.assemble.model_calls import is_call
from agentlightning.span import Span, counts
from agentlightning.trajectory import Step

TOOL_OPERATION = "execute_tool"
"""Value of `gen_ai.operation.name` that means a tool call."""


def steps(spans: Iterable[Span]) -> tuple[Step, ...]:
    """The tool calls and errors that count, by sequence number: failed model calls and recorded exceptions are errors.
    What a reward function recorded is no part of it."""
    own = (span for span in spans if counts(span) and names.JUDGE not in span.attributes)
    found = (_step(span) for span in sorted(own, key=lambda span: span.sequence_id))
    return tuple(step for step in found if step is not None)


def _step(span: Span) -> Step | None:
    error = _error(span)
    attributes = span.attributes
    if attributes.get(names.OPERATION_NAME) == TOOL_OPERATION:
        return Step(
            kind="tool",
            name=str(attributes.get(names.TOOL_NAME, span.name)),
            span_id=span.span_id,
            sequence_id=span.sequence_id,
            arguments=attributes.get(names.TOOL_ARGUMENTS),
            result=attributes.get(names.TOOL_RESULT),
            error=error,
        )
    if error is None or not (is_call(span) or span.name == names.EXCEPTION):
        return None
    return Step(kind="error", name=span.name, span_id=span.span_id, sequence_id=span.sequence_id, error=error)


def _error(span: Span) -> str | None:
    """What went wrong in a span; None where nothing did."""
    attributes = span.attributes
    kind: Any = attributes.get(names.EXCEPTION_TYPE) or attributes.get(names.ERROR_TYPE)
    if kind is None and span.status_code != "ERROR":
        return None
    message = span.status_message or attributes.get(names.EXCEPTION_MESSAGE)
    return str(message or kind or "error")
