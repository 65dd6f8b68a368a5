"""What one rank trains: its share of the model, behind the commands of rank 0."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from agentlightning.errors import ConfigError, PolicyError
from agentlightning.models.checkpoint import read_scorer
from agentlightning.models.resolve import resolve_model
from agentlightning.policy.base import UPDATE, UpdateOptions
from agentlightning.policy.config import LocalPolicyConfig, OptimizerConfig
from agentlightning.policy.fsdp.sharding import Ranks, ShardedForward, divide
from agentlightning.policy.model_loading import load_model, with_adapters_of
from agentlightning.policy.update.forward import Forward
from agentlightning.policy.update.learner import Learner
from agentlightning.policy.update.optimizer import Optimizer, WeightAverage
from agentlightning.policy.update.packing import MicroBatch, TokenTable
from agentlightning.policy.update.updater import EntropyHistory, LossSpec, Updater
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
        self.whole = [parameter for each in whole for parameter in each.parameters()]
        """What each rank has undivided."""
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

    def _gradient(self, part: TokenTable, spec: LossSpec) -> dict[str, float]:
        own = self._own(part, spec.options)
        batches = self._plan(own, spec.options) if own.part else []
        sums = self.ranks.sum(self.accumulate(batches, spec.losses, spec.within))
        self.ranks.sum_gradients(self.whole)
        return sums

    def _own(self, part: TokenTable, options: UpdateOptions) -> TokenTable:
        """The trees of this rank, as rank 0 has divided them."""
        found: tuple[list[list[int]], list[float]] | None = None
        if self.ranks.rank == 0:
            trees = [self._plan(replace(part, part=(number,)), options) for number in part.part]
            prices = [sum(map(self.forward.cost.price, batches)) for batches in trees]
            parts = divide(prices, self.ranks.count)
            found = parts, [sum(prices[i] for i in own) for own in parts]
        parts, loads = self.ranks.from_first(found)
        self._loads.append(loads)
        return replace(part, part=tuple(part.part[i] for i in parts[self.ranks.rank]))

    def _divides_rollouts(self, batches: Sequence[MicroBatch]) -> bool:
        return self.ranks.any(super()._divides_rollouts(batches))


# -- checkpoint ------------------------------------------------------------------------------------------------------

# The training state of ranks on disk, by torch's distributed checkpoint: each rank writes its share, and any number of
# ranks can read it.
#
#     weight/OWNER/NAME          float32, or the frozen dtype
#     moment/OWNER/NAME/KIND     what the optimiser remembers of it
#     average/OWNER/NAME         the moving average, where one is kept
#
# An owner is the model, an adapter or the value head. Counters are no tensors; `load_state` is given what `save_state`
# returned.

FOLDER = "ranks"
"""In a checkpoint of a policy."""
MOMENTS = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")
READ_ERRORS = (CheckpointException, OSError, RuntimeError, ValueError, KeyError, EOFError)


class TrainedParameters:
    """The weights that an updater trains, and their names."""

    def __init__(self, owner: str, module: nn.Module, optimizer: Optimizer, updater: Updater) -> None:
        self.owner, self.optimizer = owner, optimizer
        self.updater = updater if updater.optimizer is optimizer else None
        """Whose history and average are those of these weights."""
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self.by_name = {names[id(parameter)]: parameter for parameter in optimizer.masters}

    @property
    def average(self) -> WeightAverage | None:
        """The moving average of these weights, where one is kept."""
        return self.updater and self.updater.average

    def tensors(self) -> dict[str, Tensor]:
        moments, average = self.optimizer.moments(), self.average
        found: dict[str, Tensor] = {}
        for i, (name, parameter) in enumerate(self.by_name.items()):
            found[f"weight/{self.owner}/{name}"] = parameter.detach()
            for kind, value in moments.get(parameter, {}).items():
                found[f"moment/{self.owner}/{name}/{kind}"] = value
            if average is not None:
                found[f"average/{self.owner}/{name}"] = average.weights[i]
        return found

    def counters(self) -> dict[str, Any]:
        history = EntropyHistory() if self.updater is None else self.updater.entropy
        return {
            "type": self.optimizer.config.type,
            "steps": self.optimizer.steps,
            "entropy": [history.mean, history.steps],
            "average": None if self.average is None else self.average.rate,
        }

    def empty(self, saved: Container[str]) -> dict[str, Tensor]:
        """New tensors for what is `saved` of these weights, and for all weights."""
        kinds = [("weight", ""), ("average", ""), *(("moment", f"/{kind}") for kind in MOMENTS)]
        return {
            key: torch.zeros(()) if kind == "/step" else torch.zeros_like(parameter.detach())
            for name, parameter in self.by_name.items()
            for part, kind in kinds
            if (key := f"{part}/{self.owner}/{name}{kind}") in saved or part == "weight"
        }

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor], counters: Mapping[str, Any]) -> None:
        """Continue from saved tensors and counters."""
        moments: dict[Tensor, dict[str, Tensor]] = {}
        for name, parameter in self.by_name.items():
            parameter.copy_(tensors[f"weight/{self.owner}/{name}"])
            keys = {kind: f"moment/{self.owner}/{name}/{kind}" for kind in MOMENTS}
            moments[parameter] = {kind: tensors[key] for kind, key in keys.items() if key in tensors}
        self.optimizer.set_moments(moments)
        self.optimizer.steps = int(counters["steps"])
        if self.updater is not None:
            mean, steps = counters["entropy"]
            self.updater.entropy = EntropyHistory(float(mean), int(steps))
            averages = [tensors[key] for name in self.by_name if (key := f"average/{self.owner}/{name}") in tensors]
            self.updater.set_average(counters["average"], averages)


def check_complete(directory: Path) -> None:
    """Raises PolicyError where files of a saved state are not in `directory`, as those of another machine's disk."""
    storage = FileSystemReader(directory).read_metadata().storage_data or {}
    files = {str(each.relative_path) for each in storage.values()}
    if missing := sorted(name for name in files if not (directory / name).is_file()):
        raise PolicyError(
            f"{directory} lacks {missing[0]} and {len(missing) - 1} more files that ranks have written: machines that"
            " train together need a directory of runs that all of them share"
        )


