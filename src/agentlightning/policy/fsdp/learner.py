"""What one rank trains: its share of the model, behind the commands of the trainer's process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from agentlightning.policy.base import UPDATE, Columns, ScoreColumn, UpdateOptions
from agentlightning.policy.fsdp import checkpoint
from agentlightning.policy.fsdp.checkpoint import TrainedParameters
from agentlightning.policy.fsdp.messages import model_digest
from agentlightning.policy.fsdp.sharding import Ranks, ShardedForward, divide
from agentlightning.policy.local_config import LocalPolicyConfig
from agentlightning.policy.losses import TokenLoss
from agentlightning.policy.mismatch import Correction
from agentlightning.policy.model_loading import load_model, with_adapters_of
from agentlightning.policy.optimizer_config import OptimizerConfig
from agentlightning.policy.trained_weights import joint_metrics, trained_weights
from agentlightning.policy.update.learner import Learner
from agentlightning.policy.update.micro_batch import MicroBatch
from agentlightning.policy.update.updater import Updater
from agentlightning.policy.update.value_head import ValueHead
from agentlightning.trajectory import TokenTree, TrainingSample

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
        forward: ShardedForward,
        optimizer: OptimizerConfig | None = None,
        adapter: nn.Module | None = None,
        value_head: ValueHead | None = None,
    ) -> None:
        self.ranks = forward.ranks
        whole = [each.to(self.ranks.device) for each in (adapter, value_head) if each is not None]
        super().__init__(forward.model, optimizer, adapter, value_head, forward=forward)
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


class UpdaterFactory:
    """Makes the updaters of one model, which is divided with the first of them (`trained_weights.MakeUpdater`)."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._forward: ShardedForward | None = None

    def __call__(
        self,
        model: PreTrainedModel,
        optimizer: OptimizerConfig | None = None,
        adapter: nn.Module | None = None,
        value_head: ValueHead | None = None,
        *,
        gradient_checkpointing: bool = False,
    ) -> Updater:
        """See `Updater`."""
        if self._forward is None:
            self._forward = ShardedForward(model, self._ranks, gradient_checkpointing=gradient_checkpointing)
        return ShardedUpdater(self._forward, optimizer, adapter, value_head)


MODEL: Final = "model"
VALUE_HEAD: Final = "value_head"
"""Owners of weights, beside the adapters."""


def adapter_owner(name: str) -> str:
    return f"adapter:{name}"


class RankLearner:
    """Every rank calls the same method with the same arguments. Raises what the parts below do."""

    def __init__(self, config: LocalPolicyConfig, ranks: Ranks) -> None:
        self.digest = model_digest(config.model)
        """Of the model in this rank's files."""
        config, adapters = with_adapters_of(config)
        tokenizer, model = load_model(config, weights=ranks.rank == 0)
        self.changed = False
        """Whether the command in progress has changed weights."""
        self._ranks, self._model = ranks, model
        self._weights = trained_weights(model, config, UpdaterFactory(ranks))
        if adapters is not None:
            self._weights.read_weights(adapters)()
        first = ranks.rank == 0
        self._learner = Learner(model, tokenizer, self._weights, self._reference, loads_weights=first)
        self._dtype = next(iter(self._weights.updaters.values())).forward.dtype

    def _reference(self, model: PreTrainedModel) -> ShardedForward:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        return ShardedForward(model, self._ranks)

    def train(
        self, samples: Sequence[TrainingSample], options: UpdateOptions
    ) -> tuple[dict[str, float], list[str | None]]:
        """The metrics of an update, and the names of what it trained."""
        by_name = self._learner.by_trained_weights(samples)

        def changed(name: str | None) -> None:
            self.changed = True

        metrics = {name: self._learner.step(name, own, options, changed) for name, own in by_name.items()}
        self._weights.changed()
        return joint_metrics(metrics), list(by_name)

    def score(
        self, trees: Sequence[TokenTree], what: AbstractSet[ScoreColumn], reference: Path | None, adapter: str | None
    ) -> Columns | None:
        """See `Policy.score`; None on all ranks but the first."""
        found = self._learner.score(trees, what, reference, adapter)
        return found if self._ranks.rank == 0 else None

    def tensors(self, names: Sequence[str | None]) -> Iterator[tuple[str, str, Tensor]]:
        """(owner, name, values) of the weights that are trained under these names, whole, in the dtype that is sampled
        from."""
        for name in names:
            module, owner = (self._model, MODEL) if name is None else (self._adapter(name), adapter_owner(name))
            for key, parameter in module.named_parameters():
                whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                yield owner, key, whole.to(self._dtype) if name is None else whole
        if self._weights.value_head is not None:
            for key, parameter in self._weights.value_head.named_parameters():
                yield VALUE_HEAD, key, parameter

    def save(self, directory: Path) -> dict[str, Any]:
        """The counters; see `checkpoint.save`."""
        return checkpoint.save(self._ranks, self._trained(), directory)

    def load(self, directory: Path, counters: Mapping[str, Any]) -> list[str | None]:
        """The names of what was loaded; see `checkpoint.load`."""
        checkpoint.load(self._ranks, self._trained(), directory, counters)
        self._weights.changed()
        return list(self._weights.updaters)

    def _adapter(self, name: str) -> torch.nn.Module:
        assert self._weights.adapters is not None
        return self._weights.adapters.by_name[name]

    def _trained(self) -> list[TrainedParameters]:
        found: list[TrainedParameters] = []
        for name, updater in self._weights.updaters.items():
            module, owner = (self._model, MODEL) if name is None else (self._adapter(name), adapter_owner(name))
            found.append(TrainedParameters(owner, module, updater.optimizer, updater))
            if updater.value_head is not None and updater.value_optimizer is not None:
                found.append(TrainedParameters(VALUE_HEAD, updater.value_head, updater.value_optimizer, updater))
        return found
