"""Turn-level PPO: one clipped importance ratio for each model call, the geometric mean of those of its tokens.

    r_k = exp( 1/|k| sum_{t in k} (logprob_t - old_logprob_t) )       over the |k| tokens of call k
    loss_t = -min(r_k A_t, clip(r_k, 1 - clip_low, 1 + clip_high) A_t)

Between PPO, with a ratio for each token, and GSPO, with one for the rollout: the ratio type "segment" of ROLL
(arXiv:2506.06122), for credit that differs from call to call. The clipped objective is that of PPO (arXiv:1707.06347,
equation 7). It depends on what a call is: an answer that is asked for in two calls has two ratios.
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
    sums_over,
)


@register
class TurnLoss(TokenLoss):
    """The clipped importance ratio of whole calls."""

    type: Literal["turn"] = "turn"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """How far a call's ratio may fall below 1 before it stops counting."""
    clip_high: float = Field(default=0.28, gt=0)
    """How far a call's ratio may rise above 1 before it stops counting."""

    needs: ClassVar[frozenset[str]] = frozenset({ADVANTAGES, SAMPLED_LOGPROBS})
    decoupled: ClassVar[bool] = True

    def __call__(self, tokens: TokenBatch) -> LossValue:
        log_ratio, advantages = clamped_log_ratio(tokens), tokens.columns[ADVANTAGES]
        total, count = sums_over(tokens.call, log_ratio)
        ratio = shared_ratio(tokens, total / count)
        objective, clipped = clipped_objective(ratio, advantages, self.clip_low, self.clip_high)
        return LossValue(-(tokens.weights * objective).sum(), ratio_metrics(log_ratio, ratio, clipped))
