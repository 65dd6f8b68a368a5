"""Muon whose orthogonalisation on a CPU computes in float32.

torch's own computes in bfloat16 everywhere, which a CPU without such instructions emulates: an update of a small model
takes four times as long there. State and settings are those of `torch.optim.Muon`, so checkpoints fit both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

Coefficients = tuple[float, float, float]


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` with the learning rate of each matrix scaled by sqrt(max(1, rows / columns)) (Jordan et al.
    2024, https://kellerjordan.github.io/posts/muon/)."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if any(parameter.is_cuda and not isinstance(parameter, DTensor) for parameter in parameters):
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, momentum = self.state[parameter], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer: Tensor = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - momentum)
        update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        update = _orthogonalized(update.float(), group)
        rows, columns = parameter.shape
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * math.sqrt(max(1.0, rows / columns)))


def _orthogonalized(update: Tensor, group: dict[str, Any]) -> Tensor:
    """Of a matrix that processes divide, each computes the whole and keeps its own part."""
    whole = update.full_tensor() if isinstance(update, DTensor) else update
    whole = orthogonalized(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])
    if not isinstance(update, DTensor):
        return whole
    everywhere = [Replicate()] * update.device_mesh.ndim
    return DTensor.from_local(whole, update.device_mesh, everywhere).redistribute(placements=update.placements)


def orthogonalized(matrix_MN: Tensor, coefficients: Coefficients, steps: int, eps: float) -> Tensor:
    """U V^T of the singular value decomposition U S V^T, approximately: singular values end near 1. By `steps` of the
    quintic Newton-Schulz iteration X <- a X + (b G + c G G) X with G = X X^T, on the smaller side of the matrix."""
    a, b, c = coefficients
    tall = matrix_MN.size(0) > matrix_MN.size(1)
    x = matrix_MN.T if tall else matrix_MN
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
