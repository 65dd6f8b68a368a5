"""Reads rewards back from spans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentlightning import span as names
from agentlightning.span import Span
from agentlightning.trajectory import Reward


def get_reward_value(span: Span) -> Reward | None:
    """The reward of a span; None if it has none, or an invalid or late one.

    >>> agl.get_reward_value(agl.Span("ro-1", "at-1", "search", start_time=0.0)) is None
    True
    """
    if span.name != names.REWARD or not names.counts(span):
        return None
    values = span.attributes.get(names.REWARD_VALUES)
    if values is None:
        return names.usable_reward(span.attributes.get(names.SCORE_VALUE))
    found: dict[Any, Any] = values if isinstance(values, dict) else {}
    numbers = {str(name): names.usable_reward(value) for name, value in found.items()}
    usable = {name: number for name, number in numbers.items() if number is not None}
    return usable if len(usable) == len(numbers) > 0 else None


def find_reward_spans(spans: Sequence[Span]) -> list[Span]:
    """The spans with a reward, in the given order. Spans that arrived after the end of their attempt, or from a
    superseded one, do not count.

        >>> agl.find_reward_spans([agl.Span("ro-1", "at-1", "search", start_time=0.0)])
        []
    """
    return [span for span in spans if get_reward_value(span) is not None]


def find_final_reward(spans: Sequence[Span]) -> Reward | None:
    """The final reward of an attempt, given its spans in the store's order: the last one that no rule added and that is
    not for one agent alone, or the last one of `agl rescore`. None means missing, never 0.0.

    >>> score = {"gen_ai.evaluation.score.value": 1.0}
    >>> agl.find_final_reward([agl.Span("ro-1", "at-1", "gen_ai.evaluation.result", 0.0, attributes=score)])
    1.0
    """
    others = {names.AIR_RULE, names.REWARD_AGENT}
    own = [span for span in spans if others.isdisjoint(span.attributes)]
    rescored = [span for span in own if names.RESCORED in span.attributes]
    for span in (*reversed(rescored), *reversed(own)):
        if (reward := get_reward_value(span)) is not None:
            return reward
    return None
