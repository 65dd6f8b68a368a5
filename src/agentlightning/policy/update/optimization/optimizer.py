"""The optimiser of a policy: AdamW, or Muon on hidden matrices with AdamW on the rest, and a learning-rate schedule.

`OptimizerConfig` has its settings. A state dict restores an `Optimizer` exactly. Weights of less precision than float32
have float32 master copies: gradients accumulate there, the optimiser updates them, and the model gets the rounded
result. Without them, a step smaller than half a unit in the last place of a bfloat16 weight (0.4% of it) is lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agentlightning.errors import ConfigError
from agentlightning.policy.optimizer_config import OptimizerConfig
from agentlightning.policy.update.optimization.muon import Muon


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
        self.masters = [_master(p) for p in self.parameters]
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
            self._clip(norm)
            self._set_rates()
            for optimizer in self._optimizers:
                optimizer.step()
            self._round()
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

    def moments(self) -> dict[Tensor, dict[str, Tensor]]:
        """What is remembered of each of `masters`, by its name in torch; empty before the first step."""
        return {parameter: dict(state) for each in self._optimizers for parameter, state in each.state.items()}

    def set_moments(self, moments: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Continue from what another optimiser of the same type remembered."""
        for optimizer in self._optimizers:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            optimizer.state.clear()
            optimizer.state.update({p: dict(moments[p]) for p in parameters if p in moments})

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "optimizers": [each.state_dict() for each in self._optimizers],
            "masters": [master.detach() for _, master in self._copied],
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError for the state of an optimiser of another configuration or model."""
        states, masters = state["optimizers"], state.get("masters", ())
        if len(states) != len(self._optimizers):
            raise ConfigError(
                f'saved state holds {len(states)} optimisers, type="{self.config.type}" has {len(self._optimizers)}; '
                "continue with the type it was saved with"
            )
        for optimizer, saved in zip(self._optimizers, states, strict=True):
            own, kept = ([len(g["params"]) for g in each] for each in (optimizer.param_groups, saved["param_groups"]))
            if own != kept:
                raise ConfigError(
                    f"saved state is for groups of {kept} weights, this model has {own}; continue with the model it "
                    "was saved from"
                )
        if masters and [m.shape for m in masters] != [m.shape for _, m in self._copied]:
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

    @torch.no_grad()
    def _round(self) -> None:
        for parameter, master in self._copied:
            parameter.copy_(master)

    def _clip(self, norm: Tensor) -> None:
        if self.config.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(self.masters, self.config.clip_norm, norm)

    def _set_rates(self) -> None:
        factor = self.config.factor(self.steps) * self.lr_factor
        for optimizer, rates in zip(self._optimizers, self._base_lrs, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor


def _master(parameter: nn.Parameter) -> nn.Parameter:
    precise = torch.finfo(parameter.dtype).bits >= 32
    return parameter if precise else nn.Parameter(parameter.detach().float())


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
    hidden = {id(p) for p in _hidden_matrices(model)} if config.type == "muon" else set[int]()
    rest = [master for each, master in masters.items() if each not in hidden]
    optimizers: list[torch.optim.Optimizer] = []
    if hidden:
        matrices = [master for each, master in masters.items() if each in hidden]
        optimizers.append(Muon(matrices, lr=config.muon_lr, weight_decay=config.weight_decay))
    if rest:
        optimizers.append(_adamw(rest, config))
    return optimizers


def _adamw(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    assert config.lr is not None  # Set by `completed`.
    decayed = [p for p in parameters if p.ndim >= 2]
    others = [p for p in parameters if p.ndim < 2]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        weight_decay=config.weight_decay,
        foreach=True,
    )


def _hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Trainable matrices other than embeddings and the output head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    outer = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if isinstance(head, nn.Module):
        outer.append(cast("nn.Embedding", head))
    excluded = {id(p) for module in outer for p in module.parameters()}
    return [p for p in model.parameters() if p.requires_grad and p.ndim == 2 and id(p) not in excluded]
