"""A policy that several processes train and this one samples from: `policy.kind = "fsdp"`.

This process is one of them, rank 0. It has the whole weights in the dtype that is sampled from, and the ranks
divide the master copies, gradients and moments. After an update rank 0 gathers the weights that have changed, and they
take the place of the old ones between two tokens, as those of a local policy do. Sampling goes on during training.

A rank trains its share of the model (FSDP2, `fully_shard`). Each layer is gathered before it is computed and released
afterwards, so that a rank holds its share of the weights and one whole layer; embeddings, final norm and output layer
are gathered for a whole pass. What the ranks exchange in a pass must match: a rank that has fewer micro-batches than
another makes idle passes, over two tokens, whose loss counts 0.
With weights in bfloat16, the shares are float32: they are the master copies, and only what is gathered is rounded.

Zhao et al. 2023, arXiv:2304.11277; FSDP2: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import json
import logging
import math
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NoReturn, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentlightning.errors import AgentLightningError, ConfigError, PolicyError, RankError
from agentlightning.models import checkpoint
from agentlightning.models.resolve import resolve_model
from agentlightning.policy.base import (
    UPDATE,
    Capabilities,
    Columns,
    Metrics,
    ScoreColumn,
    SeparatePolicy,
    Sharing,
    UpdateOptions,
)
from agentlightning.policy.config import LocalPolicyConfig, ModelSettings
from agentlightning.policy.local import RANK_STATE as STATE
from agentlightning.policy.local import LocalPolicy
from agentlightning.policy.model_loading import find_device, load_model, with_adapters_of
from agentlightning.policy.update.forward import Forward, ModelTraits, cost_model
from agentlightning.policy.update.optimizer import master_values
from agentlightning.policy.update.packing import MicroBatch, TokenTable, plan, token_table
from agentlightning.policy.update.updater import LocalLearner, Sums, Updater, add_sums
from agentlightning.trajectory import FloatArray, Node, TokenTree, TrainingSample

logger = logging.getLogger(__name__)

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

    train = LocalLearner.update
    """Under the name that an error gives the command."""

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
        read = partial(checkpoint.read_scorer, directory, self.model, self.tokenizer, self.forward.dtype, weights=first)
        return self.load(read).requires_grad_(False)

    def make_forward(self, model: PreTrainedModel, gradient_checkpointing: bool = False) -> Forward:
        """See `LocalLearner.make_forward`. What is trained beside a model moves to the device of this rank."""
        for part in filter(None, (*self.by_name.values(), self.value_head)):
            part.to(self._ranks.device)
        return ShardedForward(model, self._ranks, gradient_checkpointing=gradient_checkpointing)

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


# -- policy ----------------------------------------------------------------------------------------------------------


class FsdpPolicy(SeparatePolicy, LocalPolicy):
    """Make it with `FsdpPolicy.open`."""

    group: RankGroup

    def __init__(self, config: LocalPolicyConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, model, tokenizer, make_updater=None)
        self._unpublished: list[str | None] = []
        """The names of what has been trained since the weights were published."""
        self._turn = asyncio.Lock()
        """Held while the ranks compute: some of that needs the worker thread, which in `save` waits for them."""

    @classmethod
    def open(cls, config: LocalPolicyConfig) -> FsdpPolicy:
        """Load the model, then start the ranks or wait for them. Raises as `LocalPolicy.open` and `RankGroup.open`."""
        policy = cast(FsdpPolicy, super().open(config))
        try:
            policy.group = RankGroup.open(config, lambda read: asyncio.run(policy._engine.run(read)))
        except BaseException:
            asyncio.run(LocalPolicy.close(policy))
            raise
        return policy

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, separate=True)

    # -- learning --------------------------------------------------------------------------------------------------

    async def train_apart(self, samples: Sequence[TrainingSample], options: UpdateOptions = UPDATE) -> Metrics:
        """See `SeparatePolicy.train_apart`. Raises RankError for a rank that ends or fails: the policy is of no
        more use then."""
        metrics = await self._call("train", list(samples), options)
        assert self.group.rank.learner is not None
        self._unpublished = list(dict.fromkeys([*self._unpublished, *self.group.rank.learner.changed]))
        return metrics

    async def check_idle(self, in_flight: bool) -> None:
        """See `SeparatePolicy.check_idle`."""
        await self._engine.run(lambda: self._generator.check_idle(in_flight))

    async def publish_update(self, *, in_flight: bool = False) -> Metrics:
        """See `SeparatePolicy.publish_update`. Returns publish_bytes, of what has changed, and publish_seconds."""
        started, names = time.monotonic(), self._unpublished
        weights = await self._call("gather", names)
        await self._engine.run(lambda: self._publish(weights, names, in_flight))
        self._unpublished = []
        size = sum(each.nbytes for own in weights.values() for each in own.values())
        return {"publish_bytes": float(size), "publish_seconds": time.monotonic() - started}

    async def score(
        self,
        trees: Sequence[TokenTree],
        what: AbstractSet[ScoreColumn],
        *,
        reference: Path | None = None,
        adapter: str | None = None,
    ) -> Columns:
        """See `LocalPolicy.score`. Computed by the ranks, which read `reference` themselves."""
        return await self._call("score", list(trees), frozenset(what), reference and _absolute(reference), adapter)

    async def load(self, directory: Path, *, in_flight: bool = False, above: int = 0) -> None:
        """See `Policy.load`; saved by any number of ranks. Raises as `LocalPolicy.load`, and RankError."""
        path = _absolute(Path(directory))
        await self.check_idle(in_flight)
        state = await asyncio.to_thread(_state_in, path)
        names = await self._call("load_state", path / FOLDER)
        weights = await self._call("gather", names)
        await self._engine.run(lambda: self._resume(state, in_flight, above, lambda: self._copy(weights)))
        self._unpublished = []

    async def save(self, directory: Path, *, training_state: bool = False) -> None:
        async with self._turn:
            await super().save(directory, training_state=training_state)

    async def close(self) -> None:
        await asyncio.to_thread(self.group.close)
        await super().close()

    async def _call(self, name: str, *arguments: Any) -> Any:
        async with self._turn:
            return await asyncio.to_thread(self.group.call, name, *arguments)

    # -- in the worker thread --------------------------------------------------------------------------------------

    def _publish(self, weights: Weights, names: Sequence[str | None], in_flight: bool) -> None:
        self._prepare_weight_change(in_flight, names)
        self._copy(weights)
        self._set_version(self._version + 1, names)

    def _copy(self, weights: Weights) -> None:
        """Sample from new weights."""
        modules = modules_by_owner(self._learner)
        for owner, own in weights.items():
            modules[owner].load_state_dict(own, strict=False)

    def _save(self, directory: Path, training_state: bool) -> None:
        if self._unpublished:
            raise PolicyError("an update has been trained and not published; call publish_update before save")
        if not training_state:
            self._learner.save(directory, None)
            return
        state = self._own_state()

        def save_ranks(beside: Path) -> None:
            state[STATE] = self.group.call("save_state", beside / FOLDER)
            check_complete(beside / FOLDER)

        self._learner.save(directory.absolute(), state, save_ranks)


def _state_in(directory: Path) -> dict[str, Any]:
    """The training state in a checkpoint. Raises PolicyError for that of a local policy."""
    state = checkpoint.load_state(directory)
    if STATE not in state:
        raise PolicyError(
            f'{directory} was saved by policy.kind = "local"; continue with that, or start a new run from its weights'
            " with policy.model"
        )
    return state


def _absolute(path: Path) -> Path:
    """What ranks with another working directory can read."""
    return path.absolute()


# -- ranks -------------------------------------------------------------------------------------------------------------

# The processes that train together, called ranks. The trainer's process is rank 0, and the others follow it.
#
#     torchrun --nproc-per-node 4 -m -- agentlightning train ... policy.kind=fsdp policy.processes=4
#
# runs the same command as every rank, on one machine or several. Where torchrun has not started the trainer, it starts
# the others itself, on its own machine.
#
# Rank 0 sends each command, (method of `RankLearner`, arguments), to all ranks, which compute it together and tell one
# another how it went. It computes in a thread of its own: a collective that waits for a rank that is gone need not end.
# When a rank ends or fails alone, the group is over and the error names it. Commands are pickled: ranks trust one
# another.

STDERR = 2
IDLE = timedelta(days=365)
"""How long a rank waits for a command."""
POLL_SECONDS = 0.2
CLOSE_SECONDS = 5.0
"""How long a computation may take to end after a rank has."""
GRACE_SECONDS = 10.0
"""After a rank has failed: time for the others to fail alike."""
RESUME = "the run continues from its last checkpoint when it is resumed"
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
"""Variables that programs with torch which this one starts, such as model servers, must not inherit."""
OPEN = "open"
SETTINGS = "settings"
"""A file for ranks that the trainer has started."""

# -- rank ------------------------------------------------------------------------------------------------------------


class Rank:
    """This process among those that train. Each of them calls the same method at the same time."""

    learner: RankLearner | None = None

    def __init__(self, settings: ModelSettings, url: str, number: int, count: int) -> None:
        """Wait for the others. Raises ConfigError for a device that this machine has not."""
        device = _device(settings.device, int(os.environ.get("LOCAL_RANK", number)))
        backend = "gloo"
        if device.type != "cpu":
            backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
        wait = timedelta(seconds=settings.rank_timeout_seconds)
        store, *_ = next(rendezvous(url, number, count, timeout=wait))
        store.set(f"rank/{number}", "")
        store.wait([f"rank/{each}" for each in range(count)], wait)  # Before torch begins what it cannot take back.
        hook = sys.excepthook
        dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=wait)
        sys.excepthook = hook  # That of torch puts the rank before each line of what the trainer says.
        mesh = init_device_mesh(device.type, (count,))
        groups: Any = [dist.new_group(backend="gloo", timeout=timeout) for timeout in (wait, IDLE)]
        self.ranks, self.commands = (Ranks(mesh, group, device) for group in groups)
        self.names = self.ranks.gather(_name(number, count, os.getpid()))

    def run(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """What a command gives here. Raises what all ranks raised alike, RankError where not all did, and foreign
        exceptions at once."""
        value = failure = None
        changed: list[str | None] = []
        try:
            if name == OPEN:
                (config,) = arguments
                torch.set_num_threads(config.threads)
                self.learner = None  # Frees its memory.
                self.learner = RankLearner(config, self.ranks)
            else:
                assert self.learner is not None
                changed = self.learner.changed
                changed.clear()
                value = getattr(self.learner, name)(*arguments)
        except AgentLightningError as error:
            failure = error
        alone = threading.Timer(GRACE_SECONDS, _end_process, (failure,))
        if failure is not None and self.ranks.rank:
            alone.start()
        said = self.commands.gather(failure and f"{type(failure).__name__}: {failure}")
        alone.cancel()
        if failure is not None and len(set(said)) == 1 and not changed:
            raise failure
        for rank, words in zip(self.names, said, strict=True):
            if words:
                raise RankError(f"{rank} failed during {name!r}: {words}")
        return value


def _name(number: int, count: int, pid: int) -> str:
    return f"rank {number} of {count} (process {pid} on {socket.gethostname()})"


def _device(name: str, local_rank: int) -> torch.device:
    found = find_device(name)
    if found.type == "cpu":
        return found
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"rank {local_rank} of this machine has no device: {socket.gethostname()} has {count} of type {found.type};"
            " start at most one rank for each"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(found.type, local_rank)


def store_url(directory: str) -> str:
    """Where ranks that the trainer has started find one another."""
    return f"file://{directory}/store"


def follow(settings: ModelSettings, url: str = "env://") -> NoReturn:
    """Compute what rank 0 commands until it ends, and then end this process."""
    logging.getLogger("agentlightning").setLevel(logging.ERROR)  # Rank 0 says the rest.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        rank = Rank(settings, url, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # Rank 0 decides what is still computed.
        while (command := rank.commands.from_first(None)) is not None:
            with suppress(AgentLightningError):  # Rank 0 raises it.
                rank.run(*command)
    except Exception as error:  # noqa: BLE001
        _end_process(error)
    _end_process()


def _end_process(error: Exception | None = None) -> NoReturn:
    """At once, since threads of the process group may wait for ranks that have ended. Whoever has started this process
    reads the error."""
    if error is not None:
        get_error_handler().record_exception(error)
        logger.error("%s: %s", type(error).__name__, error)
    sys.stdout.flush()
    os._exit(error is not None)


# -- group -----------------------------------------------------------------------------------------------------------


class RankGroup:
    """The ranks as the trainer sees them. Make it with `RankGroup.open`. Calls block, from any thread."""

    rank: Rank
    _of_torchrun: ClassVar[RankGroup | None] = None
    """Trains one policy of this process after another."""

    def __init__(self, config: LocalPolicyConfig) -> None:
        """Start the other ranks, unless torchrun has, and wait for them. Raises ConfigError where torchrun has started
        another number, and RankError for one that ends or does not come."""
        started, count, url = os.environ.get("WORLD_SIZE"), config.processes, "env://"
        if started not in (None, str(count)):
            raise ConfigError(
                f"policy.processes={count}, and torchrun has started WORLD_SIZE={started}; make them equal"
            )
        self._over: str | None = None
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._directory = TemporaryDirectory(prefix="agl-ranks-", ignore_cleanup_errors=True)
        self._works: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._compute, name="rank", daemon=True)
        if started is None:
            url = store_url(self._directory.name)
            Path(self._directory.name, SETTINGS).write_bytes(pickle.dumps(config))
            self._processes += [_start(self._directory.name, number, config) for number in range(1, count)]
        self._thread.start()
        try:
            self.rank = self._do("join", lambda: Rank(config, url, 0, count))
        except BaseException as error:
            self._end(str(error))
            raise
        if started is not None:
            RankGroup._of_torchrun = self
            atexit.register(self._end, "the process ends")
            for name in TORCHRUN:
                os.environ.pop(name, None)

    @classmethod
    def open(cls, config: LocalPolicyConfig, load: Load) -> RankGroup:
        """Ranks that have loaded the model. `load`: see `RankLearner`. Raises as `RankGroup` and `call` do."""
        group = cls._of_torchrun
        if dist.is_initialized() and (group is None or group.rank.learner is not None):
            raise ConfigError(
                'this process trains a policy of kind = "fsdp" already, or has a process group of its own; close it'
                " first"
            )
        group = group or cls(config)
        try:
            group.call(OPEN, config)
            assert group.rank.learner is not None
            group.rank.learner.load = load
        except BaseException:
            group.close()
            raise
        return group

    def call(self, name: str, *arguments: Any) -> Any:
        """What rank 0 has computed. Raises what all ranks raised alike, and RankError for one that ended or failed
        alone; the group is then over."""
        return self._do(name, lambda: self.rank.run(*self.rank.commands.from_first((name, arguments))))

    def close(self) -> None:
        """End the ranks. Those of torchrun wait for another policy, and end with this process. Idempotent."""
        self.rank.learner = None
        if self is not RankGroup._of_torchrun or self._lock.locked():
            self._end("the policy is closed; open it again")

    def _compute(self) -> None:
        """The thread."""
        while (work := self._works.get()) is not None:
            compute, answer = work
            try:
                answer.set_result(compute())
            except AgentLightningError as error:
                answer.set_exception(error)
            except Exception as error:  # noqa: BLE001
                answer.set_exception(RankError(f"rank 0 failed: {type(error).__name__}: {error}"))
        if dist.is_initialized():
            with suppress(RuntimeError, AttributeError):  # Of a rank that is gone, or never came.
                self.rank.commands.from_first(None)
            dist.destroy_process_group()

    def _do(self, name: str, work: Callable[[], Any]) -> Any:
        """What `work` gives while the other ranks do the same. Raises as `call`."""
        with self._lock:
            answer: Future[Any] = Future()
            self._works.put((work, answer))
            until = float("inf")
            while time.monotonic() < until:
                if self._over is not None:  # Before, or by `close` meanwhile.
                    raise RankError(self._over)
                if ended := self._ended():
                    raise self._end(f"{ended} during {name!r}; {RESUME}")
                if not wait([answer], POLL_SECONDS).done:
                    continue
                if not isinstance(answer.exception(), RankError):
                    return answer.result()
                until = min(until, time.monotonic() + CLOSE_SECONDS)  # Whether another one turns out to have ended.
                time.sleep(POLL_SECONDS)
            raise self._end(f"{answer.exception()}; {RESUME}")

    def _ended(self) -> str:
        """Which rank that this process has started has ended, and how; empty while all run. Of several the one that
        was killed, or whose error came first: the others lost their connection to it."""
        ended: list[tuple[bool, float, str]] = []
        for number, process in enumerate(self._processes, 1):
            status = process.poll()
            if status is not None:
                how = f"ended with status {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"
                file, when, said = Path(self._directory.name, str(number)), math.inf, ""
                if file.exists():
                    when, said = file.stat().st_mtime, f" ({json.loads(file.read_bytes())['message']['message']})"
                ended.append((status >= 0, when, f"{_name(number, len(self._processes) + 1, process.pid)} {how}{said}"))
        return min(ended)[2] if ended else ""

    def _end(self, reason: str) -> RankError:
        """Let no rank go on alone."""
        self._over = self._over or reason
        for process in self._processes:
            with process:  # Closes its input, and waits.
                process.kill()
        self._directory.cleanup()  # Whoever waits for a rank in there ends.
        self._works.put(None)
        self._thread.join(CLOSE_SECONDS)
        return RankError(reason)


def _start(directory: str, number: int, config: LocalPolicyConfig) -> subprocess.Popen[bytes]:
    """A rank on this machine (`__main__`). In a session of its own, so that Ctrl-C reaches the trainer alone."""
    variables = {
        "OMP_NUM_THREADS": str(config.threads),
        **os.environ,
        "RANK": str(number),
        "WORLD_SIZE": str(config.processes),
        "TORCHELASTIC_ERROR_FILE": f"{directory}/{number}",
    }
    command = [sys.executable, "-m", "agentlightning.policy.fsdp", directory]
    return subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=STDERR, start_new_session=True)
