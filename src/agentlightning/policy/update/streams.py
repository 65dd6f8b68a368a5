"""What the tokens of a batch weigh in each loss: weights of the three streams, corrections, and which tokens count.

`for_losses` completes the columns of samples, so that samples for reinforcement learning, supervised learning and
distillation can share a batch: where a sample has no weight in a stream, it needs no column of that stream's losses.
Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

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
from agentlightning.policy.update.packing import TRAINED
from agentlightning.trajectory import FloatArray, Node, TokenTree, TrainingSample

Column = tuple[FloatArray, ...]


def weights_name(loss: TokenLoss, columns: Iterable[str]) -> str:
    """The column of a loss's weights: that of its stream if samples have it, else `weights`."""
    own = STREAM_WEIGHTS[loss.stream]
    return own if own in columns else WEIGHTS


def for_losses(samples: Sequence[TrainingSample], losses: Sequence[TokenLoss]) -> list[TrainingSample]:
    """The samples with every column that a loss needs and with the weights of each stream, all 0 where a sample has no
    part in it; and with a column `trained`, 1 for each token that counts in a loss.

    Raises PolicyError for a column that is missing where it is needed, and UnfaithfulSampleError for trained tokens
    that were chosen greedily, if a loss needs the probability they were sampled with."""
    given = set[str]().union(*(sample.columns for sample in samples))
    streams = {weights_name(loss, given) for loss in losses}
    return [_completed(sample, losses, given, streams) for sample in samples]


def _completed(
    sample: TrainingSample, losses: Sequence[TokenLoss], given: set[str], streams: set[str]
) -> TrainingSample:
    tree, columns = sample.tree, dict(sample.columns)
    if WEIGHTS not in columns and not streams & set(columns):
        raise PolicyError(
            f"a sample of {tree.num_sampled} sampled tokens has no column of weights: give {WEIGHTS!r}, or the weights "
            "of a stream"
        )
    for name in streams | {WEIGHTS}:
        columns.setdefault(name, _zeros(tree.nodes))
    for loss in losses:
        weights = columns[weights_name(loss, given)]
        missing = loss.needs - {SAMPLED_LOGPROBS} - set(columns)
        if missing and _any(weights):
            raise PolicyError(f'loss "{loss.type}" needs the columns {sorted(missing)}, which samples do not have')
        columns |= dict.fromkeys(missing, _zeros(tree.nodes))
        if SAMPLED_LOGPROBS in loss.needs:
            _refuse_greedy(tree.nodes, weights)
    if PROXIMAL_LOGPROBS in given:
        columns.setdefault(PROXIMAL_LOGPROBS, tuple(_array(node.logprobs) for node in tree.nodes))
    if INTERPOLATION in given:
        columns.setdefault(INTERPOLATION, _zeros(tree.nodes))
    columns[TRAINED] = _trained(tree.nodes, columns, losses, given)
    faithful = {weights_name(loss, given) for loss in losses if SAMPLED_LOGPROBS in loss.needs}
    if not any(_any(columns[name]) for name in faithful):  # Imitated only: the whole distribution at temperature 1.
        tree = TokenTree(tuple(replace(node, temperature=1.0, kept_sets=None) for node in tree.nodes))
    share = sample.share if WEIGHTS in sample.columns else 0.0
    return replace(sample, tree=tree, columns=columns, share=share)


def _trained(
    nodes: Sequence[Node], columns: Mapping[str, Column], losses: Sequence[TokenLoss], given: set[str]
) -> Column:
    advantages = columns.get(ADVANTAGES)
    learning = {node.rollout_id for node, own in zip(nodes, advantages or (), strict=False) if own.any()}
    counts = [np.zeros(len(each), bool) for each in columns[WEIGHTS]]
    for loss in losses:
        for i, weight in enumerate(columns[weights_name(loss, given)]):
            own = weight != 0
            if advantages is not None and not loss.trains_zero_advantage:
                own &= nodes[i].rollout_id in learning if loss.spans_rollout else advantages[i] != 0
            counts[i] |= own
    return tuple(each.astype(np.float32) for each in counts)


def _refuse_greedy(nodes: Sequence[Node], weights: Column) -> None:
    for node, own in zip(nodes, weights, strict=True):
        if node.sampled and node.temperature <= 0 and own.any():
            raise UnfaithfulSampleError(
                f"call {node.call} of rollout {node.rollout_id} was sampled with temperature={node.temperature:g}; "
                'sample training rollouts with a temperature above 0, or train with loss="nll"'
            )


