"""The loss of a critic: the squared error of its values, clipped around those it gave before the update.

    loss_t = 1/2 max( (V_t - R_t)^2, (clip(V_t, V_old_t - clip, V_old_t + clip) - R_t)^2 )

R_t is the return and V_old_t the value that credit was assigned with. Schulman et al. 2017, arXiv:1707.06347,
equation 9, is the squared error, with the policy's loss and the coefficient c1; the clipping is that of OpenAI
Baselines' PPO2, as Engstrom et al. 2020, arXiv:2005.12729, section 3 (1), state it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from agentlightning.policy.losses.base import RETURNS, VALUES, LossValue, TokenBatch, TokenLoss, register

if TYPE_CHECKING:
    from torch import Tensor

MOMENTS = ("return_mean", "return_square", "value_error_mean", "value_error_square")


@register
class ValueLoss(TokenLoss):
    """Trains the policy's value head (`policy.value_head`) on returns."""

    type: Literal["value"] = "value"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    coefficient: float = Field(default=0.5, ge=0)
    """The factor of this loss where several add up. It matters where the head trains the policy's own weights too."""
    clip: float | None = Field(default=0.2, gt=0)
    """How far a value may move from that before the update before it stops counting, on the scale of rewards. None:
    without bound."""

    needs: ClassVar[frozenset[str]] = frozenset({VALUES, RETURNS})
    needs_values: ClassVar[bool] = True

    def __call__(self, tokens: TokenBatch) -> LossValue:
        values, old, returns = tokens.values, tokens.columns[VALUES], tokens.columns[RETURNS]
        assert values is not None  # An update refuses this loss where there is no head.
        error = self._clipped(values, old) - returns
        free = (values - returns) ** 2
        larger = free.maximum(error**2)
        loss = (tokens.weights * larger).sum() / 2
        sums = {"value_loss": larger.detach().sum() / 2, "value_clip_fraction": (larger > free).sum().float()}
        return LossValue(loss, sums | _moments(old, returns))

    def _clipped(self, values: Tensor, old: Tensor) -> Tensor:
        return values if self.clip is None else old + (values - old).clamp(-self.clip, self.clip)

    def summary(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """With explained_variance, 1 - Var(R - V_old) / Var(R), in place of the moments it is made from: 1 where the
        critic predicts every return, 0 where it does no better than a constant; absent where all returns are equal."""
        if not set(MOMENTS) <= set(means):
            return means
        returns = means["return_square"] - means["return_mean"] ** 2
        error = means["value_error_square"] - means["value_error_mean"] ** 2
        kept = {name: value for name, value in means.items() if name not in MOMENTS[1:]}
        smallest = 1e-6 * max(1.0, means["return_square"])  # Less is rounding.
        return {**kept, "explained_variance": 1 - error / returns} if returns > smallest else kept


def _moments(old: Tensor, returns: Tensor) -> dict[str, Tensor]:
    error = returns - old
    values = (returns.sum(), (returns**2).sum(), error.sum(), (error**2).sum())
    return dict(zip(MOMENTS, values, strict=True))
