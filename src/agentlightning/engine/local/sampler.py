"""Sampling of tokens from logits for a whole batch: penalties, bias, temperature, min_p, top_k, top_p, greedy.

A token is sampled by inverting the cumulative distribution at one uniform number per row (in float64), so it depends
only on the row's own logits and number, never on the rows beside it. The log-probability returned is that of the
distribution sampled from. Letters in names: N rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentlightning.engine.base import RANGES, SamplingParams, out_of_range
from agentlightning.errors import ConfigError

BLOCK = 256
"""Tokens whose probabilities are summed first when one is sampled."""
BELOW_ONE = 1.0 - 2.0**-52
"""Largest uniform number used: times a total it stays below that total, so no token of probability 0 is sampled."""
ADJUSTMENTS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
"""Parameters that change single logits."""
MIN_TEMPERATURE = 1e-30
"""Lower bound of temperature and top_p, which float32 needs; the most likely token is as certain at this value."""


@dataclass(frozen=True, slots=True)
class BatchSamplingParams:
    """Sampling parameters of a batch as tensors. None: no row needs that step."""

    temperature: Tensor | None
    """[N, 1]"""
    greedy: Tensor | None
    """[N]"""
    top_k: Tensor | None
    """[N, 1]"""
    top_p: Tensor | None
    """[N, 1]"""
    min_p: Tensor | None
    """[N, 1]"""
    adjusted: tuple[tuple[int, SamplingParams], ...]
    """The rows that have a penalty or a bias."""
    top_logprobs: int
    """Number of most likely tokens to report."""
    recording: tuple[int, ...]
    """The rows that record which tokens top_k and top_p kept."""
    all_greedy: bool


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token for each row."""

    tokens: Tensor
    """[N], int64."""
    logprobs: Tensor
    """[N], float32: of the distribution sampled from."""
    top_tokens: Tensor | None = None
    """[N, top], most likely first; if fewer can be sampled, the rest have the log-probability -inf."""
    top_logprobs: Tensor | None = None
    kept: Tensor | None = None
    """[recording rows, V], bool: the tokens that could be sampled."""


def validate(params: SamplingParams, vocab_size: int) -> None:
    """Raises ConfigError, naming the value, if `params` describe no distribution over so many tokens."""
    biases = (("logit_bias", bias) for _, bias in params.logit_bias)
    values = ((name, getattr(params, name)) for name in RANGES.keys() - {"logit_bias"})
    for name, value in (*values, *biases):
        if value is not None and (remedy := out_of_range(name, value)):
            raise ConfigError(f"{name}={value} describes no distribution; {remedy}")
    if params.json_schema is not None and params.grammar is not None:
        raise ConfigError("json_schema and grammar are both set; use one of them")
    if any(not stop for stop in params.stop):
        raise ConfigError("stop contains an empty string, which would end every answer at once; remove it")
    fields = {"logit_bias": [token for token, _ in params.logit_bias], "stop_token_ids": params.stop_token_ids}
    for name, tokens in fields.items():
        if unknown := [token for token in tokens if not 0 <= token < vocab_size]:
            raise ConfigError(f"{name} names the token {unknown[0]}; the model knows 0 to {vocab_size - 1}")


def batch_params(rows: Sequence[SamplingParams], device: torch.device) -> BatchSamplingParams:
    """The parameters of `rows` as tensors on `device`. Greedy rows ignore top_k and top_p."""
    greedy = [row.temperature == 0 for row in rows]
    drawn = [SamplingParams() if row.temperature == 0 else row for row in rows]

    def column(values: Sequence[float], neutral: float) -> Tensor | None:
        if all(value == neutral for value in values):
            return None
        return torch.tensor(values, device=device).unsqueeze(1)

    return BatchSamplingParams(
        temperature=column([max(row.temperature, MIN_TEMPERATURE) for row in drawn], 1.0),
        greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
        top_k=column([row.top_k or 2**31 for row in drawn], 2**31),
        top_p=column([max(row.top_p, MIN_TEMPERATURE) if row.top_p < 1 else 2.0 for row in drawn], 2.0),
        min_p=column([row.min_p for row in drawn], 0.0),
        adjusted=tuple((index, row) for index, row in enumerate(rows) if row.changed(ADJUSTMENTS)),
        top_logprobs=max((row.top_logprobs for row in rows), default=0),
        recording=tuple(index for index, row in enumerate(rows) if row.record_kept and row.truncates),
        all_greedy=all(greedy),
    )


