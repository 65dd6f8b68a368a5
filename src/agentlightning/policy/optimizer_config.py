"""The settings of a policy's optimiser. Imports no torch, so that configuration can be read without it."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

LARGE_MODEL = 1.5e9
"""The number of weights beyond which the default learning rate no longer falls."""
LARGE_MODEL_LR = 1e-6
"""The default learning rate of reinforcement learning for such models."""
LR_EXPONENT = 0.7
"""How the default grows for smaller models: 1e-6 at 1.5e9 weights, 2.2e-6 at 0.5e9, 3e-4 at the demo's 0.4e6."""
SUPERVISED_FACTOR = 10.0
"""The default of supervised learning, as a multiple of that of reinforcement learning."""

Objective = Literal["reinforcement", "supervised"]


class OptimizerConfig(BaseModel):
    """How gradients update weights.

    >>> agl.OptimizerConfig(lr=1e-5, schedule="cosine", total_steps=100).clip_norm
    1.0
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    type: Literal["adamw", "muon"] = "adamw"
    """adamw; or muon: hidden matrices by Muon, everything else by AdamW."""
    lr: float | None = Field(default=None, gt=0)
    """The learning rate of AdamW: of all weights, or with `muon` of embeddings, head, norms and biases. None: chosen by
    the number of weights, see `default_lr`."""
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
        if self.total_steps is not None:
            self.check_warmup(self.total_steps)
        return self

    def check_warmup(self, total_steps: int) -> None:
        """Raises ValueError if the warmup is as long as a run of `total_steps`."""
        if self.warmup_steps >= total_steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} must be below total_steps={total_steps}")

    def factor(self, step: int) -> float:
        """The factor of the learning rates at optimiser step `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.schedule == "constant" or self.total_steps is None:
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return 1.0 - done if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))

    def completed(self, *, weights: int, objective: Objective, total_steps: int | None = None) -> OptimizerConfig:
        """These settings with defaults filled in for a model of that many weights. Raises ValidationError for settings
        that contradict one another, such as a warmup as long as the run."""
        filled = {
            "lr": self.lr if self.lr is not None else default_lr(weights, objective),
            "total_steps": self.total_steps if self.total_steps is not None else total_steps,
        }
        return OptimizerConfig.model_validate(self.model_dump() | filled)


def default_lr(weights: int, objective: Objective = "reinforcement") -> float:
    """The learning rate if none is set: small models need, and tolerate, far larger steps than large ones.

    1e-6 * (1.5e9 / weights) ** 0.7 for reinforcement learning, no less than 1e-6; ten times that for supervised
    learning; rounded to two digits.
    """
    lr = LARGE_MODEL_LR * max(1.0, LARGE_MODEL / max(1, weights)) ** LR_EXPONENT
    return float(f"{lr * (SUPERVISED_FACTOR if objective == 'supervised' else 1.0):.1e}")
