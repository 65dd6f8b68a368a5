"""Intermediate rewards: each call has the step rewards that come after it, each against the mean of its group's.

With r_j the reward after call j, where there is one, and R the final reward,

    r~_j = (r_j - mean(r)) / std(r)                over all step rewards of the group
    A_k  = weight * sum_{j >= k} r~_j + (R - mean(R)) / std(R)

Process supervision of GRPO: Shao et al. 2024, DeepSeekMath (arXiv:2402.03300, section 4.1.3), with the final reward
beside it as in outcome supervision (section 4.1.2). Equal rewards, of steps or of rollouts, add nothing.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentlightning.credit.base import (
    Advantages,
    CreditRule,
    Group,
    final_rewards,
    register,
    standardised,
    step_reward,
)


@register
class IntermediateCredit(CreditRule):
    """The sum of the step rewards after a call, and the final reward, each relative to the group."""

    type: Literal["intermediate"] = "intermediate"  # pyright: ignore[reportIncompatibleVariableOverride]
    weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """What step rewards count beside the final reward."""
    normalize_std: bool = True
    """Divide by the standard deviations of the group."""

    def advantages(self, group: Group) -> Advantages | None:
        given = [[call.reward is not None for call in each.transitions] for each in group]
        rewards = [step_reward(call) for each in group for call in each.transitions if call.reward is not None]
        steps = standardised(rewards, divide=self.normalize_std)
        final = standardised(final_rewards(group), divide=self.normalize_std)
        if len(group) < self.min_group or (steps is None and final is None):
            return None
        every = iter(steps or [0.0] * len(rewards))
        gains = [[next(every) if has else 0.0 for has in own] for own in given]
        outcomes = final or [0.0] * len(group)
        return [self._to_go(own, outcome) for own, outcome in zip(gains, outcomes, strict=True)]

    def _to_go(self, gains: list[float], outcome: float) -> tuple[float, ...]:
        following, found = outcome, list[float]()
        for gain in reversed(gains):
            following += self.weight * gain
            found.append(following)
        return tuple(found[::-1])
