"""Reward functions.

A reward function gets its arguments by parameter name: `task`, `output`, `rollout`, `resources` and the keys of a dict
task. It may be async. It returns what `check_reward` of `tracing.rewards` takes. Without a reward function, a number
that the agent returns is its reward. Anything else fails the attempt; a missing reward never becomes 0.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from agentlightning.errors import AgentError
from agentlightning.runner.agents.arguments import Invocation, Signature, string_keys


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
        return self.signature.bind_values({**string_keys(invocation.task), **known})()
