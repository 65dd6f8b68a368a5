"""Information gain: each call has the rise of the policy's probability of the known answer that it brought (IGPO).

With a the answer of L tokens, s_k the history that call k saw, and n calls,

    p_k = exp( 1/L sum_j log pi(a_j | s_k, a_{<j}) )
    r_k = p_{k+1} - p_k  for k < n,   r_n = R
    A_k = sum_{j >= k} gamma^(j - k) (r_j - mean(r)) / std(r)        over all calls of the group

A call whose p is not known, because it sampled no token, neither gains nor loses: p stays what it was.

Wang et al. 2025 (arXiv:2510.14967, section 3), with the final reward R at the last call. The answer is a field of the
task; the policy scores it after the prompt of each call, which is one forward pass over the prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

from pydantic import Field, field_validator

from agentlightning.credit.base import (
    Credit,
    CreditContext,
    Group,
    OutcomeRule,
    plain_reward,
    register,
    standardised,
)
from agentlightning.errors import RewardError
from agentlightning.trajectory import Trajectory

ANSWER_LOGPROBS = "answer_logprobs"
"""By call, log p of each token of the known answer, said in place of what the call sampled."""


@register
class InformationGainCredit(OutcomeRule):
    """The rise of p(answer) from one call to the next, and the final reward at the last."""

    type: Literal["information_gain"] = "information_gain"  # pyright: ignore[reportIncompatibleVariableOverride]
    aliases: ClassVar[tuple[str, ...]] = ("igpo",)
    needs: ClassVar[frozenset[str]] = frozenset({ANSWER_LOGPROBS})
    answer: str = "answer"
    """The field of the task that holds the answer."""
    answer_format: str = "{answer}"
    """How the policy would say it: `{answer}` stands for the answer."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """What a gain one call later is worth."""
    normalize_std: bool = True
    """Divide by the standard deviation of the group's gains."""

    @field_validator("answer_format")
    @classmethod
    def _check_format(cls, text: str) -> str:
        if "{answer}" not in text:
            raise ValueError(f'answer_format={text!r} does not contain "{{answer}}"')
        return text

    def check(self, trajectory: Trajectory) -> None:
        self.answer_text(trajectory)
        super().check(trajectory)

    def answer_text(self, trajectory: Trajectory) -> str:
        """The known answer as the policy would say it. Raises RewardError where the task has none."""
        task = cast("Mapping[str, Any]", trajectory.task) if isinstance(trajectory.task, Mapping) else {}
        known = task.get(self.answer)
        if known is None or not str(known):
            raise RewardError(
                f'the task of rollout {trajectory.rollout_id} has no {self.answer!r}, which credit rule "{self.type}" '
                f"needs; it has {sorted(task) or 'no fields'}. Set credit.answer to the field with the known answer"
            )
        return self.answer_format.replace("{answer}", str(known))

    def assign(self, groups: Sequence[Group], context: CreditContext) -> list[Credit | None]:
        return [self._group(group, context) for group in groups]

    def _group(self, group: Group, context: CreditContext) -> Credit | None:
        gains = [self._gains(trajectory, context) for trajectory in group]
        found = standardised([gain for own in gains for gain in own], divide=self.normalize_std)
        if found is None:
            return None
        every = iter(found)
        return Credit([_to_go([next(every) for _ in own], self.gamma) for own in gains])

    def _gains(self, trajectory: Trajectory, context: CreditContext) -> list[float]:
        columns = [context.of_call(ANSWER_LOGPROBS, call) for call in trajectory.transitions]
        chances = [math.exp(float(sum(own)) / len(own)) if len(own) else None for own in columns]
        known = [chance for chance in chances if chance is not None]
        gains, before = list[float](), known[0] if known else 0.0
        for chance in chances[1:]:
            gains.append(0.0 if chance is None else chance - before)
            before = before if chance is None else chance
        return [*gains, plain_reward(trajectory)] if chances else []


def _to_go(numbers: list[float], gamma: float) -> list[float]:
    found, following = list[float](), 0.0
    for number in reversed(numbers):
        following = number + gamma * following
        found.append(following)
    return found[::-1]
