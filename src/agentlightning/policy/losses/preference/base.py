"""What the losses of preference learning share: a loss of whole sequences, as a loss of their tokens.

A preference loss is a function f of a margin m: what the policy makes of a pair, or of one sequence. m is a sum over
tokens, m = sum_t s_t log p(token_t) + constant, with a factor s_t that is positive for what is preferred. Therefore

    f(m)  has the gradient  sum_t f'(m) s_t grad log p(token_t)

and tokens can be in any micro-batch. m is known before the update (`preference_margin`); the loss of a token is

    loss_t = w_t (f(m) / n + f'(m) s_t (logprob_t - stop_gradient(logprob_t)))

with n tokens in the pair, so that the sum over a pair is f(m) with its gradient, w_t the weight of the pair.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from agentlightning.policy.losses.base import LossValue, TokenBatch, TokenLoss

if TYPE_CHECKING:
    from torch import Tensor

MARGIN = "preference_margin"
"""The column of m, the same for all tokens of a pair."""
FACTOR = "preference_factor"
"""The column of s_t."""
COUNT = "preference_tokens"
"""The column of n, the trained tokens of the pair."""


class PreferenceLoss(TokenLoss):
    """A function of the margin between what is preferred and what is not."""

    beta: float = Field(default=0.1, gt=0)
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
