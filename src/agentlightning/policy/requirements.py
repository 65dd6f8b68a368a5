"""What a policy on this machine needs installed. Imports none of it."""

from __future__ import annotations

from importlib.util import find_spec

from agentlightning.errors import MissingExtraError

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


def require_training() -> None:
    """Raises MissingExtraError where a package that models are sampled and trained with here is not installed."""
    for package in PACKAGES:
        if find_spec(package) is None:
            raise MissingExtraError(package, "train")
