"""Gradient checkpointing: layers store their input alone, and are computed again in the backward pass.

The layers stay in evaluation mode, and a key-value cache is put back to what it was before they are computed again, so
that the gradient is the same and rows can share a prefix. transformers' own checkpointing allows neither. The last
layer stores its activations: it is computed at trained positions only (`head_positions`).

Chen et al. 2016, arXiv:1604.06174.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agentlightning.errors import ConfigError

FIELDS = ("keys", "values", "is_initialized")
"""The state of a layer of a cache."""


def layers_to_recompute(model: PreTrainedModel) -> list[nn.Module]:
    """All layers but the last. Raises ConfigError for a model whose layers cannot be computed again."""
    layers: list[nn.Module] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"policy.gradient_checkpointing: {type(model).__name__} has no layers that can be computed again; leave it"
            " out, or lower policy.token_budget"
        )
    return layers[:-1]


@contextmanager
def recomputed(layers: Sequence[nn.Module]) -> Generator[None]:
    """Forward passes within store the inputs of these layers alone."""
    for layer in layers:
        layer.forward = _recomputing(layer.forward, _cache_index(layer))
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _recomputing(forward: Callable[..., Any], index: int | None) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **options)
        found = [each for each in (*args, *options.values()) if isinstance(each, Cache)]
        again = forward if not found or index is None else _with_cache_as_now(forward, found[0].layers[index])
        return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False, **options)

    return run


def _with_cache_as_now(forward: Callable[..., Any], cached: Any) -> Callable[..., Any]:
    """`forward`, which each time sees this layer of a cache as it is now; only the first time changes it."""
    now, calls = _state(cached), 0

    def run(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            return forward(*args, **options)
        later = _state(cached)
        _restore(cached, now)
        try:
            return forward(*args, **options)
        finally:
            _restore(cached, later)

    return run


def _state(cached: Any) -> tuple[Any, ...]:
    return tuple(getattr(cached, name, None) for name in FIELDS)


def _restore(cached: Any, state: tuple[Any, ...]) -> None:
    for name, value in zip(FIELDS, state, strict=True):
        setattr(cached, name, value)


def _cache_index(layer: nn.Module) -> int | None:
    found = [getattr(module, "layer_idx", None) for module in layer.modules()]
    return next((index for index in found if isinstance(index, int)), None)
