"""Importance-weighted policy gradient: the ratio of each token, neither clipped nor masked.

    loss_t = -r_t A_t,   r_t = exp(logprob_t - old_logprob_t)

Sutton and Barto 2018, "Reinforcement Learning", section 13.3 (REINFORCE), with the importance ratio of each token. With
one update for each batch r_t is 1, and this is REINFORCE; for data of older weights it is unbiased for a token, and has
no bound.
"""

from __future__ import annotations

from typing import ClassVar, Literal

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
class ImportanceLoss(TokenLoss):
    """The policy gradient, each token weighed by its importance ratio."""

    type: Literal["importance"] = "importance"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""

    needs: ClassVar[frozenset[str]] = frozenset({ADVANTAGES, SAMPLED_LOGPROBS})
    decoupled: ClassVar[bool] = True

    def __call__(self, tokens: TokenBatch) -> LossValue:
        log_ratio = clamped_log_ratio(tokens)
        ratio = log_ratio.exp()
        loss = -(tokens.weights * ratio * tokens.columns[ADVANTAGES]).sum()
        return LossValue(loss, ratio_metrics(log_ratio, ratio))
