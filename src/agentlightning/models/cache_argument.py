"""The name of the argument by which a model of transformers takes its key-value cache."""

from __future__ import annotations

import inspect
from typing import Any


def cache_argument(model: Any) -> str:
    """`cache` since transformers 5.24, `past_key_values` in versions before and in models that patch their forward.
    `model` may be a model of peft, which passes its arguments on."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "cache" if "cache" in inspect.signature(base.forward).parameters else "past_key_values"
