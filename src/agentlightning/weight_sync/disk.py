"""Checkpoints for servers to read weights from: one directory for each version, of which the last few are kept."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any, Protocol

import orjson

from agentlightning.models import INPUT_EMBEDDING, OUTPUT_HEAD

KEEP = 2
"""The newest, and one that a server may still be reading."""
INDEX = "model.safetensors.index.json"


class SavesCheckpoints(Protocol):
    """The part of a policy that this module needs."""

    @property
    def policy_version(self) -> int: ...

    async def save(self, directory: Path) -> None: ...


class CheckpointFolder:
    """The checkpoints below `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    def directory(self, version: int) -> Path:
        return self.path / f"version-{version:06d}"

    async def write(self, policy: SavesCheckpoints) -> Path:
        """Write the current weights of `policy`. Raises PolicyError if the disk refuses."""
        directory = self.directory(policy.policy_version)
        await policy.save(directory)
        await asyncio.to_thread(_write_output_layer, directory)
        return directory

    async def prune(self, newest: Path) -> None:
        """Remove all but `newest` and the one written last before it."""
        await asyncio.to_thread(self._prune, newest)

    async def remove(self, directory: Path) -> None:
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    def _prune(self, newest: Path) -> None:
        others = [entry for entry in self.path.glob("version-*") if entry != newest]
        others.sort(key=lambda entry: entry.stat().st_mtime)
        for entry in others[: max(0, len(others) - (KEEP - 1))]:
            shutil.rmtree(entry, ignore_errors=True)


def _write_output_layer(directory: Path) -> None:
    """Store a tied output layer a second time under its own name: vLLM on a CPU keeps a packed copy of it, which it
    rebuilds only when it reads the layer (0.32, `layerwise.py`: "Failed to load weights")."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    index, files = directory / INDEX, sorted(directory.glob("*.safetensors"))
    for file in files:
        with safe_open(file, "pt") as tensors:
            names = set(tensors.keys())
            if OUTPUT_HEAD in names or INPUT_EMBEDDING not in names or not _is_tied(directory):
                continue
            save_file(
                {OUTPUT_HEAD: tensors.get_tensor(INPUT_EMBEDDING)}, directory / "lm_head.safetensors", {"format": "pt"}
            )
        if index.exists():
            content: dict[str, Any] = orjson.loads(index.read_bytes())
            content["weight_map"][OUTPUT_HEAD] = "lm_head.safetensors"
            index.write_bytes(orjson.dumps(content))
        return


def _is_tied(directory: Path) -> bool:
    return bool(orjson.loads((directory / "config.json").read_bytes()).get("tie_word_embeddings"))
