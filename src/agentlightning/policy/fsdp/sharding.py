"""A model whose weights the ranks divide (FSDP2, `fully_shard`), and passes through it that all ranks make together.

Each layer is gathered before it is computed and released afterwards, so that a rank holds its share of the weights
and one whole layer; embeddings, final norm and output layer are gathered for a whole pass. What the ranks exchange in a
pass must match: a rank that has fewer micro-batches than another makes idle passes, over two tokens, whose loss counts
0.
With weights in bfloat16, the shares are float32: they are the master copies, and only what is gathered is rounded.

Zhao et al. 2023, arXiv:2304.11277; FSDP2: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import DynamicCache, PreTrainedModel

from agentlightning.errors import ConfigError
from agentlightning.policy.update.forward import Forward, ModelTraits, States, cost_model, ones
from agentlightning.policy.update.optimizer import master_values
from agentlightning.policy.update.packing import MicroBatch, plan
from agentlightning.policy.update.value_head import ValueHead
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

    def any(self, value: bool) -> bool:
        """Whether it is so on one rank."""
        return any(self.gather(value))

    def most(self, counts: Sequence[int]) -> list[int]:
        """The largest count at each position."""
        return [max(each) for each in zip_longest(*self.gather(list(counts)), fillvalue=0)]

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """The sums by name, with the same bits on every rank."""
        total: dict[str, float] = {}
        for own in self.gather(dict(values)):
            for name, value in own.items():
                total[name] = total.get(name, 0.0) + value
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
        super().__init__(model, gradient_checkpointing=gradient_checkpointing, traits=traits)
        if ranks.rank == 0:  # Which has run the whole model.
            ranks.from_first(self.traits)
        self.ranks = ranks
        self._left: list[int] = []
        """Passes of the longest rank at each position that is still to come."""
        self._used = False
        """Whether there has been a pass, before which torch has no state to reset."""
        shard(model, ranks, self.dtype)
        self.cost = cost_model(model)

    @contextmanager
    def aligned(self, batches: Sequence[MicroBatch]) -> Generator[None]:
        """See `Forward.aligned`: idle passes where another rank has more."""
        self._left = self.ranks.most([_passes(batch) for batch in batches])
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

    def states(self, batch: MicroBatch) -> States:
        """See `Forward.states`, with the idle passes of this position."""
        idle = self._idle(self._left.pop(0) - _passes(batch)) if self._left else None
        states = super().states(batch)
        return states if idle is None else States(states.hidden + idle.to(states.hidden.dtype), states.logits)

    def _states(
        self, ids_BT: Tensor, positions: np.ndarray[Any, Any], cache: DynamicCache | None, **inputs: Tensor
    ) -> States:
        self._used = True
        return super()._states(ids_BT, positions, cache, **inputs)

    def score(
        self,
        trees: Sequence[TokenTree],
        what: AbstractSet[str] = frozenset({"logprobs", "entropy"}),
        *,
        value_head: ValueHead | None = None,
        token_budget: int = 8192,
    ) -> dict[str, list[tuple[FloatArray, ...]]]:
        """See `Forward.score`: the columns of all trees, on every rank."""
        samples = [TrainingSample(tree, weights=ones(tree)) for tree in trees]
        plans = [self.plan([each], token_budget=token_budget, trains_zero_advantage=True) for each in samples]
        prices = [sum(map(self.cost.price, plan)) for plan in plans]
        parts = divide([price or 1.0 for price in prices], self.ranks.count)
        own = parts[self.ranks.rank]
        found = super().score([trees[i] for i in own], what, value_head=value_head, token_budget=token_budget)
        columns: dict[str, list[Any]] = {name: [()] * len(trees) for name in what}
        for part, each in zip(parts, self.ranks.gather(found), strict=True):
            for name, values in each.items():
                for index, column in zip(part, values, strict=True):
                    columns[name][index] = column
        return columns

    def _idle(self, passes: int) -> Tensor:
        """Passes whose sum is 0; every weight has a gradient of 0."""
        total = torch.zeros((), device=self.model.device)
        batch = _idle_batch()
        for _ in range(passes):
            states = super().states(batch)
            logprobs_1, _ = self.logprobs(batch, states, at_temperature=False)
            total = total + logprobs_1.sum() * 0.0
        return total


def _passes(batch: MicroBatch) -> int:
    return 2 if batch.shared_length else 1


def _idle_batch() -> MicroBatch:
    """One target behind one token."""
    tree = TokenTree((Node(-1, (0,)), Node(0, (0,), sampled=True, logprobs=(0.0,))))
    (batch,) = plan([TrainingSample(tree, weights=ones(tree))], token_budget=1, sharing="rows")
    return batch


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
