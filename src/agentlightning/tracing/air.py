"""AIR, automatic intermediate rewards: rules that find signs of progress in the spans of an attempt and reward them.

A rule is a function of a span, or of a span and all spans of its attempt. It returns a score, or None where it has
nothing to say. The reward is the score times the rule's weight (Luo et al., Agent Lightning, arXiv:2508.03680, section
3.4: monitoring signals such as the status of a tool call become rewards of the step). It belongs to the model call that
the span is, or that it follows; what happens before the first call earns nothing.

Rewards are computed from finished attempts where trajectories are read, not inside the agent: a rule sees the whole
attempt, the recorded calls of agents in any language, and no agent can forge or disturb it. The result depends on the
spans alone and the ids of reward spans derive from their content, so that reading again adds nothing.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from agentlightning import span as names
from agentlightning.errors import ConfigError, RewardError
from agentlightning.span import Span, counts, usable_reward
from agentlightning.util.json_values import recorded_objects
from agentlightning.util.plugins import Registry

Rule: TypeAlias = Callable[..., Any]
"""(span) or (span, spans of the attempt in order) -> score, or None."""

R = TypeVar("R", bound=Rule)

TOOL_OPERATION: Final = "execute_tool"
QUOTED_WORDS: Final = 5
"""Consecutive words of a tool's result that a later answer must repeat to have used it; all of a shorter result."""

RULES: Final = Registry("air_rules", "AIR rule")


def air_rule(function: R) -> R:
    """Make a rule known by the name of the function; a decorator.

    >>> from agentlightning.tracing.air import air_rule
    >>> @air_rule
    ... def short_answer(span):
    ...     tokens = span.attributes.get("gen_ai.usage.output_tokens")
    ...     return None if tokens is None else tokens < 200
    >>> agl.TrainConfig(air={"short_answer": 0.05}).air
    {'short_answer': 0.05}
    """
    RULES[function.__name__] = function
    return function


@dataclass(frozen=True, slots=True)
class AutomaticRewards:
    """The rules of a run."""

    rules: Mapping[str, tuple[Rule, float]]
    """By name, with their weights."""

    def reward_spans(self, spans: Sequence[Span], calls: Sequence[Span]) -> list[Span]:
        """The rewards of one attempt as spans. `spans`: all of its spans; `calls`: those that are model calls."""
        # Rules see what counts, but for rewards and what a reward function has recorded.
        seen = [
            each for each in spans if counts(each) and each.name != names.REWARD and names.JUDGE not in each.attributes
        ]
        own = sorted(seen, key=lambda span: span.sequence_id)
        known = {call.span_id for call in calls}
        found: list[Span] = []
        call: str | None = None
        for span in own:
            call = span.span_id if span.span_id in known else call
            if call is None:
                continue
            for name, (function, weight) in self.rules.items():
                if reward := _reward(name, function, weight, span, own):
                    found.append(_reward_span(span, call, name, reward))
        return found


def _reward(name: str, function: Rule, weight: float, span: Span, spans: Sequence[Span]) -> float | None:
    """The reward of a span; None or 0 for none. Raises RewardError for a rule that fails."""
    about = f"AIR rule {name!r}, on span {span.span_id} of rollout {span.rollout_id},"
    try:
        score = function(span, spans) if _takes_attempt(function) else function(span)
    except Exception as error:  # the rule is the user's code
        raise RewardError(f"{about} raised {type(error).__name__}: {error}") from error
    if score is None:
        return None
    number = usable_reward(score)
    reward = None if number is None else usable_reward(number * weight)
    if reward is None:
        raise RewardError(f"{about} returned {score!r:.80}; return a finite number, or None for nothing")
    return reward


def weighted_rules(weights: Mapping[str, float]) -> AutomaticRewards | None:
    """The rules of a configuration; None for none. Raises ConfigError."""
    check_rules(weights)
    return AutomaticRewards({name: (RULES.find(name), weight) for name, weight in weights.items()}) if weights else None


def check_rules(weights: Mapping[str, float]) -> None:
    """Raises ConfigError for a rule that nobody knows, or a weight that is not finite or gives nothing."""
    for name, weight in weights.items():
        RULES.named(name)
        if not math.isfinite(weight) or not weight:
            raise ConfigError(
                f"the weight {weight} of AIR rule {name!r} rewards nothing; use a finite one, or leave it out"
            )


def _takes_attempt(function: Rule) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return len([each for each in parameters if each.kind in kinds and each.default is each.empty]) > 1


