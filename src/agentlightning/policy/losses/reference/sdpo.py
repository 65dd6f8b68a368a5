"""SDPO: self-distillation from feedback. The teacher is the policy itself, shown what it could not know when it
answered: the error its tool call led to, or the answer of a sibling that succeeded.

    loss_t = stop_gradient( min(r_t, clip) (logprob_t - teacher_logprob_t) ) logprob_t
    r_t = exp(logprob_t - old_logprob_t),   teacher_logprob_t = log p(token_t | prompt, feedback, tokens before t)

Its gradient is that of KL(policy || policy given feedback), estimated at the sampled tokens: Huebotter et al. 2026,
arXiv:2601.20802, with the teacher's weights a moving average of the policy's and the importance ratio truncated. A
token that the policy would not write again after the feedback is made less likely, where it stands: the feedback
becomes credit for single tokens.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from agentlightning.policy.losses.base import (
    SAMPLED_LOGPROBS,
    TEACHER_LOGPROBS,
    LossValue,
    Stream,
    TokenBatch,
    TokenLoss,
    clamped_log_ratio,
    limited,
    register,
)


@register
class SDPOLoss(TokenLoss):
    """The divergence of the policy from itself given feedback, as a policy gradient."""

    type: Literal["sdpo"] = "sdpo"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""
    clip: float = Field(default=2.0, gt=0)
    """The largest importance ratio."""

    stream: ClassVar[Stream] = "reference_kl"
    needs: ClassVar[frozenset[str]] = frozenset({TEACHER_LOGPROBS, SAMPLED_LOGPROBS})

    def __call__(self, tokens: TokenBatch) -> LossValue:
        logprobs = tokens.trained_logprobs
        difference = limited(logprobs.detach() - tokens.columns[TEACHER_LOGPROBS])
        ratio = clamped_log_ratio(tokens).detach().exp()
        loss = (tokens.weights * ratio.clamp(max=self.clip) * difference * logprobs).sum()
        return LossValue(loss, {"teacher_kl": difference.sum(), "clip_fraction": (ratio > self.clip).sum().float()})
