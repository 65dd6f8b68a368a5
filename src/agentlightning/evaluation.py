"""Evaluation: how good an agent is on tasks, as a number that knows its uncertainty.

A task whose rollout failed or gave no reward is *missing*; it is counted and left out, never read as 0.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import total_ordering
from typing import Any

from agentlightning.assemble import scalar_reward
from agentlightning.errors import RewardError
from agentlightning.source import RolloutPlan, RolloutSource
from agentlightning.statistics import Gain, mean_interval, paired_gain


@total_ordering
@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """The reward of each task. Compares, adds up and prints like its mean."""

    rewards: tuple[float | None, ...]
    """One for each task, in the order of the tasks; None is missing."""
    seconds: float = 0.0

    @property
    def known(self) -> list[float]:
        return [reward for reward in self.rewards if reward is not None]

    @property
    def missing(self) -> int:
        return len(self.rewards) - len(self.known)

    @property
    def mean(self) -> float:
        """The mean reward over the tasks that have one. Raises RewardError when none has."""
        if not self.known:
            raise RewardError(
                f"none of {len(self.rewards)} tasks has a reward; return a number from the agent, call emit_reward,"
                " or give a reward function"
            )
        return sum(self.known) / len(self.known)

    @property
    def interval(self) -> tuple[float, float]:
        """95% confidence interval of the mean."""
        return mean_interval(self.known)

    def __float__(self) -> float:
        return self.mean

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Evaluation | float | int) and float(self) == float(other)

    def __lt__(self, other: Evaluation | float) -> bool:
        return float(self) < float(other)

    def __hash__(self) -> int:
        return hash(self.rewards)

    def __str__(self) -> str:
        low, high = self.interval
        tail = f", {self.missing} missing" if self.missing else ""
        return f"{self.mean:.3f} (95% interval {low:.3f} to {high:.3f}, {len(self.known)} tasks{tail})"


def compare(before: Evaluation, after: Evaluation) -> Gain:
    """The paired gain over the tasks that have a reward in both."""
    pairs = [(b, a) for b, a in zip(before.rewards, after.rewards, strict=True) if b is not None and a is not None]
    if not pairs:
        raise RewardError("no task has a reward both before and after; nothing can be compared")
    return paired_gain([b for b, _ in pairs], [a for _, a in pairs])


async def evaluate_tasks(
    source: RolloutSource,
    tasks: Sequence[Any],
    *,
    name: str,
    resources_id: str,
    reward_weights: Mapping[str, float] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """One rollout for each task; `name` makes their ids, so that asking again continues."""
    plans = [RolloutPlan(f"{name}-{index:05d}", task, f"{name}-{index}") for index, task in enumerate(tasks)]
    collected = await source.collect(plans, resources_id=resources_id, mode="val", on_progress=on_progress)
    rewards = {
        trajectory.rollout_id: scalar_reward(trajectory.reward, reward_weights) for trajectory in collected.trajectories
    }
    return Evaluation(tuple(rewards.get(plan.rollout_id) for plan in plans), collected.seconds)
