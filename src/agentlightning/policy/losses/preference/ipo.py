"""IPO: the margin is drawn to a finite value, so that certain preferences do not grow it without end.

    m = [log p(y_w) - log p_ref(y_w)] / |y_w| - [log p(y_l) - log p_ref(y_l)] / |y_l|
    loss = (m - 1 / (2 beta))^2

Azar et al. 2023, "A General Theoretical Paradigm to Understand Learning from Human Preferences", arXiv:2310.12036,
equation 17, with tau = beta and log-probabilities averaged over the tokens, as in the authors' later code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from agentlightning.policy.losses.base import register
from agentlightning.policy.losses.preference.base import PreferenceLoss

if TYPE_CHECKING:
    from torch import Tensor


@register
class IPOLoss(PreferenceLoss):
    """The squared distance of the margin from its target."""

    type: Literal["ipo"] = "ipo"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""

    mean: ClassVar[bool] = True

    def of_margin(self, margin: Tensor, sign: Tensor) -> Tensor:
        return (margin - 1 / (2 * self.beta)) ** 2
