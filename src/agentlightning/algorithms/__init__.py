"""Algorithms, and the registry that finds one by its settings."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from pydantic import BaseModel

from agentlightning.algorithms.base import Algorithm
from agentlightning.algorithms.training import Training

__all__ = ["ALGORITHMS", "Algorithm", "Training", "class_name", "make_algorithm"]

ALGORITHMS: Final[dict[str, str]] = {
    "lightning_rl": "agentlightning.algorithms.lightning_rl:LightningRL",
}
"""The `type` in the settings -> where the class is."""


def class_name(algorithm: Algorithm[Any]) -> str:
    """`module:Class` of an algorithm."""
    return f"{type(algorithm).__module__}:{type(algorithm).__qualname__}"


def make_algorithm(config: BaseModel) -> Algorithm[Any]:
    """The algorithm whose settings these are."""
    module, _, name = ALGORITHMS[str(getattr(config, "type"))].partition(":")  # noqa: B009
    return getattr(import_module(module), name)(config)
