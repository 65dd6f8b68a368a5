"""What one rank trains: its share of a model (FSDP2, `fully_shard`), behind the commands of rank 0.

Each layer is gathered before it is computed and released afterwards, so that a rank holds its share of the weights
and one whole layer; embeddings, final norm and output layer are gathered for a whole pass. What the ranks exchange in a
pass must match: a rank that has fewer micro-batches than another makes idle passes, over two tokens, whose loss counts
0.
With weights in bfloat16, the shares are float32: they are the master copies, and only what is gathered is rounded.

Zhao et al. 2023, arXiv:2304.11277; FSDP2: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from agentlightning.errors import ConfigError, PolicyError
from agentlightning.models.checkpoint import read_scorer
from agentlightning.models.resolve import resolve_model
from agentlightning.policy.base import UPDATE, Sharing, UpdateOptions
from agentlightning.policy.config import LocalPolicyConfig
from agentlightning.policy.model_loading import load_model, with_adapters_of
from agentlightning.policy.update.forward import Forward, ModelTraits, cost_model
from agentlightning.policy.update.optimizer import master_values
from agentlightning.policy.update.packing import MicroBatch, TokenTable, plan, token_table
from agentlightning.policy.update.updater import LocalLearner, Sums, Updater, add_sums
from agentlightning.trajectory import FloatArray, Node, TokenTree, TrainingSample

# -- collectives -----------------------------------------------------------------------------------------------------

# What the ranks do together beside the passes through the model. Every rank calls the same method at the same time.

T = TypeVar("T")


class Ranks:
    """The process group of training, seen by one rank."""

    def __init__(self, mesh: DeviceMesh, control: dist.ProcessGroup, device: torch.device) -> None:
        """`control` carries objects between CPUs; `mesh` divides the weights."""
        self.mesh = mesh
        self.control = control
        self.device = device
        self.rank = dist.get_rank()
        self.count = dist.get_world_size()

    def from_first(self, value: T | None) -> T:
        """What rank 0 gave."""
        held: list[Any] = [value]
        dist.broadcast_object_list(held, src=0, group=self.control)
        return held[0]

    @torch.no_grad()
    def copy_from_first(self, tensor: Tensor) -> None:
        """Give a tensor the values that it has on rank 0."""
        if self.count == 1:
            return
        values = tensor.detach().cpu().contiguous()
        # As bytes: not every type of numbers can be sent.
        dist.broadcast(values.flatten().view(torch.uint8), src=0, group=self.control)
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values)

    def gather(self, value: T) -> list[T]:
        """What every rank gave, by rank."""
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self.control)
        return found

    def sum(self, values: Sums) -> Sums:
        """The sums by name, with the same bits on every rank."""
        total: Sums = {}
        for own in self.gather(values):
            add_sums(total, own)
        return total

    @torch.no_grad()
    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Of parameters that every rank has whole. One without a gradient on all of them stays without."""
        has = self.gather([p.grad is not None for p in parameters])
        found = [p for p, own in zip(parameters, zip(*has, strict=True), strict=True) if any(own)]
        if not found:
            return
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in found])
        dist.all_reduce(flat)
        for parameter, summed in zip(found, flat.split([p.numel() for p in found]), strict=True):
            parameter.grad = summed.view_as(parameter).clone()


# -- division --------------------------------------------------------------------------------------------------------

# Which rank computes which trees of a batch: each is whole on one rank, so that no call or rollout is divided.


def divide(prices: Sequence[float], ranks: int) -> list[list[int]]:
    """For each rank the indices of its items, ascending: the dearest first, each to the rank with the least so far
    (Graham 1969; the dearest rank has at most 4/3 of what the best division gives it). Free items go to nobody."""
    loads = [0.0] * ranks
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(prices)), key=lambda i: (-prices[i], i)):
        if prices[index] > 0:
            rank = loads.index(min(loads))
            parts[rank].append(index)
            loads[rank] += prices[index]
    return [sorted(part) for part in parts]


