"""Token-level losses, found by the `type` in their settings. Importing them imports no torch.

    loss = sum over tokens of weight_t * loss_t

A loss sees flat vectors, one entry for each token with a weight in its stream, and knows nothing of rows, trees or
models. Micro-batches are parts of that sum, so their losses add up. Policy gradient, cross entropy and KL to a
reference are three streams, each with its own weights (`STREAM_WEIGHTS`), so that reinforcement learning, supervised
learning and distillation share a batch. A loss is a frozen configuration; adding one means a class with its formula.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from agentlightning.errors import ConfigError, PolicyError
from agentlightning.util.plugins import Registry, calls_of, is_own
from agentlightning.util.settings import AtLeastOne, Chosen, OneOrSeveral, OpenShare, Part, chosen

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

Stream = Literal["policy_gradient", "cross_entropy", "reference_kl"]
WEIGHTS = "weights"
CORRECTED_WEIGHTS = "corrected_weights"
"""`weights` times the correction of the difference between sampler and trainer (`policy.mismatch`)."""
STREAM_WEIGHTS: Mapping[Stream, str] = MappingProxyType(
    {"policy_gradient": WEIGHTS, "cross_entropy": "cross_entropy_weights", "reference_kl": "reference_kl_weights"}
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
    sums: Mapping[str, Tensor] = field(default_factory=dict[str, "Tensor"])
    """Sums over the tokens of the batch, without gradient; divided by their number they are metrics."""


class TokenLoss(Part, ABC):
    """A loss over sampled tokens."""

    coefficient: NonNegativeFloat = 1.0
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
    needs_proximal: ClassVar[bool] = False
    """Whether it clips so near to 1 that the rounding between sampler and trainer alone would leave most tokens out:
    without the setting `proximal`, it is "pass"."""
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


def value_of(loss: TokenLoss, tokens: TokenBatch) -> LossValue:
    """The value of a loss. Raises ExtensionError, which names its file, for one of others that fails, or whose value is
    no finite scalar while its tokens are finite."""
    with calls_of(type(loss), "loss"):
        value = loss(tokens)
        if not is_own(type(loss)):
            _check(value, tokens)
        return value


def _check(value: Any, tokens: TokenBatch) -> None:
    if not isinstance(value, LossValue):
        raise TypeError(f"it returned {type(value).__name__}; return a LossValue")
    for name, each in {"loss": value.loss, **value.sums}.items():
        if each.shape:
            raise ValueError(f"its {name} has the shape {list(each.shape)}; return a scalar, as sum() does")
        given = (tokens.trained_logprobs, *tokens.columns.values())
        if not each.isfinite() and all(bool(own.isfinite().all()) for own in given):
            raise ValueError(f"its {name} is {each.item()} for {len(tokens.weights)} tokens whose values are finite")


LOSSES = Registry("losses", "loss", TokenLoss)
"""By `type`."""
register = LOSSES.register


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


def ratio_metrics(log_ratio: Tensor, ratio: Tensor, clipped: Tensor | None = None) -> dict[str, Tensor]:
    """The sums that losses with an importance ratio log: the ratio, how many tokens were clipped (none, for a loss that
    clips nothing), and an estimate of KL(before || now), k3 of http://joschu.net/blog/kl-approx.html."""
    log_ratio, ratio = log_ratio.detach(), ratio.detach()
    return {
        "ratio": ratio.sum(),
        "clip_fraction": ratio.new_zeros(()) if clipped is None else clipped.detach().sum().float(),
        "approx_kl": (log_ratio.exp() - 1 - log_ratio).sum(),
    }


class RatioLoss(TokenLoss):
    """A policy gradient with the importance ratio of each token, against what samples were drawn with."""

    needs: ClassVar[frozenset[str]] = frozenset({ADVANTAGES, SAMPLED_LOGPROBS})
    decoupled: ClassVar[bool] = True


