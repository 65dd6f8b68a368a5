"""The weights of a finished run as a directory or a file for other programs.

hf          what transformers loads; an adapter is merged into the model below it
gguf-ready  the same, checked for what llama.cpp's converter reads:
                python convert_hf_to_gguf.py DIRECTORY --outfile model.gguf
gguf        one file that llama.cpp and Ollama load
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Literal

from agentlightning.errors import ConfigError
from agentlightning.models import Precision

WeightsForm = Literal["hf", "gguf-ready", "gguf"]
TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model")
"""Files of which llama.cpp's converter reads one."""


@dataclass(frozen=True, slots=True)
class ExportedWeights:
    """What was written."""

    path: Path
    files: tuple[str, ...]
    merged: bool
    """Whether an adapter was merged into the model below it."""


def export_weights(run_dir: Path, form: WeightsForm, path: Path, precision: Precision = "f16") -> ExportedWeights:
    """Write the weights of a finished run to a new directory, or to a GGUF file whose matrices have the `precision`.
    Raises ConfigError where there are none, where the directory has contents, and PolicyError for adapters that cannot
    be merged and models that cannot be written."""
    checkpoint = checkpoint_of(run_dir)
    if not holds_weights(checkpoint):
        raise ConfigError(f"{checkpoint} holds no weights: the run trained none; its prompts are in resources.json")
    adapters = not (checkpoint / "config.json").exists()
    if form == "gguf":
        _write_gguf(checkpoint, path, precision, adapters)
        return ExportedWeights(path, (path.name,), adapters)
    if path.exists() and any(path.iterdir()):
        raise ConfigError(f"{path} has contents; give a directory that is new or empty")
    if adapters:
        from agentlightning.models.lora.merge import merge

        merge(checkpoint, path)
    else:
        shutil.copytree(checkpoint, path, dirs_exist_ok=True)
    if form == "gguf-ready":
        _check(path)
    return ExportedWeights(path, tuple(sorted(each.name for each in path.iterdir())), adapters)


def checkpoint_of(run_dir: Path) -> Path:
    """The result of a finished run. Raises ConfigError where there is none."""
    if not (run_dir / "state.json").exists():
        raise ConfigError(f"{run_dir} holds no run: there is no state.json in it; give the directory of a run")
    if not (checkpoint := run_dir / "checkpoint").is_dir():
        raise ConfigError(f"{run_dir} is not finished, so that there is no {checkpoint}; finish it with --resume")
    return checkpoint


def holds_weights(checkpoint: Path) -> bool:
    """Whether a run has trained weights, and not only prompts."""
    return any((checkpoint / name).exists() for name in ("adapter_config.json", "agents.json", "config.json"))


def _write_gguf(checkpoint: Path, path: Path, precision: Precision, adapters: bool) -> None:
    from agentlightning.models.gguf.write import write_gguf

    with TemporaryDirectory(prefix="agl-merged-") as folder:
        if adapters:
            from agentlightning.models.lora.merge import merge

            merge(checkpoint, Path(folder))
        write_gguf(Path(folder) if adapters else checkpoint, path, precision)


def _check(path: Path) -> None:
    if not any((path / name).exists() for name in TOKENIZERS):
        raise ConfigError(
            f"{path} has neither {' nor '.join(TOKENIZERS)}, of which llama.cpp's converter reads one; copy that of the"
            " model the run started from"
        )
    if not list(path.glob("*.safetensors")):
        raise ConfigError(f"{path} has no *.safetensors, which llama.cpp's converter reads")
