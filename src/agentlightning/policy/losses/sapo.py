"""SAPO: a smooth gate on each token's importance ratio in place of a clip.

    loss_t = -f(r_t) A_t,   f(r) = 4 / tau * sigmoid(tau (r - 1)),   tau = tau_positive if A_t > 0 else tau_negative

Gao et al. 2025, "Soft Adaptive Policy Optimization", arXiv:2511.20347. The weight of a token's
gradient is 1 at r = 1 and falls smoothly to 0 on both sides, faster where A < 0.
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
class SAPOLoss(TokenLoss):
    """The importance ratio through a sigmoid gate."""

    type: Literal["sapo"] = "sapo"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    tau_positive: float = Field(default=1.0, gt=0)
    """How fast the gate closes for tokens with A > 0."""
    tau_negative: float = Field(default=1.05, gt=0)
    """How fast it closes for the others."""

    needs: ClassVar[frozenset[str]] = frozenset({ADVANTAGES, SAMPLED_LOGPROBS})
    decoupled: ClassVar[bool] = True

    def __call__(self, tokens: TokenBatch) -> LossValue:
        log_ratio, advantages = clamped_log_ratio(tokens), tokens.columns[ADVANTAGES]
        ratio = log_ratio.exp()
        positive = (advantages > 0).to(advantages.dtype)
        tau = positive * self.tau_positive + (1 - positive) * self.tau_negative
        gate = 4 / tau * (tau * (ratio - 1)).sigmoid()
        return LossValue(-(tokens.weights * gate * advantages).sum(), ratio_metrics(log_ratio, ratio))
