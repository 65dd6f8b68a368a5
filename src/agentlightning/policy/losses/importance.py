"""Importance-weighted policy gradient: the ratio of each action, neither clipped nor masked.

    loss_t = -r_t A_t,   r_t = exp(logprob_t - old_logprob_t)                             each token is an action
    loss_t = -s A_t,     s = exp( sum_t (logprob_t - old_logprob_t) )                     the whole rollout is one

Sutton and Barto 2018, "Reinforcement Learning", section 13.3 (REINFORCE), with the importance ratio of each action.
With one update for each batch the ratio is 1, and this is REINFORCE; for data of older weights it is unbiased for an
action, and has no bound. A whole response is one action in RLOO (Ahmadian et al. 2024, arXiv:2402.14740, section 3).
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
    limited,
    ratio_metrics,
    register,
    shared_ratio,
    sums_over_rollout,
)


@register
class ImportanceLoss(TokenLoss):
    """The policy gradient, each token weighed by its importance ratio."""

    type: Literal["importance"] = "importance"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    level: Literal["token", "rollout"] = "token"
    """What is one action, with one ratio: a token, or all that was sampled in a rollout."""

    needs: ClassVar[frozenset[str]] = frozenset({ADVANTAGES, SAMPLED_LOGPROBS})
    decoupled: ClassVar[bool] = True

    @property
    def spans_rollout(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.level == "rollout"

    def __call__(self, tokens: TokenBatch) -> LossValue:
        log_ratio = clamped_log_ratio(tokens)
        ratio = log_ratio.exp()
        if self.spans_rollout:
            ratio = shared_ratio(tokens, limited(sums_over_rollout(tokens, log_ratio)[0]))
        loss = -(tokens.weights * ratio * tokens.columns[ADVANTAGES]).sum()
        return LossValue(loss, ratio_metrics(log_ratio, ratio))
