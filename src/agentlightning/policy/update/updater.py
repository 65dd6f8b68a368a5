"""What a policy trains, and scores tokens with: all weights of its model, or adapters over them.

Each has its own optimiser, and a policy trains one kind for its whole life. The weights of a name are those of
`TrainingSample.adapter`; each sample trains the weights that it is for. `Updater` makes one update of one of them:
training samples in, an optimiser step done. `LocalLearner` has them all.
"""

from __future__ import annotations

import ctypes
import logging
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentlightning.errors import ConfigError, PolicyError, UnfaithfulSampleError
from agentlightning.models import SHARED, checkpoint
from agentlightning.models.lora import AGENTS, Adapters, adapter_directory, has_adapters, read_weights, write_adapter
from agentlightning.models.resolve import resolve_model, shared_name
from agentlightning.policy.base import UPDATE, Columns, ScoreColumn, UpdateOptions
from agentlightning.policy.config import LR_FACTOR, LocalPolicyConfig, Lora, OptimizerConfig, default_lr
from agentlightning.policy.losses import (
    ADVANTAGES,
    CORRECTED_WEIGHTS,
    INTERPOLATION,
    PROXIMAL_LOGPROBS,
    SAMPLED_LOGPROBS,
    STREAM_WEIGHTS,
    WEIGHTS,
    LossSetting,
    TokenBatch,
    TokenLoss,
    clamped_log_ratio,
    token_losses,
    value_of,
)
from agentlightning.policy.mismatch import (
    DEFAULT,
    Correction,
    MismatchSetting,
    check_combination,
    check_token_level,
    factors,
    is_off,
    measures,
)
from agentlightning.policy.model_loading import LARGE, SavedAgents
from agentlightning.policy.update.forward import Forward
from agentlightning.policy.update.optimizer import Optimizer, WeightAverage
from agentlightning.policy.update.packing import TRAINED, IntArray, KeptTokens, MicroBatch, TokenTable, token_table
from agentlightning.policy.update.value_head import NO_HEAD, ValueHead, read_values
from agentlightning.trajectory import FloatArray, TokenTree, TrainingSample

logger = logging.getLogger(__name__)

TOKEN_BUDGET = 8192
"""Tokens of one forward pass, where neither the update nor a configuration says otherwise."""


