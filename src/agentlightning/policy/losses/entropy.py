"""Entropy bonus: the entropy of each token's distribution is rewarded, by a coefficient on a schedule.

    loss_t = -c(k) [ H_t - smoothing * ( max(0, lower Hbar - H_t) + max(0, H_t - upper Hbar) ) ]
    c(k) = coefficient + (final - coefficient) min(1, k / steps)           at optimiser step k

H_t is the entropy over the whole vocabulary, at the temperature of sampling (Mnih et al. 2016, arXiv:1602.01783,
section 4). Hbar is the mean entropy of all earlier steps: the second term keeps the entropy of a token within a band
around it, which dampens the oscillations of long episodes. It is the smoothing of EPO (Xu et al. 2025,
arXiv:2509.22576), with a penalty that grows with the distance from the band, so that it has a gradient.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from agentlightning.errors import PolicyError
from agentlightning.policy.losses.base import SAMPLED_LOGPROBS, LossValue, TokenBatch, TokenLoss, register


@register
class EntropyLoss(TokenLoss):
    """The negative entropy of the tokens' distributions."""

    type: Literal["entropy"] = "entropy"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    coefficient: float = Field(default=0.01, ge=0)  # pyright: ignore[reportIncompatibleVariableOverride]
    """The factor of the bonus at the first step."""
    final: float | None = Field(default=None, ge=0)
    """The factor from optimiser step `steps` on; between the two it changes linearly. None: constant."""
    steps: int = Field(default=100, ge=1)
    """The number of optimiser steps until `final`."""
    smoothing: float = Field(default=0.0, ge=0)
    """The weight of leaving the band around the mean entropy of earlier steps. 0: no band."""
    lower: float = Field(default=0.8, ge=0)
    """Where the band begins, as a factor of that mean."""
    upper: float = Field(default=1.2, ge=1)
    """Where the band ends, as a factor of that mean."""

    needs: ClassVar[frozenset[str]] = frozenset({SAMPLED_LOGPROBS})
    needs_entropy: ClassVar[bool] = True

    def coefficient_at(self, step: int) -> float:
        if self.final is None:
            return self.coefficient
        return self.coefficient + (self.final - self.coefficient) * min(1.0, step / self.steps)

    def __call__(self, tokens: TokenBatch) -> LossValue:
        entropy = tokens.entropy
        if entropy is None:
            raise PolicyError('loss "entropy" needs the entropy of each token, which this policy does not compute')
        bonus = entropy
        sums = {"entropy_bonus": entropy.detach().sum()}
        if self.smoothing and tokens.past_entropy is not None:
            below = (self.lower * tokens.past_entropy - entropy).clamp(min=0)
            above = (entropy - self.upper * tokens.past_entropy).clamp(min=0)
            bonus = entropy - self.smoothing * (below + above)
            sums["entropy_outside"] = ((below + above) > 0).sum().float()
        return LossValue(-(tokens.weights * bonus).sum(), sums)
