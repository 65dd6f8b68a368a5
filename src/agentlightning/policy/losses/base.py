"""What a loss over sampled tokens is, and the registry that finds one by its `type`.

    loss = sum over tokens of weight_t * loss_t

A loss sees flat vectors, one entry for each trained token of a micro-batch, and knows nothing of rows, trees or models.
Micro-batches are parts of that sum, so their losses add up. A loss is a frozen configuration; adding one means a file
with a class and a line in `agentlightning.policy.losses`. Importing this imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""exp() of more is no usable ratio; a token this far off is clipped in every loss here."""

SAMPLED_LOGPROBS = "sampled_logprobs"
"""The column that token trees bring themselves: log p(token) when it was sampled."""
ADVANTAGES = "advantages"


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The trained tokens of one micro-batch, N of them. Every call in it is whole; a rollout need not be."""

    trained_logprobs: Tensor
    """log p(token) under the weights being trained [N], with gradient. Where a loss needs `sampled_logprobs`, at the
    temperature the token was sampled with, else at temperature 1."""
    columns: Mapping[str, Tensor]
    """By name, float32 [N]: `weights`, and the columns that the loss needs."""
    call: Tensor
    """The call of each token, int64 [N]: numbered from 0 within this batch."""
    rollout: Tensor
    """The rollout of each token, numbered likewise."""

    @property
    def weights(self) -> Tensor:
        return self.columns["weights"]


@dataclass(frozen=True, slots=True)
class LossValue:
    """A loss, and its metrics."""

    loss: Tensor
    """Scalar, with gradient."""
    sums: Mapping[str, Tensor]
    """Sums over tokens, without gradient; divided by the number of tokens they are metrics."""


class TokenLoss(BaseModel, ABC):
    """A loss over sampled tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    type: str
    """Which loss this is."""
    coefficient: float = Field(default=1.0, ge=0)
    """The factor of this loss where several add up."""

    needs: ClassVar[frozenset[str]]
    """The columns it reads beside `weights`. With `sampled_logprobs` among them, tokens must have been sampled from a
    distribution whose probabilities are known, and are trained at their temperature."""

    @property
    def trains_zero_advantage(self) -> bool:
        """Whether a call whose advantages are all 0 has a gradient; if not, it is not computed."""
        return ADVANTAGES not in self.needs

    @abstractmethod
    def __call__(self, tokens: TokenBatch) -> LossValue:
        """The loss of a micro-batch, before `coefficient`."""


LOSSES: dict[str, type[TokenLoss]] = {}
"""By `type`."""

L = TypeVar("L", bound=type[TokenLoss])


def register(loss: L) -> L:
    """Make a loss known by the default of its `type`; a class decorator."""
    LOSSES[str(loss.model_fields["type"].default)] = loss
    return loss


def clamped_log_ratio(tokens: TokenBatch) -> Tensor:
    """log of p(token) now over p(token) when it was sampled [N], with gradient."""
    return (tokens.trained_logprobs - tokens.columns[SAMPLED_LOGPROBS]).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ratio_metrics(log_ratio: Tensor, ratio: Tensor, clipped: Tensor) -> dict[str, Tensor]:
    """The sums that losses with an importance ratio log: the ratio, how many tokens were clipped, and an estimate of
    KL(sampled || trained), k3 of http://joschu.net/blog/kl-approx.html."""
    log_ratio, ratio = log_ratio.detach(), ratio.detach()
    return {
        "ratio": ratio.sum(),
        "clip_fraction": clipped.detach().sum().float(),
        "approx_kl": (log_ratio.exp() - 1 - log_ratio).sum(),
    }
