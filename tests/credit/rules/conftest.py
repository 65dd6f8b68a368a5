"""Rollouts whose states are letters."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agentlightning.trajectory import Trajectory, Transition

MakeRollout = Callable[..., Trajectory]


def observed(text: str, history: Sequence[str]) -> str:
    """The messages of a call: what was said and answered before, and what is observed now."""
    earlier = [
        message
        for old in history
        for message in ({"role": "user", "parts": [{"content": old}]}, {"role": "assistant", "parts": []})
    ]
    return json.dumps([*earlier, {"role": "user", "parts": [{"content": text}]}])


def _rollout(
    name: str,
    reward: Any,
    states: Sequence[str],
    steps: Sequence[Any] | None = None,
    *,
    tokens: int = 2,
    agent: str | None = None,
    messages: bool = True,
    **more: Any,
) -> Trajectory:
    """A rollout with a call in each of `states`, each followed by its intermediate reward in `steps`. Without
    `messages` the prompt is the state."""
    given = list(steps or [None] * len(states))
    calls = tuple(
        Transition(
            name,
            "at",
            f"{name}-{t}",
            t,
            tuple(state.encode()),
            (7,) * tokens,
            (-1.0,) * tokens,
            agent=agent,
            reward=given[t],
            input_messages=observed(state, states[:t]) if messages else None,
        )
        for t, state in enumerate(states)
    )
    return Trajectory(name, "at", calls, reward, "g", **more)


@pytest.fixture(scope="session")
def make() -> MakeRollout:
    """(name, reward, states, intermediate rewards) -> a rollout with a call in each state."""
    return _rollout
