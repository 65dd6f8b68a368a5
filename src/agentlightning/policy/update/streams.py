"""What the tokens of a batch weigh in each loss: weights of the three streams, corrections, and which tokens count.

`for_losses` completes the columns of samples, so that samples for reinforcement learning, supervised learning and
distillation can share a batch: where a sample has no weight in a stream, it needs no column of that stream's losses.
Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from agentlightning.errors import PolicyError, UnfaithfulSampleError
from agentlightning.policy.losses import (
    ADVANTAGES,
    CORRECTED_WEIGHTS,
    INTERPOLATION,
    PROXIMAL_LOGPROBS,
    SAMPLED_LOGPROBS,
    STREAM_WEIGHTS,
    WEIGHTS,
    TokenBatch,
    TokenLoss,
)
from agentlightning.policy.mismatch import Correction, factors, measures
from agentlightning.policy.update.packing import TRAINED, IntArray, KeptTokens, TokenTable, token_table
from agentlightning.trajectory import FloatArray, TrainingSample

Tokens: TypeAlias = NDArray[np.bool_]
"""Which tokens of a table."""


def weights_name(loss: TokenLoss, columns: Iterable[str]) -> str:
    """The column of a loss's weights: that of its stream if samples have it, else `weights`."""
    own = STREAM_WEIGHTS[loss.stream]
    return own if own in columns else WEIGHTS


def for_losses(samples: Sequence[TrainingSample], losses: Sequence[TokenLoss]) -> TokenTable:
    """The tokens of the samples with every column that a loss needs and with the weights of each stream, all 0 where a
    sample has no part in it; and with a column `trained`, 1 for each token that counts in a loss.

    Raises PolicyError for a column that is missing where it is needed, and UnfaithfulSampleError for trained tokens
    that were chosen greedily, if a loss needs the probability they were sampled with."""
    table = token_table(samples)
    weights = {weights_name(loss, table.columns) for loss in losses} | {WEIGHTS}
    for sample in samples:
        if not weights & set(sample.columns):
            raise PolicyError(
                f"a sample of {sample.tree.num_sampled} sampled tokens has no column of weights: give {WEIGHTS!r}, or"
                " the weights of a stream"
            )
    zeros = np.zeros_like(table.temperatures)
    needed = weights.union(*(loss.needs for loss in losses))
    columns = {**dict.fromkeys(needed, zeros), **table.columns}
    trained, faithful = np.zeros(len(zeros), bool), np.zeros(len(zeros), bool)
    for loss in losses:
        counts = columns[weights_name(loss, table.columns)] != 0
        missing = sorted(n for n in loss.needs - {SAMPLED_LOGPROBS} if (counts & ~table.has(n)).any())
        if missing:
            raise PolicyError(f'loss "{loss.type}" needs the columns {missing}, which samples do not have')
        if SAMPLED_LOGPROBS in loss.needs:
            _refuse_greedy(table, counts)
            faithful |= counts
        trained |= counts & _learning(loss, columns, table.rollout)
    if PROXIMAL_LOGPROBS in columns:
        proximal, sampled = columns[PROXIMAL_LOGPROBS], columns[SAMPLED_LOGPROBS]
        columns[PROXIMAL_LOGPROBS] = np.where(table.has(PROXIMAL_LOGPROBS), proximal, sampled)
    columns[TRAINED] = trained.astype(np.float32)
    return _imitated(replace(table, columns=columns), faithful)


def _learning(loss: TokenLoss, columns: Mapping[str, FloatArray], rollout: IntArray) -> Any:
    """Which tokens have a gradient if they have a weight."""
    if loss.trains_zero_advantage:
        return True
    own = columns[ADVANTAGES] != 0
    return np.isin(rollout, rollout[own]) if loss.spans_rollout else own


def _refuse_greedy(table: TokenTable, counts: Tokens) -> None:
    for place in np.flatnonzero(counts & (table.temperatures <= 0))[:1]:
        node = table.nodes[table.node[place]]
        raise UnfaithfulSampleError(
            f"call {node.call} of rollout {node.rollout_id} was sampled with temperature={node.temperature:g}; sample"
            ' training rollouts with a temperature above 0, or train with loss="nll"'
        )


def _imitated(table: TokenTable, faithful: Tokens) -> TokenTable:
    """Samples without a `faithful` token are imitated only: the whole distribution at temperature 1."""
    sampled, kept = np.isin(table.sample, table.sample[faithful]), table.kept
    if kept is not None:
        kept = KeptTokens(kept.sizes * sampled, kept.ids[np.repeat(sampled, kept.sizes)])
    return replace(table, temperatures=np.where(sampled, table.temperatures, np.float32(1)), kept=kept)


