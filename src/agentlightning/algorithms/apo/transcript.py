"""A rollout as text, for the critic: task, model calls, tool calls, output, named rewards, failure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import orjson

from agentlightning import span as names
from agentlightning.algorithms.apo.budget import price
from agentlightning.algorithms.apo.config import SearchBudget
from agentlightning.algorithms.training import RolloutReport
from agentlightning.assemble import calls, steps
from agentlightning.span import Span
from agentlightning.util.json_values import dumps, recorded_objects


def transcript(task: Any, report: RolloutReport) -> str:
    """What happened in a rollout. A message that several calls share is shown once."""
    parts = [f"Task: {_text(task)}", *_events(report.spans)]
    if report.output is not None:
        parts.append(f"Output: {_text(report.output)}")
    if isinstance(report.reward, dict):
        parts.append(f"Rewards: {_text(report.reward)}")
    if report.failure is not None:
        parts.append(f"Failure: {report.failure}")
    return "\n".join(parts)


def usage(spans: Sequence[Span], budget: SearchBudget) -> tuple[int, float]:
    """Tokens of the recorded model calls of a rollout, and what they cost: what the gateway has recorded, for calls
    without a price there by the prices of the budget."""
    tokens, money = 0, 0.0
    for span in calls(spans):
        read, written, cost = (_number(span, name) for name in (names.INPUT_TOKENS, names.OUTPUT_TOKENS, names.COST))
        tokens += int(read + written)
        money += cost or price(read, written, budget.agent_input_price, budget.agent_output_price)
    return tokens, money


def _number(span: Span, name: str) -> float:
    value = span.attributes.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def _events(spans: Sequence[Span]) -> Iterator[str]:
    events: list[tuple[int, Span | str]] = [(span.sequence_id, span) for span in calls(spans)]
    for step in steps(spans):
        shown = f"Tool {step.name}({_text(step.arguments)}): {_text(step.result)}" if step.kind == "tool" else "Error"
        events.append((step.sequence_id, shown + (f": {step.error}" if step.error else "")))
    seen: set[str] = set()
    for _, event in sorted(events, key=lambda each: each[0]):
        if isinstance(event, str):
            yield event
            continue
        for name in (names.INPUT_MESSAGES, names.OUTPUT_MESSAGES):
            for line in _messages(event.attributes.get(name)):
                if line not in seen:
                    seen.add(line)
                    yield line


def _messages(recorded: object) -> Iterator[str]:
    for message in recorded_objects(recorded):
        parts = [_part(part) for part in message.get("parts") or ()]
        yield f"{message.get('role', 'message')}: {' '.join(part for part in parts if part)}"


def _part(part: Any) -> str:
    if not isinstance(part, dict):
        return str(part)
    fields = cast("dict[str, Any]", part)
    if fields.get("type") == "tool_call":
        return f"calls {fields.get('name')}({_text(fields.get('arguments'))})"
    return _text(fields.get("content", fields.get("response", "")))


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode()
    except TypeError:
        return str(value)
