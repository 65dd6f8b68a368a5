"""The optimizers of an update, and the moving average of weights."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from agentlightning.errors import ConfigError
from agentlightning.policy.config import OptimizerConfig

# -- muon ------------------------------------------------------------------------------------------------------------

# Muon whose orthogonalisation computes in bfloat16 on GPUs alone.
#
# torch's own does so everywhere, and a CPU without such instructions emulates it: an update of a small model takes four
# times as long there. State and settings are those of `torch.optim.Muon`, so checkpoints fit both.

Coefficients = tuple[float, float, float]


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` with the learning rate of each matrix scaled by sqrt(max(1, rows / columns)) (Jordan et al.
    2024, https://kellerjordan.github.io/posts/muon/)."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, momentum = self.state[parameter], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer: Tensor = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - momentum)
        update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        update = _orthogonalized(update.bfloat16() if update.is_cuda else update.float(), group)
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


# -- weight average --------------------------------------------------------------------------------------------------

# A moving average of the weights of a policy, which changes more slowly than the policy itself.
#
#     average <- (1 - rate) average + rate * weights             after each optimiser step
#
# A teacher for self-distillation (SDPO, arXiv:2601.20802, section 3). It costs one copy of the trained weights.


class WeightAverage:
    """The average of `masters`, the weights that an optimiser updates; `parameters` are those that the model uses."""

    def __init__(self, parameters: Sequence[nn.Parameter], masters: Sequence[nn.Parameter], rate: float) -> None:
        self.rate = rate
        self._parameters = parameters
        self._masters = masters
        self.weights: list[Tensor] = [master.detach().clone() for master in masters]

    @torch.no_grad()
    def update(self) -> None:
        """After an optimiser step."""
        for average, master in zip(self.weights, self._masters, strict=True):
            average.lerp_(master.detach(), self.rate)

    def state_dict(self) -> dict[str, Any]:
        return {"rate": self.rate, "weights": self.weights}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rate = float(state["rate"])
        for own, saved in zip(self.weights, state["weights"], strict=True):
            own.copy_(saved)

    @contextmanager
    def in_use(self) -> Generator[None]:
        """Forward passes within use the average."""
        own = [parameter.detach().clone() for parameter in self._parameters]
        self._set(self.weights)
        try:
            yield
        finally:
            self._set(own)

    @torch.no_grad()
    def _set(self, weights: Sequence[Tensor]) -> None:
        """In place: a parameter that processes divide is read from the memory that it has."""
        for parameter, values in zip(self._parameters, weights, strict=True):
            parameter.copy_(values)


# -- optimizer -------------------------------------------------------------------------------------------------------

# The optimiser of a policy: AdamW, or Muon on hidden matrices with AdamW on the rest, and a learning-rate schedule.
#
# `OptimizerConfig` has its settings. A state dict restores an `Optimizer` exactly. Weights of less precision than
# float32 have float32 master copies: gradients accumulate there, the optimiser updates them, and the model gets the
# rounded result. Without them, a step smaller than half a unit in the last place of a bfloat16 weight (0.4% of it) is
# lost. A copy begins anywhere within what is rounded to its weight: a step of a tenth of a unit then changes a tenth of
# the weights at once. Were it to begin at the weight itself, the first steps would change none (dithered quantisation:
# Gray & Stockham 1993, https://doi.org/10.1109/18.256489).


class Optimizer:
    """The optimiser of one model's trainable weights."""

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        """Raises ConfigError if no weight can be trained, or a schedule has no end."""
        if config.schedule != "constant" and config.total_steps is None:
            raise ConfigError(f'schedule="{config.schedule}" needs total_steps; set it or use schedule="constant"')
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            raise ConfigError("the model has no weight that requires a gradient; unfreeze it or add an adapter")
        weights = sum(p.numel() for p in model.parameters())
        self.config = config.completed(weights=weights, objective="reinforcement")
        self.masters = [
            p if torch.finfo(p.dtype).bits >= 32 else nn.Parameter(master_values(p.detach())) for p in self.parameters
        ]
        """What the optimiser updates: float32 copies of weights of less precision, and the other weights themselves."""
        self.steps = 0
        """Optimiser steps taken or skipped so far: the position in the schedule."""
        self.lr_factor = 1.0
        """Multiplies all learning rates."""
        self._copied = [(p, m) for p, m in zip(self.parameters, self.masters, strict=True) if p is not m]
        for parameter, master in self._copied:
            parameter.register_post_accumulate_grad_hook(partial(_accumulate, master))
        self._optimizers = _build(model, self.config, dict(zip(map(id, self.parameters), self.masters, strict=True)))
        self._base_lrs = [[group["lr"] for group in each.param_groups] for each in self._optimizers]

    def grad_norm(self) -> Tensor:
        """The norm of all gradients."""
        norm = nn.utils.get_total_norm([m.grad for m in self.masters if m.grad is not None])
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step(self, loss: float = 0.0, norm: Tensor | None = None) -> dict[str, float]:
        """Clip the gradients, whose `norm` may be given, update the weights, clear the gradients.

        If a gradient or the `loss` is not finite, no weight and no moment changes and the step counts as skipped.
        Returns lr, grad_norm (before clipping), optimizer_steps (1 or 0) and skipped_steps.
        """
        norm = self.grad_norm() if norm is None else norm
        finite = bool(torch.isfinite(norm)) and math.isfinite(loss)
        if finite:
            if self.config.clip_norm is not None:
                nn.utils.clip_grads_with_norm_(self.masters, self.config.clip_norm, norm)
            factor = self.config.factor(self.steps) * self.lr_factor
            for optimizer, rates in zip(self._optimizers, self._base_lrs, strict=True):
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * factor
                optimizer.step()
            with torch.no_grad():
                for parameter, master in self._copied:
                    parameter.copy_(master)
        metrics = {"lr": self.lr, "grad_norm": float(norm), "optimizer_steps": float(finite)}
        self.zero_grad()
        self.steps += 1
        return {**metrics, "skipped_steps": float(not finite)}

    @property
    def lr(self) -> float:
        """The learning rate of AdamW at this point of the schedule."""
        assert self.config.lr is not None  # Set by `completed`.
        return self.config.lr * self.config.factor(self.steps) * self.lr_factor

    def zero_grad(self) -> None:
        for parameter in (*self.parameters, *self.masters):
            parameter.grad = None

    def begin(self) -> None:
        """Remember of each weight what a first step begins with, so that a state has the same parts at any time."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    state, zeros = optimizer.state[weight], torch.zeros_like(weight.detach())
                    if isinstance(optimizer, Muon):
                        state.setdefault("momentum_buffer", zeros)
                    elif not state:
                        step = torch.zeros((), device=weight.device if group["fused"] else "cpu")
                        state.update(step=step, exp_avg=zeros, exp_avg_sq=zeros.clone())

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "optimizers": [each.state_dict() for each in self._optimizers],
            "masters": [master.detach() for _, master in self._copied],
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError for the state of an optimiser of another configuration or model."""
        own, saved = (
            [[len(group["params"]) for group in groups] for groups in found]
            for found in ([o.param_groups for o in self._optimizers], [s["param_groups"] for s in state["optimizers"]])
        )
        if own != saved:
            raise ConfigError(
                f"saved state holds {len(saved)} optimisers over groups of {saved} weights, and this one"
                f' (type="{self.config.type}") has {own}; continue with the model and the type it was saved with'
            )
        if (masters := state.get("masters")) and [m.shape for m in masters] != [m.shape for _, m in self._copied]:
            raise ConfigError("saved state holds the master weights of another model or dtype; continue with its own")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of an optimiser of the same configuration and model, whose weights the model has
        already. Raises as `check_state_dict` does, before anything changes."""
        self.check_state_dict(state)
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.steps = int(state["steps"])
        masters = state.get("masters") or [parameter.detach() for parameter, _ in self._copied]
        with torch.no_grad():
            for (_, master), saved in zip(self._copied, masters, strict=True):
                master.copy_(saved)


def master_values(weight: Tensor) -> Tensor:
    """Float32 numbers that are rounded to a weight; the same ones each time."""
    values = weight.float()
    if weight.dtype == torch.bfloat16:  # The upper half of a float32.
        generator = torch.Generator(weight.device).manual_seed(0)
        lower = torch.randint(
            -0x7FFF, 0x8000, weight.shape, dtype=torch.int32, device=weight.device, generator=generator
        )
        values.view(torch.int32).add_(lower.masked_fill_((weight == 0) | ~weight.isfinite(), 0))
    return values


def _accumulate(master: nn.Parameter, parameter: Tensor) -> None:
    """Move the gradient of `parameter` to that of its master copy, after each backward pass."""
    assert parameter.grad is not None
    gradient = parameter.grad.to(master.dtype)
    parameter.grad = None
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)


def _build(
    model: nn.Module, config: OptimizerConfig, masters: Mapping[int, nn.Parameter]
) -> list[torch.optim.Optimizer]:
    """`masters`: by id of the model's trainable weights, the parameters to optimise in their place."""
    outer = _outer_weights(model)
    by_muon: list[nn.Parameter] = []
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for each, master in masters.items():
        if config.type == "muon" and master.ndim == 2 and each not in outer:
            by_muon.append(master)
        else:
            (decayed if master.ndim >= 2 else others).append(master)
    optimizers: list[torch.optim.Optimizer] = []
    if by_muon:
        optimizers.append(Muon(by_muon, lr=config.muon_lr, weight_decay=config.weight_decay))
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    if decayed or others:
        assert config.lr is not None  # Set by `completed`.
        adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            # One pass over the memory of the weights: on a CPU a sixth of the time of the default. Not tried on what
            # processes divide.
            fused=not any(isinstance(p, DTensor) for p in (*decayed, *others)),
        )
        optimizers.append(adamw)
    return optimizers


def _outer_weights(model: nn.Module) -> set[int]:
    """The ids of the weights of embeddings and of the output head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    outer = (module for module in model.modules() if module is head or isinstance(module, nn.Embedding))
    return {id(p) for module in outer for p in module.parameters()}
