"""What a loss over sampled tokens is, and the registry that finds one by its `type`.

    loss = sum over tokens of weight_t * loss_t

A loss sees flat vectors, one entry for each token with a weight in its stream, and knows nothing of rows, trees or
models. Micro-batches are parts of that sum, so their losses add up. Policy gradient, cross entropy and KL to a
reference are three streams, each with its own weights (`STREAM_WEIGHTS`), so that reinforcement learning, supervised
learning and distillation share a batch. A loss is a frozen configuration; adding one means a file with a class and a
line in `agentlightning.policy.losses`. Importing this imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""exp() of more is no usable ratio; a token this far off is clipped in every loss here."""

SAMPLED_LOGPROBS = "sampled_logprobs"
"""The column that token trees bring themselves: log p(token) when it was sampled."""
ADVANTAGES = "advantages"
PROXIMAL_LOGPROBS = "proximal_logprobs"
"""The column of log p(token) under the weights that the update starts from. Where samples have it, ratios are against
these and not against `sampled_logprobs` (decoupled PPO, Hilton et al. 2022, arXiv:2110.00641)."""
INTERPOLATION = "interpolation"
"""The column of how far the proximal log-probability of a token lies from the sampled one towards that of the weights
being trained, 0 to 1 (`policy.proximal`)."""
REF_LOGPROBS = "ref_logprobs"
TEACHER_LOGPROBS = "teacher_logprobs"
VALUES = "values"
"""The column of values that the value head gave before the update."""
RETURNS = "returns"
"""The column of what the value head learns to predict."""

Stream: TypeAlias = Literal["policy_gradient", "cross_entropy", "reference_kl"]
WEIGHTS = "weights"
CORRECTED_WEIGHTS = "corrected_weights"
"""`weights` times the correction of the difference between sampler and trainer (`policy.mismatch`)."""
STREAM_WEIGHTS: Mapping[Stream, str] = MappingProxyType(
    {
        "policy_gradient": WEIGHTS,
        "cross_entropy": "cross_entropy_weights",
        "reference_kl": "reference_kl_weights",
    }
)
"""The column of weights of each stream. `weights` are shares of the loss that sum to 1, as credit assignment makes
them; the other two are relative, and an update divides them by the number of tokens in their stream. In a batch without
such a column its stream has the tokens and shares of `weights`."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The trained tokens of one micro-batch, N of them. Every call in it is whole; a rollout need not be."""

    trained_logprobs: Tensor
    """log p(token) under the weights being trained [N], with gradient. Where a loss needs `sampled_logprobs`, at the
    temperature the token was sampled with, else at temperature 1."""
    columns: Mapping[str, Tensor]
    """By name, float32 [N]: `weights` (those of the loss's stream), and the columns that the loss needs."""
    call: Tensor
    """The call of each token, int64 [N]: numbered from 0 within this batch."""
    rollout: Tensor
    """The rollout of each token, numbered likewise."""
    entropy: Tensor | None = None
    """The entropy of the distribution of each token in nats [N], with gradient; for losses that need it."""
    values: Tensor | None = None
    """The value head's predictions under the weights being trained [N], with gradient; for losses that need them."""
    rollout_log_ratio: Tensor | None = None
    """For each token, the sum of the log-ratios of its whole rollout, and the number of these [2, N], without gradient,
    where this batch holds a part of that rollout only."""
    step: int = 0
    """Optimiser steps before this one."""
    past_entropy: float | None = None
    """The mean entropy of the tokens of all earlier steps; None in the first one."""

    @property
    def weights(self) -> Tensor:
        return self.columns[WEIGHTS]

    @property
    def old_logprobs(self) -> Tensor:
        """What ratios are against: `proximal_logprobs` where samples have them, else `sampled_logprobs` [N]."""
        found = self.columns.get(PROXIMAL_LOGPROBS)
        return self.columns[SAMPLED_LOGPROBS] if found is None else found


@dataclass(frozen=True, slots=True)
class LossValue:
    """A loss, and its metrics."""

    loss: Tensor
    """Scalar, with gradient."""
    sums: Mapping[str, Tensor]
    """Sums over the tokens of the batch, without gradient; divided by their number they are metrics."""


