"""What one rank trains: its share of the model, behind the commands of the trainer's process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from agentlightning.models.checkpoint import read_scorer
from agentlightning.policy.base import UPDATE, UpdateOptions
from agentlightning.policy.config import LocalPolicyConfig, OptimizerConfig
from agentlightning.policy.fsdp import checkpoint
from agentlightning.policy.fsdp.checkpoint import TrainedParameters
from agentlightning.policy.fsdp.sharding import Ranks, ShardedForward, divide
from agentlightning.policy.losses import TokenLoss
from agentlightning.policy.mismatch import Correction
from agentlightning.policy.model_loading import load_model, with_adapters_of
from agentlightning.policy.update.forward import Forward
from agentlightning.policy.update.learner import Learner
from agentlightning.policy.update.micro_batch import MicroBatch
from agentlightning.policy.update.updater import Updater
from agentlightning.policy.update.value_head import ValueHead
from agentlightning.trajectory import TrainingSample

# -- updater ---------------------------------------------------------------------------------------------------------

# One update on several processes: each computes the gradient of some trees, and all take the same step.
#
# The weights of tokens are shares of the whole batch, so that gradients and metrics of the ranks add up to those of one
# process, whatever the division. Weights that the ranks divide are summed as they are computed; adapters and value head
# are small, so that every rank has them whole.


class ShardedUpdater(Updater):
    """Trains a model that the ranks divide. Every rank calls the same method with the same samples."""

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: OptimizerConfig | None = None,
        adapter: nn.Module | None = None,
        value_head: ValueHead | None = None,
        *,
        forward: ShardedForward,
    ) -> None:
        self.ranks = forward.ranks
        whole = [each.to(self.ranks.device) for each in (adapter, value_head) if each is not None]
        super().__init__(model, optimizer, adapter, value_head, forward=forward)
        self._whole = [parameter for each in whole for parameter in each.parameters()]
        self._loads: list[list[float]] = []
        """Of each batch divided since the step began: the predicted cost of each rank."""

    def step(self, samples: Sequence[TrainingSample], options: UpdateOptions = UPDATE) -> dict[str, float]:
        """See `Updater.step`. The metrics also have `idle_ranks`, the most ranks without a tree in an optimiser step,
        and `rank_imbalance`, the predicted cost of the busiest rank as a multiple of the mean."""
        self._loads = []
        metrics = super().step(samples, options)
        busy = [loads for loads in self._loads if sum(loads)]
        idle = max((loads.count(0.0) for loads in busy), default=self.ranks.count)
        imbalance = sum(max(loads) for loads in busy) * self.ranks.count / max(sum(map(sum, busy)), 1e-9)
        return {**metrics, "idle_ranks": float(idle), "rank_imbalance": imbalance}

    def _gradient(
        self,
        part: Sequence[TrainingSample],
        losses: Sequence[TokenLoss],
        within: Sequence[Correction],
        options: UpdateOptions,
    ) -> dict[str, float]:
        own = [part[i] for i in self._own(part, options)]
        batches = self._plan(own, options) if own else []
        sums = self.ranks.sum(self.accumulate(batches, losses, within))
        self.ranks.sum_gradients(self._whole)
        return sums

    def _own(self, part: Sequence[TrainingSample], options: UpdateOptions) -> list[int]:
        """The trees of this rank, as rank 0 has divided them."""
        found: tuple[list[list[int]], list[float]] | None = None
        if self.ranks.rank == 0:
            prices = [sum(map(self.forward.cost.price, self._plan([sample], options))) for sample in part]
            parts = divide(prices, self.ranks.count)
            found = parts, [sum(prices[i] for i in own) for own in parts]
        parts, loads = self.ranks.from_first(found)
        self._loads.append(loads)
        return parts[self.ranks.rank]

    def _divides_rollouts(self, batches: Sequence[MicroBatch]) -> bool:
        return self.ranks.any(super()._divides_rollouts(batches))


# -- learner ---------------------------------------------------------------------------------------------------------

MODEL: Final = "model"
VALUE_HEAD: Final = "value_head"
"""Owners of weights, beside the adapters."""
GATHER: Final = "gather"
"""The command whose answer comes in parts."""
Part = tuple[str, str, "np.ndarray[Any, np.dtype[np.uint8]]"]
"""(owner, name, bytes) of a tensor."""


def owner_of(name: str | None) -> str:
    return MODEL if name is None else f"adapter:{name}"


def modules_by_owner(learner: Learner) -> dict[str, nn.Module]:
    """What is sampled from or trained. An owner is the model, an adapter or the value head."""
    found: dict[str, nn.Module] = {MODEL: cast(nn.Module, learner.model)}
    found |= {} if learner.value_head is None else {VALUE_HEAD: learner.value_head}
    return found | {owner_of(name): adapter for name, adapter in learner.by_name.items()}


class RankLearner(Learner):
    """Every rank calls the same method with the same arguments. Raises what the parts below do."""

    def __init__(self, config: LocalPolicyConfig, ranks: Ranks) -> None:
        config, adapters = with_adapters_of(config)
        tokenizer, model = load_model(config, weights=ranks.rank == 0)
        self.changed: list[str | None] = []
        """The names of the weights that the command in progress has changed."""
        self._ranks = ranks
        super().__init__(model, tokenizer, config, ShardedUpdater)
        if adapters is not None:
            self.read_weights(adapters)()
        self._modules = modules_by_owner(self)

    def read_scorer(self, directory: Path) -> PreTrainedModel:
        """See `Learner.read_scorer`. Ranks other than the first get its weights when it is divided."""
        first = self._ranks.rank == 0
        scorer = read_scorer(directory, self.model, self.tokenizer, self.dtype, weights=first)
        return scorer.requires_grad_(False)

    def make_forward(self, model: PreTrainedModel, gradient_checkpointing: bool = False) -> Forward:
        """See `Learner.make_forward`."""
        return ShardedForward(model, self._ranks, gradient_checkpointing=gradient_checkpointing)

    def train(
        self, samples: Sequence[TrainingSample], options: UpdateOptions
    ) -> tuple[dict[str, float], list[str | None]]:
        """The metrics of an update, and the names of what it trained."""
        metrics = self.update(samples, options, self.changed.append)
        self.changed()
        return metrics, list(self.changed)

    def gather(self, names: Sequence[str | None]) -> Iterator[Part]:
        """The weights that are trained under these names, whole, in the dtype that is sampled from, on rank 0."""
        for owner in (*map(owner_of, names), VALUE_HEAD):
            for name, parameter in self._modules[owner].named_parameters() if owner in self._modules else ():
                whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
                whole = whole.to(self.dtype) if owner == MODEL else whole
                if self._ranks.rank == 0:
                    yield owner, name, whole.detach().cpu().flatten().view(torch.uint8).numpy()

    def save(self, directory: Path) -> dict[str, Any]:
        """The counters; see `checkpoint.save`."""
        return checkpoint.save(self._ranks, self._trained(), directory)

    def load(self, directory: Path, counters: Mapping[str, Any]) -> list[str | None]:
        """The names of what was loaded; see `checkpoint.load`."""
        checkpoint.load(self._ranks, self._trained(), directory, counters)
        self.changed()
        return list(self.updaters)

    def _trained(self) -> list[TrainedParameters]:
        return [
            TrainedParameters(owner, self._modules[owner], optimizer, updater)
            for name, updater in self.updaters.items()
            for owner, optimizer in ((owner_of(name), updater.optimizer), (VALUE_HEAD, updater.value_optimizer))
            if optimizer is not None
        ]
