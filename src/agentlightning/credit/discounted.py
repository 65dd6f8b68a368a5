"""Discounted returns: each call has the rewards that come after it, against the mean of the group's.

With r_k the intermediate reward after call k of n, and R the final reward, which follows the last call,

    G_k = sum_{j=k}^{n} gamma^(j - k) r_j + gamma^(n - k) R        the return of call k
    A_k = (G_k - mean(G)) / std(G)                                 over all calls of the group

Sutton and Barto, Reinforcement Learning (2nd ed. 2018), equations 3.8 and 13.8. With gamma = 1, no intermediate
rewards and rollouts of equally many calls it is `group_relative`.
"""

from __future__ import annotations

import statistics
from typing import Literal

from pydantic import Field

from agentlightning.credit.base import (
    SMALLEST_SPREAD,
    Advantages,
    CreditRule,
    Group,
    plain_reward,
    register,
    spread,
)
from agentlightning.errors import RewardError
from agentlightning.trajectory import Trajectory, Transition


@register
class DiscountedCredit(CreditRule):
    """The discounted return from a call on, against the mean over the calls of its group."""

    type: Literal["discounted"] = "discounted"  # pyright: ignore[reportIncompatibleVariableOverride]
    gamma: float = Field(default=0.95, ge=0, le=1)
    """What a reward one call later is worth."""
    normalize_std: bool = True
    """Divide by the standard deviation of the group's returns."""

    def advantages(self, group: Group) -> Advantages | None:
        returns = [self._returns(trajectory) for trajectory in group]
        every = [value for own in returns for value in own]
        if len(group) < self.min_group or not every or spread(every) <= SMALLEST_SPREAD:
            return None
        baseline = statistics.fmean(every)
        scale = statistics.pstdev(every) if self.normalize_std else 1.0
        return [tuple((value - baseline) / scale for value in own) for own in returns]

    def _returns(self, trajectory: Trajectory) -> list[float]:
        """G of each call, from the first to the last."""
        following = plain_reward(trajectory)
        returns: list[float] = []
        for call in reversed(trajectory.transitions):
            returns.append(_reward_after(call) + following)
            following = self.gamma * returns[-1]
        return returns[::-1]


def _reward_after(call: Transition) -> float:
    if isinstance(call.reward, dict):
        raise RewardError(f"call {call.span_id} has reward {call.reward!r}; credit needs one number")
    return 0.0 if call.reward is None else float(call.reward)
