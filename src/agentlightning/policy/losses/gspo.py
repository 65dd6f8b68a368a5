"""GSPO: one importance ratio for each rollout, the geometric mean of those of its tokens.

    s = exp( 1/|y| sum_t (logprob_t - old_logprob_t) )       over the |y| tokens the policy sampled in the rollout
    loss_t = -min(s A_t, clip(s, 1 - clip_low, 1 + clip_high) A_t)

Zheng et al. 2025, arXiv:2507.18071: equation 7 is the ratio, equation 5 the objective; tokens with advantages of their
own as in equation 13 (GSPO-token, the same where they are equal); the bounds are those of section 5.1. A rollout is
clipped or trained as a whole. It has one ratio however many calls it was made with: a trainer with one row for each
call has as many as there are rows.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from agentlightning.policy.losses.base import (
    ADVANTAGES,
    SAMPLED_LOGPROBS,
    LossValue,
    TokenBatch,
    TokenLoss,
    clamped_log_ratio,
    clipped_objective,
    ratio_metrics,
    register,
    shared_ratio,
    sums_over_rollout,
)


@register
class GSPOLoss(TokenLoss):
    """The clipped importance ratio of whole rollouts."""

    type: Literal["gspo"] = "gspo"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """How far a rollout's ratio may fall below 1 before it stops counting."""
    clip_high: float = Field(default=4e-4, gt=0)
    """How far a rollout's ratio may rise above 1 before it stops counting."""

    needs: ClassVar[frozenset[str]] = frozenset({ADVANTAGES, SAMPLED_LOGPROBS})
    decoupled: ClassVar[bool] = True
    spans_rollout: ClassVar[bool] = True

    def __call__(self, tokens: TokenBatch) -> LossValue:
        log_ratio, advantages = clamped_log_ratio(tokens), tokens.columns[ADVANTAGES]
        total, count = sums_over_rollout(tokens, log_ratio)
        ratio = shared_ratio(tokens, total / count)
        objective, clipped = clipped_objective(ratio, advantages, self.clip_low, self.clip_high)
        return LossValue(-(tokens.weights * objective).sum(), ratio_metrics(log_ratio, ratio, clipped))
