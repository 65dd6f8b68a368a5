"""One update of a policy: training samples in, an optimiser step done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from agentlightning.errors import ConfigError, PolicyError, UnfaithfulSampleError
from agentlightning.policy.losses import LossSetting, LossValue, TokenBatch, TokenLoss, token_losses
from agentlightning.policy.losses.base import SAMPLED_LOGPROBS
from agentlightning.policy.optimizer_config import OptimizerConfig
from agentlightning.policy.update.forward import Forward, checkpoints_activations
from agentlightning.policy.update.micro_batch import IntArray, MicroBatch
from agentlightning.policy.update.optimizer import Optimizer
from agentlightning.policy.update.packing import Sharing
from agentlightning.trajectory import TrainingSample


class Updater:
    """Trains one model in place. Not thread safe: nothing may use the weights during a step."""

    def __init__(self, model: PreTrainedModel, optimizer: OptimizerConfig | None = None) -> None:
        self.model = model
        self.optimizer = Optimizer(model, optimizer or OptimizerConfig())
        self.forward = Forward(model)

    def step(
        self,
        samples: Sequence[TrainingSample],
        *,
        loss: LossSetting = "ppo",
        token_budget: int = 8192,
        sharing: Sharing = "auto",
        minibatches: int = 1,
    ) -> dict[str, float]:
        """Train on all samples once.

        `loss` is one or several, which add up. `token_budget` bounds the tokens of one forward pass, padding included.
        `minibatches` divides the batch by samples into that many optimiser steps, each over its share of the whole.
        Returns means over trained tokens (loss, entropy, and what the losses log: ratio, clip_fraction, approx_kl ...),
        grad_norm and lr (means over steps), and counts: tokens_trained, tokens_computed (padding included),
        micro_batches, optimizer_steps and skipped_steps (a loss or gradient that was not finite).

        Raises UnfaithfulSampleError for samples the loss cannot correct for, PolicyError for samples without a column
        it needs, ConfigError for impossible settings.
        """
        if minibatches < 1 or token_budget < 1:
            raise ConfigError(f"minibatches={minibatches} and token_budget={token_budget} must be at least 1")
        losses = token_losses(loss)
        check_samples(samples, losses)
        trains_zero_advantage = any(each.trains_zero_advantage for each in losses)
        totals = dict.fromkeys(COUNTS, 0.0)
        for part in _split_minibatches(samples, minibatches):
            batches = self.forward.plan(
                part, token_budget=token_budget, sharing=sharing, trains_zero_advantage=trains_zero_advantage
            )
            if batches:
                sums = self.accumulate(batches, losses)
                _add(totals, sums)
                _add(totals, self.optimizer.step(sums["loss"]))
        return _means(totals)

    def accumulate(self, batches: Sequence[MicroBatch], loss: LossSetting = "ppo") -> dict[str, float]:
        """Add the gradient of `batches` to that of `optimizer.masters`; returns sums over tokens, and counts."""
        losses = token_losses(loss)
        needs = frozenset[str]().union(*(each.needs for each in losses))
        self.model.train(checkpoints_activations(self.model))
        totals: dict[str, float] = {}
        for batch in batches:
            logprobs_N, entropy_N = self.forward.logprobs(batch, at_temperature=SAMPLED_LOGPROBS in needs)
            value = _sum_of_losses(losses, self._tokens(batch, logprobs_N, needs))
            value.loss.backward()
            _add(totals, {"loss": value.loss.detach(), "entropy": entropy_N.sum(), **value.sums})
            _add(totals, {"tokens_trained": len(logprobs_N), "tokens_computed": batch.tokens, "micro_batches": 1})
            _add(totals, {"shared_prefixes": len(batch.families)})
        self.model.eval()
        return totals

    def state_dict(self) -> dict[str, Any]:
        """All that a resume needs beside the weights."""
        return self.optimizer.state_dict()

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError for a state that `load_state_dict` would refuse."""
        self.optimizer.check_state_dict(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def _tokens(self, batch: MicroBatch, logprobs_N: Tensor, needs: frozenset[str]) -> TokenBatch:
        table, places = batch.table, batch.places
        return TokenBatch(
            trained_logprobs=logprobs_N,
            columns={name: self.forward.tensor(table.columns[name][places]) for name in sorted(needs | {"weights"})},
            call=self.forward.tensor(_renumbered(table.call[places])),
            rollout=self.forward.tensor(_renumbered(table.rollout[places])),
        )


def _renumbered(numbers: IntArray) -> IntArray:
    """The same groups, numbered from 0 without gaps."""
    return np.unique(numbers, return_inverse=True)[1].astype(np.int64)


def _sum_of_losses(losses: Sequence[TokenLoss], tokens: TokenBatch) -> LossValue:
    """Where two losses log under one name, the later one's has its type before it."""
    values = [each(tokens) for each in losses]
    sums: dict[str, Tensor] = {}
    for loss, value in zip(losses, values, strict=True):
        sums |= {f"{loss.type}_{name}" if name in sums else name: total for name, total in value.sums.items()}
    total = values[0].loss * losses[0].coefficient
    for loss, value in zip(losses[1:], values[1:], strict=True):
        total = total + value.loss * loss.coefficient
    return LossValue(total, sums)


def check_samples(samples: Sequence[TrainingSample], losses: Sequence[TokenLoss]) -> None:
    """Raises PolicyError for a column that a loss needs and the samples lack, and UnfaithfulSampleError for trained
    tokens that were chosen greedily, if a loss needs the probability they were sampled with."""
    for loss in losses:
        for sample in samples:
            if missing := {*loss.needs, "weights"} - {SAMPLED_LOGPROBS} - set(sample.columns):
                raise PolicyError(f'loss "{loss.type}" needs the columns {sorted(missing)}, which samples do not have')
    if any(SAMPLED_LOGPROBS in loss.needs for loss in losses):
        for sample in samples:
            _refuse_greedy(sample)


def _refuse_greedy(sample: TrainingSample) -> None:
    for node, weights in zip(sample.tree.nodes, sample.columns["weights"], strict=True):
        if node.sampled and node.temperature <= 0 and weights.any():
            raise UnfaithfulSampleError(
                f"call {node.call} of rollout {node.rollout_id} was sampled with temperature={node.temperature:g}; "
                'sample training rollouts with a temperature above 0, or train with loss="nll"'
            )


def _split_minibatches(samples: Sequence[TrainingSample], minibatches: int) -> list[Sequence[TrainingSample]]:
    """The samples in so many parts, the weights of each divided by its share: whatever normalised the weights, a part
    then weighs as a whole batch does."""
    if minibatches == 1:
        return [samples]
    parts = (samples[i::minibatches] for i in range(minibatches))
    return [_as_whole(part) for part in parts if part]


def _as_whole(samples: Sequence[TrainingSample]) -> Sequence[TrainingSample]:
    share = sum(sample.share for sample in samples)
    if not share:
        return samples
    return [replace(each, weights=[w / share for w in each.columns["weights"]]) for each in samples]  # pyright: ignore[reportCallIssue]


COUNTS: tuple[str, ...] = (
    "optimizer_steps",
    "skipped_steps",
    "tokens_trained",
    "tokens_computed",
    "micro_batches",
    "shared_prefixes",
)
PER_STEP: tuple[str, ...] = ("loss", "lr", "grad_norm")


def _add(totals: dict[str, float], values: Mapping[str, float | Tensor]) -> None:
    for name, value in values.items():
        totals[name] = totals.get(name, 0.0) + float(value)


def _means(totals: dict[str, float]) -> dict[str, float]:
    """Sums over tokens become means over tokens, sums over steps means over steps; counts stay."""
    steps = totals["optimizer_steps"] + totals["skipped_steps"]
    divisors = dict.fromkeys(COUNTS, 1.0) | dict.fromkeys(PER_STEP, steps)
    return {name: total / divisors.get(name, totals["tokens_trained"]) for name, total in totals.items()}
