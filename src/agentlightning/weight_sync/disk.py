"""Weights on disk for servers to read: a checkpoint each, named by its version, the last few kept."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any, Final, Protocol

import orjson

from agentlightning.models import INPUT_EMBEDDING, OUTPUT_HEAD

KEPT: Final = 2
"""The newest, and one that a server may still be reading."""
INDEX: Final = "model.safetensors.index.json"


class Checkpointed(Protocol):
    """A policy whose weights can be saved as a checkpoint."""

    @property
    def policy_version(self) -> int: ...

    async def save(self, directory: Path) -> None: ...


class WeightsFolder:
    """The checkpoints below `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    def directory(self, version: int) -> Path:
        return self.path / f"version-{version:06d}"

    async def write(self, policy: Checkpointed) -> Path:
        """The weights that `policy` has now. Raises PolicyError where the disk refuses."""
        directory = self.directory(policy.policy_version)
        await policy.save(directory)
        await asyncio.to_thread(_write_output, directory)
        return directory

    async def prune(self, newest: Path) -> None:
        """Remove all but `newest` and the last written beside it."""
        await asyncio.to_thread(self._prune, newest)

    async def remove(self, directory: Path) -> None:
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    def _prune(self, newest: Path) -> None:
        others = [entry for entry in self.path.glob("version-*") if entry != newest]
        others.sort(key=lambda entry: entry.stat().st_mtime)
        for entry in others[: max(0, len(others) - (KEPT - 1))]:
            shutil.rmtree(entry, ignore_errors=True)


def _write_output(directory: Path) -> None:
    """Where the output layer is the input embedding, write it a second time under its own name: vLLM on a CPU keeps a
    packed copy of it, which is made anew only when it is read (0.32, `layerwise.py`: "Failed to load weights")."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    index, files = directory / INDEX, sorted(directory.glob("*.safetensors"))
    for file in files:
        with safe_open(file, "pt") as tensors:
            names = set(tensors.keys())
            if OUTPUT_HEAD in names or INPUT_EMBEDDING not in names or not _tied(directory):
                continue
            save_file(
                {OUTPUT_HEAD: tensors.get_tensor(INPUT_EMBEDDING)}, directory / "lm_head.safetensors", {"format": "pt"}
            )
        if index.exists():
            content: dict[str, Any] = orjson.loads(index.read_bytes())
            content["weight_map"][OUTPUT_HEAD] = "lm_head.safetensors"
            index.write_bytes(orjson.dumps(content))
        return


def _tied(directory: Path) -> bool:
    return bool(orjson.loads((directory / "config.json").read_bytes()).get("tie_word_embeddings"))
