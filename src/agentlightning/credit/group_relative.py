"""Uniform credit: every call of a rollout shares the rollout's advantage over its group (GRPO).

    A_i = (R_i - mean(R)) / std(R)

Shao et al. 2024, DeepSeekMath, equation for outcome supervision (arXiv:2402.03300, section 4.1.2), with the
population standard deviation. Without the division it is the advantage of Dr. GRPO (Liu et al. 2025, arXiv:2503.20783).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

from agentlightning.credit.base import Advantages, CreditRule, final_rewards, refuse_intermediate, register
from agentlightning.trajectory import Trajectory

SMALLEST_SPREAD = 1e-9
"""Rewards closer than this, relative to their size, are equal: what is left of them is rounding."""


@register
class UniformCredit(CreditRule):
    """The rollout's reward against the mean of its group."""

    type: Literal["uniform"] = "uniform"  # pyright: ignore[reportIncompatibleVariableOverride]
    normalize_std: bool = True
    """Divide by the group's standard deviation."""
    intermediate: Literal["refuse", "ignore"] = "refuse"
    """What to do with intermediate rewards, which this rule has no use for."""

    def check(self, trajectory: Trajectory) -> None:
        if self.intermediate == "refuse":
            refuse_intermediate([trajectory], self.type)

    def advantages(self, group: Sequence[Trajectory]) -> Advantages | None:
        for trajectory in group:
            self.check(trajectory)
        rewards = final_rewards(group)
        if len(rewards) < self.min_group or _spread(rewards) <= SMALLEST_SPREAD:
            return None
        mean = statistics.fmean(rewards)
        scale = statistics.pstdev(rewards) if self.normalize_std else 1.0
        return [((r - mean) / scale,) * len(t.transitions) for r, t in zip(rewards, group, strict=True)]


def _spread(rewards: Sequence[float]) -> float:
    return (max(rewards) - min(rewards)) / max(1.0, *map(abs, rewards))