# -- learner ---------------------------------------------------------------------------------------------------------

MODEL: Final = "model"
VALUE_HEAD: Final = "value_head"
"""Owners of weights, beside the adapters."""
Weights: TypeAlias = dict[str, dict[str, Tensor]]
"""By owner and name."""
Load: TypeAlias = Callable[[Callable[[], Any]], Any]
PACKAGES = ("agentlightning", "torch", "transformers", "numpy")


def identity(model: str) -> str:
    """What the ranks must have in common: versions, and a digest of the files of this package and of the model's
    settings. Its weights are those of rank 0."""
    sources = sorted(Path(__file__).parents[2].rglob("*.py"))
    files = [*sources, Path(resolve_model(model, weights=False)) / "config.json"]
    digest = hashlib.blake2b(b"".join(path.read_bytes() for path in files), digest_size=6).hexdigest()
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    return f"{versions}, agentlightning's files and config.json {digest}"


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
        first, *others = ranks.gather(identity(config.model))
        for number, other in enumerate(others, 1):
            if other != first:
                raise ConfigError(
                    f"rank {number} has {other}, and rank 0 has {first}; give all machines the same version and model"
                )
        tokenizer, model = load_model(config, weights=ranks.rank == 0)
        self.changed_names: list[str | None] = []
        """The names of the weights that the command in progress has changed."""
        self._ranks = ranks
        self.load: Load = lambda read: read()
        """Calls what reads a model, which changes the default dtype of this process meanwhile."""
        super().__init__(model, tokenizer, config, ShardedUpdater)
        if adapters is not None:
            self.read_weights(adapters)()
        for updater in self.updaters.values():
            for parameter in cast(ShardedUpdater, updater).whole:
                ranks.copy_from_first(parameter)
        self._modules = modules_by_owner(self)

    def read_scorer(self, directory: Path) -> PreTrainedModel:
        """See `Learner.read_scorer`. Ranks other than the first get its weights when it is divided."""
        first = self._ranks.rank == 0
        read = partial(read_scorer, directory, self.model, self.tokenizer, self.dtype, weights=first)
        return self.load(read).requires_grad_(False)

    def make_forward(self, model: PreTrainedModel, gradient_checkpointing: bool = False) -> Forward:
        """See `Learner.make_forward`."""
        return ShardedForward(model, self._ranks, gradient_checkpointing=gradient_checkpointing)

    def train(
        self, samples: Sequence[TrainingSample], options: UpdateOptions
    ) -> tuple[dict[str, float], list[str | None]]:
        """The metrics of an update, and the names of what it trained."""
        metrics = self.update(samples, options, self.changed_names.append)
        self.changed()
        return metrics, list(self.changed_names)

    def gather(self, names: Sequence[str | None]) -> Weights:
        """The weights that are trained under these names, whole, in the dtype that is sampled from, on rank 0."""
        found: Weights = {}
        for owner in (*map(owner_of, names), VALUE_HEAD):
            for name, parameter in self._modules[owner].named_parameters() if owner in self._modules else ():
                whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
                whole = whole.to(self.dtype) if owner == MODEL else whole
                if self._ranks.rank == 0:
                    found.setdefault(owner, {})[name] = whole.detach().cpu()
        return found

    def save_state(self, directory: Path) -> dict[str, Any]:
        """Write the state of all ranks to `directory`, and return the counters. Raises PolicyError."""
        trained = self._trained()
        tensors: Any = {key: value for each in trained for key, value in each.tensors().items()}
        try:
            state_dict_saver.save(tensors, checkpoint_id=directory, process_group=self._ranks.control)
        except READ_ERRORS as error:
            raise PolicyError(f"the ranks cannot save to {directory}: {error}; free space or choose another") from error
        return {each.owner: each.counters() for each in trained}

    def load_state(self, directory: Path, counters: Mapping[str, Any]) -> list[str | None]:
        """Continue from the state in `directory`, and return the names of what was loaded. Raises PolicyError for one
        that is damaged or of another model, and ConfigError for one of another optimiser, before anything changes."""
        trained = self._trained()
        for each in trained:
            own = each.optimizer.config.type
            if (found := counters.get(each.owner, {}).get("type", own)) != own:
                raise ConfigError(
                    f'the optimiser type="{found}" was saved, and "{own}" is set; continue with the type it was saved'
                    " with"
                )
        try:
            saved = FileSystemReader(directory).read_metadata().state_dict_metadata
            tensors: Any = {key: value for each in trained for key, value in each.empty(saved).items()}
            state_dict_loader.load(tensors, checkpoint_id=directory, process_group=self._ranks.control)
        except READ_ERRORS as error:
            raise PolicyError(
                f"{directory} holds no state of this model that can be read: {error}; continue with the model and"
                " policy.lora it was saved with, or choose an earlier checkpoint; ranks on other machines need a"
                " directory that all of them share"
            ) from error
        for each in trained:
            each.take(tensors, counters[each.owner])
        self.changed()
        return list(self.updaters)

    def _trained(self) -> list[TrainedParameters]:
        return [
            TrainedParameters(owner, self._modules[owner], optimizer, updater)
            for name, updater in self.updaters.items()
            for owner, optimizer in ((owner_of(name), updater.optimizer), (VALUE_HEAD, updater.value_optimizer))
            if optimizer is not None
        ]
