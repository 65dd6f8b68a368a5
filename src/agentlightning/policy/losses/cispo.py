"""CISPO: policy gradient with a clipped importance weight that has no gradient, so that every token has one.

    r_t = clip( exp(logprob_t - old_logprob_t), 1 - clip_low, 1 + clip_high )
    loss_t = -stop_gradient(r_t) A_t logprob_t

MiniMax 2025, "MiniMax-M1", arXiv:2506.13585: equation 4 is the objective, equation 5 the weight. Unlike PPO's, tokens
beyond the bounds keep a gradient, with the bound as their weight.
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
    ratio_metrics,
    register,
)


@register
class CISPOLoss(TokenLoss):
    """REINFORCE, each token weighed by its clipped importance ratio."""

    type: Literal["cispo"] = "cispo"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    clip_low: float | None = Field(default=None, gt=0, lt=1)
    """How far below 1 a weight may be; None: down to 0, as in the paper."""
    clip_high: float = Field(default=4.0, gt=0)
    """How far above 1 a weight may be."""

    needs: ClassVar[frozenset[str]] = frozenset({ADVANTAGES, SAMPLED_LOGPROBS})
    decoupled: ClassVar[bool] = True

    def __call__(self, tokens: TokenBatch) -> LossValue:
        log_ratio = clamped_log_ratio(tokens).detach()
        ratio = log_ratio.exp()
        clipped = ratio.clamp(0.0 if self.clip_low is None else 1 - self.clip_low, 1 + self.clip_high)
        objective = clipped * tokens.columns[ADVANTAGES] * tokens.trained_logprobs
        return LossValue(-(tokens.weights * objective).sum(), ratio_metrics(log_ratio, ratio, clipped != ratio))
