"""One update of a policy: training samples in, an optimiser step done."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentlightning.errors import ConfigError, PolicyError
from agentlightning.policy import mismatch as mismatches
from agentlightning.policy.base import UPDATE, UpdateOptions
from agentlightning.policy.config import OptimizerConfig
from agentlightning.policy.losses import (
    CORRECTED_WEIGHTS,
    INTERPOLATION,
    PROXIMAL_LOGPROBS,
    SAMPLED_LOGPROBS,
    WEIGHTS,
    LossSetting,
    TokenBatch,
    TokenLoss,
    clamped_log_ratio,
    token_losses,
    value_of,
)
from agentlightning.policy.mismatch import Correction, MismatchSetting
from agentlightning.policy.update import streams
from agentlightning.policy.update.forward import Forward
from agentlightning.policy.update.optimizer import Optimizer, WeightAverage
from agentlightning.policy.update.packing import IntArray, KeptTokens, MicroBatch, TokenTable
from agentlightning.policy.update.value_head import NO_HEAD, ValueHead
from agentlightning.trajectory import TrainingSample

logger = logging.getLogger(__name__)

TOKEN_BUDGET = 8192
"""Tokens of one forward pass, where neither the update nor a configuration says otherwise."""


@dataclass(slots=True)
class EntropyHistory:
    """The mean entropy of the trained tokens over all steps."""

    mean: float = 0.0
    steps: int = 0

    @property
    def value(self) -> float | None:
        return self.mean if self.steps else None

    def add(self, entropy: float) -> None:
        if math.isfinite(entropy):
            self.steps += 1
            self.mean += (entropy - self.mean) / self.steps


@dataclass(frozen=True, slots=True)
class LossSpec:
    """What the gradient of samples is computed of."""

    losses: Sequence[TokenLoss]
    within: Sequence[Correction] = ()
    """Corrections of weights against interpolated proximal log-probabilities."""
    options: UpdateOptions = UPDATE


class Updater:
    """Trains one model in place. Not thread safe: nothing may use the weights during a step."""

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: OptimizerConfig | None = None,
        adapter: nn.Module | None = None,
        value_head: ValueHead | None = None,
        *,
        gradient_checkpointing: bool = False,
        forward: Forward | None = None,
    ) -> None:
        """With an `adapter`, whose weights the model's forward pass uses during a step, only these are trained, and the
        `value_head`. `forward`: the passes through the model, with their own gradient checkpointing."""
        self.model = model
        self.optimizer = Optimizer(model if adapter is None else adapter, optimizer or OptimizerConfig())
        self.forward = forward or Forward(model, gradient_checkpointing=gradient_checkpointing)
        self.value_head = value_head
        self.value_optimizer = (
            None if value_head is None else Optimizer(value_head, value_head.optimizer_config(self.optimizer.config))
        )
        """Of the head alone: its gradient does not count in the norm by which that of the policy is clipped."""
        self.entropy = EntropyHistory()
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
        check_value_head(losses, self.value_head)
        if options.average is not None:
            self.average = self.average or self.new_average(options.average)
            self.average.rate = options.average
        table = streams.for_losses(samples, losses)
        several = _corrections(table, losses, options.mismatch)
        within = several if INTERPOLATION in table.columns else ()
        table, corrections = streams.corrected(table, several) if several and not within else (table, {})
        totals, spec = dict.fromkeys(COUNTS, 0.0), LossSpec(losses, within, options)
        for index, part in enumerate(streams.minibatches(table, options.minibatches)):
            sums = self._step(streams.normalized(part, losses), spec)
            if index == 0 and "approx_kl" in sums and not within and PROXIMAL_LOGPROBS not in table.columns:
                # What sampler and trainer disagree about, before the first change of weights.
                corrections["mismatch_kl"] = sums["approx_kl"] / max(1.0, sums[f"{COUNT_OF}approx_kl"])
            _add(totals, sums)
        metrics: Mapping[str, float] = _means(totals)
        for loss in losses:
            metrics = loss.summary(metrics)
        if totals["tokens_trained"]:
            self.entropy.add(metrics["entropy"])
        return {**metrics, **corrections}

    def _step(self, part: TokenTable, spec: LossSpec) -> dict[str, float]:
        """One optimiser step. If the gradient is not finite, the rollouts responsible are left out."""
        sums = self._gradient(part, spec)
        if not sums:
            return {}
        norm, left_out = self.optimizer.grad_norm(), 0
        if not _finite(sums, norm):
            part, left_out = self._without_not_finite(part, spec)
            if left_out:
                self.zero_grad()
                sums = self._gradient(part, spec) or {"loss": math.nan}
                norm = self.optimizer.grad_norm()
        return {**sums, **self._optimize(sums["loss"], norm), "rollouts_not_finite": float(left_out)}

    def _optimize(self, loss: float, norm: Tensor) -> dict[str, float]:
        """The step of the policy's optimiser, and of the value head's, which is skipped where the policy's is."""
        metrics = self.optimizer.step(loss, norm)
        if self.average is not None and metrics["optimizer_steps"]:
            self.average.update()
        if self.value_optimizer is None:
            return metrics
        own = self.value_optimizer.step(loss if metrics["optimizer_steps"] else math.nan)
        return {**metrics, "value_lr": own["lr"], "value_grad_norm": own["grad_norm"]}

    def zero_grad(self) -> None:
        """Drop the gradients that were accumulated."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _without_not_finite(self, part: TokenTable, spec: LossSpec) -> tuple[TokenTable, int]:
        """The batch without the rollouts whose data, loss or gradient is not finite, and their number: 0 where that is
        so of all, because the weights themselves are broken."""
        found = streams.not_finite_in_data(part, {SAMPLED_LOGPROBS}.union(*(loss.needs for loss in spec.losses)))
        if not len(found):
            every = np.unique(part.rollout[part.within])
            found = self._not_finite(part, every, spec)
            if len(found) == len(every):
                return part, 0
        excluded = np.isin(part.rollout, found)
        logger.warning(
            "%d rollouts are left out of this update, because their loss or its gradient is not finite: %s",
            len(found),
            ", ".join(sorted({str(part.nodes[number].rollout_id) for number in np.unique(part.node[excluded])})),
        )
        return streams.without(part, excluded), len(found)

    def _not_finite(self, part: TokenTable, rollouts: IntArray, spec: LossSpec) -> IntArray:
        """Those of the rollouts whose gradient alone is not finite, found by halving. Several processes that train
        together (`policy.fsdp`) all ask about the same rollouts in the same order: each gradient is theirs together."""
        self.zero_grad()
        sums = self._gradient(streams.without(part, ~np.isin(part.rollout, rollouts)), spec)
        if not sums or _finite(sums, self.optimizer.grad_norm()):
            return rollouts[:0]
        if len(rollouts) == 1:
            return rollouts
        return np.concatenate([self._not_finite(part, half, spec) for half in np.array_split(rollouts, 2)])

    def _gradient(self, part: TokenTable, spec: LossSpec) -> dict[str, float]:
        """Add the gradient of samples, and return sums over their tokens; empty where nothing is trained."""
        batches = self._plan(part, spec.options)
        return self.accumulate(batches, spec.losses, spec.within) if batches else {}

    def _plan(self, part: TokenTable, options: UpdateOptions) -> list[MicroBatch]:
        budget = options.token_budget or TOKEN_BUDGET
        return self.forward.plan(part, token_budget=budget, sharing=options.sharing)

    def accumulate(
        self, batches: Sequence[MicroBatch], loss: LossSetting = "ppo", within: Sequence[Correction] = ()
    ) -> dict[str, float]:
        """Add the gradient of `batches` to that of `optimizer.masters`; returns sums over tokens, and counts. `within`
        corrects weights against interpolated proximal log-probabilities."""
        losses = token_losses(loss)
        needs = frozenset[str]().union(*(each.needs for each in losses))
        at_temperature, entropy = SAMPLED_LOGPROBS in needs, any(each.needs_entropy for each in losses)
        critic = self.value_head if any(each.needs_values for each in losses) else None
        self.model.eval()
        totals: dict[str, float] = {}
        ratios_R = self._rollout_log_ratios(batches, losses, at_temperature)
        with self.forward.aligned(batches):
            for batch in batches:
                states = self.forward.states(batch)
                logprobs_N, entropy_N = self.forward.logprobs(batch, states, at_temperature, entropy)
                tokens = self._tokens(batch, logprobs_N, entropy_N, ratios_R)
                tokens = tokens if critic is None else replace(tokens, values=critic(states.hidden))
                value, sums = sum_of_losses(losses, tokens, within)
                value.backward()
                sums |= {
                    "loss": value.detach(),
                    "entropy": entropy_N.detach().sum(),
                    "tokens_trained": len(logprobs_N),
                    "tokens_computed": batch.tokens,
                    "micro_batches": 1,
                    "shared_prefixes": batch.shared_prefixes,
                }
                if at_temperature and batch.kept is not None:
                    sums |= _kept_metrics(batch.kept)
                _add(totals, sums)
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
        state = {**self.optimizer.state_dict(), "entropy": [self.entropy.mean, self.entropy.steps]}
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
        self.entropy = EntropyHistory(float(mean), int(steps))
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
            past_entropy=self.entropy.value,
        )
        return streams.interpolated(tokens)


def _corrections(
    table: TokenTable, losses: Sequence[TokenLoss], mismatch: MismatchSetting | None
) -> tuple[Correction, ...]:
    """The corrections of weights; none where none applies."""
    several = mismatches.DEFAULT if mismatch is None else mismatches.check_combination(mismatch, losses)
    decoupled = any(loss.decoupled for loss in losses)
    proximal = PROXIMAL_LOGPROBS in table.columns
    if INTERPOLATION in table.columns:
        if proximal:
            raise PolicyError(
                f"samples have both {INTERPOLATION!r} and {PROXIMAL_LOGPROBS!r}; give one of these columns"
            )
        if not decoupled:
            raise ConfigError(f"the column {INTERPOLATION!r} is used by none of the losses; leave it out, or use ppo")
        mismatches.check_token_level(several)
        return several
    if mismatches.is_off(several) or not decoupled:
        return ()
    if mismatch is not None and table.samples and not proximal:
        raise PolicyError(f'mismatch={mismatch!r} needs the column "{PROXIMAL_LOGPROBS}", which samples do not have')
    return several if proximal else ()


def check_value_head(losses: Sequence[TokenLoss], head: ValueHead | None) -> None:
    """Raises PolicyError for a loss that needs a value head where there is none."""
    for loss in losses:
        if loss.needs_values and head is None:
            raise PolicyError(f'loss "{loss.type}" trains a critic: {NO_HEAD}')


def _renumbered(numbers: IntArray) -> IntArray:
    """The same groups, numbered from 0 without gaps."""
    return np.unique(numbers, return_inverse=True)[1].astype(np.int64)


def _counts(tokens: TokenBatch, loss: TokenLoss) -> Tensor:
    """Which tokens have a weight in the stream of a loss [N]."""
    return tokens.columns[streams.weights_name(loss, tokens.columns)] != 0


def tokens_of(tokens: TokenBatch, loss: TokenLoss) -> TokenBatch:
    """The tokens with a weight in the stream of a loss, with its weights."""
    name = streams.weights_name(loss, tokens.columns)
    if loss.decoupled and name == WEIGHTS and CORRECTED_WEIGHTS in tokens.columns:
        name = CORRECTED_WEIGHTS
    columns = {**tokens.columns, WEIGHTS: tokens.columns[name]}
    counts = _counts(tokens, loss)
    if bool(counts.all()):
        return replace(tokens, columns=columns)
    whole = tokens.rollout_log_ratio
    return replace(
        tokens,
        trained_logprobs=tokens.trained_logprobs[counts],
        columns={each: values[counts] for each, values in columns.items()},
        call=tokens.call[counts].unique(return_inverse=True)[1],
        rollout=tokens.rollout[counts].unique(return_inverse=True)[1],
        entropy=None if tokens.entropy is None else tokens.entropy[counts],
        values=None if tokens.values is None else tokens.values[counts],
        rollout_log_ratio=None if whole is None else whole[:, counts],
    )


def sum_of_losses(
    losses: Sequence[TokenLoss], tokens: TokenBatch, within: Sequence[Correction] = ()
) -> tuple[Tensor, dict[str, float | Tensor]]:
    """The sum of all losses, and the sums of their metrics and of those of the corrections `within`, each with the
    number of its tokens (`COUNT_OF`). Where two losses log under one name, the later one's has its type before it."""
    sums: dict[str, float | Tensor] = {}
    if within:
        tokens, found, count = streams.corrected_tokens(tokens, within)
        sums |= _counted(found, count)
    total = tokens.trained_logprobs.sum() * 0.0
    for loss in losses:
        own = tokens_of(tokens, loss)
        value = value_of(loss, own)
        total = total + value.loss * loss.coefficient_at(tokens.step)
        named = {f"{loss.type}_{name}" if name in sums else name: each for name, each in value.sums.items()}
        sums |= _counted(named, len(own.trained_logprobs))
    return total, sums


