"""Leave-one-out credit: a rollout's reward against the mean of the others of its group (RLOO, LOOP).

    A_i = R_i - 1 / (G - 1) sum_{j != i} R_j

Ahmadian et al. 2024, Back to Basics (arXiv:2402.14740, equation 8), after Kool et al. 2019; it is the advantage of LOOP
(Chen et al. 2025, arXiv:2502.01600). Unlike the mean of the whole group, the baseline does not depend on the rollout
itself, so that the gradient is unbiased. Nothing is divided by a standard deviation.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from agentlightning.credit.base import (
    SMALLEST_SPREAD,
    Advantages,
    Group,
    OutcomeRule,
    final_rewards,
    register,
    spread,
)


@register
class LeaveOneOutCredit(OutcomeRule):
    """The rollout's reward against the mean of the others."""

    type: Literal["leave_one_out"] = "leave_one_out"  # pyright: ignore[reportIncompatibleVariableOverride]
    aliases: ClassVar[tuple[str, ...]] = ("rloo", "loop")

    def advantages(self, group: Group) -> Advantages | None:
        for trajectory in group:
            self.check(trajectory)
        rewards = final_rewards(group)
        if len(rewards) < self.min_group or spread(rewards) <= SMALLEST_SPREAD:
            return None
        total, others = sum(rewards), len(rewards) - 1
        gains = [reward - (total - reward) / others for reward in rewards]
        return [(gain,) * len(each.transitions) for gain, each in zip(gains, group, strict=True)]
