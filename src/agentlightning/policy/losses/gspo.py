"""GSPO: one importance ratio for each call, the geometric mean of those of its tokens.

    s = exp( 1/|y| sum_t (logprob_t - sampled_logprob_t) )              over the |y| tokens of the call
    loss_t = -min(s A_t, clip(s, 1 - clip_low, 1 + clip_high) A_t)

Zheng et al. 2025, arXiv:2507.18071: equation 7 is the ratio, equation 5 the objective; the bounds are those of its
section 5.1. A call is clipped or trained as a whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from agentlightning.policy.losses.base import (
    ADVANTAGES,
    SAMPLED_LOGPROBS,
    LossValue,
    TokenBatch,
    TokenLoss,
    clamped_log_ratio,
    ratio_metrics,
    register,
)

if TYPE_CHECKING:
    from torch import Tensor


@register
class GSPOLoss(TokenLoss):
    """The clipped importance ratio of whole calls."""

    type: Literal["gspo"] = "gspo"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """How far a call's ratio may fall below 1 before it stops counting."""
    clip_high: float = Field(default=4e-4, gt=0)
    """How far a call's ratio may rise above 1 before it stops counting."""

    needs: ClassVar[frozenset[str]] = frozenset({ADVANTAGES, SAMPLED_LOGPROBS})

    def __call__(self, tokens: TokenBatch) -> LossValue:
        log_ratio, advantages = clamped_log_ratio(tokens), tokens.columns[ADVANTAGES]
        ratio = _mean_by(tokens.call, log_ratio).exp()
        free = ratio * advantages
        objective = free.minimum(ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages)
        return LossValue(-(tokens.weights * objective).sum(), ratio_metrics(log_ratio, ratio, objective != free))


def _mean_by(group_N: Tensor, values_N: Tensor) -> Tensor:
    """For each entry the mean over its group [N]."""
    counts_G = group_N.bincount()
    sums_G = values_N.new_zeros(len(counts_G)).index_add(0, group_N, values_N)
    return (sums_G / counts_G)[group_N]
