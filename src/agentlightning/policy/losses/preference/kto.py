"""KTO: answers that are good or bad, each by itself; no pairs are needed.

    r = log p(y) - log p_ref(y),    z = max(0, mean of r over the batch)
    good y:  m = r - z,    loss = desirable_weight (1 - sigmoid(beta m))
    bad y:   m = z - r,    loss = undesirable_weight (1 - sigmoid(beta m))

Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization", arXiv:2402.01306, equation 8. z
stands for the divergence from the reference and has no gradient; the paper estimates it with answers to other prompts,
here it is the mean of the batch's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from agentlightning.policy.losses.base import register
from agentlightning.policy.losses.preference.base import PreferenceLoss

if TYPE_CHECKING:
    from torch import Tensor


@register
class KTOLoss(PreferenceLoss):
    """The value of gains and losses against a baseline."""

    type: Literal["kto"] = "kto"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    desirable_weight: float = Field(default=1.0, gt=0)
    """The weight of good answers."""
    undesirable_weight: float = Field(default=1.0, gt=0)
    """The weight of bad ones."""

    paired: ClassVar[bool] = False

    def of_margin(self, margin: Tensor, sign: Tensor) -> Tensor:
        value = 1 - (self.beta * margin).sigmoid()
        return value * (sign > 0).to(value.dtype).mul(self.desirable_weight - self.undesirable_weight).add(
            self.undesirable_weight
        )
