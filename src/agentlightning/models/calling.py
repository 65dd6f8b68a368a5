"""Calls of a model: the name of the argument for its key-value cache, and what it raises where it cannot be used, which
is a typed error when it is opened in place of any other at the first call."""

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from agentlightning.errors import AgentLightningError, PolicyError

FORWARD_ERRORS: Final = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError)
"""What the forward pass of a model raises for inputs that it does not know."""


@contextmanager
def refusing(model: PreTrainedModel) -> Generator[None]:
    """Within, whatever the model raises is the PolicyError that it cannot be used."""
    try:
        yield
    except (torch.OutOfMemoryError, AgentLightningError):
        raise
    except FORWARD_ERRORS as error:
        raise PolicyError(
            f"{type(model).__name__} cannot be used here ({type(error).__name__}: {error}); use another model, or serve"
            " this one with vLLM"
        ) from error


def cache_argument(model: Any) -> str:
    """`cache` since transformers 5.24, `past_key_values` in versions before and in models that patch their forward.
    `model` may be a model of peft, which passes its arguments on."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "cache" if "cache" in inspect.signature(base.forward).parameters else "past_key_values"