class ShardedForward(Forward):
    """Passes through a model that it divides over the ranks."""

    always_uses_prefix = True

    def __init__(self, model: PreTrainedModel, ranks: Ranks, *, gradient_checkpointing: bool = False) -> None:
        """`model` is whole on the CPU of rank 0, and may be on the meta device of others. Raises ConfigError for one
        without layers that can be divided."""
        first: ModelTraits | None = None
        traits = None if ranks.rank == 0 else ranks.from_first(first)
        self._left: list[int] = []
        """Passes of the longest rank at each position that is still to come."""
        super().__init__(model, gradient_checkpointing=gradient_checkpointing, traits=traits)
        if ranks.rank == 0:  # Which has run the whole model.
            ranks.from_first(self.traits)
        self.ranks = ranks
        self._used = False
        """Whether there has been a pass, before which torch has no state to reset."""
        self.loads: list[list[float]] = []
        """Of each batch that was planned: the predicted cost of each rank."""
        shard(model, ranks, self.dtype)
        self.cost = cost_model(model)

    @contextmanager
    def aligned(self, batches: Sequence[MicroBatch]) -> Generator[None]:
        """See `Forward.aligned`: idle passes where another rank has more."""
        counts = self.ranks.gather([_passes(batch) for batch in batches])
        self._left = [max(passes) for passes in zip_longest(*counts, fillvalue=0)]
        done = False
        try:
            yield
            for passes in self._left:
                idle = self._idle(passes)
                if idle.requires_grad:
                    idle.backward()
            done = True
        finally:
            self._left = []
            if self._used and not (done and torch.is_grad_enabled()):
                # What was gathered must not outlive the next change of the weights.
                cast(FSDPModule, self.model).reset_iter_state()

    def states(self, batch: MicroBatch) -> Tensor:
        """See `Forward.states`, with the idle passes of this position."""
        self._used = True
        idle = self._idle(self._left.pop(0) - _passes(batch)) if self._left else None
        hidden_NH = super().states(batch)
        return hidden_NH if idle is None else hidden_NH + idle.to(hidden_NH.dtype)

    def plan(
        self, batch: TokenTable | Sequence[TrainingSample], *, token_budget: int = 8192, sharing: Sharing = "auto"
    ) -> list[MicroBatch]:
        """See `Forward.plan`: that of the trees of this rank. Every rank divides them alike."""
        table = batch if isinstance(batch, TokenTable) else token_table(batch)
        own = partial(super().plan, token_budget=token_budget, sharing=sharing)
        prices = [sum(map(self.cost.price, own(replace(table, part=(number,))))) for number in table.part]
        parts = divide(prices, self.ranks.count)
        self.loads.append([sum(prices[i] for i in part) for part in parts])
        part = tuple(table.part[i] for i in parts[self.ranks.rank])
        return own(replace(table, part=part)) if part else []

    def joint(self, found: FloatArray) -> FloatArray:
        """See `Forward.joint`."""
        return np.sum(self.ranks.gather(found), axis=0)

    def _idle(self, passes: int) -> Tensor:
        """Passes over one target behind one token, whose sum is 0; every weight has a gradient of 0."""
        total = torch.zeros((), device=self.model.device)
        tree = TokenTree((Node(-1, (0,)), Node(0, (0,), sampled=True, logprobs=(0.0,))))
        (batch,) = plan([TrainingSample(tree)], token_budget=1, sharing="rows")
        for _ in range(passes):
            self._used = True
            logprobs_1, _ = self.logprobs(batch, super().states(batch), at_temperature=False)
            total = total + logprobs_1.sum() * 0.0
        return total


def _passes(batch: MicroBatch) -> int:
    return 2 if batch.shared_length else 1


def shard(model: PreTrainedModel, ranks: Ranks, dtype: torch.dtype) -> None:
    """Divide the weights of rank 0's `model`, computed with in `dtype`, over the ranks, a layer at a time: others hold
    no more than their share, one whole layer, and the embeddings. Gradients are sums over the ranks."""
    trains = any(parameter.requires_grad for parameter in model.parameters())
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    layers = _layers(model)
    inner = {each for layer in layers for each in layer.modules()}
    for part in (*layers, model):
        owners = [each for each in part.modules() if part is not model or each not in inner]
        fill(owners, ranks, masters=trains)
        fully_shard(part, mesh=ranks.mesh, mp_policy=precision)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    cast(FSDPModule, model).set_reduce_scatter_unused_params(True)