def sample_tokens(
    logits_NV: Tensor,
    params: BatchSamplingParams,
    uniform_N: Tensor,
    sampled: Sequence[Sequence[int]] = (),
    allowed_NV: Tensor | None = None,
    seen: Sequence[Sequence[int]] = (),
) -> SampledTokens:
    """A token for each row. `uniform_N`: float64 in [0, 1). `sampled`: the tokens each row has sampled so far, and
    `seen` those with its prompt, needed where `params` adjust logits. `allowed_NV`: bool, the only tokens that may be
    sampled; None: all."""
    logits_NV = _adjust_logits(logits_NV.float(), params, sampled, seen)
    if allowed_NV is not None:
        logits_NV = logits_NV.masked_fill(~allowed_NV, -math.inf)
    if params.temperature is not None:
        logits_NV = logits_NV / params.temperature
    if params.min_p is not None:
        floor_N1 = logits_NV.max(dim=-1, keepdim=True).values + params.min_p.log()
        logits_NV = logits_NV.masked_fill(logits_NV < floor_N1, -math.inf)
    if params.top_k is not None or params.top_p is not None:
        logits_NV = top_k_top_p_mask(logits_NV, params.top_k, params.top_p)
    kept = logits_NV[list(params.recording)] > -math.inf if params.recording else None
    largest_N1 = logits_NV.max(dim=-1, keepdim=True).values
    weights_NV = (logits_NV - largest_N1).exp_()
    totals_NB = _block_totals(weights_NV)
    tokens_N = logits_NV.argmax(dim=-1) if params.all_greedy else inverse_cdf_sample(weights_NV, totals_NB, uniform_N)
    if params.greedy is not None and not params.all_greedy:
        tokens_N = torch.where(params.greedy, logits_NV.argmax(dim=-1), tokens_N)
    normalizer_N1 = largest_N1 + totals_NB[:, -1:].log().float()
    logprobs_N = (logits_NV.gather(1, tokens_N.unsqueeze(1)) - normalizer_N1).squeeze(1)
    if not params.top_logprobs:
        return SampledTokens(tokens_N, logprobs_N, kept=kept)
    top = logits_NV.topk(min(params.top_logprobs, logits_NV.shape[-1]), dim=-1)
    return SampledTokens(tokens_N, logprobs_N, top.indices, top.values - normalizer_N1, kept)


def _adjust_logits(
    logits_NV: Tensor, params: BatchSamplingParams, sampled: Sequence[Sequence[int]], seen: Sequence[Sequence[int]]
) -> Tensor:
    """Apply penalties and bias."""
    if not params.adjusted:
        return logits_NV
    logits_NV, device = logits_NV.clone(), logits_NV.device
    for row, wanted in params.adjusted:
        logits_V = logits_NV[row]
        if wanted.repetition_penalty != 1:
            tokens = torch.tensor(seen[row], device=device).unique()
            values = logits_V[tokens]
            penalty = wanted.repetition_penalty
            logits_V[tokens] = torch.where(values > 0, values / penalty, values * penalty)
        if sampled[row]:
            tokens, counts = torch.tensor(sampled[row], device=device).unique(return_counts=True)
            logits_V[tokens] -= wanted.presence_penalty + wanted.frequency_penalty * counts
        if wanted.logit_bias:
            tokens, biases = zip(*wanted.logit_bias, strict=True)
            biases_K = torch.tensor(biases, dtype=logits_V.dtype, device=device)
            logits_V.index_add_(0, torch.tensor(tokens, device=device), biases_K)
    return logits_NV


def _block_totals(weights_NV: Tensor) -> Tensor:
    """Cumulative sums of the weights at the ends of blocks of BLOCK tokens, [N, B] in float64: the whole row's last."""
    whole = weights_NV.shape[-1] // BLOCK * BLOCK
    sums_NB = weights_NV[:, :whole].unflatten(-1, (-1, BLOCK)).sum(-1)
    if whole < weights_NV.shape[-1]:
        sums_NB = torch.cat([sums_NB, weights_NV[:, whole:].sum(-1, keepdim=True)], -1)
    return sums_NB.cumsum(-1, dtype=torch.float64)


def inverse_cdf_sample(weights_NV: Tensor, totals_NB: Tensor, uniform_N: Tensor) -> Tensor:
    """The token at which each row's cumulative weight first exceeds its uniform number's share of the whole: first the
    block, then the token in it, since a cumulative sum of the vocabulary costs more than all else here."""
    target_N1 = uniform_N.clamp(max=BELOW_ONE).unsqueeze(1) * totals_NB[:, -1:]
    block_N1 = torch.searchsorted(totals_NB, target_N1, right=True).clamp_(max=totals_NB.shape[-1] - 1)
    before_N1 = torch.where(block_N1 > 0, totals_NB.gather(1, (block_N1 - 1).clamp(min=0)), 0.0)
    share_N1 = (target_N1 - before_N1) / (totals_NB.gather(1, block_N1) - before_N1)
    last = weights_NV.shape[-1] - 1
    columns_NK = block_N1 * BLOCK + torch.arange(min(BLOCK, last + 1), device=weights_NV.device)
    inside_NK = weights_NV.gather(1, columns_NK.clamp(max=last)).masked_fill_(columns_NK > last, 0.0)
    cumulative_NK = inside_NK.cumsum(-1, dtype=torch.float64)
    # Relative to the block's own sum, so that rounding never reaches beyond it to a token of probability 0.
    within_N1 = torch.searchsorted(cumulative_NK, share_N1.clamp(0.0, BELOW_ONE) * cumulative_NK[:, -1:], right=True)
    return (block_N1 * BLOCK + within_N1).squeeze(1).clamp_(max=last)


def top_k_top_p_mask(logits_NV: Tensor, top_k_N1: Tensor | None, top_p_N1: Tensor | None) -> Tensor:
    """Logits with -inf outside the `top_k` largest, then outside the smallest set of them that reaches `top_p`."""
    sorted_NV, order_NV = logits_NV.sort(dim=-1, descending=True, stable=True)
    if top_k_N1 is not None:
        rank_V = torch.arange(sorted_NV.shape[-1], device=sorted_NV.device)
        sorted_NV = sorted_NV.masked_fill(rank_V >= top_k_N1, -math.inf)
    if top_p_N1 is not None:
        probs_NV = sorted_NV.softmax(dim=-1)
        sorted_NV = sorted_NV.masked_fill(probs_NV.cumsum(dim=-1) - probs_NV >= top_p_N1, -math.inf)
    return torch.empty_like(logits_NV).scatter_(1, order_NV, sorted_NV)
