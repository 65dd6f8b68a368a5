"""The optimiser of a policy: AdamW, or Muon on hidden matrices with AdamW on the rest, and a learning-rate schedule.

`OptimizerConfig` is what users write; `Optimizer` is what `policy.update` steps. Its state dict restores it exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from agentlightning.errors import ConfigError


class OptimizerConfig(BaseModel):
    """How weights follow gradients."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    type: Literal["adamw", "muon"] = "adamw"
    """adamw; or muon: hidden matrices by Muon, everything else by AdamW."""
    lr: float = Field(default=1e-5, gt=0)
    """The learning rate of AdamW: of all weights, or with `muon` of embeddings, head, norms and biases."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's two moments."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled; on matrices only."""
    muon_lr: float = Field(default=0.02, gt=0)
    """The learning rate of Muon, scaled for each matrix by sqrt(max(1, rows / columns)) (Jordan et al. 2024)."""
    clip_norm: float | None = Field(default=1.0, gt=0)
    """The largest norm of the whole gradient; None leaves it as it is."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """How the learning rate falls, to 0 at `total_steps`."""
    total_steps: int | None = Field(default=None, ge=1)
    """Optimiser steps of the whole run; needed unless the schedule is constant. A trainer fills it in."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises to its full value."""

    @model_validator(mode="after")
    def _check_schedule(self) -> OptimizerConfig:
        if self.total_steps is not None and self.warmup_steps >= self.total_steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} must be below total_steps={self.total_steps}")
        return self

    def factor(self, step: int) -> float:
        """What the learning rates are multiplied by at optimiser step `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.schedule == "constant" or self.total_steps is None:
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return 1.0 - done if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


class Optimizer:
    """The optimiser of one model's trainable weights."""

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        """Raises ConfigError where nothing can be trained, or a schedule has no end."""
        if config.schedule != "constant" and config.total_steps is None:
            raise ConfigError(f'schedule="{config.schedule}" needs total_steps; set it or use schedule="constant"')
        self.config = config
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            raise ConfigError("the model has no weight that requires a gradient; unfreeze it or add an adapter")
        self.steps = 0
        """Optimiser steps taken or skipped so far: the position in the schedule."""
        self._optimizers = _build(model, config)
        self._base_lrs = [[group["lr"] for group in each.param_groups] for each in self._optimizers]

    def step(self, loss: float = 0.0) -> dict[str, float]:
        """Clip the gradients, update the weights, clear the gradients.

        A gradient or a `loss` that is not finite changes no weight and no moment; it counts as a skipped step. Returns
        lr, grad_norm (before clipping), optimizer_steps (1 or 0) and skipped_steps.
        """
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        finite = bool(torch.isfinite(norm)) and math.isfinite(loss)
        if finite:
            self._clip(norm)
            self._set_rates()
            for optimizer in self._optimizers:
                optimizer.step()
        metrics = {"lr": self.lr, "grad_norm": float(norm), "optimizer_steps": float(finite)}
        self.zero_grad()
        self.steps += 1
        return {**metrics, "skipped_steps": float(not finite)}

    @property
    def lr(self) -> float:
        """The learning rate of AdamW at this point of the schedule."""
        return self.config.lr * self.config.factor(self.steps)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "optimizers": [each.state_dict() for each in self._optimizers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another optimiser of the same configuration and model stood. Raises ConfigError."""
        states = state["optimizers"]
        if len(states) != len(self._optimizers):
            raise ConfigError(
                f'saved state holds {len(states)} optimisers, type="{self.config.type}" has {len(self._optimizers)}; '
                "continue with the type it was saved with"
            )
        for optimizer, saved in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict(saved)
        self.steps = int(state["steps"])

    def _clip(self, norm: Tensor) -> None:
        if self.config.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(self.parameters, self.config.clip_norm, norm)

    def _set_rates(self) -> None:
        factor = self.config.factor(self.steps)
        for optimizer, rates in zip(self._optimizers, self._base_lrs, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor


def _build(model: nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    hidden = {id(p) for p in _hidden_matrices(model)} if config.type == "muon" else set[int]()
    rest = [p for p in trainable if id(p) not in hidden]
    optimizers: list[torch.optim.Optimizer] = []
    if hidden:
        matrices = [p for p in trainable if id(p) in hidden]
        muon = torch.optim.Muon(matrices, lr=config.muon_lr, weight_decay=config.weight_decay, adjust_lr_fn="original")
        optimizers.append(muon)
    if rest:
        optimizers.append(_adamw(rest, config))
    return optimizers


def _adamw(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
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
    """Trainable 2-D weights that are neither an embedding nor the output head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    outer = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if isinstance(head, nn.Module):
        outer.append(cast("nn.Embedding", head))
    excluded = {id(p) for module in outer for p in module.parameters()}
    return [p for p in model.parameters() if p.requires_grad and p.ndim == 2 and id(p) not in excluded]