@torch.no_grad()
def fill(owners: Sequence[nn.Module], ranks: Ranks, *, masters: bool) -> None:
    """Give all ranks the own weights and buffers of these modules of rank 0, in float32 where they are `masters`."""
    places = [
        (owner, name, tensor)
        for owner in owners
        for named in (owner.named_parameters, owner.named_buffers)
        for name, tensor in named(recurse=False, remove_duplicate=False)
    ]
    dtypes = ranks.from_first([tensor.dtype for _, _, tensor in places])
    filled: dict[int, Tensor] = {}
    for (owner, name, tensor), dtype in zip(places, dtypes, strict=True):
        if (known := filled.get(id(tensor))) is None:  # Two modules may have the same.
            known = tensor
            if ranks.rank:
                known = torch.empty_like(tensor, dtype=dtype, device="cpu")
                if isinstance(tensor, nn.Parameter):
                    known = nn.Parameter(known, requires_grad=tensor.requires_grad)
            ranks.copy_from_first(known)
            if masters and known.is_floating_point():
                known.data = master_values(known.data) if known.requires_grad else known.data.float()
            filled[id(tensor)] = known
        setattr(owner, name, known)


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    layers = list(getattr(model.get_decoder(), "layers", None) or getattr(model.get_decoder(), "h", None) or [])
    if not layers:
        raise ConfigError(
            f'policy.kind="fsdp" divides a model by its layers, and {type(model).__name__} names none; train it with'
            ' policy.kind="local"'
        )
    return layers


# -- updater ---------------------------------------------------------------------------------------------------------

# One update on several processes: each computes the gradient of some trees, and all take the same step.
#
# The weights of tokens are shares of the whole batch, so that gradients and metrics of the ranks add up to those of one
# process, whatever the division. Weights that the ranks divide are summed as they are computed; adapters and value head
# are small, so that every rank has them whole.


class ShardedUpdater(Updater):
    """Trains a model that the ranks divide. Every rank calls the same method with the same samples."""

    forward: ShardedForward  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def whole(self) -> list[nn.Parameter]:
        """What is trained and each rank has undivided."""
        trained = [each for optimizer in self.optimizers for each in optimizer.parameters]
        return [parameter for parameter in trained if not isinstance(parameter, DTensor)]

    def step(self, samples: Sequence[TrainingSample], options: UpdateOptions = UPDATE) -> dict[str, float]:
        """See `Updater.step`. The metrics also have `idle_ranks`, the most ranks without a tree in an optimiser step,
        and `rank_imbalance`, the predicted cost of the busiest rank as a multiple of the mean."""
        self.forward.loads.clear()
        metrics = super().step(samples, options)
        busy, count = [loads for loads in self.forward.loads if sum(loads)], self.forward.ranks.count
        idle = max((loads.count(0.0) for loads in busy), default=count)
        imbalance = sum(max(loads) for loads in busy) * count / max(sum(map(sum, busy)), 1e-9)
        return {**metrics, "idle_ranks": float(idle), "rank_imbalance": imbalance}

    def _gradient(self, part: TokenTable, options: UpdateOptions) -> Sums:
        sums = self.forward.ranks.sum(self.accumulate(self._plan(part, options), options.loss))
        self.forward.ranks.sum_gradients(self.whole)
        return sums

    def _divides_rollouts(self, batches: Sequence[MicroBatch]) -> bool:
        return any(self.forward.ranks.gather(super()._divides_rollouts(batches)))


# -- checkpoint ------------------------------------------------------------------------------------------------------

# The training state of ranks on disk, by torch's distributed checkpoint: each rank writes its share, and any number of
# ranks can read it. Beside the weights that are trained it is what `LocalLearner.state_dict` has.

FOLDER = "ranks"
"""In a checkpoint of a policy."""
READ_ERRORS = (CheckpointException, OSError, RuntimeError, ValueError, KeyError, EOFError)


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

MODEL = "model"
VALUE_HEAD = "value_head"
"""Owners of weights, beside the adapters."""
Weights = dict[str, dict[str, Tensor]]
"""By owner and name."""
Load = Callable[[Callable[[], Any]], Any]
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


