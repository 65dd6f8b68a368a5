"""Hierarchies of agents: each level is the environment of the level above it (TAG, arXiv 2502.15425).

A level looks to the one above like a text environment of gymnasium: `reset` returns (observation, info), and `step`
takes an action, here a goal, and returns (observation, reward, terminated, truncated, info). So levels stack to any
depth above an environment of that kind, whose methods may be coroutines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from agentlightning.errors import AgentError
from agentlightning.tracing.emit import emit_reward, track_agent
from agentlightning.util.event_loop import result_of


@dataclass(slots=True)
class LevelStep:
    """What a level did to follow one goal.

    >>> from agentlightning.hierarchy import LevelStep
    >>> LevelStep("east", observations=["ice", "stone"], actions=["left"], rewards=[0.5]).reward
    0.5
    """

    goal: Any
    """What the level above asked for; None at the top."""
    observations: list[Any] = field(default_factory=list[Any])
    """What it saw of the level below: before each action, and after the last one."""
    actions: list[Any] = field(default_factory=list[Any])
    rewards: list[float] = field(default_factory=list[float])
    """What the level below gave for each action."""

    @property
    def reward(self) -> float:
        """The sum of the rewards."""
        return sum(self.rewards)


class Level:
    """An agent of a hierarchy, and the environment of the agent above it.

    For each goal it acts `steps` times on the level `below`, or less often where that ends. It calls its model as the
    agent `name`: under that name it has an adapter, rewards and metrics of its own (`LightningRL(agents=...)`).

    act: its action, of (observation, goal); the goal of the level below. May be a coroutine.
    below: another level or an environment; made anew for each rollout, as all levels are.
    observe: what the level above sees, of a `LevelStep` (default: the last observation).
    reward: what the level above is given (default: the sum of the rewards).
    credit: the level's own reward for the step, for `LightningRL(agent_rewards="own")`. Default: none, its calls are
        credited with the reward of the rollout.

        >>> class World:
        ...     def reset(self, **options): return "a door", {}
        ...     def step(self, action): return "a room", float(action == "open"), True, False, {}
        >>> level = agl.Level("guide", lambda observation, goal: "open", World())
        >>> await level.run()  # doctest: +SKIP
        1.0
    """

    def __init__(
        self,
        name: str,
        act: Callable[[Any, Any], Any],
        below: Any,
        *,
        steps: int = 1,
        observe: Callable[[LevelStep], Any] | None = None,
        reward: Callable[[LevelStep], float] | None = None,
        credit: Callable[[LevelStep], float] | None = None,
    ) -> None:
        if steps < 1:
            raise AgentError(f"Level({name!r}, steps={steps}): a level acts at least once for each goal")
        if not all(callable(getattr(below, method, None)) for method in ("reset", "step")):
            raise AgentError(f"Level({name!r}): {below!r} has no reset and step; give another Level, or an environment")
        self.name, self.act, self.below, self.steps = name, act, below, steps
        self.observe = observe or _last_observation
        self.reward = reward or attrgetter("reward")
        self.credit = credit
        self._seen: Any = None
        self._plays = False

    async def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Begin again, with the options that the environment at the bottom takes, such as `seed`."""
        found = await result_of(self.below.reset(**options))
        self._seen, self._plays = found[0] if isinstance(found, tuple) else found, True
        return self.observe(LevelStep(None, [self._seen])), {}

    async def step(self, goal: Any = None) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Follow a goal: (observation, reward, terminated, truncated, info) for the level above. Raises AgentError
        after the end."""
        if not self._plays:
            raise AgentError(f"level {self.name!r} has ended, or was never begun: call reset first")
        done, terminated, truncated = LevelStep(goal, [self._seen]), False, False
        while len(done.actions) < self.steps and self._plays:
            with track_agent(self.name):
                action = await result_of(self.act(self._seen, goal))
            self._seen, reward, terminated, truncated, _ = await result_of(self.below.step(action))
            done.actions.append(action)
            done.rewards.append(float(reward))
            done.observations.append(self._seen)
            self._plays = not (terminated or truncated)
        if self.credit is not None:
            emit_reward(float(self.credit(done)), agent=self.name)
        return self.observe(done), float(self.reward(done)), terminated, truncated, {}

    async def run(self, *, max_steps: int | None = None, **options: Any) -> float:
        """Play from `reset(**options)` to the end, or for `max_steps` steps of this level, which is then the top one.
        Returns the sum of its rewards: return it from the agent, as the reward of the rollout."""
        await self.reset(**options)
        total, steps = 0.0, 0
        while self._plays and (max_steps is None or steps < max_steps):
            _, reward, *_ = await self.step()
            total, steps = total + reward, steps + 1
        return total


def _last_observation(step: LevelStep) -> Any:
    return step.observations[-1]
