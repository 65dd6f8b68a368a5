"""From what an agent returned to its final reward.

A reward function is called by the names of its parameters: `task`, `output`, `rollout`, `resources` and the keys of a
dict task. It may be async. It returns a finite number, or finite numbers by dimension. Without one, a number that the
agent returned is its reward. Anything else is a RewardError: a failed attempt, never a reward of 0.0.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, cast

from agentlightning.errors import AgentError, RewardError
from agentlightning.runner.agents.arguments import Call, Signature
from agentlightning.span import MAX_REWARD

Reward = float | dict[str, float]


def looks_like_reward(value: Any) -> bool:
    """Whether a returned value is a number, or a dict of nothing but numbers by name."""
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value)
        return bool(items) and all(isinstance(k, str) and isinstance(v, Real) for k, v in items.items())
    return isinstance(value, Real)


def check_reward(value: Any, source: str) -> Reward:
    """The value as a reward. Raises RewardError, naming `source`, for what is none."""
    if not looks_like_reward(value):
        raise RewardError(
            f"{source} gave {reprlib.repr(value)}, which is no reward: return a number, or a dict of numbers by name"
        )
    if isinstance(value, Mapping):
        return {name: _finite(number, f"{source}[{name!r}]") for name, number in cast(Mapping[str, Any], value).items()}
    return _finite(value, source)


def _finite(value: Any, source: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf if value > 0 else -math.inf
    if not math.isfinite(number):
        raise RewardError(
            f"{source} gave {number}, which cannot be learned from; return a finite number, "
            "or raise an exception where there is none"
        )
    if abs(number) > MAX_REWARD:
        raise RewardError(f"{source} gave {number:g}; a reward is at most {MAX_REWARD:g} either way: scale it")
    return number


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A user's reward function."""

    signature: Signature

    @classmethod
    def of(cls, function: Any) -> RewardFunction:
        """Raises AgentError for what cannot be called."""
        if not callable(function):
            raise AgentError(f"the reward is {function!r}, which cannot be called; give a function")
        return cls(Signature.of(cast(Callable[..., Any], function)))

    @property
    def source(self) -> str:
        return f"the reward function {self.signature.name}"

    def start(self, call: Call, output: Any) -> Any:
        """What the function returns, an awaitable if it is async."""
        task = cast(Mapping[Any, Any], call.task) if isinstance(call.task, Mapping) else {}
        values = {key: value for key, value in task.items() if isinstance(key, str)}
        known = {"task": call.task, "output": output, "rollout": call.rollout, "resources": call.resources}
        return self.signature.apply({**values, **known})
