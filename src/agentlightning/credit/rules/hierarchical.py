"""Hierarchical credit: for each group the rule that its own rollouts are evidence for.

    share = calls, after the first of each rollout, in a state that another rollout was in / all such calls

Other rollouts are those of the group, and of earlier groups of the task that are remembered (`pool`).

- share >= `repeated`: `state_value`, which needs no critic;
- else `value`, if the policy's value head is trained (the loss "value");
- else the return of the rollout against the mean of its group, the same for every call: `uniform`.

The metrics of a step count the groups of each kind: credit_hierarchical_state_value, credit_hierarchical_value,
credit_hierarchical_uniform. The episode level of LightningRL: Luo et al. 2025, arXiv:2508.03680, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from agentlightning.credit.base import (
    Credit,
    CreditContext,
    CreditRule,
    Group,
    register,
    returns_to_go,
    standardised,
)
from agentlightning.credit.rules.state_value import StateValueCredit
from agentlightning.credit.rules.value import VALUES, ValueCredit
from agentlightning.credit.states import repeated_states, state_keys


@register
class HierarchicalCredit(CreditRule):
    """`state_value` where states repeat, else `value` where there is a value head, else `uniform`."""

    type: Literal["hierarchical"] = "hierarchical"  # pyright: ignore[reportIncompatibleVariableOverride]
    uses: ClassVar[frozenset[str]] = frozenset({VALUES})
    gives_returns: ClassVar[bool] = True
    repeated: float = Field(default=0.25, gt=0, le=1)
    """The share of repeated states from which on they decide."""
    similarity: float = Field(default=1.0, gt=0, le=1)
    """States are the same from this similarity of their observations on; 1: only equal ones."""
    history: int = Field(default=0, ge=0, le=8)
    """Number of earlier states that may have to be the same, too."""
    pool: float | None = Field(default=None, ge=0, lt=1)
    """What a visit counts one group of the same task later. None: as in `state_value`."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Of `value`: what a reward one call later is worth."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """Of `value`: how much of what lies behind the next call counts."""

    def assign(self, groups: Sequence[Group], context: CreditContext) -> list[Credit | None]:
        by_state, by_value = self.rules()
        return [self._group(group, by_state, by_value, context) for group in groups]

    def rules(self) -> tuple[StateValueCredit, ValueCredit]:
        """The rules it chooses from."""
        pool = {} if self.pool is None else {"pool": self.pool}
        return (
            StateValueCredit.model_validate({"similarity": self.similarity, "history": self.history, **pool}),
            ValueCredit(gamma=self.gamma, lam=self.lam),
        )

    def _group(
        self, group: Group, by_state: StateValueCredit, by_value: ValueCredit, context: CreditContext
    ) -> Credit | None:
        keys = state_keys(group, self.similarity)
        repeated, later = repeated_states(keys, by_state.remembered(group, context))
        if later and repeated >= self.repeated * later:
            chosen, credit = "state_value", by_state.assign_group(group, keys, context)
        elif VALUES in context.columns:
            chosen, credit = "value", by_value.assign_group(group, context)
        else:
            chosen, credit = "uniform", uniform_returns(group)
        if repeated and chosen != "state_value":
            by_state.remember(group, keys, context)
        if credit is None:
            return None
        counts = {"states": float(later), "states_repeated": float(repeated), f"hierarchical_{chosen}": 1.0}
        return replace(credit, counts=counts)


def uniform_returns(group: Group) -> Credit | None:
    """Every call of a rollout has its return, less the mean of the group's."""
    gains = standardised([sum(returns_to_go(each)[:1]) for each in group], divide=False)
    if gains is None:
        return None
    return Credit([(gain,) * len(each.transitions) for gain, each in zip(gains, group, strict=True)])
