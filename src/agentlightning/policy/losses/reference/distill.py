"""On-policy distillation: the policy's own tokens, each with the advantage that a stronger model gives it.

    loss_t = -r_t stop_gradient(teacher_logprob_t - logprob_t),   r_t = exp(logprob_t - old_logprob_t)

Its gradient is that of KL(policy || teacher) at the states the policy visits, estimated at the sampled tokens (Agarwal
et al. 2024, arXiv:2306.13649, with lambda = 1 and reverse KL; Gu et al. 2024, MiniLLM, arXiv:2306.08543, section 2.2).
Rewards play no part: it is a signal for every token.
"""

from __future__ import annotations

from typing import ClassVar, Literal

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
class DistillLoss(TokenLoss):
    """The divergence of the policy from a teacher, as a policy gradient."""

    type: Literal["distill"] = "distill"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""

    stream: ClassVar[Stream] = "reference_kl"
    needs: ClassVar[frozenset[str]] = frozenset({TEACHER_LOGPROBS, SAMPLED_LOGPROBS})

    def __call__(self, tokens: TokenBatch) -> LossValue:
        gain = limited(tokens.columns[TEACHER_LOGPROBS] - tokens.trained_logprobs.detach())
        loss = -(tokens.weights * clamped_log_ratio(tokens).exp() * gain).sum()
        return LossValue(loss, {"teacher_kl": -gain.sum()})