def _counted(sums: Mapping[str, float | Tensor], count: float) -> dict[str, float | Tensor]:
    return {**sums, **dict.fromkeys((f"{COUNT_OF}{name}" for name in sums), float(count))}


def _finite(sums: Mapping[str, float], norm: Tensor) -> bool:
    return math.isfinite(sums["loss"]) and bool(torch.isfinite(norm))


COUNTS: tuple[str, ...] = (
    "optimizer_steps",
    "skipped_steps",
    "rollouts_not_finite",
    "tokens_trained",
    "tokens_computed",
    "micro_batches",
    "shared_prefixes",
)
KEPT_COUNT = "tokens_with_kept_sets"
"""Trained tokens whose probability is that over a recorded set; only in updates that have some."""
PER_STEP: tuple[str, ...] = ("loss", "lr", "grad_norm", "value_lr", "value_grad_norm")
COUNT_OF = "count of "
"""Before the name of a metric: the number of tokens that it is a sum over."""


def _add(totals: dict[str, float], values: Mapping[str, float | Tensor]) -> None:
    for name, value in values.items():
        totals[name] = totals.get(name, 0.0) + float(value)


def _kept_metrics(kept: KeptTokens) -> dict[str, float | Tensor]:
    count = float(np.count_nonzero(kept.sizes))
    return {KEPT_COUNT: count, **_counted({"kept_set_size": float(kept.sizes.sum())}, count)}


def _means(totals: dict[str, float]) -> dict[str, float]:
    """Sums over tokens become means over tokens, sums over steps means over steps; counts stay."""
    steps = totals["optimizer_steps"] + totals["skipped_steps"]
    divisors = dict.fromkeys((*COUNTS, KEPT_COUNT), 1.0) | dict.fromkeys(PER_STEP, max(1.0, steps))
    names = [name for name in totals if not name.startswith(COUNT_OF)]

    def tokens(name: str) -> float:
        return max(1.0, totals.get(f"{COUNT_OF}{name}", totals["tokens_trained"]))

    return {name: totals[name] / divisors.get(name, tokens(name)) for name in names}
