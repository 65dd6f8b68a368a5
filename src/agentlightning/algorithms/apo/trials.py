"""Trials of texts on tasks, what is recorded of them, and the transcripts that a critic reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import orjson

from agentlightning import span as names
from agentlightning.algorithms.apo.config import SearchBudget, price
from agentlightning.algorithms.apo.text import Candidate
from agentlightning.algorithms.training import RolloutReport, Training
from agentlightning.assemble import calls, steps
from agentlightning.resources import PromptTemplate
from agentlightning.span import Span
from agentlightning.util.json_values import dumps, recorded_objects

# -- record ----------------------------------------------------------------------------------------------------------

# The record of a search: which candidate earned what on which task. Nothing in it is bought twice.

Split = Literal["train", "validation"]
"""The tasks that a search may see. Those held out are the trainer's alone."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One evaluation to make: a task by its place in a split; `repeat` tells repetitions apart."""

    task: int
    repeat: int = 0
    split: Split = "train"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a candidate earned in one rollout."""

    task: int
    score: float | None
    """None: the rollout failed or has no usable reward; it counts as the lowest score seen, or 0."""
    transcript: str = ""
    """The rollout as the critic reads it."""
    tokens: int = 0
    money: float = 0.0

    def as_json(self) -> list[Any]:
        return [self.task, self.score, self.transcript]


class Evaluator(Protocol):
    """Runs the agent with a candidate."""

    async def evaluate(self, candidate: Candidate, trials: Sequence[Trial]) -> list[Outcome]:
        """One rollout for each trial, in their order; they run at the same time."""
        ...


# -- transcript ------------------------------------------------------------------------------------------------------

# A rollout as text, for the critic: task, model calls, tool calls, output, named rewards, failure.


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


@dataclass(frozen=True, slots=True)
class RunEvaluator:
    """Implements `Evaluator` with the rollouts of a training run."""

    training: Training
    start: Mapping[str, PromptTemplate]
    budget: SearchBudget
    """With the prices of the agent's calls."""

    async def evaluate(self, candidate: Candidate, trials: Sequence[Trial]) -> list[Outcome]:
        splits = {"train": self.training.train_tasks, "validation": self.training.validation_tasks}
        names = [f"{candidate.digest}-{each.split}{each.task:05d}-{each.repeat}" for each in trials]
        tasks = dict(zip(names, (splits[each.split][each.task] for each in trials), strict=True))
        reports = await self.training.try_resources(dict(templates(self.start, candidate)), tasks)
        found = dict(zip(tasks, reports, strict=True))
        return [
            Outcome(
                trial.task,
                found[name].score,
                transcript(tasks[name], found[name]),
                *usage(found[name].spans, self.budget),
            )
            for name, trial in zip(names, trials, strict=True)
        ]


def templates(start: Mapping[str, PromptTemplate], candidate: Candidate) -> dict[str, PromptTemplate]:
    """The templates with the texts of a candidate."""
    return {name: start[name].model_copy(update={"template": text}) for name, text in candidate.texts.items()}
