"""KL divergence of the policy from a reference, such as the weights it started with.

    d_t = logprob_t - ref_logprob_t,   r_t = exp(logprob_t - old_logprob_t)
    k1:        loss_t = d_t
    k2:        loss_t = d_t^2 / 2
    k3:        loss_t = exp(-d_t) - 1 + d_t
    unbiased:  loss_t = r_t (exp(-d_t) - 1 + d_t)

The estimators are those of Schulman 2020, http://joschu.net/blog/kl-approx.html; k3 is the term of GRPO (Shao et al.
2024, arXiv:2402.03300, equation 4). As a loss, k2 has the gradient of KL(policy || reference) on average over tokens
the policy samples, k3 that of KL(reference || policy), and k1 none: it is for rewards (`kl_in_reward`). "unbiased" has
both the value and the gradient of KL(policy || reference), for tokens of older weights too (DeepSeek-V3.2, 2025,
arXiv:2512.02556, its unbiased KL estimate).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from pydantic import Field

from agentlightning.policy.losses.base import (
    REF_LOGPROBS,
    SAMPLED_LOGPROBS,
    LossValue,
    Stream,
    TokenBatch,
    TokenLoss,
    clamped_log_ratio,
    limited,
    register,
)

if TYPE_CHECKING:
    from torch import Tensor

Estimator: TypeAlias = Literal["k1", "k2", "k3", "unbiased"]


@register
class KLLoss(TokenLoss):
    """The divergence from a reference, estimated at the sampled tokens."""

    type: Literal["kl"] = "kl"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    coefficient: float = Field(default=0.001, ge=0)  # pyright: ignore[reportIncompatibleVariableOverride]
    """The factor of the divergence (beta)."""
    estimator: Estimator = "unbiased"
    """k1, k2, k3, or unbiased: the importance ratio times k3."""

    stream: ClassVar[Stream] = "reference_kl"
    needs: ClassVar[frozenset[str]] = frozenset({REF_LOGPROBS, SAMPLED_LOGPROBS})

    def __call__(self, tokens: TokenBatch) -> LossValue:
        difference = limited(tokens.trained_logprobs - tokens.columns[REF_LOGPROBS])
        k3 = (-difference).exp() - 1 + difference
        loss = (tokens.weights * self._estimate(tokens, difference, k3)).sum()
        return LossValue(loss, {"ref_kl": k3.detach().sum()})

    def _estimate(self, tokens: TokenBatch, difference: Tensor, k3: Tensor) -> Tensor:
        match self.estimator:
            case "k1":
                return difference
            case "k2":
                return difference**2 / 2
            case "k3":
                return k3
            case "unbiased":
                return clamped_log_ratio(tokens).exp() * k3
