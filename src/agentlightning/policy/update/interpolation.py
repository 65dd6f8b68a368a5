"""Proximal log-probabilities between those of the sampler and of the weights being trained (`policy.proximal`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from agentlightning.policy.losses import (
    CORRECTED_WEIGHTS,
    INTERPOLATION,
    PROXIMAL_LOGPROBS,
    SAMPLED_LOGPROBS,
    WEIGHTS,
    TokenBatch,
    limited,
)
from agentlightning.policy.mismatch import Correction, factors


def interpolated(tokens: TokenBatch) -> TokenBatch:
    """The tokens with `proximal_logprobs`, without gradient, where they have the column `interpolation`."""
    if INTERPOLATION not in tokens.columns:
        return tokens
    sampled = tokens.columns[SAMPLED_LOGPROBS]
    proximal = sampled + tokens.columns[INTERPOLATION] * (tokens.trained_logprobs.detach() - sampled)
    return replace(tokens, columns={**tokens.columns, PROXIMAL_LOGPROBS: proximal})


def corrected(tokens: TokenBatch, several: Sequence[Correction]) -> tuple[TokenBatch, dict[str, Tensor], int]:
    """Interpolated tokens with `corrected_weights`; sums for the metrics of the correction, and of how many tokens.
    The corrections are those of tokens: no rollout is whole here."""
    log_ratio = limited(tokens.columns[PROXIMAL_LOGPROBS] - tokens.columns[SAMPLED_LOGPROBS])
    rollout = tokens.rollout.cpu().numpy()
    found = factors(log_ratio.double().cpu().numpy(), rollout, several)
    weights = tokens.columns[WEIGHTS]
    product = torch.as_tensor(found).to(weights)
    counts = weights != 0
    sums = {
        "mismatch_ratio": log_ratio.exp(),
        "mismatch_kl": log_ratio.exp() - 1 - log_ratio,
        "mismatch_weight": product,
        "mismatch_masked": (product == 0).float(),
        "proximal_differs": (log_ratio != 0).float(),
    }
    tokens = replace(tokens, columns={**tokens.columns, CORRECTED_WEIGHTS: weights * product})
    return tokens, {name: values[counts].sum() for name, values in sums.items()}, int(counts.sum())