class ClippedLoss(RatioLoss):
    """A policy gradient with a clipped importance ratio: min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)."""

    clip_low: OpenShare = 0.2
    """How far a ratio may fall below 1 before it stops counting."""
    clip_high: PositiveFloat = 0.28
    """How far a ratio may rise above 1 before it stops counting."""

    def _ratio(self, tokens: TokenBatch, log_ratio: Tensor) -> Tensor:
        """The importance ratio r of each token [N]."""
        return log_ratio.exp()

    def _objective(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """What is maximised [N]."""
        return (ratio * advantages).minimum(ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages)

    def __call__(self, tokens: TokenBatch) -> LossValue:
        log_ratio, advantages = clamped_log_ratio(tokens), tokens.columns[ADVANTAGES]
        ratio = self._ratio(tokens, log_ratio)
        objective = self._objective(ratio, advantages)
        metrics = ratio_metrics(log_ratio, ratio, objective != ratio * advantages)
        return LossValue(-(tokens.weights * objective).sum(), metrics)


@register
class PPOLoss(ClippedLoss):
    """The clipped importance ratio against the log-probabilities the tokens were sampled with.

    PPO: the clipped importance ratio of each token.

        r_t = exp(logprob_t - old_logprob_t)
        loss_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)

    `old_logprob` is the recorded one of the sampler, or `proximal_logprobs` where samples have that column (decoupled
    PPO, Hilton et al. 2022, arXiv:2110.00641; what is between the two is corrected by `mismatch`). Schulman et al.
    2017, arXiv:1707.06347, equation 7; separate bounds from DAPO, Yu et al. 2025, arXiv:2503.14476. With group-relative
    advantages this is the loss of GRPO without its KL term.

    >>> from agentlightning.policy.losses import PPOLoss
    >>> PPOLoss().type
    'ppo'
    """

    type: Literal["ppo"] = "ppo"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Where A < 0 the loss is at most dual_clip * |A| (Ye et al. 2020, arXiv:1912.09729, equation 5)."""

    def _objective(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        objective = super()._objective(ratio, advantages)
        if self.dual_clip is None:
            return objective
        return objective.maximum(self.dual_clip * advantages).where(advantages < 0, objective)


@register
class GSPOLoss(ClippedLoss):
    """The clipped importance ratio of whole rollouts.

    GSPO: one importance ratio for each rollout, the geometric mean of those of its tokens.

        s = exp( 1/|y| sum_t (logprob_t - old_logprob_t) )       over the |y| tokens the policy sampled in the rollout
        loss_t = -min(s A_t, clip(s, 1 - clip_low, 1 + clip_high) A_t)

    Zheng et al. 2025, arXiv:2507.18071: equation 7 is the ratio, equation 5 the objective; tokens with advantages of
    their own as in equation 13 (GSPO-token, the same where they are equal); the bounds are those of section 5.1. A
    rollout is clipped or trained as a whole. It has one ratio however many calls it was made with: a trainer with one
    row for each call has as many as there are rows.
    """

    type: Literal["gspo"] = "gspo"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    clip_low: OpenShare = 3e-4
    """How far a rollout's ratio may fall below 1 before it stops counting."""
    clip_high: PositiveFloat = 4e-4
    """How far a rollout's ratio may rise above 1 before it stops counting."""

    needs_proximal: ClassVar[bool] = True

    spans_rollout: ClassVar[bool] = True

    def _ratio(self, tokens: TokenBatch, log_ratio: Tensor) -> Tensor:
        total, count = sums_over_rollout(tokens, log_ratio)
        return shared_ratio(tokens, total / count)


@register
class TurnLoss(ClippedLoss):
    """The clipped importance ratio of whole calls.

    Turn-level PPO: one clipped importance ratio for each model call, the geometric mean of those of its tokens.

        r_k = exp( 1/|k| sum_{t in k} (logprob_t - old_logprob_t) )       over the |k| tokens of call k
        loss_t = -min(r_k A_t, clip(r_k, 1 - clip_low, 1 + clip_high) A_t)

    Between PPO, with a ratio for each token, and GSPO, with one for the rollout: the ratio type "segment" of ROLL
    (arXiv:2506.06122), for credit that differs from call to call. The clipped objective is that of PPO
    (arXiv:1707.06347, equation 7). It depends on what a call is: an answer that is asked for in two calls has two
    ratios.
    """

    type: Literal["turn"] = "turn"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""

    def _ratio(self, tokens: TokenBatch, log_ratio: Tensor) -> Tensor:
        total, count = sums_over(tokens.call, log_ratio)
        return shared_ratio(tokens, total / count)


@register
class SAPOLoss(RatioLoss):
    """The importance ratio through a sigmoid gate.

    SAPO: a smooth gate on each token's importance ratio in place of a clip.

        loss_t = -f(r_t) A_t,   f(r) = 4 / tau * sigmoid(tau (r - 1)),   tau = tau_positive if A_t > 0 else tau_negative

    Gao et al. 2025, "Soft Adaptive Policy Optimization", arXiv:2511.20347. The weight of a token's
    gradient is 1 at r = 1 and falls smoothly to 0 on both sides, faster where A < 0.
    """

    type: Literal["sapo"] = "sapo"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    tau_positive: PositiveFloat = 1.0
    """How fast the gate closes for tokens with A > 0."""
    tau_negative: PositiveFloat = 1.05
    """How fast it closes for the others."""

    def __call__(self, tokens: TokenBatch) -> LossValue:
        log_ratio, advantages = clamped_log_ratio(tokens), tokens.columns[ADVANTAGES]
        ratio = log_ratio.exp()
        positive = (advantages > 0).to(advantages.dtype)
        tau = positive * self.tau_positive + (1 - positive) * self.tau_negative
        gate = 4 / tau * (tau * (ratio - 1)).sigmoid()
        return LossValue(-(tokens.weights * gate * advantages).sum(), ratio_metrics(log_ratio, ratio))


@register
class DPPOLoss(RatioLoss):
    """The importance ratio, masked by the change of the token's probability.

    DPPO: tokens whose probability moved too far in the direction of their advantage are masked; the square of their
    log-ratio holds all of them near the sampler.

        m_t = 0 if A_t > 0 and p_t - q_t > mask_high, or A_t <= 0 and p_t - q_t < -mask_low; else 1 loss_t = -m_t
        adv_tau r_t A_t + kl_tau (log r_t)^2,   r_t = p_t / q_t,  p = exp(logprob), q = exp(sampled_logprob)

    The mask is a bound on the total variation of the binary distribution (this token or another), DPPO-Binary-TV: 2026,
    arXiv:2602.04879; the squared log-ratio is that of Kimi K2.5, 2026, arXiv:2602.02276. Unlike a clipped ratio, the
    mask leaves unlikely tokens free to change by a large factor, and holds likely ones. Its ratio is against the
    sampler's probabilities, so that no other correction of a difference between sampler and trainer applies to it.
    """

    type: Literal["dppo"] = "dppo"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    mask_low: PositiveFloat = 0.2
    """How far the probability of a token with A <= 0 may fall before it stops counting."""
    mask_high: PositiveFloat = 0.2
    """How far the probability of a token with A > 0 may rise before it stops counting."""
    adv_tau: NonNegativeFloat = 1.0
    """The factor of the policy gradient."""
    kl_tau: NonNegativeFloat = 1e-3
    """The factor of the squared log-ratio."""

    decoupled: ClassVar[bool] = False

    def __call__(self, tokens: TokenBatch) -> LossValue:
        sampled, advantages = tokens.columns[SAMPLED_LOGPROBS], tokens.columns[ADVANTAGES]
        log_ratio = limited(tokens.trained_logprobs - sampled)
        ratio = log_ratio.exp()
        change = (tokens.trained_logprobs.exp() - sampled.exp()).detach()
        too_far = (change > self.mask_high).where(advantages > 0, change < -self.mask_low)
        gradient = ratio * advantages * self.adv_tau * ~too_far
        loss = (tokens.weights * (self.kl_tau * log_ratio**2 - gradient)).sum()
        return LossValue(loss, ratio_metrics(log_ratio, ratio, too_far))


@register
class CISPOLoss(RatioLoss):
    """REINFORCE, each token weighed by its clipped importance ratio.

    CISPO: policy gradient with a clipped importance weight that has no gradient, so that every token has one.

        r_t = clip( exp(logprob_t - old_logprob_t), 1 - clip_low, 1 + clip_high )
        loss_t = -stop_gradient(r_t) A_t logprob_t

    MiniMax 2025, "MiniMax-M1", arXiv:2506.13585: equation 4 is the objective, equation 5 the weight. Unlike PPO's,
    tokens beyond the bounds keep a gradient, with the bound as their weight.
    """

    type: Literal["cispo"] = "cispo"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    clip_low: OpenShare | None = None
    """How far below 1 a weight may be; None: down to 0, as in the paper."""
    clip_high: PositiveFloat = 4.0
    """How far above 1 a weight may be."""

    def __call__(self, tokens: TokenBatch) -> LossValue:
        log_ratio = clamped_log_ratio(tokens).detach()
        ratio = log_ratio.exp()
        clipped = ratio.clamp(0.0 if self.clip_low is None else 1 - self.clip_low, 1 + self.clip_high)
        objective = clipped * tokens.columns[ADVANTAGES] * tokens.trained_logprobs
        return LossValue(-(tokens.weights * objective).sum(), ratio_metrics(log_ratio, ratio, clipped != ratio))


@register
class ImportanceLoss(RatioLoss):
    """The policy gradient, each token weighed by its importance ratio.

    Importance-weighted policy gradient: the ratio of each action, neither clipped nor masked.

        loss_t = -r_t A_t,   r_t = exp(logprob_t - old_logprob_t)                             each token is an action
        loss_t = -s A_t,     s = exp( sum_t (logprob_t - old_logprob_t) )                     the whole rollout is one

    Sutton and Barto 2018, "Reinforcement Learning", section 13.3 (REINFORCE), with the importance ratio of each action.
    With one update for each batch the ratio is 1, and this is REINFORCE; for data of older weights it is unbiased for
    an action, and has no bound. A whole response is one action in RLOO (Ahmadian et al. 2024, arXiv:2402.14740, section
    3).
    """

    type: Literal["importance"] = "importance"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    level: Literal["token", "rollout"] = "token"
    """What is one action, with one ratio: a token, or all that was sampled in a rollout."""

    @property
    def spans_rollout(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.level == "rollout"

    def __call__(self, tokens: TokenBatch) -> LossValue:
        log_ratio = clamped_log_ratio(tokens)
        ratio = log_ratio.exp()
        if self.spans_rollout:
            ratio = shared_ratio(tokens, limited(sums_over_rollout(tokens, log_ratio)[0]))
        loss = -(tokens.weights * ratio * tokens.columns[ADVANTAGES]).sum()
        return LossValue(loss, ratio_metrics(log_ratio, ratio))


@register
class AWRLoss(TokenLoss):
    """The negative log-likelihood, each token weighed by the exponential of its advantage.

    Advantage-weighted regression: imitate what was recorded, what went better than expected the more.

        loss_t = -min( exp(A_t / beta), max_weight ) logprob_t

    Peng et al. 2019, "Advantage-Weighted Regression", arXiv:1910.00177: equation 3 is the weight, section 4 its bound
    (20). It needs no probability of the sampler, so text that any model, or a person, has written can be learned from.
    """

    type: Literal["awr"] = "awr"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    beta: PositiveFloat = 0.5
    """The temperature: the smaller, the less is learned from what went worse than expected."""
    max_weight: PositiveFloat = 20.0
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


@register
class NLLLoss(TokenLoss):
    """The negative log-likelihood of the tokens. Advantages and sampled log-probabilities play no part.

    Supervised learning: loss_t = -log p(token).

    >>> from agentlightning.policy.losses import NLLLoss
    >>> NLLLoss().type
    'nll'
    """

    type: Literal["nll"] = "nll"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""

    stream: ClassVar[Stream] = "cross_entropy"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, tokens: TokenBatch) -> LossValue:
        logprobs = tokens.trained_logprobs
        return LossValue(-(tokens.weights * logprobs).sum(), {"nll": -logprobs.detach().sum()})


@register
class EntropyLoss(TokenLoss):
    """The negative entropy of the tokens' distributions.

    Entropy bonus: the entropy of each token's distribution is rewarded, by a coefficient on a schedule.

        loss_t = -c(k) [ H_t - smoothing * ( max(0, lower Hbar - H_t) + max(0, H_t - upper Hbar) ) ]
        c(k) = coefficient + (final - coefficient) min(1, k / steps)           at optimiser step k

    H_t is the entropy over the whole vocabulary, at the temperature of sampling (Mnih et al. 2016, arXiv:1602.01783,
    section 4). Hbar is the mean entropy of all earlier steps: the second term keeps the entropy of a token within a
    band around it, which dampens the oscillations of long episodes. It is the smoothing of EPO (Xu et al. 2025,
    arXiv:2509.22576), with a penalty that grows with the distance from the band, so that it has a gradient.
    """

    type: Literal["entropy"] = "entropy"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    coefficient: NonNegativeFloat = 0.01  # pyright: ignore[reportIncompatibleVariableOverride]
    """The factor of the bonus at the first step."""
    final: NonNegativeFloat | None = None
    """The factor from optimiser step `steps` on; between the two it changes linearly. None: constant."""
    steps: AtLeastOne = 100
    """The number of optimiser steps until `final`."""
    smoothing: NonNegativeFloat = 0.0
    """The weight of leaving the band around the mean entropy of earlier steps. 0: no band."""
    lower: NonNegativeFloat = 0.8
    """Where the band begins, as a factor of that mean."""
    upper: float = Field(default=1.2, ge=1)
    """Where the band ends, as a factor of that mean."""

    needs: ClassVar[frozenset[str]] = frozenset({SAMPLED_LOGPROBS})
    needs_entropy: ClassVar[bool] = True

    def coefficient_at(self, step: int) -> float:
        if self.final is None:
            return self.coefficient
        return self.coefficient + (self.final - self.coefficient) * min(1.0, step / self.steps)

    def __call__(self, tokens: TokenBatch) -> LossValue:
        entropy = tokens.entropy
        if entropy is None:
            raise PolicyError('loss "entropy" needs the entropy of each token, which this policy does not compute')
        bonus = entropy
        sums = {"entropy_bonus": entropy.detach().sum()}
        if self.smoothing and tokens.past_entropy is not None:
            below = (self.lower * tokens.past_entropy - entropy).clamp(min=0)
            above = (entropy - self.upper * tokens.past_entropy).clamp(min=0)
            bonus = entropy - self.smoothing * (below + above)
            sums["entropy_outside"] = ((below + above) > 0).sum().float()
        return LossValue(-(tokens.weights * bonus).sum(), sums)


MOMENTS = ("return_mean", "return_square", "value_error_mean", "value_error_square")


@register
class ValueLoss(TokenLoss):
    """Trains the policy's value head (`policy.value_head`) on returns.

    The loss of a critic: the squared error of its values, clipped around those it gave before the update.

        loss_t = 1/2 max( (V_t - R_t)^2, (clip(V_t, V_old_t - clip, V_old_t + clip) - R_t)^2 )

    R_t is the return and V_old_t the value that credit was assigned with. Schulman et al. 2017, arXiv:1707.06347,
    equation 9, is the squared error, with the policy's loss and the coefficient c1; the clipping is that of OpenAI
    Baselines' PPO2, as Engstrom et al. 2020, arXiv:2005.12729, section 3 (1), state it.
    """

    type: Literal["value"] = "value"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    coefficient: NonNegativeFloat = 0.5
    """The factor of this loss where several add up. It matters where the head trains the policy's own weights too."""
    clip: PositiveFloat | None = 0.2
    """How far a value may move from that before the update before it stops counting, on the scale of rewards. None:
    without bound."""

    needs: ClassVar[frozenset[str]] = frozenset({VALUES, RETURNS})
    needs_values: ClassVar[bool] = True

    def __call__(self, tokens: TokenBatch) -> LossValue:
        values, old, returns = tokens.values, tokens.columns[VALUES], tokens.columns[RETURNS]
        assert values is not None  # An update refuses this loss where there is no head.
        clipped = values if self.clip is None else old + (values - old).clamp(-self.clip, self.clip)
        free = (values - returns) ** 2
        larger = free.maximum((clipped - returns) ** 2)
        loss = (tokens.weights * larger).sum() / 2
        sums = {"value_loss": larger.detach().sum() / 2, "value_clip_fraction": (larger > free).sum().float()}
        return LossValue(loss, sums | _moments(old, returns))

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


Estimator = Literal["k1", "k2", "k3", "unbiased"]


@register
class KLLoss(TokenLoss):
    """The divergence from a reference, estimated at the sampled tokens.

    KL divergence of the policy from a reference, such as the weights it started with.

        d_t = logprob_t - ref_logprob_t,   r_t = exp(logprob_t - old_logprob_t)
        k1:        loss_t = d_t
        k2:        loss_t = d_t^2 / 2
        k3:        loss_t = exp(-d_t) - 1 + d_t
        unbiased:  loss_t = r_t (exp(-d_t) - 1 + d_t)

    The estimators are those of Schulman 2020, http://joschu.net/blog/kl-approx.html; k3 is the term of GRPO (Shao et
    al. 2024, arXiv:2402.03300, equation 4). As a loss, k2 has the gradient of KL(policy || reference) on average over
    tokens the policy samples, k3 that of KL(reference || policy), and k1 none: it is for rewards (`kl_in_reward`).
    "unbiased" has both the value and the gradient of KL(policy || reference), for tokens of older weights too
    (DeepSeek-V3.2, 2025, arXiv:2512.02556, its unbiased KL estimate).
    """

    type: Literal["kl"] = "kl"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    coefficient: NonNegativeFloat = 0.001  # pyright: ignore[reportIncompatibleVariableOverride]
    """The factor of the divergence (beta)."""
    estimator: Estimator = "unbiased"
    """k1, k2, k3, or unbiased: the importance ratio times k3."""

    stream: ClassVar[Stream] = "reference_kl"
    needs: ClassVar[frozenset[str]] = frozenset({REF_LOGPROBS, SAMPLED_LOGPROBS})

    def __call__(self, tokens: TokenBatch) -> LossValue:
        difference = limited(tokens.trained_logprobs - tokens.columns[REF_LOGPROBS])
        k3 = (-difference).exp() - 1 + difference
        loss = (tokens.weights * self._estimate(tokens, difference, k3)).sum()
        return LossValue(loss, {"ref_kl": k3.detach().sum()})

    def _estimate(self, tokens: TokenBatch, difference: Tensor, k3: Tensor) -> Tensor:
        match self.estimator:
            case "k1":
                return difference
            case "k2":
                return difference**2 / 2
            case "k3":
                return k3
            case "unbiased":
                return clamped_log_ratio(tokens).exp() * k3


@register
class DistillLoss(TokenLoss):
    """The divergence of the policy from a teacher, as a policy gradient.

    On-policy distillation: the policy's own tokens, each with the advantage that a stronger model gives it.

        loss_t = -r_t stop_gradient(teacher_logprob_t - logprob_t),   r_t = exp(logprob_t - old_logprob_t)

    Its gradient is that of KL(policy || teacher) at the states the policy visits, estimated at the sampled tokens
    (Agarwal et al. 2024, arXiv:2306.13649, with lambda = 1 and reverse KL; Gu et al. 2024, MiniLLM, arXiv:2306.08543,
    section 2.2). Rewards play no part: it is a signal for every token.
    """

    type: Literal["distill"] = "distill"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""

    stream: ClassVar[Stream] = "reference_kl"
    needs: ClassVar[frozenset[str]] = frozenset({TEACHER_LOGPROBS, SAMPLED_LOGPROBS})

    def __call__(self, tokens: TokenBatch) -> LossValue:
        gain = limited(tokens.columns[TEACHER_LOGPROBS] - tokens.trained_logprobs.detach())
        loss = -(tokens.weights * clamped_log_ratio(tokens).exp() * gain).sum()
        return LossValue(loss, {"teacher_kl": -gain.sum()})


@register
class SDPOLoss(TokenLoss):
    """The divergence of the policy from itself given feedback, as a policy gradient.

    SDPO: self-distillation from feedback. The teacher is the policy itself, shown what it could not know when it
    answered: the error its tool call led to, or the answer of a sibling that succeeded.

        loss_t = stop_gradient( min(r_t, clip) (logprob_t - teacher_logprob_t) ) logprob_t
        r_t = exp(logprob_t - old_logprob_t),   teacher_logprob_t = log p(token_t | prompt, feedback, tokens before t)

    Its gradient is that of KL(policy || policy given feedback), estimated at the sampled tokens: Huebotter et al. 2026,
    arXiv:2601.20802, with the teacher's weights a moving average of the policy's and the importance ratio truncated. A
    token that the policy would not write again after the feedback is made less likely, where it stands: the feedback
    becomes credit for single tokens.
    """

    type: Literal["sdpo"] = "sdpo"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    clip: PositiveFloat = 2.0
    """The largest importance ratio."""

    stream: ClassVar[Stream] = "reference_kl"
    needs: ClassVar[frozenset[str]] = frozenset({TEACHER_LOGPROBS, SAMPLED_LOGPROBS})

    def __call__(self, tokens: TokenBatch) -> LossValue:
        logprobs = tokens.trained_logprobs
        difference = limited(logprobs.detach() - tokens.columns[TEACHER_LOGPROBS])
        ratio = clamped_log_ratio(tokens).detach().exp()
        loss = (tokens.weights * ratio.clamp(max=self.clip) * difference * logprobs).sum()
        return LossValue(loss, {"teacher_kl": difference.sum(), "clip_fraction": (ratio > self.clip).sum().float()})


MARGIN = "preference_margin"
"""The column of m, the same for all tokens of a pair."""
FACTOR = "preference_factor"
"""The column of s_t."""
COUNT = "preference_tokens"
"""The column of n, the trained tokens of the pair."""


class PreferenceLoss(TokenLoss):
    """A function of the margin between what is preferred and what is not.

    What the losses of preference learning share: a loss of whole sequences, as a loss of their tokens.

    A preference loss is a function f of a margin m: what the policy makes of a pair, or of one sequence. m is a sum
    over tokens, m = sum_t s_t log p(token_t) + constant, with a factor s_t that is positive for what is preferred.
    Therefore

        f(m)  has the gradient  sum_t f'(m) s_t grad log p(token_t)

    and tokens can be in any micro-batch. m is known before the update (`preference_margin`); the loss of a token is

        loss_t = w_t (f(m) / n + f'(m) s_t (logprob_t - stop_gradient(logprob_t)))

    with n tokens in the pair, so that the sum over a pair is f(m) with its gradient, w_t the weight of the pair.
    """

    beta: PositiveFloat = 0.1
    """How much a difference in log-probability counts."""

    needs: ClassVar[frozenset[str]] = frozenset({MARGIN, FACTOR, COUNT})
    reference: ClassVar[bool] = True
    """Whether log-probabilities are relative to those of a reference model."""
    mean: ClassVar[bool] = False
    """Whether a sequence has the mean of its log-probabilities, not their sum."""
    paired: ClassVar[bool] = True
    """Whether it compares two sequences, not one with a baseline."""

    @abstractmethod
    def of_margin(self, margin: Tensor, sign: Tensor) -> Tensor:
        """f(m) [N]; `sign` is 1 for tokens of what is preferred, else -1."""

    def __call__(self, tokens: TokenBatch) -> LossValue:
        import torch

        columns = tokens.columns
        with torch.enable_grad():
            margin = columns[MARGIN].detach().clone().requires_grad_()
            factor = columns[FACTOR]
            value = self.of_margin(margin, factor.sign())
            (slope,) = torch.autograd.grad(value.sum(), margin)
        own = tokens.trained_logprobs - tokens.trained_logprobs.detach()
        count = columns[COUNT].clamp(min=1)
        loss = (tokens.weights * (value.detach() / count + slope * factor * own)).sum()
        return LossValue(loss, {})


@register
class DPOLoss(PreferenceLoss):
    """The logistic loss of the margin.

    DPO: the preferred answer becomes more probable than the other, relative to a reference.

        m = [log p(y_w) - log p_ref(y_w)] - [log p(y_l) - log p_ref(y_l)]
        loss = -(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m)

    Rafailov et al. 2023, "Direct Preference Optimization", arXiv:2305.18290, equation 7; with label smoothing e > 0,
    conservative DPO (Mitchell 2023), for labels that are wrong that often.
    """

    type: Literal["dpo"] = "dpo"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """The share of pairs whose preference is the wrong way round."""

    def of_margin(self, margin: Tensor, sign: Tensor) -> Tensor:
        from torch.nn.functional import logsigmoid

        scaled = self.beta * margin
        return -(1 - self.label_smoothing) * logsigmoid(scaled) - self.label_smoothing * logsigmoid(-scaled)


@register
class IPOLoss(PreferenceLoss):
    """The squared distance of the margin from its target.

    IPO: the margin is drawn to a finite value, so that certain preferences do not grow it without end.

        m = [log p(y_w) - log p_ref(y_w)] / |y_w| - [log p(y_l) - log p_ref(y_l)] / |y_l|
        loss = (m - 1 / (2 beta))^2

    Azar et al. 2023, "A General Theoretical Paradigm to Understand Learning from Human Preferences", arXiv:2310.12036,
    equation 17, with tau = beta and log-probabilities averaged over the tokens, as in the authors' later code.
    """

    type: Literal["ipo"] = "ipo"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""

    mean: ClassVar[bool] = True

    def of_margin(self, margin: Tensor, sign: Tensor) -> Tensor:
        return (margin - 1 / (2 * self.beta)) ** 2


@register
class KTOLoss(PreferenceLoss):
    """The value of gains and losses against a baseline.

    KTO: answers that are good or bad, each by itself; no pairs are needed.

        r = log p(y) - log p_ref(y),    z = max(0, mean of r over the batch)
        good y:  m = r - z,    loss = desirable_weight (1 - sigmoid(beta m))
        bad y:   m = z - r,    loss = undesirable_weight (1 - sigmoid(beta m))

    Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization", arXiv:2402.01306, equation 8. z
    stands for the divergence from the reference and has no gradient; the paper estimates it with answers to other
    prompts, here it is the mean of the batch's own.
    """

    type: Literal["kto"] = "kto"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    desirable_weight: PositiveFloat = 1.0
    """The weight of good answers."""
    undesirable_weight: PositiveFloat = 1.0
    """The weight of bad ones."""

    paired: ClassVar[bool] = False

    def of_margin(self, margin: Tensor, sign: Tensor) -> Tensor:
        value = 1 - (self.beta * margin).sigmoid()
        return value * (sign > 0).to(value.dtype).mul(self.desirable_weight - self.undesirable_weight).add(
            self.undesirable_weight
        )


@register
class SimPOLoss(PreferenceLoss):
    """The logistic loss of the margin of mean log-probabilities.

    SimPO: DPO without a reference, of mean log-probabilities, with a margin to exceed.

        m = log p(y_w) / |y_w| - log p(y_l) / |y_l|
        loss = -log sigmoid(beta m - gamma)

    Meng et al. 2024, "SimPO: Simple Preference Optimization with a Reference-Free Reward", arXiv:2405.14734, equation
    6.
    """

    type: Literal["simpo"] = "simpo"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    beta: PositiveFloat = 2.0
    """How much a difference in log-probability counts."""
    gamma: NonNegativeFloat = 1.0
    """By how much the preferred answer must be ahead."""

    reference: ClassVar[bool] = False
    mean: ClassVar[bool] = True

    def of_margin(self, margin: Tensor, sign: Tensor) -> Tensor:
        from torch.nn.functional import logsigmoid

        return -logsigmoid(self.beta * margin - self.gamma)


OneLoss = Annotated[TokenLoss, Chosen(LOSSES)]
Loss = OneOrSeveral[OneLoss]
"""The setting `loss`: a loss, its name, or a list of them, which add up."""

AnyLoss = str | Mapping[str, Any] | TokenLoss | type[TokenLoss]
LossSetting = AnyLoss | Sequence[AnyLoss]


def token_losses(setting: LossSetting) -> tuple[TokenLoss, ...]:
    """The losses of a setting: names ("ppo"), tables with a `type`, losses, or a list of these. Raises ConfigError."""
    given = [setting] if isinstance(setting, str | type | Mapping | TokenLoss) else list(setting)
    if not given:
        raise ConfigError("loss=[] trains nothing; name at least one")
    return tuple(chosen(each, LOSSES) for each in given)
