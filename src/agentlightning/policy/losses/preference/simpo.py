"""SimPO: DPO without a reference, of mean log-probabilities, with a margin to exceed.

    m = log p(y_w) / |y_w| - log p(y_l) / |y_l|
    loss = -log sigmoid(beta m - gamma)

Meng et al. 2024, "SimPO: Simple Preference Optimization with a Reference-Free Reward", arXiv:2405.14734, equation 6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from agentlightning.policy.losses.base import register
from agentlightning.policy.losses.preference.base import PreferenceLoss

if TYPE_CHECKING:
    from torch import Tensor


@register
class SimPOLoss(PreferenceLoss):
    """The logistic loss of the margin of mean log-probabilities."""

    type: Literal["simpo"] = "simpo"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    beta: float = Field(default=2.0, gt=0)
    """How much a difference in log-probability counts."""
    gamma: float = Field(default=1.0, ge=0)
    """By how much the preferred answer must be ahead."""

    reference: ClassVar[bool] = False
    mean: ClassVar[bool] = True

    def of_margin(self, margin: Tensor, sign: Tensor) -> Tensor:
        from torch.nn.functional import logsigmoid

        return -logsigmoid(self.beta * margin - self.gamma)
