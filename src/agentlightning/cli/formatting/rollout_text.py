"""A rollout as text for `agl store show`: its task, its model calls with their messages, its rewards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from agentlightning import span as names
from agentlightning.dashboard.data.text import shortened
from agentlightning.rollouts import Attempt, Rollout
from agentlightning.span import Span
from agentlightning.tracing.rewards import get_reward_value
from agentlightning.util.json_values import recorded_objects
from agentlightning.util.printable import printable


def rollout_lines(rollout: Rollout, attempts: Sequence[Attempt], spans: Sequence[Span]) -> Iterator[str]:
    """The rollout, then each attempt with its spans in order. Control characters in the text of agents are escaped."""
    yield from map(printable, _lines(rollout, attempts, spans))


def _lines(rollout: Rollout, attempts: Sequence[Attempt], spans: Sequence[Span]) -> Iterator[str]:
    mode = f", {rollout.mode}" if rollout.mode else ""
    yield f"{rollout.rollout_id} {rollout.status}{mode}"
    yield f"  task     {shortened(rollout.input)}"
    if command := rollout.metadata.get("command"):
        yield f"  command  {shortened(command)}"
    for attempt in attempts:
        yield f"attempt {attempt.sequence_id} {attempt.attempt_id} {attempt.status}{_duration(attempt)}"
        error = attempt.metadata.get("error")
        if isinstance(error, dict):
            yield f"  error    {shortened(cast('dict[str, Any]', error).get('message'))}"
        for span in spans:
            if span.attempt_id == attempt.attempt_id:
                yield from _span(span)


def _duration(attempt: Attempt) -> str:
    return "" if attempt.end_time is None else f" in {attempt.end_time - attempt.start_time:.1f} s"


def _span(span: Span) -> Iterator[str]:
    values = span.attributes
    number = f"  {span.sequence_id:>3}"
    if names.OPERATION_NAME in values and names.REQUEST_MODEL in values:
        yield from _call(span, number)
    elif (reward := get_reward_value(span)) is not None:
        yield f"{number} reward {reward}"
    elif names.MESSAGE_BODY in values:
        yield f"{number} {shortened(values[names.MESSAGE_BODY])}"
    elif names.EXCEPTION_MESSAGE in values:
        yield f"{number} {values.get(names.EXCEPTION_TYPE)}: {shortened(values[names.EXCEPTION_MESSAGE])}"
    else:
        yield f"{number} {span.name}"


def _call(span: Span, number: str) -> Iterator[str]:
    values = span.attributes
    agent = f", {values[names.AGENT_NAME]}" if names.AGENT_NAME in values else ""
    dollars = values.get(names.COST)
    cost = f", ${dollars:.4f}" if isinstance(dollars, int | float) else ""
    tokens = f"{values.get(names.INPUT_TOKENS) or 0} tokens in, {values.get(names.OUTPUT_TOKENS) or 0} out"
    yield f"{number} {span.name}{agent}: {tokens}{cost}"
    inputs, outputs = (recorded_objects(values.get(name)) for name in (names.INPUT_MESSAGES, names.OUTPUT_MESSAGES))
    yield from (f"        {line}" for message in (*inputs[-1:], *outputs) for line in _message(message))
    if span.status_code == "ERROR":
        yield f"        failed: {shortened(span.status_message or values.get(names.ERROR_TYPE))}"


def _message(message: dict[str, Any]) -> Iterator[str]:
    role = str(message.get("role", "?"))
    for part in message.get("parts") or ():
        kind = part.get("type")
        if kind == "tool_call":
            yield f"{role:<10} {part.get('name')}({shortened(part.get('arguments'))})"
        elif kind == "tool_call_response":
            yield f"{role:<10} {shortened(part.get('response'))}"
        else:
            note = " (thinks)" if kind == "reasoning" else ""
            yield f"{role:<10}{note} {shortened(part.get('content', kind))}"
