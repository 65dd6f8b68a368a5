"""Supervised learning: loss_t = -log p(token)."""

from __future__ import annotations

from typing import ClassVar, Literal

from agentlightning.policy.losses.base import LossValue, Stream, TokenBatch, TokenLoss, register


@register
class NLLLoss(TokenLoss):
    """The negative log-likelihood of the tokens. Advantages and sampled log-probabilities play no part.

    >>> agl.NLLLoss().type
    'nll'
    """

    type: Literal["nll"] = "nll"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which loss this is."""

    stream: ClassVar[Stream] = "cross_entropy"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, tokens: TokenBatch) -> LossValue:
        logprobs = tokens.trained_logprobs
        return LossValue(-(tokens.weights * logprobs).sum(), {"nll": -logprobs.detach().sum()})
