"""What one rank trains: its share of the model, behind the commands of the trainer's process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from agentlightning.policy.adapters.checkpoint import with_adapters_of
from agentlightning.policy.base import Columns, ScoreColumn
from agentlightning.policy.fsdp import checkpoint
from agentlightning.policy.fsdp.checkpoint import TrainedParameters
from agentlightning.policy.fsdp.collectives import Ranks
from agentlightning.policy.fsdp.identity import model_digest
from agentlightning.policy.fsdp.sharding import ShardedForward
from agentlightning.policy.fsdp.updater import UpdaterFactory
from agentlightning.policy.local_config import LocalPolicyConfig
from agentlightning.policy.model_loading import load_model
from agentlightning.policy.trained_weights import joint_metrics, trained_weights
from agentlightning.policy.update.learner import Learner
from agentlightning.trajectory import TokenTree, TrainingSample

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
        self, samples: Sequence[TrainingSample], options: Mapping[str, Any]
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
