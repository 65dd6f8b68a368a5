"""DPPO: tokens whose probability moved too far in the direction of their advantage are masked; the square of their
log-ratio holds all of them near the sampler.

    m_t = 0 if A_t > 0 and p_t - q_t > mask_high, or A_t <= 0 and p_t - q_t < -mask_low; else 1
    loss_t = -m_t adv_tau r_t A_t + kl_tau (log r_t)^2,   r_t = p_t / q_t,  p = exp(logprob), q = exp(sampled_logprob)

The mask is a bound on the total variation of the binary distribution (this token or another), DPPO-Binary-TV: 2026,
arXiv:2602.04879; the squared log-ratio is that of Kimi K2.5, 2026, arXiv:2602.02276. Unlike a clipped ratio, the mask
leaves unlikely tokens free to change by a large factor, and holds likely ones. Its ratio is against the sampler's
probabilities, so that no other correction of a difference between sampler and trainer applies to it.
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
    limited,
    ratio_metrics,
    register,
)


@register
class DPPOLoss(TokenLoss):
    """The importance ratio, masked by the change of the token's probability."""

    type: Literal["dppo"] = "dppo"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    mask_low: float = Field(default=0.2, gt=0)
    """How far the probability of a token with A <= 0 may fall before it stops counting."""
    mask_high: float = Field(default=0.2, gt=0)
    """How far the probability of a token with A > 0 may rise before it stops counting."""
    adv_tau: float = Field(default=1.0, ge=0)
    """The factor of the policy gradient."""
    kl_tau: float = Field(default=1e-3, ge=0)
    """The factor of the squared log-ratio."""

    needs: ClassVar[frozenset[str]] = frozenset({ADVANTAGES, SAMPLED_LOGPROBS})

    def __call__(self, tokens: TokenBatch) -> LossValue:
        sampled, advantages = tokens.columns[SAMPLED_LOGPROBS], tokens.columns[ADVANTAGES]
        log_ratio = limited(tokens.trained_logprobs - sampled)
        ratio = log_ratio.exp()
        change = (tokens.trained_logprobs.exp() - sampled.exp()).detach()
        too_far = (change > self.mask_high).where(advantages > 0, change < -self.mask_low)
        gradient = ratio * advantages * self.adv_tau * ~too_far
        loss = (tokens.weights * (self.kl_tau * log_ratio**2 - gradient)).sum()
        return LossValue(loss, ratio_metrics(log_ratio, ratio, too_far))
