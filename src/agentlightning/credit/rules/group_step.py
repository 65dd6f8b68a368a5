"""Group-in-group credit: a rollout against its group, and each call against the calls made in the same state (GiGPO).

With G_t the discounted return of a call, rewards of steps included, and S(s) all calls of the group in state s,

    A_t = A^E + omega A^S_t
    A^E   = (R - mean(R)) / std(R)                          over the rollouts of the group
    A^S_t = (G_t - mean(G)) / std(G)                        over S(s_t); 0 where they are equal or only one

Feng et al. 2025 (arXiv:2505.10978, sections 4.1 to 4.3), with the return as R where steps have rewards. Where all
rollouts pass the same states, the noise of all later steps is in G_t, and little is gained over `group_relative`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import ClassVar, Literal

from pydantic import Field

from agentlightning.credit.base import Advantages, CreditRule, Group, register, returns_to_go, standardised
from agentlightning.credit.states import StateKeys, state_keys


@register
class GroupStepCredit(CreditRule):
    """The rollout against its group plus the call against those in the same state."""

    type: Literal["group_step"] = "group_step"  # pyright: ignore[reportIncompatibleVariableOverride]
    aliases: ClassVar[tuple[str, ...]] = ("gigpo",)
    omega: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """The weight of the comparison within states."""
    gamma: float = Field(default=0.95, ge=0, le=1)
    """What a reward one call later is worth to a call."""
    similarity: float = Field(default=1.0, gt=0, le=1)
    """States are the same from this similarity of their observations on; 1: only equal ones."""
    normalize_std: bool = True
    """Divide by standard deviations."""

    def advantages(self, group: Group) -> Advantages | None:
        episodes = standardised([_return(returns_to_go(each)) for each in group], divide=self.normalize_std)
        returns = [returns_to_go(each, self.gamma) for each in group]
        steps = within_states(state_keys(group, self.similarity), returns, divide=self.normalize_std)
        if len(group) < self.min_group or (episodes is None and not any(map(any, steps))):
            return None
        outcomes = episodes or [0.0] * len(group)
        return [
            tuple(outcome + self.omega * step for step in own) for outcome, own in zip(outcomes, steps, strict=True)
        ]


def _return(to_go: list[float]) -> float:
    return to_go[0] if to_go else 0.0


def within_states(keys: StateKeys, numbers: list[list[float]], *, divide: bool) -> list[list[float]]:
    """Each call's number relative to those of all calls in the same state; 0.0 where these are equal."""
    members: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for i, own in enumerate(keys):
        for t, key in enumerate(own):
            members[key].append((i, t))
    found = [[0.0] * len(own) for own in keys]
    for places in members.values():
        for (i, t), value in zip(places, _relative([numbers[i][t] for i, t in places], divide), strict=True):
            found[i][t] = value
    return found


def _relative(numbers: list[float], divide: bool) -> list[float]:
    """`standardised`, for numbers of any size: what is equal is decided relative to the largest."""
    size = max(map(abs, numbers))
    relative = standardised([number / size for number in numbers], divide=divide) if size else None
    if relative is None:
        return [0.0] * len(numbers)
    return relative if divide else [size * number for number in relative]
