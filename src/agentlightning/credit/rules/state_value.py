"""State values: each call has the change of the value of its state, measured by the group's own rollouts.

With G_t the return of a rollout from call t on (step rewards r and the final reward), and N(s) the rollouts of the
group that were in state s, each counted once, at its first visit,

    V(s)  = mean of G over N(s)
    A_t   = r_t + V(s_{t+1}) - V(s_t),        V after the last call = the final reward
    sum_t A_t = G_0 - V(s_0)                  exactly: all that happened between the states is told apart

The difference of Monte Carlo state values (Sutton and Barto 2018, section 5.1, as a critic in section 13.5) without a
critic: what came before a call and what came after it are averaged over all rollouts that share the state, so that
neither is noise in its advantage.

- `history` k > 0: V is a weighted mean over the last 0 to k states being the same as well, of those orders with two
  visits or more, with weights (order + 1)^history_power (HGPO, arXiv:2602.22817).
- `pool` d > 0: visits of earlier groups of the task count d per group that has passed: n' = n + d c and
  V = (n mean(G) + d c m) / n', which are then remembered as c and m: a moving mean.
- A state with less than two visits, earlier ones included, has V = (n mean(G) + k prior) / (n + k), k = `prior_visits`:
  the prior is the learned value of the state if the policy has a value head, else the value of the state before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from agentlightning.credit.base import (
    SMALLEST_SPREAD,
    Credit,
    CreditContext,
    CreditRule,
    Group,
    plain_reward,
    register,
    returns_to_go,
    step_reward,
)
from agentlightning.credit.columns import monte_carlo_returns
from agentlightning.credit.memory import MemoryTable, memory_key
from agentlightning.credit.states import StateKeys, history_keys, repeated_states, state_keys
from agentlightning.trajectory import Trajectory, Transition

VALUES = "values"
SHARED_VISITS = 2.0
"""With as many visits a state's own mean is its value."""
FAINT = 0.05
"""Visits that count less than this are forgotten."""


