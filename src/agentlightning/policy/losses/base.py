"""Token-level losses, each a frozen configuration with a `type`.

    loss = sum over tokens of weight_t * loss_t

A loss sees flat vectors, one entry for each trained token of a micro-batch, and knows nothing of rows, trees or models.
Because weights sum to 1 over a batch, losses of micro-batches add up. Importing this imports no torch: losses are part
of a configuration.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from agentlightning.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""exp() of more is no ratio any more; a token this far off is clipped in every loss here."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The trained tokens of one micro-batch: vectors [N], all float32."""

    logprobs: Tensor
    """log p(token) under the weights being trained, at the temperature it was sampled with; carries the gradient."""
    sampled_logprobs: Tensor
    """log p(token) when it was sampled."""
    advantages: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class LossValue:
    """A loss and what to log of it."""

    loss: Tensor
    """Scalar, with gradient."""
    sums: dict[str, Tensor]
    """Sums over tokens, without gradient; divided by the number of tokens they are metrics."""


class TokenLoss(BaseModel, ABC):
    """A loss over sampled tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    uses_advantages: ClassVar[bool]
    """Whether a token with advantage 0 has no gradient, and so costs no computation."""
    needs_sampled_logprobs: ClassVar[bool]
    """Whether tokens must have been sampled from a distribution the loss can correct for, at its temperature."""

    @abstractmethod
    def __call__(self, tokens: TokenBatch) -> LossValue: ...


class PPOLoss(TokenLoss):
    """The clipped importance ratio against the log-probabilities the tokens were sampled with.

        r_t = exp(logprob_t - sampled_logprob_t)
        loss_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)

    Schulman et al. 2017, arXiv:1707.06347, equation 7; separate bounds from DAPO, Yu et al. 2025, arXiv:2503.14476.
    With group-relative advantages this is the loss of GRPO without its KL term.

        >>> agl.PPOLoss().type
        'ppo'
    """

    type: Literal["ppo"] = "ppo"
    """Which loss this is."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """How far a ratio may fall below 1 before it stops counting."""
    clip_high: float = Field(default=0.28, gt=0)
    """How far a ratio may rise above 1 before it stops counting."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Where A < 0 the loss is at most dual_clip * |A| (Ye et al. 2020, arXiv:1912.09729, equation 5)."""

    uses_advantages: ClassVar[bool] = True
    needs_sampled_logprobs: ClassVar[bool] = True

    def __call__(self, tokens: TokenBatch) -> LossValue:
        log_ratio = (tokens.logprobs - tokens.sampled_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        ratio, advantages = log_ratio.exp(), tokens.advantages
        free = ratio * advantages
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages
        objective = free.minimum(clipped)
        if self.dual_clip is not None:
            bounded = objective.maximum(self.dual_clip * advantages)
            objective = bounded.where(advantages < 0, objective)
        sums = _ratio_sums(log_ratio.detach(), ratio.detach(), (objective != free).detach())
        return LossValue(loss=-(tokens.weights * objective).sum(), sums=sums)


class NLLLoss(TokenLoss):
    """Supervised learning: loss_t = -log p(token). Advantages and sampled log-probabilities play no part.

    >>> agl.NLLLoss().type
    'nll'
    """

    type: Literal["nll"] = "nll"
    """Which loss this is."""

    uses_advantages: ClassVar[bool] = False
    needs_sampled_logprobs: ClassVar[bool] = False

    def __call__(self, tokens: TokenBatch) -> LossValue:
        return LossValue(loss=-(tokens.weights * tokens.logprobs).sum(), sums={"nll": -tokens.logprobs.detach().sum()})


Loss = Annotated[PPOLoss | NLLLoss, Field(discriminator="type")]
_loss: TypeAdapter[PPOLoss | NLLLoss] = TypeAdapter(Loss)


def token_loss(loss: str | Mapping[str, Any] | TokenLoss) -> TokenLoss:
    """The loss of a name ("ppo", "nll") or of a configuration with `type`. Raises ConfigError."""
    if isinstance(loss, TokenLoss):
        return loss
    try:
        return _loss.validate_python({"type": loss} if isinstance(loss, str) else dict(loss))
    except ValidationError as error:
        raise ConfigError(f"loss {loss!r} cannot be used: {error}; known types: ppo, nll") from error


def _ratio_sums(log_ratio: Tensor, ratio: Tensor, clipped: Tensor) -> dict[str, Tensor]:
    """`approx_kl` is k3 of http://joschu.net/blog/kl-approx.html, for KL(sampled || trained)."""
    return {
        "ratio": ratio.sum(),
        "clip_fraction": clipped.sum().float(),
        "approx_kl": (ratio - 1 - log_ratio).sum(),
    }