def modules_by_owner(learner: LocalLearner) -> dict[str, nn.Module]:
    """What is sampled from or trained. An owner is the model, an adapter or the value head."""
    found: dict[str, nn.Module] = {MODEL: cast(nn.Module, learner.model)}
    found |= {} if learner.value_head is None else {VALUE_HEAD: learner.value_head}
    return found | {owner_of(name): adapter for name, adapter in learner.by_name.items()}


class RankLearner(LocalLearner):
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
        """See `LocalLearner.read_scorer`. Ranks other than the first get its weights when it is divided."""
        first = self._ranks.rank == 0
        read = partial(read_scorer, directory, self.model, self.tokenizer, self.forward.dtype, weights=first)
        return self.load(read).requires_grad_(False)

    def make_forward(self, model: PreTrainedModel, gradient_checkpointing: bool = False) -> Forward:
        """See `LocalLearner.make_forward`. What is trained beside a model moves to the device of this rank."""
        for part in filter(None, (*self.by_name.values(), self.value_head)):
            part.to(self._ranks.device)
        return ShardedForward(model, self._ranks, gradient_checkpointing=gradient_checkpointing)

    def train(
        self, samples: Sequence[TrainingSample], options: UpdateOptions
    ) -> tuple[dict[str, float], list[str | None]]:
        """The metrics of an update, and the names of what it trained."""
        metrics = self.update(samples, options)
        return metrics, list(self.changed)

    def gather(self, names: Sequence[str | None]) -> Weights:
        """The weights that are trained under these names, whole, in the dtype that is sampled from, on rank 0."""
        found: Weights = {}
        for owner in (*map(owner_of, names), VALUE_HEAD):
            for name, parameter in self._modules[owner].named_parameters() if owner in self._modules else ():
                whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
                whole = whole.to(self.forward.dtype) if owner == MODEL else whole
                if self._ranks.rank == 0:
                    found.setdefault(owner, {})[name] = whole.detach().cpu()
        return found

    def save_state(self, directory: Path) -> dict[str, Any]:
        """Write the state of all ranks to `directory`, and return the steps of each owner. Raises PolicyError."""
        try:
            state_dict_saver.save(self._state(), checkpoint_id=directory, process_group=self._ranks.control)
        except READ_ERRORS as error:
            raise PolicyError(f"the ranks cannot save to {directory}: {error}; free space or choose another") from error
        return {owner_of(name): {"steps": updater.optimizer.steps} for name, updater in self.updaters.items()}

    def load_state(self, directory: Path) -> list[str | None]:
        """Continue from the state in `directory`, and return the names of what was loaded. Raises PolicyError for one
        that is damaged, or of another model or optimiser, before anything changes."""
        state = deepcopy(self._state())
        states: dict[str, dict[str, Any]] = state["updaters"]
        try:
            saved = FileSystemReader(directory).read_metadata().state_dict_metadata
            for name, updater in self.updaters.items():
                own = states[owner_of(name)]
                own.pop("average", None)
                if f"updaters.{owner_of(name)}.average.rate" in saved:
                    own["average"] = deepcopy(updater.new_average(0.0).state_dict())
            state_dict_loader.load(state, checkpoint_id=directory, process_group=self._ranks.control)
        except READ_ERRORS as error:
            raise PolicyError(
                f"{directory} holds no state of this model that can be read: {error}; continue with the model,"
                " policy.lora and optimizer it was saved with, or choose an earlier checkpoint; ranks on other machines"
                " need a directory that all of them share"
            ) from error
        with torch.no_grad():
            for owner, weights in self._trained().items():
                for name, weight in weights.items():
                    weight.copy_(state["weights"][owner][name])
        for name, updater in self.updaters.items():
            updater.load_state_dict(states[owner_of(name)])
        return list(self.updaters)

    def _trained(self) -> Weights:
        return {
            owner: {name: each.detach() for name, each in module.named_parameters() if each.requires_grad}
            for owner, module in self._modules.items()
        }

    def _state(self) -> dict[str, Any]:
        """With what the optimisers remember of every weight, also before the first step."""
        for updater in self.updaters.values():
            for optimizer in updater.optimizers:
                optimizer.begin()
        # Under names that are texts: torch gives back nothing but tensors of what stands under any other key.
        states = {owner_of(name): updater.state_dict() for name, updater in self.updaters.items()}
        return {"weights": self._trained(), "updaters": states}
