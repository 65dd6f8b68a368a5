"""Learned values: generalised advantages over the calls of a rollout, and below them over the tokens of each call.

V_k is the value that the policy's value head gives the state of call k, before its first token, r_k the reward after
the call and R the final reward, behind the last call:

    delta_k = r_k + gamma V_{k+1} - V_k,             V_{n+1} = R
    A_k     = sum_{l >= 0} (gamma lambda)^l delta_{k+l}

Schulman et al. 2016 (arXiv:1506.02438, equation 16), with a call as one action. Within a call of tokens 1..J with
values v_1 = V_k, ..., v_J, what the call led to, V_k + A_k, stands behind its last token:

    d_j = v_{j+1} - v_j,  v_{J+1} = V_k + A_k;       a_j = sum_{l >= 0} token_lambda^l d_{j+l}

Two levels as in VAGEN (Wang et al. 2025, arXiv:2510.16907, section 3), with another anchor of a turn. There the value
of a turn is the one behind the last token of its answer, and A_k starts the token level at that token. Here it is the
one before the first token, and what the answer itself changed is in A_k, too: with token_lambda = 1 the first token has
A_k. One token then has no more lambda than a call has: rewards reach the first of a hundred calls undamped by their
length. The head learns a_j + v_j.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from agentlightning.credit.base import Credit, CreditContext, CreditRule, Group, plain_reward, register, step_reward
from agentlightning.trajectory import Trajectory

VALUES = "values"


@register
class ValueCredit(CreditRule):
    """Generalised advantage estimation with the values of the policy's value head, by call and by token."""

    type: Literal["value"] = "value"  # pyright: ignore[reportIncompatibleVariableOverride]
    aliases: ClassVar[tuple[str, ...]] = ("gae",)
    min_group: ClassVar[int] = 1
    needs: ClassVar[frozenset[str]] = frozenset({VALUES})
    gives_returns: ClassVar[bool] = True
    gamma: float = Field(default=1.0, ge=0, le=1)
    """What a reward one call later is worth."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """How much of what lies behind the next call counts; 0: values alone, 1: rewards alone."""
    token_lam: float = Field(default=1.0, ge=0, le=1)
    """The same for the tokens of a call."""

    def assign(self, groups: Sequence[Group], context: CreditContext) -> list[Credit | None]:
        return [self.assign_group(group, context) for group in groups]

    def assign_group(self, group: Group, context: CreditContext) -> Credit:
        """The credit of one group."""
        found = [self._rollout(trajectory, context) for trajectory in group]
        return Credit(
            [[advantage for advantage, _ in own] for own in found],
            returns=[[target for _, target in own] for own in found],
            counts={"value_groups": 1.0},
        )

    def _rollout(self, trajectory: Trajectory, context: CreditContext) -> list[tuple[Any, Any]]:
        """(advantages, returns) of the tokens of each call."""
        import numpy as np

        values = [np.asarray(context.of_call(VALUES, call), np.float64) for call in trajectory.transitions]
        states = [float(own[0]) if len(own) else 0.0 for own in values]
        gains = self._calls(trajectory, states)
        tokens = [self._tokens(own, state + gain) for own, state, gain in zip(values, states, gains, strict=True)]
        return [(advantage, advantage + own) for advantage, own in zip(tokens, values, strict=True)]

    def _calls(self, trajectory: Trajectory, states: list[float]) -> list[float]:
        following, later = plain_reward(trajectory), 0.0
        found: list[float] = []
        for place, call in reversed(list(enumerate(trajectory.transitions))):
            discount = self.gamma if place + 1 < len(states) else 1.0
            later = step_reward(call) + discount * following - states[place] + self.gamma * self.lam * later
            found.append(later)
            following = states[place]
        return found[::-1]

    def _tokens(self, values: Any, end: float) -> Any:
        import numpy as np

        found = np.zeros(len(values))
        following, later = end, 0.0
        for place in range(len(values) - 1, -1, -1):
            later = following - values[place] + self.token_lam * later
            found[place] = later
            following = values[place]
        return found
