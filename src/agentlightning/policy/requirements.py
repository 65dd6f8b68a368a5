"""The packages that a policy on this machine needs. Imports none of them."""

from __future__ import annotations

from importlib.util import find_spec
from os import PathLike
from typing import cast

from agentlightning.errors import ConfigError, MissingExtraError

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


def require_training() -> None:
    """Raises MissingExtraError if a package for sampling or training is not installed."""
    for package in PACKAGES:
        if find_spec(package) is None:
            raise MissingExtraError(package, "train")


def check_trainable(model: object) -> None:
    """Raises ConfigError for anything but a path, a policy, a transformers model, or a pair of model and tokenizer."""
    if model is None or isinstance(model, str | PathLike) or hasattr(model, "chat"):
        return
    if isinstance(model, tuple):
        pair = cast("tuple[object, ...]", model)
        if len(pair) == 2 and hasattr(pair[0], "save_pretrained") and hasattr(pair[1], "apply_chat_template"):
            return
        kinds = ", ".join(type(part).__name__ for part in pair)
        raise ConfigError(f"model=({kinds}) is no pair of a model and its tokenizer; give (model, tokenizer)")
    if not hasattr(model, "save_pretrained") or not hasattr(model, "parameters"):
        raise ConfigError(
            f"model is a {type(model).__name__} object; give a directory (save_pretrained writes one), a transformers"
            " model, or (model, tokenizer)"
        )
