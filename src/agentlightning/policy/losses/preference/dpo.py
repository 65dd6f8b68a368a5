"""DPO: the preferred answer becomes more probable than the other, relative to a reference.

    m = [log p(y_w) - log p_ref(y_w)] - [log p(y_l) - log p_ref(y_l)]
    loss = -(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m)

Rafailov et al. 2023, "Direct Preference Optimization", arXiv:2305.18290, equation 7; with label smoothing e > 0,
conservative DPO (Mitchell 2023), for labels that are wrong that often.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from agentlightning.policy.losses.base import register
from agentlightning.policy.losses.preference.base import PreferenceLoss

if TYPE_CHECKING:
    from torch import Tensor


@register
class DPOLoss(PreferenceLoss):
    """The logistic loss of the margin."""

    type: Literal["dpo"] = "dpo"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """The share of pairs whose preference is the wrong way round."""

    def of_margin(self, margin: Tensor, sign: Tensor) -> Tensor:
        from torch.nn.functional import logsigmoid

        scaled = self.beta * margin
        return -(1 - self.label_smoothing) * logsigmoid(scaled) - self.label_smoothing * logsigmoid(-scaled)
