"""Hierarchical credit: for each group the rule that there is evidence for.

Without a value head the group's own rollouts are the evidence:

    share = calls, after the first of each rollout, in a state that another rollout was in / all such calls

Other rollouts are those of the group, and of earlier groups of the task that are remembered (`pool`).

- share >= `repeated`: `state_value`, which needs no critic;
- else the return of the rollout against the mean of its group, the same for every call: `uniform`.

With a value head that is trained (the loss "value"), the evidence is how well state values and the critic have
predicted returns of earlier groups that neither was fit to (`agentlightning.credit.evidence`):

- `state_value` where the states' mean squared error is below the critic's by the share `margin`, by default a tenth;
- else `value`, also where the mean of the group's other rollouts predicts as well: the critic is a baseline for groups
  without spread, too.

The first group, of which nothing is known, is decided as without a head. Whatever is chosen, the critic learns from
every group.

The metrics of a step count the groups of each kind: credit_hierarchical_state_value, credit_hierarchical_value,
credit_hierarchical_uniform; and, over the groups, add up what the errors were measured on and the errors themselves:
credit_evidence_calls, credit_evidence_mean, credit_evidence_states, credit_evidence_critic. The episode level of
LightningRL: Luo et al. 2025, arXiv:2508.03680, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal

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
from agentlightning.credit.columns import monte_carlo_returns
from agentlightning.credit.evidence import Evidence, Predictor, group_evidence, read_evidence, write_evidence
from agentlightning.credit.rules.state_value import StateValueCredit
from agentlightning.credit.rules.value import VALUES, ValueCredit
from agentlightning.credit.states import StateKeys, repeated_states, state_keys

Choice = Literal["state_value", "value", "uniform"]
CHOICES: Mapping[Predictor, Choice] = MappingProxyType({"states": "state_value", "critic": "value"})


@register
class HierarchicalCredit(CreditRule):
    """`state_value` where states repeat, else `uniform`; with a value head the better predictor of returns."""

    type: Literal["hierarchical"] = "hierarchical"  # pyright: ignore[reportIncompatibleVariableOverride]
    uses: ClassVar[frozenset[str]] = frozenset({VALUES})
    gives_returns: ClassVar[bool] = True
    repeated: float = Field(default=0.25, gt=0, le=1)
    """Without a value head: the share of repeated states from which on they decide."""
    margin: float = Field(default=0.1, ge=0, lt=1)
    """With a value head: how much smaller the error of state values has to be than that of the critic."""
    evidence: float = Field(default=0.97, ge=0, lt=1)
    """What an error counts one group later; 0: the last group alone."""
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
        earlier = by_state.remembered(group, context)
        repeated, later = repeated_states(keys, earlier)
        chosen: Choice = "state_value" if later and repeated >= self.repeated * later else "uniform"
        counts = {"states": float(later), "states_repeated": float(repeated)}
        if VALUES in context.columns:
            known = read_evidence(context.memory)
            found = group_evidence(group, keys, _weighed(earlier, by_state.pool), _values(group, context))
            write_evidence(context.memory, known.faded(self.evidence) + found)
            if (better := known.better(self.margin)) is not None:
                chosen = CHOICES[better]
            counts |= _counts(found)
        credit = self._credit(chosen, group, keys, by_state, by_value, context)
        if repeated and chosen != "state_value":
            by_state.remember(group, keys, context)
        return None if credit is None else replace(credit, counts={**counts, f"hierarchical_{chosen}": 1.0})

    def _credit(
        self,
        chosen: Choice,
        group: Group,
        keys: StateKeys,
        by_state: StateValueCredit,
        by_value: ValueCredit,
        context: CreditContext,
    ) -> Credit | None:
        if chosen == "value":
            return by_value.assign_group(group, context)
        if chosen == "state_value":
            return by_state.assign_group(group, keys, context)
        credit = uniform_returns(group)
        if VALUES not in context.columns:
            return credit
        returns = monte_carlo_returns([returns_to_go(each) for each in group], group)
        nothing = [(0.0,) * len(each.transitions) for each in group]
        return Credit(nothing, returns=returns) if credit is None else replace(credit, returns=returns)


def _weighed(earlier: Mapping[str, Sequence[float]], pool: float) -> dict[str, tuple[float, float]]:
    """Remembered visits as they count in this group."""
    return {key: (pool * count, mean) for key, (count, mean) in earlier.items()}


def _values(group: Group, context: CreditContext) -> list[list[float]]:
    """The critic's value of the state of each call; 0 for one without tokens."""
    found: list[list[float]] = []
    for trajectory in group:
        own: list[Any] = [context.of_call(VALUES, call) for call in trajectory.transitions]
        found.append([float(each[0]) if len(each) else 0.0 for each in own])
    return found


def _counts(found: Evidence) -> dict[str, float]:
    names = ("evidence_calls", "evidence_mean", "evidence_states", "evidence_critic")
    return dict(zip(names, found.numbers(), strict=True))


def uniform_returns(group: Group) -> Credit | None:
    """Every call of a rollout has its return, less the mean of the group's."""
    gains = standardised([sum(returns_to_go(each)[:1]) for each in group], divide=False)
    if gains is None:
        return None
    return Credit([(gain,) * len(each.transitions) for gain, each in zip(gains, group, strict=True)])
