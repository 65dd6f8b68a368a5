"""What the ranks of a group must have in common: their code and the model that they start from."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from agentlightning.models.resolve import resolve_model

PACKAGES = ("agentlightning", "torch", "transformers", "numpy")
WEIGHTS = frozenset({".safetensors", ".bin"})
BLOCK, MOST_BLOCKS = 1024, 4096
"""Bytes of a block, and the blocks of a file, that are compared."""


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


def model_digest(source: str) -> str:
    """Of the files of a model: their sizes, and bytes spread over the weights. `source` as in `LocalPolicyConfig`."""
    directory = Path(resolve_model(source))
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(each for each in directory.iterdir() if each.name == "config.json" or each.suffix in WEIGHTS):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for place in range(0, size, max(BLOCK, size // MOST_BLOCKS)):
                file.seek(place)
                digest.update(file.read(BLOCK))
    return digest.hexdigest()