class Updater:
    """Trains one model in place. Not thread safe: nothing may use the weights during a step."""

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: OptimizerConfig | None = None,
        adapter: nn.Module | None = None,
        value_head: ValueHead | None = None,
        *,
        forward: Forward | None = None,
    ) -> None:
        """With an `adapter`, whose weights the model's forward pass uses during a step, only these are trained, and the
        `value_head`. `forward`: the passes through the model."""
        self.model = model
        self.optimizer = Optimizer(model if adapter is None else adapter, optimizer or OptimizerConfig())
        self.forward = forward or Forward(model)
        self.value_head = value_head
        self.value_optimizer = (
            None if value_head is None else Optimizer(value_head, value_head.optimizer_config(self.optimizer.config))
        )
        """Of the head alone: its gradient does not count in the norm by which that of the policy is clipped."""
        self.entropy = 0.0, 0
        """The mean entropy of the trained tokens over all steps, and the number of these."""
        self.average: WeightAverage | None = None
        """A moving average of the weights, from the first step that asks for one."""

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """Of the weights, and of the value head where there is one."""
        return (self.optimizer,) if self.value_optimizer is None else (self.optimizer, self.value_optimizer)

    def step(self, samples: Sequence[TrainingSample], options: UpdateOptions = UPDATE) -> dict[str, float]:
        """Train on all samples once.

        Returns means over trained tokens (loss, entropy, and what the losses log: ratio, clip_fraction, approx_kl ...),
        grad_norm and lr (means over steps), mismatch_kl (approx_kl of sampler and trainer, before the first step), and
        counts: tokens_trained, tokens_computed (padding included), micro_batches, optimizer_steps, skipped_steps (a
        loss or gradient that was not finite) and rollouts_not_finite (rollouts left out because theirs was not). Where
        tokens have recorded sets of top-k or top-p: tokens_with_kept_sets, kept_set_size (their mean number of ids).

        Raises UnfaithfulSampleError for samples the loss cannot correct for, PolicyError for samples without a column
        it needs, ConfigError for impossible settings.
        """
        for optimizer in self.optimizers:
            optimizer.lr_factor = options.lr_factor
        losses = token_losses(options.loss)
        for loss in losses:
            if loss.needs_values and self.value_head is None:
                raise PolicyError(f'loss "{loss.type}" trains a critic: {NO_HEAD}')
        if options.average is not None:
            self.average = self.average or self.new_average(options.average)
            self.average.rate = options.average
        options = replace(options, loss=losses)
        table, corrections = for_losses(samples, losses), dict[str, float]()
        several = _corrections(table, losses, options.mismatch)
        if INTERPOLATION in table.columns:
            table = replace(table, corrections=several)
        elif several:
            table, corrections = corrected(table, several)
        totals: Sums = dict.fromkeys(COUNTS, np.zeros(2))
        for index, part in enumerate(minibatches(table, options.minibatches)):
            sums = self._step(normalized(part, losses), options)
            if index == 0 and "approx_kl" in sums and not {INTERPOLATION, PROXIMAL_LOGPROBS} & table.columns.keys():
                # What sampler and trainer disagree about, before the first change of weights.
                corrections["mismatch_kl"] = means(sums)["approx_kl"]
            add_sums(totals, sums)
        metrics: Mapping[str, float] = means(totals)
        for loss in losses:
            metrics = loss.summary(metrics)
        if totals["tokens_trained"][0] and math.isfinite(metrics["entropy"]):
            mean, steps = self.entropy
            self.entropy = mean + (metrics["entropy"] - mean) / (steps + 1), steps + 1
        return {**metrics, **corrections}

    def _step(self, part: TokenTable, options: UpdateOptions) -> Sums:
        """One optimiser step. If the gradient is not finite, the rollouts responsible are left out."""
        (sums, norm, finite), left_out = self._gradient_alone(part, options), 0
        if not finite:
            part, left_out = self._without_not_finite(part, options)
            if left_out:
                sums, norm, _ = self._gradient_alone(part, options)
                sums = sums or over(1, {"loss": math.nan})
        if not sums:
            return {}
        return self._with_step(sums, self._optimize(sums["loss"][0], norm), left_out)

    def _optimize(self, loss: float, norm: Tensor) -> dict[str, float]:
        """The step of the policy's optimiser, and of the value head's, which is skipped where the policy's is."""
        metrics = self.optimizer.step(loss, norm)
        if self.average is not None and metrics["optimizer_steps"]:
            self.average.update()
        if self.value_optimizer is None:
            return metrics
        own = self.value_optimizer.step(loss if metrics["optimizer_steps"] else math.nan)
        return {**metrics, "value_lr": own["lr"], "value_grad_norm": own["grad_norm"]}

    @staticmethod
    def _with_step(sums: Sums, metrics: Mapping[str, float], left_out: int) -> Sums:
        """The sums of an optimiser step with its own metrics, and the number of rollouts that it left out."""
        return {**sums, **over(1, {"loss": sums["loss"][0], **metrics, "rollouts_not_finite": left_out})}

    def zero_grad(self) -> None:
        """Drop the gradients that were accumulated."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _without_not_finite(self, part: TokenTable, options: UpdateOptions) -> tuple[TokenTable, int]:
        """The batch without the rollouts whose data, loss or gradient is not finite, and their number: 0 where that is
        so of all, because the weights themselves are broken."""
        needs = {SAMPLED_LOGPROBS}.union(*(loss.needs for loss in token_losses(options.loss)))
        found = not_finite_in_data(part, needs)
        if not len(found):
            every = np.unique(part.rollout[part.within])
            found = self._not_finite(part, every, options)
            if len(found) == len(every):
                return part, 0
        excluded = np.isin(part.rollout, found)
        logger.warning(
            "%d rollouts are left out of this update, because their loss or its gradient is not finite: %s",
            len(found),
            ", ".join(sorted({str(part.nodes[number].rollout_id) for number in np.unique(part.node[excluded])})),
        )
        return without(part, excluded), len(found)

    def _not_finite(self, part: TokenTable, rollouts: IntArray, options: UpdateOptions) -> IntArray:
        """Those of the rollouts whose gradient alone is not finite, found by halving. Several processes that train
        together (`policy.fsdp`) all ask about the same rollouts in the same order: each gradient is theirs together."""
        _, _, finite = self._gradient_alone(without(part, ~np.isin(part.rollout, rollouts)), options)
        if finite:
            return rollouts[:0]
        if len(rollouts) == 1:
            return rollouts
        return np.concatenate([self._not_finite(part, half, options) for half in np.array_split(rollouts, 2)])

    def _gradient_alone(self, part: TokenTable, options: UpdateOptions) -> tuple[Sums, Tensor, bool]:
        """What `_gradient` returns, without earlier gradients; the norm, and whether loss and norm are finite."""
        self.zero_grad()
        sums, norm = self._gradient(part, options), self.optimizer.grad_norm()
        return sums, norm, not sums or (math.isfinite(sums["loss"][0]) and bool(torch.isfinite(norm)))

    def _gradient(self, part: TokenTable, options: UpdateOptions) -> Sums:
        """Add the gradient of samples, and return sums over their tokens; empty where nothing is trained."""
        batches = self._plan(part, options)
        return self.accumulate(batches, options.loss) if batches else {}

    def _plan(self, part: TokenTable, options: UpdateOptions) -> list[MicroBatch]:
        budget = options.token_budget or TOKEN_BUDGET
        return self.forward.plan(part, token_budget=budget, sharing=options.sharing)

    def accumulate(self, batches: Sequence[MicroBatch], loss: LossSetting = "ppo") -> Sums:
        """Add the gradient of `batches` to that of `optimizer.masters`; returns sums over tokens, and counts."""
        losses = token_losses(loss)
        needs = frozenset[str]().union(*(each.needs for each in losses))
        at_temperature, entropy = SAMPLED_LOGPROBS in needs, any(each.needs_entropy for each in losses)
        critic = self.value_head if any(each.needs_values for each in losses) else None
        self.model.eval()
        totals: Sums = {}
        ratios_R = self._rollout_log_ratios(batches, losses, at_temperature)
        with self.forward.aligned(batches):
            for batch in batches:
                hidden_NH = self.forward.states(batch)
                logprobs_N, entropy_N = self.forward.logprobs(batch, hidden_NH, at_temperature, entropy)
                tokens = self._tokens(batch, logprobs_N, entropy_N, ratios_R)
                tokens = tokens if critic is None else replace(tokens, values=critic(hidden_NH))
                value, sums = sum_of_losses(losses, tokens, batch.table.corrections)
                value.backward()
                counts = {"tokens_trained": len(logprobs_N), "tokens_computed": batch.tokens, "micro_batches": 1}
                own = {"loss": value.detach(), "entropy": entropy_N.detach().sum(), **counts}
                sums |= over(len(logprobs_N), own)
                if at_temperature and (kept := batch.kept) is not None:
                    count = int(np.count_nonzero(kept.sizes))
                    sums |= over(count, {KEPT_COUNT: count, "kept_set_size": float(kept.sizes.sum())})
                add_sums(totals, sums)
        return totals

    @torch.no_grad()
    def _rollout_log_ratios(
        self, batches: Sequence[MicroBatch], losses: Sequence[TokenLoss], at_temperature: bool
    ) -> Tensor | None:
        """For each rollout of the table the sum of the log-ratios of its tokens, and their number [2, R], if a loss
        needs them and a rollout has tokens in several micro-batches: their log-probabilities are then computed once
        more."""
        spanning = [loss for loss in losses if loss.spans_rollout]
        if not spanning or not self._divides_rollouts(batches):
            return None
        rollouts = max((int(batch.table.rollout.max()) + 1 for batch in batches[:1]), default=0)
        device = self.model.device
        sums_R, counts_R = torch.zeros(rollouts, device=device), torch.zeros(rollouts, device=device)
        with self.forward.aligned(batches):
            for batch in batches:
                logprobs_N, entropy_N = self.forward.logprobs(batch, self.forward.states(batch), at_temperature)
                tokens = self._tokens(batch, logprobs_N, entropy_N, None)
                counts = _counts(tokens, spanning[0]).to(logprobs_N.dtype)
                rollout_N = self.forward.tensor(batch.table.rollout[batch.places])
                sums_R.index_add_(0, rollout_N, clamped_log_ratio(tokens) * counts)
                counts_R.index_add_(0, rollout_N, counts)
        return torch.stack((sums_R, counts_R))

    def _divides_rollouts(self, batches: Sequence[MicroBatch]) -> bool:
        """Whether a rollout has tokens in several micro-batches."""
        found = [np.unique(batch.table.rollout[batch.places]) for batch in batches]
        return sum(map(len, found)) > len(np.unique(np.concatenate(found))) if found else False

    def average_in_use(self) -> AbstractContextManager[None]:
        """Forward passes within use the moving average of the weights, where one is kept."""
        return nullcontext() if self.average is None else self.average.in_use()

    def new_average(self, rate: float) -> WeightAverage:
        """A moving average that begins at the present weights."""
        return WeightAverage(self.optimizer.parameters, self.optimizer.masters, rate)

    def state_dict(self) -> dict[str, Any]:
        """All that a resume needs beside the weights."""
        state = {**self.optimizer.state_dict(), "entropy": [*self.entropy]}
        if self.value_optimizer is not None:
            state["value_head"] = self.value_optimizer.state_dict()
        return state if self.average is None else {**state, "average": self.average.state_dict()}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError for a state that `load_state_dict` would refuse."""
        self.optimizer.check_state_dict(state)
        if self.value_optimizer is not None and "value_head" in state:
            self.value_optimizer.check_state_dict(state["value_head"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; a value head that was saved without one continues with its own."""
        self.optimizer.load_state_dict(state)
        if self.value_optimizer is not None and "value_head" in state:
            self.value_optimizer.load_state_dict(state["value_head"])
        mean, steps = state.get("entropy", (0.0, 0))
        self.entropy = float(mean), int(steps)
        self.average = None
        if "average" in state:
            self.average = self.new_average(0.0)
            self.average.load_state_dict(state["average"])

    def _tokens(self, batch: MicroBatch, logprobs_N: Tensor, entropy_N: Tensor, ratios_R: Tensor | None) -> TokenBatch:
        table, places = batch.table, batch.places
        rollout = table.rollout[places]
        tokens = TokenBatch(
            trained_logprobs=logprobs_N,
            columns={name: self.forward.tensor(values[places]) for name, values in sorted(table.columns.items())},
            call=self.forward.tensor(_renumbered(table.call[places])),
            rollout=self.forward.tensor(_renumbered(rollout)),
            entropy=entropy_N,
            rollout_log_ratio=None if ratios_R is None else ratios_R[:, self.forward.tensor(rollout)],
            step=self.optimizer.steps,
            past_entropy=self.entropy[0] if self.entropy[1] else None,
        )
        return interpolated(tokens)


def _corrections(
    table: TokenTable, losses: Sequence[TokenLoss], mismatch: MismatchSetting | None
) -> tuple[Correction, ...]:
    """The corrections of weights; none where none applies."""
    several = DEFAULT if mismatch is None else check_combination(mismatch, losses)
    decoupled = any(loss.decoupled for loss in losses)
    proximal = PROXIMAL_LOGPROBS in table.columns
    if INTERPOLATION in table.columns:
        if proximal:
            raise PolicyError(
                f"samples have both {INTERPOLATION!r} and {PROXIMAL_LOGPROBS!r}; give one of these columns"
            )
        if not decoupled:
            raise ConfigError(f"the column {INTERPOLATION!r} is used by none of the losses; leave it out, or use ppo")
        check_token_level(several)
        return several
    if is_off(several) or not decoupled:
        return ()
    if mismatch is not None and table.samples and not proximal:
        raise PolicyError(f'mismatch={mismatch!r} needs the column "{PROXIMAL_LOGPROBS}", which samples do not have')
    return several if proximal else ()


def _renumbered(numbers: IntArray) -> IntArray:
    """The same groups, numbered from 0 without gaps."""
    return np.unique(numbers, return_inverse=True)[1].astype(np.int64)


def _counts(tokens: TokenBatch, loss: TokenLoss) -> Tensor:
    """Which tokens have a weight in the stream of a loss [N]."""
    return tokens.columns[weights_name(loss, tokens.columns)] != 0


def tokens_of(tokens: TokenBatch, loss: TokenLoss) -> TokenBatch:
    """The tokens with a weight in the stream of a loss, with its weights."""
    name = weights_name(loss, tokens.columns)
    if loss.decoupled and name == WEIGHTS and CORRECTED_WEIGHTS in tokens.columns:
        name = CORRECTED_WEIGHTS
    columns = {**tokens.columns, WEIGHTS: tokens.columns[name]}
    counts = _counts(tokens, loss)
    if bool(counts.all()):
        return replace(tokens, columns=columns)
    vectors = {name: getattr(tokens, name) for name in ("trained_logprobs", "entropy", "values", "rollout_log_ratio")}
    return replace(
        tokens,
        columns={each: values[counts] for each, values in columns.items()},
        call=tokens.call[counts].unique(return_inverse=True)[1],
        rollout=tokens.rollout[counts].unique(return_inverse=True)[1],
        **{name: None if each is None else each[..., counts] for name, each in vectors.items()},
    )


def sum_of_losses(
    losses: Sequence[TokenLoss], tokens: TokenBatch, within: Sequence[Correction] = ()
) -> tuple[Tensor, Sums]:
    """The sum of all losses, and the sums of their metrics and of those of the corrections `within`. Where two losses
    log under one name, the later one's has its type before it."""
    sums: Sums = {}
    if within:
        tokens, found, count = corrected_tokens(tokens, within)
        sums |= over(count, found)
    total = tokens.trained_logprobs.sum() * 0.0
    for loss in losses:
        own = tokens_of(tokens, loss)
        value = value_of(loss, own)
        total = total + value.loss * loss.coefficient_at(tokens.step)
        named = {f"{loss.type}_{name}" if name in sums else name: each for name, each in value.sums.items()}
        sums |= over(len(own.trained_logprobs), named)
    return total, sums


Sums = dict[str, Any]
"""By name of a metric its sum, and the number of tokens or steps that it is a sum over."""


COUNTS: tuple[str, ...] = (
    "optimizer_steps",
    "skipped_steps",
    "rollouts_not_finite",
    "tokens_trained",
    "tokens_computed",
    "micro_batches",
)
KEPT_COUNT = "tokens_with_kept_sets"
"""Trained tokens whose probability is that over a recorded set; only in updates that have some."""


def over(count: float, sums: Mapping[str, float | Tensor]) -> Sums:
    return {name: (value, count) for name, value in sums.items()}


def add_sums(totals: Sums, sums: Sums) -> None:
    for name, (value, count) in sums.items():
        totals[name] = totals.get(name, 0.0) + np.array([float(value), count])


def means(sums: Sums) -> dict[str, float]:
    """Sums over tokens become means over tokens, sums over steps means over steps; counts stay."""
    counts = (*COUNTS, KEPT_COUNT)
    return {name: float(value if name in counts else value / max(1.0, count)) for name, (value, count) in sums.items()}


# -- streams ---------------------------------------------------------------------------------------------------------

# What the tokens of a batch weigh in each loss: weights of the three streams, corrections, and which tokens count.
#
# `for_losses` completes the columns of samples, so that samples for reinforcement learning, supervised learning and
# distillation can share a batch: where a sample has no weight in a stream, it needs no column of that stream's losses.

Tokens = NDArray[np.bool_]
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
    parts: list[TokenTable] = []
    for part in filter(None, (table.part[i::count] for i in range(count))):
        share = sum(table.samples[i].share for i in part if WEIGHTS in table.samples[i].columns)
        names = {WEIGHTS, CORRECTED_WEIGHTS} & set(table.columns) if share else ()
        scaled = table.with_columns({name: table.columns[name] / np.float32(share) for name in names})
        parts.append(replace(scaled, part=part))
    return parts


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


# -- learner ----------------------------------------------------------------------------------------------------------

MAX_REFERENCES = 2
"""Models kept to score tokens with: a reference and a teacher."""


class LocalLearner:
    """Not thread safe: nothing may use the weights during a step."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: LocalPolicyConfig,
        make_updater: Callable[..., Updater] | None = Updater,
    ) -> None:
        """`make_updater`: called as the class is; None: other processes train the weights. Raises ConfigError for
        adapters that the model cannot have, for a critic of several, and where nothing is trained."""
        shapes = config.adapters
        self.model, self.tokenizer, self._config = model, tokenizer, config
        self.value_head = config.value_head and ValueHead.of(model, config.value_head, seed=config.seed)
        """The critic of the policy itself: the one beside its model, else a new one."""
        if self.value_head is not None and (weights := self.value_head.read(Path(config.model))) is not None:
            self.value_head.load_state_dict(weights)
        if shapes and self.value_head is not None and list(shapes) != [SHARED]:
            raise ConfigError(
                f"policy.value_head is the critic of one policy, and the adapters {', '.join(sorted(shapes))} are"
                " trained here: leave it out, or let all agents share one policy"
            )
        size = model.num_parameters()
        self.adapters = Adapters(model)
        """None of them where all weights are trained."""
        self.by_name, self.use = self.adapters.by_name, self.adapters.use
        for name, lora in shapes.items():
            self.adapters.add(name, r=lora.r, alpha=lora.scale_numerator, targets=lora.targets, seed=config.seed)
        self.own: str | None = SHARED if SHARED in shapes else None
        """The name of the policy itself: an adapter, or None for the model's own weights."""
        self.changed: list[str | None] = []
        """The names of the weights that the last update has changed."""
        self.updaters: dict[str | None, Updater] = {}
        """By name. A name that is not here does not learn."""
        if make_updater is not None:
            self.forward = self.make_forward(model, config.gradient_checkpointing)
            """Passes with the weights that are in use."""
            for name, lora in shapes.items() or [(None, None)]:
                optimizer = _optimizer(lora, config, size)
                adapter = None if name is None else self.by_name[name]
                self.updaters[name] = make_updater(model, optimizer, adapter, self.value_head, forward=self.forward)
        self._references: dict[Path, Forward] = {}

    # -- training --------------------------------------------------------------------------------------------------

    def update(
        self,
        samples: Sequence[TrainingSample],
        options: UpdateOptions,
        before: Callable[[Collection[str | None]], None] = lambda names: None,
    ) -> dict[str, float]:
        """The metrics of an update. Calls `before` with the names of the weights that it trains; `changed` has each of
        them once they have changed, also where a later minibatch fails. Raises PolicyError, before anything changes,
        for weights that do not learn."""
        self.changed.clear()
        by_name: dict[str | None, list[TrainingSample]] = {}
        for sample in samples:
            by_name.setdefault(self.own if sample.adapter is None else sample.adapter, []).append(sample)
        for name in by_name:
            self._check_trained(name)
        by_name = by_name or {self.own if self.own in self.updaters else next(iter(self.updaters)): []}
        before(by_name)
        return joint_metrics({name: self._step(name, own, options) for name, own in by_name.items()})

    def _check_trained(self, name: str | None) -> None:
        if name not in self.updaters:
            raise PolicyError(
                f"samples are for the adapter {name!r}, which this policy does not train; it trains "
                f"{', '.join(repr(each) for each in self.updaters if each is not None) or 'all weights'}"
            )

    def _step(self, name: str | None, samples: Sequence[TrainingSample], options: UpdateOptions) -> dict[str, float]:
        """`Updater.step` of the weights of a name."""
        updater = self.updaters[name]
        steps = updater.optimizer.steps
        try:
            with self.use(name):
                metrics = updater.step(samples, options)
        except BaseException:
            updater.zero_grad()  # The next step must not start from these gradients.
            if updater.optimizer.steps > steps:
                self.changed.append(name)
            raise
        finally:
            if self.model.num_parameters() >= LARGE:
                _return_memory()
        self.changed.append(name)
        return metrics

    # -- scoring ---------------------------------------------------------------------------------------------------

    def score(
        self, trees: Sequence[TokenTree], what: AbstractSet[ScoreColumn], reference: Path | None, adapter: str | None
    ) -> Columns:
        """See `Policy.score`."""
        if "values" in what and self.value_head is None:
            raise PolicyError(f'"values" need a critic: {NO_HEAD}')
        if "ref_logprobs" in what and reference is None and not self.by_name:
            raise PolicyError('"ref_logprobs" need a reference; give the directory of the reference model')
        name, found = self.own, dict[str, Any]()
        if adapter is not None:
            self._check_trained(name := adapter)
        with self.use(name):
            if present := what & {"logprobs", "entropy", "values"}:
                found |= self.forward.score(trees, present, value_head=self.value_head)
            if "average_logprobs" in what:
                with self.updaters[name].average_in_use() if name in self.updaters else nullcontext():
                    found["average_logprobs"] = self.forward.score(trees, {"logprobs"})["logprobs"]
        if "ref_logprobs" in what:  # The model below adapters, where no reference is given.
            scorer = self.forward if reference is None else self._reference_at(reference)
            found["ref_logprobs"] = scorer.score(trees, {"logprobs"})["logprobs"]
        return found

    def _reference_at(self, reference: Path) -> Forward:
        directory = Path(resolve_model(reference)).absolute()
        if directory not in self._references:
            while len(self._references) >= MAX_REFERENCES:  # Frees the memory of the oldest before the next is loaded.
                del self._references[next(iter(self._references))]
            self._references[directory] = self.make_forward(self.read_scorer(directory))
        return self._references[directory]

    def read_scorer(self, directory: Path) -> PreTrainedModel:
        """A model that scores tokens, on the device of the policy. Raises as `checkpoint.read_scorer`."""
        scorer = checkpoint.read_scorer(directory, self.model, self.tokenizer, self.forward.dtype)
        return cast(PreTrainedModel, cast(nn.Module, scorer).to(self.model.device))

    def make_forward(self, model: PreTrainedModel, gradient_checkpointing: bool = False) -> Forward:
        """Passes through a model."""
        return Forward(model, gradient_checkpointing=gradient_checkpointing)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, directory: Path, state: Mapping[str, Any] | None, *beside: Callable[[Path], object]) -> None:
        """See `models.checkpoint.save`."""
        own: Callable[[Path], object] = self._save_adapters if self.by_name else self.model.save_pretrained
        head = () if self.value_head is None else (self.value_head.save_pretrained,)
        checkpoint.save(directory, state, own, self.tokenizer.save_pretrained, *head, *beside)

    def _save_adapters(self, directory: Path) -> None:
        base, agents = shared_name(self._config.model), self._config.agents
        for name, adapter in self.by_name.items():
            write_adapter(adapter_directory(directory, name), adapter, base)
        if agents:
            content = SavedAgents(base_model_name_or_path=base, agents=agents)
            (directory / AGENTS).write_text(content.model_dump_json(indent=2, exclude_none=True))

    def state_dict(self) -> dict[str, Any]:
        """All that a resume needs beside the weights."""
        states = {name: updater.state_dict() for name, updater in self.updaters.items()}
        return {"adapters": states} if self.by_name else {"updater": states[None]}

    def read(self, directory: Path, state: Mapping[str, Any]) -> Callable[[], None]:
        """What puts the weights in `directory`, and `state`, in place. Raises PolicyError or ConfigError where they do
        not fit, before anything changes."""
        if not self.by_name and has_adapters(directory):
            raise PolicyError(
                f"{directory} holds adapters, and all weights are trained here; set policy.lora as it was"
            )
        states: Mapping[str | None, Any] = state.get("adapters", {}) if self.by_name else {None: state["updater"]}
        if states.keys() != self.updaters.keys():
            raise PolicyError(
                f"{directory} holds the adapters {sorted(map(str, states)) or 'none'}, and"
                f" {sorted(map(str, self.updaters))} are trained here; continue with the policy.lora and agents that it"
                " was saved with"
            )
        load_weights = self.read_weights(directory)
        for name, updater in self.updaters.items():
            updater.check_state_dict(states[name])

        def load() -> None:
            load_weights()
            for name, updater in self.updaters.items():
                updater.load_state_dict(states[name])

        return load

    def read_weights(self, directory: Path) -> Callable[[], None]:
        """`read` without the state of the optimisers."""
        found: list[tuple[Any, Mapping[str, Tensor] | None]] = [
            (self.value_head, read_values(self.value_head, directory))
        ]
        for name, adapter in self.by_name.items():
            found.append((adapter, read_weights(adapter_directory(directory, name), adapter)))
        if not self.by_name:
            found.append((self.model, checkpoint.read_model(directory, self.model).state_dict()))

        def load() -> None:
            for module, weights in found:
                if weights is not None:
                    module.load_state_dict(weights)

        return load


def _optimizer(lora: Lora | None, config: LocalPolicyConfig, weights: int) -> OptimizerConfig:
    given = (lora and lora.optimizer) or config.optimizer
    completed = given.completed(weights=weights, objective=config.objective, total_steps=config.optimizer.total_steps)
    if lora is None or given.lr is not None:
        return completed
    return completed.model_copy(update={"lr": LR_FACTOR * default_lr(weights, config.objective)})


def joint_metrics(by_name: Mapping[str | None, Mapping[str, float]]) -> dict[str, float]:
    """The metrics of an update of several adapters: each under `NAME/metric`, and over all of them under its own name,
    counts as sums, others as means weighted by trained tokens."""
    if by_name.keys() <= {None, SHARED}:
        return dict(next(iter(by_name.values())))
    joint = {f"{name}/{metric}": value for name, own in by_name.items() for metric, value in own.items()}
    for metric in sorted(set[str]().union(*by_name.values())):
        having = [own for own in by_name.values() if metric in own]
        if metric in (*COUNTS, KEPT_COUNT):
            joint[metric] = sum(own[metric] for own in having)
        else:
            tokens = [max(own["tokens_trained"], 1.0) for own in having]
            joint[metric] = sum(own[metric] * n for own, n in zip(having, tokens, strict=True)) / sum(tokens)
    return joint


def _return_memory() -> None:
    """Give the system back what an update has freed: glibc keeps it, gigabytes that the next one fragments further."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # Of another C library.
            ctypes.CDLL(None).malloc_trim(0)
