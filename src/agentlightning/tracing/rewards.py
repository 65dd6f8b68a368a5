"""What a reward is, wherever it comes from; and rewards read back from spans."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any, cast

from agentlightning import span as names
from agentlightning.errors import RewardError
from agentlightning.span import MAX_REWARD, Span
from agentlightning.trajectory import Reward


def looks_like_reward(value: Any) -> bool:
    """Whether a value is a number, or a non-empty dict of numbers by name."""
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value)
        return bool(items) and all(isinstance(k, str) and _is_number(v) for k, v in items.items())
    return _is_number(value)


def _is_number(value: Any) -> bool:
    """Scalars of NumPy (`(a == b).all()`) and torch are numbers, as they are to `emit_reward`."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    return isinstance(value, Real)


def check_reward(value: Any, source: str) -> Reward:
    """The value as a reward: a finite number, or finite numbers by the name of their dimension. What a reward model
    returns, a tensor of one element, is a number here. Raises RewardError, naming `source`, for anything else."""
    if isinstance(value, Mapping):
        value = {name: _scalar(number) for name, number in cast(Mapping[Any, Any], value).items()}
    else:
        value = _scalar(value)
    if not looks_like_reward(value):
        raise RewardError(
            f"{source} gave {reprlib.repr(value)}, which is not a reward: give a number, a dict of numbers by name, or"
            " none at all"
        )
    if isinstance(value, Mapping):
        return {name: _finite(number, f"{source}[{name!r}]") for name, number in cast(Mapping[str, Any], value).items()}
    return _finite(value, source)


def _scalar(value: Any) -> Any:
    """The number in a decimal, or in a tensor or array of one element; any other value as it is."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and math.prod(cast(tuple[int, ...], shape)) == 1 and hasattr(value, "item"):
        return value.item()
    return float(value) if isinstance(value, Decimal) else value


def _finite(value: Any, source: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf if value > 0 else -math.inf
    if abs(number) <= MAX_REWARD:
        return number
    raise RewardError(
        f"{source} gave {number:g}, which cannot be learned from: rewards range from {-MAX_REWARD:g} to "
        f"{MAX_REWARD:g}; scale it, or raise an exception if there is no reward"
    )


# -- of spans ----------------------------------------------------------------------------------------------------------


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
    own = [span for span in spans if not {names.AIR_RULE, names.REWARD_AGENT} & span.attributes.keys()]
    rescored = [span for span in own if names.RESCORED in span.attributes]
    for span in reversed(own + rescored):
        if (reward := get_reward_value(span)) is not None:
            return reward
    return None
