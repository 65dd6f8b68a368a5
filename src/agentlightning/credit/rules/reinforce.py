"""REINFORCE: the reward itself is the advantage, less a constant baseline (Williams 1992).

It learns from groups of one.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from agentlightning.credit.base import Advantages, Group, OutcomeRule, final_rewards, register


@register
class ReinforceCredit(OutcomeRule):
    """Every call of a rollout has `reward - baseline`."""

    type: Literal["reinforce"] = "reinforce"  # pyright: ignore[reportIncompatibleVariableOverride]
    min_group: ClassVar[int] = 1
    baseline: float = 0.0
    """A reward that is neither good nor bad."""

    def advantages(self, group: Group) -> Advantages | None:
        for trajectory in group:
            self.check(trajectory)
        gains = [reward - self.baseline for reward in final_rewards(group)]
        return [(gain,) * len(t.transitions) for gain, t in zip(gains, group, strict=True)]