@register
class StateValueCredit(CreditRule):
    """The change of the group's mean return from one state to the next."""

    type: Literal["state_value"] = "state_value"  # pyright: ignore[reportIncompatibleVariableOverride]
    uses: ClassVar[frozenset[str]] = frozenset({VALUES})
    gives_returns: ClassVar[bool] = True
    similarity: float = Field(default=1.0, gt=0, le=1)
    """States are the same from this similarity of their observations on; 1: only equal ones."""
    history: int = Field(default=0, ge=0, le=8)
    """Number of earlier states that may have to be the same, too."""
    history_power: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """How much more a longer common history counts."""
    pool: float = Field(default=0.8, ge=0, lt=1)
    """What a visit counts one group of the same task later; 0: each group stands for itself."""
    prior_visits: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """How many visits the prior counts for in the value of a state that was visited once."""

    @model_validator(mode="after")
    def _check_pool(self) -> Self:
        if self.similarity < 1 and self.pool and "pool" in self.model_fields_set:
            raise ValueError(
                f"similarity={self.similarity:g} compares observations within a group only; set pool=0, or similarity=1"
            )
        return self

    def assign(self, groups: Sequence[Group], context: CreditContext) -> list[Credit | None]:
        return [self.assign_group(group, state_keys(group, self.similarity), context) for group in groups]

    def assign_group(self, group: Group, keys: StateKeys, context: CreditContext) -> Credit | None:
        """The credit of one group whose states are known."""
        values = self._values(group, keys, context)
        found = [_differences(trajectory, own) for trajectory, own in zip(group, values, strict=True)]
        size = max((abs(plain_reward(each)) for each in group), default=0.0)
        learns = VALUES in context.columns
        largest = max((abs(advantage) for own in found for advantage in own), default=0.0)
        if largest <= SMALLEST_SPREAD * max(1.0, size):
            if not learns:
                return None
            found = [(0.0,) * len(own) for own in found]
        repeated, later = repeated_states(keys)
        counts = {"states": float(later), "states_repeated": float(repeated)}
        returns = monte_carlo_returns([returns_to_go(each) for each in group], group) if learns else None
        return Credit(found, returns=returns, counts=counts)

    def _values(self, group: Group, keys: StateKeys, context: CreditContext) -> list[list[float]]:
        """V of each state of each rollout."""
        returns = [returns_to_go(trajectory) for trajectory in group]
        orders = self._orders(keys)
        visits = self.remember(group, keys, context)
        start = sum(own[0] for own in returns if own) / max(1, sum(map(bool, returns)))
        learned = context if VALUES in context.columns else None
        return [
            self._along(each.transitions, [order[i] for order in orders], visits, start, learned)
            for i, each in enumerate(group)
        ]

    def remembered(self, group: Group, context: CreditContext) -> Mapping[str, Sequence[float]]:
        """The visits of earlier groups of the task, by state: how many they count for, and their mean return."""
        return context.memory.read(memory_key(group)) if self.pool > 0 and self.similarity >= 1 else {}

    def remember(self, group: Group, keys: StateKeys, context: CreditContext) -> MemoryTable:
        """The visits of this group together with the remembered ones, which they join."""
        now = _visits(self._orders(keys), [returns_to_go(trajectory) for trajectory in group])
        visits = _pooled(now, self.remembered(group, context), self.pool)
        if self.pool > 0 and self.similarity >= 1:
            context.memory.write(memory_key(group), visits)
        return visits

    def _orders(self, keys: StateKeys) -> list[StateKeys]:
        return [[history_keys(own, order) for own in keys] for order in range(self.history + 1)]

    def _along(
        self,
        calls: Sequence[Transition],
        orders: Sequence[Sequence[str]],
        visits: MemoryTable,
        start: float,
        learned: CreditContext | None,
    ) -> list[float]:
        """V of the states of one rollout, in order: a state seen once leans on the one before it."""
        values: list[float] = []
        for t, call in enumerate(calls):
            found = [visits[order[t]] for order in orders]
            shared = [
                ((order + 1) ** self.history_power, mean)
                for order, (count, mean) in enumerate(found)
                if count >= SHARED_VISITS
            ]
            if shared:
                values.append(sum(weight * mean for weight, mean in shared) / sum(weight for weight, _ in shared))
                continue
            before = values[-1] if values else start
            own: Any = () if learned is None else learned.of_call(VALUES, call)
            prior = float(own[0]) if len(own) else before
            count, mean = found[0]
            values.append((count * mean + self.prior_visits * prior) / (count + self.prior_visits))
        return values


def _differences(trajectory: Trajectory, values: list[float]) -> tuple[float, ...]:
    after = [*values[1:], plain_reward(trajectory)]
    return tuple(
        step_reward(call) + following - value
        for call, value, following in zip(trajectory.transitions, values, after, strict=False)
    )


def _visits(orders: list[StateKeys], returns: list[list[float]]) -> MemoryTable:
    """By state, the number of rollouts that were in it, and the mean of their returns from their first visit on."""
    found: dict[str, list[float]] = defaultdict(list)
    for keys in orders:
        for own, gains in zip(keys, returns, strict=True):
            first = dict(zip(reversed(own), reversed(gains), strict=True))
            for key, gain in first.items():
                found[key].append(gain)
    return {key: [float(len(gains)), sum(gains) / len(gains)] for key, gains in found.items()}


def _pooled(now: MemoryTable, earlier: Mapping[str, Sequence[float]], decay: float) -> MemoryTable:
    """Visits of this group and of earlier ones; states that have not been visited for long are forgotten."""
    found = {
        key: [decay * count, mean] for key, (count, mean) in earlier.items() if decay * count > FAINT or key in now
    }
    for key, (count, mean) in now.items():
        before, earlier_mean = found.get(key, (0.0, 0.0))
        total = count + before
        found[key] = [total, (count * mean + before * earlier_mean) / total]
    return found
