"""Advantage-weighted regression: imitate what was recorded, what went better than expected the more.

    loss_t = -min( exp(A_t / beta), max_weight ) logprob_t

Peng et al. 2019, "Advantage-Weighted Regression", arXiv:1910.00177: equation 3 is the weight, section 4 its bound (20).
It needs no probability of the sampler, so text that any model, or a person, has written can be learned from.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field

from agentlightning.policy.losses.base import ADVANTAGES, LossValue, TokenBatch, TokenLoss, register


@register
class AWRLoss(TokenLoss):
    """The negative log-likelihood, each token weighed by the exponential of its advantage."""

    type: Literal["awr"] = "awr"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    beta: float = Field(default=0.5, gt=0)
    """The temperature: the smaller, the less is learned from what went worse than expected."""
    max_weight: float = Field(default=20.0, gt=0)
    """The largest weight."""

    needs: ClassVar[frozenset[str]] = frozenset({ADVANTAGES})

    @property
    def trains_zero_advantage(self) -> bool:
        """An average answer has the weight 1."""
        return True

    def __call__(self, tokens: TokenBatch) -> LossValue:
        exponent = (tokens.columns[ADVANTAGES] / self.beta).clamp(max=math.log(self.max_weight))
        weights = exponent.exp()
        loss = -(tokens.weights * weights * tokens.trained_logprobs).sum()
        nll = -tokens.trained_logprobs.detach().sum()
        return LossValue(loss, {"awr_weight": weights.detach().sum(), "nll": nll})