def minibatches(table: TokenTable, count: int) -> list[TokenTable]:
    """The samples in so many parts, the weights of each divided by its share: whatever normalised the weights, a part
    then weighs as a whole batch does."""
    if count == 1:
        return [table]
    parts = [replace(table, part=table.part[i::count]) for i in range(count)]
    return [_as_whole(part) for part in parts if part.part]


def _as_whole(table: TokenTable) -> TokenTable:
    samples = [table.samples[i] for i in table.part]
    share = sum(sample.share for sample in samples if WEIGHTS in sample.columns)
    names = {WEIGHTS, CORRECTED_WEIGHTS} & set(table.columns) if share else ()
    return table.with_columns({name: table.columns[name] / np.float32(share) for name in names})


def normalized(table: TokenTable, losses: Sequence[TokenLoss]) -> TokenTable:
    """The weights of each stream but `weights`, divided by the number of tokens in the stream."""
    within = table.within
    names = {weights_name(loss, table.columns) for loss in losses} - {WEIGHTS}
    counts = {name: np.count_nonzero(table.columns[name][within]) for name in names}
    return table.with_columns({name: table.columns[name] / np.float32(max(1, n)) for name, n in counts.items()})


def corrected(table: TokenTable, several: Sequence[Correction]) -> tuple[TokenTable, dict[str, float]]:
    """The tokens with `corrected_weights`, and the means of `measures` over the tokens of `weights`."""
    columns, weights = table.columns, table.columns[WEIGHTS]
    learning = np.isin(table.sample, table.sample[columns[TRAINED] != 0])
    counts = learning & (weights != 0)
    log_ratio = (columns[PROXIMAL_LOGPROBS] - columns[SAMPLED_LOGPROBS])[counts]
    product = np.ones_like(weights)
    product[counts] = factors(log_ratio, table.rollout[counts], several)
    table = table.with_columns({CORRECTED_WEIGHTS: weights * product})
    if not (finite := np.isfinite(log_ratio)).any():
        return table, {}
    precise: Any = log_ratio[finite].astype(np.float64)
    measured = measures(precise, product[counts][finite])
    return table, {name: float(values.mean()) for name, values in measured.items()}


def interpolated(tokens: TokenBatch) -> TokenBatch:
    """The tokens with `proximal_logprobs`, without gradient, where they have the column `interpolation`."""
    if INTERPOLATION not in tokens.columns:
        return tokens
    sampled = tokens.columns[SAMPLED_LOGPROBS]
    proximal = sampled + tokens.columns[INTERPOLATION] * (tokens.trained_logprobs.detach() - sampled)
    return replace(tokens, columns={**tokens.columns, PROXIMAL_LOGPROBS: proximal})


def corrected_tokens(tokens: TokenBatch, several: Sequence[Correction]) -> tuple[TokenBatch, dict[str, float], int]:
    """Interpolated tokens with `corrected_weights`; the sums of `measures`, and of how many tokens. The corrections are
    those of tokens: no rollout is whole here."""
    log_ratio = (tokens.columns[PROXIMAL_LOGPROBS] - tokens.columns[SAMPLED_LOGPROBS]).double().cpu().numpy()
    product = factors(log_ratio, tokens.rollout.cpu().numpy(), several)
    weights = tokens.weights
    counts = (weights != 0).cpu().numpy()
    sums = {name: float(values.sum()) for name, values in measures(log_ratio[counts], product[counts]).items()}
    tokens = replace(tokens, columns={**tokens.columns, CORRECTED_WEIGHTS: weights * weights.new_tensor(product)})
    return tokens, sums, int(counts.sum())


def without(table: TokenTable, excluded: Tokens) -> TokenTable:
    """The same with all weights of some tokens 0."""
    names = {*STREAM_WEIGHTS.values(), CORRECTED_WEIGHTS, TRAINED} & set(table.columns)
    return table.with_columns({name: np.where(excluded, np.float32(0), table.columns[name]) for name in names})


def not_finite_in_data(table: TokenTable, needs: Iterable[str]) -> IntArray:
    """The rollouts with a value that is not finite, in a column that a loss reads."""
    columns = [table.columns[name] for name in {*needs, CORRECTED_WEIGHTS, WEIGHTS} & set(table.columns)]
    finite = np.logical_and.reduce([np.isfinite(each) for each in columns])
    return np.unique(table.rollout[table.within & (table.columns[TRAINED] != 0) & ~finite])