class TokenLoss(BaseModel, ABC):
    """A loss over sampled tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    type: str
    """Which loss this is."""
    coefficient: float = Field(default=1.0, ge=0)
    """The factor of this loss where several add up."""

    stream: ClassVar[Stream] = "policy_gradient"
    """Whose tokens and weights it has."""
    needs: ClassVar[frozenset[str]]
    """The columns it reads beside `weights`. With `sampled_logprobs` among them, tokens must have been sampled from a
    distribution whose probabilities are known, and are trained at their temperature."""
    needs_entropy: ClassVar[bool] = False
    """Whether it needs the entropy of each token's distribution, with gradient."""
    needs_values: ClassVar[bool] = False
    """Whether it needs the predictions of a value head."""
    decoupled: ClassVar[bool] = False
    """Whether its ratio is against `proximal_logprobs` where samples have them. What lies between these and the sampled
    ones is then corrected in its weights."""
    spans_rollout: ClassVar[bool] = False
    """Whether a token's loss depends on the other tokens of its rollout, in whichever call or micro-batch they are."""

    @property
    def trains_zero_advantage(self) -> bool:
        """Whether a call whose advantages are all 0 has a gradient; if not, it is not computed, unless the loss
        `spans_rollout` and another call of its rollout has one."""
        return ADVANTAGES not in self.needs

    def coefficient_at(self, step: int) -> float:
        """The factor after so many optimiser steps."""
        return self.coefficient

    @abstractmethod
    def __call__(self, tokens: TokenBatch) -> LossValue:
        """The loss of a micro-batch, before `coefficient`."""

    def summary(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """The metrics of an update, from the means over its tokens."""
        return means


LOSSES: dict[str, type[TokenLoss]] = {}
"""By `type`."""

L = TypeVar("L", bound=type[TokenLoss])


def register(loss: L) -> L:
    """Make a loss known by the default of its `type`; a class decorator."""
    LOSSES[str(loss.model_fields["type"].default)] = loss
    return loss


def clamped_log_ratio(tokens: TokenBatch) -> Tensor:
    """log of p(token) now over p(token) before the update [N], with gradient."""
    return limited(tokens.trained_logprobs - tokens.old_logprobs)


def limited(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sums_over(group_N: Tensor, values_N: Tensor) -> tuple[Tensor, Tensor]:
    """For each entry the sum over its group, and the number of entries in it [N]."""
    counts_G = group_N.bincount()
    sums_G = values_N.new_zeros(len(counts_G)).index_add(0, group_N, values_N)
    return sums_G[group_N], counts_G[group_N]


def sums_over_rollout(tokens: TokenBatch, log_ratio_N: Tensor) -> tuple[Tensor, Tensor]:
    """For each token the sum of the log-ratios of its rollout, and the number of these [N]."""
    whole = tokens.rollout_log_ratio
    return sums_over(tokens.rollout, log_ratio_N) if whole is None else (whole[0], whole[1])


def shared_ratio(tokens: TokenBatch, log_ratio_N: Tensor) -> Tensor:
    """exp of a log-ratio that several tokens share [N]. Its value is the shared one, its gradient for each token that
    of the token's own log-probability, so that tokens of one ratio may have different advantages (GSPO-token, Zheng et
    al. 2025, arXiv:2507.18071, equation 14)."""
    own = tokens.trained_logprobs - tokens.trained_logprobs.detach()
    return (log_ratio_N.detach() + own).exp()


def clipped_objective(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, 1 - low, 1 + high) A) [N], and where it is clipped."""
    free = ratio * advantages
    objective = free.minimum(ratio.clamp(1 - low, 1 + high) * advantages)
    return objective, objective != free


def ratio_metrics(log_ratio: Tensor, ratio: Tensor, clipped: Tensor | None = None) -> dict[str, Tensor]:
    """The sums that losses with an importance ratio log: the ratio, how many tokens were clipped (none, for a loss that
    clips nothing), and an estimate of KL(before || now), k3 of http://joschu.net/blog/kl-approx.html."""
    log_ratio, ratio = log_ratio.detach(), ratio.detach()
    return {
        "ratio": ratio.sum(),
        "clip_fraction": ratio.new_zeros(()) if clipped is None else clipped.detach().sum().float(),
        "approx_kl": (log_ratio.exp() - 1 - log_ratio).sum(),
    }
