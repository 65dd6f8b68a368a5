"""Discounted returns: each call has the rewards that come after it, against the mean of the group's.

With r_k the intermediate reward after call k of n, and R the final reward, which follows the last call,

    G_k = sum_{j=k}^{n} gamma^(j - k) r_j + gamma^(n - k) R        the return of call k
    A_k = (G_k - mean(G)) / std(G)                                 over all calls of the group

Sutton and Barto, Reinforcement Learning (2nd ed. 2018), equations 3.8 and 13.8. With gamma = 1, no intermediate
rewards and rollouts of equally many calls it is `group_relative`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentlightning.credit.base import Advantages, CreditRule, Group, register, returns_to_go, standardised


@register
class DiscountedCredit(CreditRule):
    """The discounted return from a call on, against the mean over the calls of its group."""

    type: Literal["discounted"] = "discounted"  # pyright: ignore[reportIncompatibleVariableOverride]
    gamma: float = Field(default=0.95, ge=0, le=1)
    """What a reward one call later is worth."""
    normalize_std: bool = True
    """Divide by the standard deviation of the group's returns."""

    def advantages(self, group: Group) -> Advantages | None:
        returns = [returns_to_go(trajectory, self.gamma) for trajectory in group]
        found = standardised([value for own in returns for value in own], divide=self.normalize_std)
        if len(group) < self.min_group or found is None:
            return None
        every = iter(found)
        return [tuple(next(every) for _ in own) for own in returns]
