"""REINFORCE: the reward itself is the advantage, less a constant baseline (Williams 1992).

It learns from groups of one.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from agentlightning.credit.base import Advantages, CreditRule, Group, final_rewards, refuse_intermediate, register
from agentlightning.trajectory import Trajectory


@register
class ReinforceCredit(CreditRule):
    """Every call of a rollout has `reward - baseline`."""

    type: Literal["reinforce"] = "reinforce"  # pyright: ignore[reportIncompatibleVariableOverride]
    min_group: ClassVar[int] = 1
    baseline: float = 0.0
    """A reward that is neither good nor bad."""
    intermediate: Literal["refuse", "ignore"] = "refuse"
    """What to do with intermediate rewards, which this rule has no use for."""

    def check(self, trajectory: Trajectory) -> None:
        if self.intermediate == "refuse":
            refuse_intermediate(trajectory, self.type)

    def advantages(self, group: Group) -> Advantages | None:
        for trajectory in group:
            self.check(trajectory)
        gains = [reward - self.baseline for reward in final_rewards(group)]
        if not any(gains):
            return None
        return [(gain,) * len(t.transitions) for gain, t in zip(gains, group, strict=True)]
