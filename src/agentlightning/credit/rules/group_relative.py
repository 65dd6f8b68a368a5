"""Group-relative credit: every call of a rollout has the rollout's advantage over its group (GRPO).

    A_i = (R_i - mean(R)) / std(R)

Shao et al. 2024, DeepSeekMath, equation for outcome supervision (arXiv:2402.03300, section 4.1.2), with the
population standard deviation. Without the division it is the advantage of Dr. GRPO (Liu et al. 2025, arXiv:2503.20783).
"""

from __future__ import annotations

from typing import ClassVar, Literal

from agentlightning.credit.base import (
    Advantages,
    Group,
    OutcomeRule,
    final_rewards,
    register,
    standardised,
)


@register
class GroupRelativeCredit(OutcomeRule):
    """The rollout's reward against the mean of its group."""

    type: Literal["group_relative"] = "group_relative"  # pyright: ignore[reportIncompatibleVariableOverride]
    aliases: ClassVar[tuple[str, ...]] = ("uniform", "grpo")
    normalize_std: bool = True
    """Divide by the group's standard deviation."""

    def advantages(self, group: Group) -> Advantages | None:
        for trajectory in group:
            self.check(trajectory)
        found = standardised(final_rewards(group), divide=self.normalize_std)
        if len(group) < self.min_group or found is None:
            return None
        return [(advantage,) * len(each.transitions) for advantage, each in zip(found, group, strict=True)]