def normalized(samples: Sequence[TrainingSample], losses: Sequence[TokenLoss]) -> list[TrainingSample]:
    """The weights of each stream but `weights`, divided by the number of tokens in the stream."""
    names = {weights_name(loss, samples[0].columns) for loss in losses} - {WEIGHTS} if samples else set[str]()
    tokens = {name: sum(int((a != 0).sum()) for sample in samples for a in sample.columns[name]) for name in names}
    return [
        replace(s, columns={**s.columns, **{name: _divided(s.columns[name], n) for name, n in tokens.items()}})
        for s in samples
    ]


def _divided(column: Column, count: int) -> Column:
    return tuple(each / np.float32(max(1, count)) for each in column)


def corrected(
    samples: Sequence[TrainingSample], several: Sequence[Correction]
) -> tuple[list[TrainingSample], dict[str, float]]:
    """The samples with `corrected_weights`, and the means of `measures` over the tokens of `weights`."""
    found: list[TrainingSample] = []
    log_ratios: list[Any] = []
    products: list[FloatArray] = []
    for sample in samples:
        if not _any(sample.columns.get(TRAINED, sample.weights)):
            found.append(replace(sample, columns={**sample.columns, CORRECTED_WEIGHTS: sample.weights}))
            continue
        counts = np.concatenate([a != 0 for a in sample.weights])
        sampled = np.concatenate([_array(node.logprobs) for node in sample.tree.nodes])
        log_ratio = (np.concatenate(sample.columns[PROXIMAL_LOGPROBS]) - sampled)[counts]
        product = np.ones(len(counts), np.float32)
        product[counts] = factors(log_ratio, _rollouts(sample)[counts], several)
        ends = np.cumsum([len(a) for a in sample.weights])[:-1]
        weights = [w * f for w, f in zip(sample.weights, np.split(product, ends), strict=True)]
        found.append(replace(sample, columns={**sample.columns, CORRECTED_WEIGHTS: weights}))
        finite = np.isfinite(log_ratio)
        log_ratios.append(log_ratio[finite].astype(np.float64))
        products.append(product[counts][finite])
    if not sum(map(len, products)):
        return found, {}
    measured = measures(np.concatenate(log_ratios), np.concatenate(products))
    return found, {name: float(values.mean()) for name, values in measured.items()}


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


def _rollouts(sample: TrainingSample) -> np.ndarray[Any, Any]:
    """The rollout of each token, numbered within the sample."""
    numbers: dict[object, int] = {}
    found = [
        np.full(len(weights), numbers.setdefault(node.rollout_id or index, len(numbers)), np.int64)
        for index, (node, weights) in enumerate(zip(sample.tree.nodes, sample.weights, strict=True))
    ]
    return np.concatenate(found)


def without(sample: TrainingSample, excluded: Callable[[Node], bool]) -> TrainingSample:
    """The sample with all weights of some nodes 0."""
    names = [*STREAM_WEIGHTS.values(), CORRECTED_WEIGHTS, TRAINED]
    columns = dict(sample.columns)
    for name in set(names) & set(columns):
        pairs = zip(sample.tree.nodes, columns[name], strict=True)
        columns[name] = tuple(np.zeros_like(a) if excluded(node) else a for node, a in pairs)
    return replace(sample, columns=columns)


def not_finite_in_data(sample: TrainingSample, needs: Iterable[str]) -> set[str]:
    """The rollouts with a value that is not finite, in a column that a loss reads or among their recorded
    log-probabilities."""
    found: set[str] = set()
    columns = [sample.columns[name] for name in {*needs, CORRECTED_WEIGHTS, WEIGHTS} & set(sample.columns)]
    for index, node in enumerate(sample.tree.nodes):
        counts = sample.columns[TRAINED][index] != 0
        values = [column[index] for column in columns]
        if SAMPLED_LOGPROBS in needs and node.sampled:
            values.append(_array(node.logprobs))
        if any(not np.isfinite(each[counts]).all() for each in values if len(each) == len(counts)):
            found.add(str(node.rollout_id))
    return found


def _zeros(nodes: Sequence[Node]) -> Column:
    return tuple(np.zeros(len(node.token_ids) if node.sampled else 0, np.float32) for node in nodes)


def _array(values: Sequence[float]) -> FloatArray:
    return np.asarray(values, np.float32)


def _any(column: Column) -> bool:
    return any(each.any() for each in column)
