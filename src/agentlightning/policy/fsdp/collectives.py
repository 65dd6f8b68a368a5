"""What the ranks do together beside the passes through the model. Every rank calls the same method at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

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
        """Give a tensor on the CPU the values that it has on rank 0."""
        if self.count == 1:
            return
        values = tensor.detach().contiguous()
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
        found = self.gather(list(counts))
        return [max(each[i] for each in found if i < len(each)) for i in range(max(map(len, found)))]

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
        if not parameters:
            return
        has = torch.tensor([float(p.grad is not None) for p in parameters], device=self.device)
        dist.all_reduce(has)
        found = [p for p, count in zip(parameters, has.tolist(), strict=True) if count]
        if not found:
            return
        flat = torch.cat([_gradient(p).flatten() for p in found])
        dist.all_reduce(flat)
        for parameter, summed in zip(found, flat.split([p.numel() for p in found]), strict=True):
            parameter.grad = summed.view_as(parameter).clone()


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
