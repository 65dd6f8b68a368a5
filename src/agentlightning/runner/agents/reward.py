"""Reward functions, and rewards returned by agents.

A reward function gets its arguments by parameter name: `task`, `output`, `rollout`, `resources` and the keys of a dict
task. It may be async. It returns a finite number, or a dict of finite numbers by dimension. Without a reward function,
a number that the agent returns is its reward. Anything else is a RewardError, which fails the attempt; a missing
reward never becomes 0.0.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, cast

from agentlightning.errors import AgentError, RewardError
from agentlightning.runner.agents.arguments import Invocation, Signature, string_keys
from agentlightning.span import MAX_REWARD
from agentlightning.trajectory import Reward


def looks_like_reward(value: Any) -> bool:
    """Whether a returned value is a number, or a non-empty dict of numbers by name."""
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
    """The value as a reward. Raises RewardError, naming `source`, for an invalid one."""
    if not looks_like_reward(value):
        raise RewardError(
            f"{source} gave {reprlib.repr(value)}, which is not a reward: return a number, or a dict of numbers by name"
        )
    if isinstance(value, Mapping):
        return {name: _finite(number, f"{source}[{name!r}]") for name, number in cast(Mapping[str, Any], value).items()}
    return _finite(value, source)


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


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A user's reward function."""

    signature: Signature

    @classmethod
    def of(cls, function: Any) -> RewardFunction:
        """Raises AgentError for an object that cannot be called."""
        if not callable(function):
            raise AgentError(f"the reward is {function!r}, which cannot be called; pass a function")
        return cls(Signature.of(cast(Callable[..., Any], function)))

    @property
    def source(self) -> str:
        return f"the reward function {self.signature.name}"

    def start(self, invocation: Invocation, output: Any, **further: Any) -> Any:
        """Call the function; an async one returns an awaitable. `further`: more arguments by parameter name."""
        known = {
            "task": invocation.task,
            "output": output,
            "rollout": invocation.rollout,
            "resources": invocation.resources,
            **further,
        }
        return self.signature.apply({**string_keys(invocation.task), **known})
