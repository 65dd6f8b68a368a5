"""Judged steps: each call's score by a judge, against those of its group, beside the final reward.

With q_k the score of call k,

    A_k = weight * (q_k - mean(q)) / std(q) + (R - mean(R)) / std(R)

over all scored calls, and all rollouts, of the group. The scores are the intermediate rewards that the agent, its
environment or a rule over spans recorded; or a `scorer`, a function of a trajectory that returns one number for each of
its calls and may ask a model. A rollout whose scorer fails, or does not give a finite number for each call, is not
learned from (weight 0) and counted, credit_judge_failed; the first of a batch is logged.

Step scores relative to the group instead of as returns: Shao et al. 2024, DeepSeekMath (arXiv:2402.03300, section
4.1.3), with the scores of the step itself in place of their sum.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

from pydantic import Field, field_validator

from agentlightning.credit.base import (
    Credit,
    CreditContext,
    CreditRule,
    Group,
    final_rewards,
    register,
    standardised,
    step_reward,
)
from agentlightning.errors import ConfigError, RewardError
from agentlightning.trajectory import Trajectory

logger = logging.getLogger(__name__)


@register
class JudgeCredit(CreditRule):
    """The score of each call relative to its group, beside the final reward."""

    type: Literal["judge"] = "judge"  # pyright: ignore[reportIncompatibleVariableOverride]
    scorer: str | None = None
    """The function that scores the calls of a trajectory, as "module:function". None: their intermediate rewards."""
    weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """What a call's score counts beside the final reward."""
    normalize_std: bool = True
    """Divide by the standard deviations of the group."""

    @field_validator("scorer")
    @classmethod
    def _check_name(cls, scorer: str | None) -> str | None:
        if scorer is not None and not all(scorer.partition(":")):
            raise ValueError(f'scorer={scorer!r} names no function; write "module:function"')
        return scorer

    def check(self, trajectory: Trajectory) -> None:
        if (
            self.scorer is None
            and trajectory.transitions
            and all(call.reward is None for call in trajectory.transitions)
        ):
            raise RewardError(
                f'no call of rollout {trajectory.rollout_id} has a score, which credit rule "judge" needs: emit '
                'rewards between the calls, or set scorer="module:function"'
            )

    def assign(self, groups: Sequence[Group], context: CreditContext) -> list[Credit | None]:
        score = _recorded if self.scorer is None else _scorer(self.scorer)
        failures: list[str] = []
        credits = [self._group(group, [_scores(score, each, failures) for each in group]) for group in groups]
        if failures:
            logger.warning("%d rollouts could not be judged and are not learned from: %s", len(failures), failures[0])
        return credits

    def _group(self, group: Group, scores: list[list[float | None] | None]) -> Credit | None:
        known = [score for own in scores for score in own or () if score is not None]
        steps = standardised(known, divide=self.normalize_std)
        final = standardised(final_rewards(group), divide=self.normalize_std)
        if steps is None and final is None:
            return None
        every = iter(steps or [0.0] * len(known))
        outcomes = final or [0.0] * len(group)
        advantages: list[list[float]] = []
        for each, own, outcome in zip(group, scores, outcomes, strict=True):
            own = own or [None] * len(each.transitions)
            advantages.append([outcome + self.weight * (0.0 if one is None else next(every)) for one in own])
        failed = [own is None for own in scores]
        weights = [[float(not lost)] * len(each.transitions) for each, lost in zip(group, failed, strict=True)]
        return Credit(advantages, weights, counts={"judge_failed": float(sum(failed))})


Scorer = Callable[[Trajectory], Sequence[Any]]


@cache
def _scorer(name: str) -> Scorer:
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"scorer={name!r} cannot be loaded: {error}") from error


def _recorded(trajectory: Trajectory) -> list[float | None]:
    return [None if call.reward is None else step_reward(call) for call in trajectory.transitions]


def _scores(score: Scorer, trajectory: Trajectory, failures: list[str]) -> list[float | None] | None:
    """One score for each call, None for a call without; None where the scorer failed."""
    try:
        found = [None if each is None else float(each) for each in score(trajectory)]
    except RewardError:
        raise
    except Exception as error:  # noqa: BLE001  The boundary of the user's function, which may raise anything.
        failures.append(f"the scorer failed on rollout {trajectory.rollout_id}: {error!r}")
        return None
    if len(found) != len(trajectory.transitions):
        calls = len(trajectory.transitions)
        failures.append(f"the scorer gave {len(found)} scores for the {calls} calls of rollout {trajectory.rollout_id}")
        return None
    if not all(each is None or math.isfinite(each) for each in found):
        failures.append(f"the scorer gave rollout {trajectory.rollout_id} a score that is not finite")
        return None
    return found
