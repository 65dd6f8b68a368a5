"""A moving average of the weights of a policy, which changes more slowly than the policy itself.

    average <- (1 - rate) average + rate * weights             after each optimiser step

A teacher for self-distillation (SDPO, arXiv:2601.20802, section 3). It costs one copy of the trained weights.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


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
