"""Evaluation: the rewards of an agent on tasks, their mean and its confidence interval.

A task whose rollout failed or gave no reward is part of the result: it is counted by its reason, never as 0.0, and the
interval covers any reward it could have had. Where one number must decide (a comparison, the choice of a checkpoint),
such a task counts as the lowest reward, so that an agent that crashes never beats one that answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import total_ordering

from agentlightning.credit.rejection import FAILED, describe_reasons
from agentlightning.errors import RewardError
from agentlightning.evaluation.intervals import Gain, lowest_means, mean_interval, paired_gain

WITHOUT_REWARD = (
    "return a number from the agent, call agl.emit_reward, or give a reward function (reward=..., --reward)"
)


@total_ordering
@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """The reward of each task. Compares and prints like its `score`.

    >>> agl.Evaluation(rewards=(1.0, 0.0, None)).mean
    0.5
    """

    rewards: tuple[float | None, ...]
    """One for each task, in the order of the tasks. None: the rollout failed, or gave no usable reward."""
    seconds: float = 0.0
    reasons: Mapping[str, int] = field(default_factory=dict[str, int])
    """The number of tasks without a reward by reason: `failed`, `missing_reward`, `bad_reward` ..."""

    @property
    def known(self) -> list[float]:
        """The rewards of the tasks that have one."""
        return [reward for reward in self.rewards if reward is not None]

    @property
    def missing(self) -> int:
        """Tasks without a reward, those whose rollout failed included."""
        return len(self.rewards) - len(self.known)

    @property
    def failed(self) -> int:
        """Tasks whose rollout failed."""
        return self.reasons.get(FAILED, 0)

    @property
    def mean(self) -> float:
        """The mean reward over the tasks that have one. Raises RewardError if none has."""
        if not self.known:
            counted = f" ({describe_reasons(self.reasons)})" if self.reasons else ""
            raise RewardError(f"none of {len(self.rewards)} tasks has a reward{counted}; {WITHOUT_REWARD}")
        return sum(self.known) / len(self.known)

    @property
    def score(self) -> float:
        """The mean with the lowest possible reward for tasks without one: 0 if rewards lie between 0 and 1, else the
        lowest one seen. Equals `mean` if every task has a reward. Raises RewardError if none has."""
        return lowest_means(self.rewards)[0] if self.missing and self.known else self.mean

    @property
    def interval(self) -> tuple[float, float]:
        """95% confidence interval of the mean over all tasks, for any rewards that those without one could have had."""
        return mean_interval(self.rewards)

    def __float__(self) -> float:
        return self.score

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Evaluation):
            return self._comparable == other._comparable
        return isinstance(other, float | int) and self._comparable == other

    def __lt__(self, other: Evaluation | float) -> bool:
        return float(self) < float(other)

    def __hash__(self) -> int:
        return hash(self._comparable)

    @property
    def _comparable(self) -> float | tuple[float | None, ...]:
        return self.score if self.known else self.rewards

    def __str__(self) -> str:
        low, high = self.interval
        if not self.missing:
            return f"{self.mean:.3f} (95% interval {low:.3f} to {high:.3f}, {len(self.known)} tasks)"
        why = describe_reasons(self.reasons) or f"{self.missing} missing"
        return (
            f"{self.mean:.3f} on {len(self.known)} of {len(self.rewards)} tasks, {why}; {self.score:.3f} with those at"
            f" the lowest reward (95% interval {low:.3f} to {high:.3f})"
        )


def compare(before: Evaluation, after: Evaluation) -> Gain:
    """The paired gain over the tasks that have a reward in both; its interval covers the others."""
    return paired_gain(before.rewards, after.rewards)


def gain_of(before: Evaluation, after: Evaluation) -> Gain:
    """Like `compare`, but with NaN instead of an error if no task can be compared."""
    if any(b is not None and a is not None for b, a in zip(before.rewards, after.rewards, strict=True)):
        return compare(before, after)
    return Gain(math.nan, math.nan, math.nan, (math.nan, math.nan), 0, before.missing, after.missing)
