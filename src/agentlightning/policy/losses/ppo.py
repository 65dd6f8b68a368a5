"""PPO: the clipped importance ratio of each token.

    r_t = exp(logprob_t - old_logprob_t)
    loss_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)

`old_logprob` is the recorded one of the sampler, or `proximal_logprobs` where samples have that column (decoupled PPO,
Hilton et al. 2022, arXiv:2110.00641; what is between the two is corrected by `mismatch`).
Schulman et al. 2017, arXiv:1707.06347, equation 7; separate bounds from DAPO, Yu et al. 2025, arXiv:2503.14476. With
group-relative advantages this is the loss of GRPO without its KL term.
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
    clamped_log_ratio,
    clipped_objective,
    ratio_metrics,
    register,
)


@register
class PPOLoss(TokenLoss):
    """The clipped importance ratio against the log-probabilities the tokens were sampled with.

    >>> agl.PPOLoss().type
    'ppo'
    """

    type: Literal["ppo"] = "ppo"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """How far a ratio may fall below 1 before it stops counting."""
    clip_high: float = Field(default=0.28, gt=0)
    """How far a ratio may rise above 1 before it stops counting."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Where A < 0 the loss is at most dual_clip * |A| (Ye et al. 2020, arXiv:1912.09729, equation 5)."""

    needs: ClassVar[frozenset[str]] = frozenset({ADVANTAGES, SAMPLED_LOGPROBS})
    decoupled: ClassVar[bool] = True

    def __call__(self, tokens: TokenBatch) -> LossValue:
        log_ratio, advantages = clamped_log_ratio(tokens), tokens.columns[ADVANTAGES]
        ratio = log_ratio.exp()
        objective, clipped = clipped_objective(ratio, advantages, self.clip_low, self.clip_high)
        if self.dual_clip is not None:
            bounded = objective.maximum(self.dual_clip * advantages)
            bounded = bounded.where(advantages < 0, objective)
            objective, clipped = bounded, clipped | (bounded != objective)
        return LossValue(-(tokens.weights * objective).sum(), ratio_metrics(log_ratio, ratio, clipped))
