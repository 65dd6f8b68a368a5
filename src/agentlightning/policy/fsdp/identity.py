"""What the ranks of a group must have in common: their code and the model that they start from."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from transformers import PreTrainedModel

PACKAGES = ("agentlightning", "torch", "transformers", "numpy")
MOST_VALUES = 1024
"""Values of each weight that are compared."""


@dataclass(frozen=True, slots=True)
class Code:
    """What a process runs."""

    python: str
    packages: tuple[tuple[str, str], ...]
    digest: str
    """Of the source files of this package."""

    def difference(self, other: Code) -> str:
        """Where the other differs, in words; empty where it does not."""
        own, others = {"python": self.python, **dict(self.packages)}, {"python": other.python, **dict(other.packages)}
        found = [
            f"{name} {others.get(name)} and not {value}" for name, value in own.items() if others.get(name) != value
        ]
        if not found and self.digest != other.digest:
            found = [f"other source files of agentlightning ({other.digest} and not {self.digest})"]
        return ", ".join(found)


@cache
def code() -> Code:
    """That of this process."""
    digest = hashlib.blake2b(digest_size=6)
    root = Path(__file__).parents[2]
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return Code(_minor_version(), tuple((name, _version(name)) for name in PACKAGES), digest.hexdigest())


def _minor_version() -> str:
    return ".".join(platform.python_version_tuple()[:2])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def model_digest(model: PreTrainedModel) -> str:
    """Of the shape of a model and of values spread over its weights, as they are before processes divide them."""
    digest = hashlib.blake2b(digest_size=6)
    for name, weight in model.named_parameters():
        values = weight.detach().flatten()
        spread = values[:: max(1, len(values) // MOST_VALUES)].contiguous().cpu()
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(spread.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
