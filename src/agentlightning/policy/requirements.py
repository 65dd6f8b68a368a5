"""The packages that a policy on this machine needs. Imports none of them."""

from __future__ import annotations

from importlib.util import find_spec

from agentlightning.errors import MissingExtraError

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


def require_training() -> None:
    """Raises MissingExtraError if a package for sampling or training is not installed."""
    for package in PACKAGES:
        if find_spec(package) is None:
            raise MissingExtraError(package, "train")