def _reward_span(span: Span, call: str, rule: str, value: float) -> Span:
    content = f"{span.attempt_id} {call} {span.span_id} {rule} {value!r}"
    return Span(
        rollout_id=span.rollout_id,
        attempt_id=span.attempt_id,
        name=names.REWARD,
        start_time=span.start_time if span.end_time is None else span.end_time,
        trace_id=span.trace_id,
        span_id=hashlib.sha256(content.encode()).hexdigest()[:16],
        parent_id=span.span_id,
        attributes={
            names.EVALUATION_NAME: rule,
            names.SCORE_VALUE: value,
            names.AIR_RULE: rule,
            names.AIR_CALL: call,
            names.AIR_SOURCE: span.span_id,
        },
    )


# -- the rules -------------------------------------------------------------------------------------------------------


@air_rule
def tool_succeeded(span: Span) -> float | None:
    """1 for a tool call, or a step recorded with `agl.operation`, that ended without an error."""
    return 1.0 if _is_tool(span) and not _failed(span) else None


@air_rule
def tool_raised(span: Span) -> float | None:
    """1 for a tool call or step that ended with an error; give it a negative weight."""
    return 1.0 if _is_tool(span) and _failed(span) else None


@air_rule
def repeated_failure(span: Span, spans: Sequence[Span]) -> float | None:
    """1 for a failed tool call that had failed before with the same arguments; give it a negative weight."""
    if tool_raised(span) is None:
        return None
    before = [each for each in spans if tool_raised(each) and each.sequence_id < span.sequence_id]
    return 1.0 if _tool_call(span)[:2] in [_tool_call(each)[:2] for each in before] else None


@air_rule
def output_parsed(span: Span) -> float | None:
    """1 for an answer in the format that was asked for (`response_format`, tools with a schema); 0 otherwise."""
    constraint = span.attributes.get(names.CONSTRAINT)
    return None if constraint is None else float(constraint != "violated")


@air_rule
def retrieved_text_used(span: Span, spans: Sequence[Span]) -> float | None:
    """1 for a tool call whose result a later answer repeats: five consecutive words, or all of a shorter result, that
    the arguments of the tool did not contain."""
    if not _is_tool(span) or _failed(span):
        return None
    _, arguments, result = _tool_call(span)
    known = " ".join(_words(arguments))
    quotes = [quote for quote in _runs(_words(result)) if quote not in known]
    later = (" ".join(_words(_answer(each))) for each in spans if each.sequence_id > span.sequence_id)
    return 1.0 if quotes and any(f" {quote} " in f" {answer} " for answer in later for quote in quotes) else None


@air_rule
def progress(span: Span, spans: Sequence[Span]) -> float | None:
    """The rise of the attribute `agentlightning.progress` since the environment last told it, from 0. The rewards of an
    attempt sum to the last value, so that going back and forth earns nothing."""
    value = usable_reward(span.attributes.get(names.PROGRESS))
    if value is None:
        return None
    before = [each.attributes.get(names.PROGRESS) for each in spans if each.sequence_id < span.sequence_id]
    known = [number for number in map(usable_reward, before) if number is not None]
    return value - (known[-1] if known else 0.0)


def _is_tool(span: Span) -> bool:
    return span.attributes.get(names.OPERATION_NAME) == TOOL_OPERATION or span.name == names.OPERATION


def _failed(span: Span) -> bool:
    return span.status_code == "ERROR" or bool({names.ERROR_TYPE, names.EXCEPTION_TYPE} & span.attributes.keys())


def _tool_call(span: Span) -> tuple[str, str, Any]:
    """Name, arguments and result."""
    of_step = (names.OPERATION_LABEL, names.OPERATION_INPUT, names.OPERATION_OUTPUT)
    of_tool = (names.TOOL_NAME, names.TOOL_ARGUMENTS, names.TOOL_RESULT)
    name, arguments, result = map(span.attributes.get, of_step if span.name == names.OPERATION else of_tool)
    return str(name), str(arguments), result


def _answer(span: Span) -> str:
    """The text of a model call's answer; empty for any other span."""
    messages = recorded_objects(span.attributes.get(names.OUTPUT_MESSAGES))
    parts = [part for message in messages for part in recorded_objects(message.get("parts"))]
    return " ".join(str(part.get("content", "")) for part in parts if part.get("type") == "text")


def _words(value: Any) -> list[str]:
    text = value if isinstance(value, str) else json.dumps(value, default=str) if value is not None else ""
    return re.findall(r"\w+", text.lower())


def _runs(words: Sequence[str]) -> list[str]:
    size = min(QUOTED_WORDS, len(words))
    runs = [" ".join(words[start : start + size]) for start in range(len(words) - size + 1)] if size else []
    return [run for run in runs if len(run) > 2]
