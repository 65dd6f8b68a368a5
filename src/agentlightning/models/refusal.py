"""What a model raises that cannot be used: a typed error when it is opened, in place of any other at the first call."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

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
