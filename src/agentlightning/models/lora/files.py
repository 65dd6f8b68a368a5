"""Adapters on disk, in the format of the peft library, which transformers and vLLM load.

DIR/adapter_config.json, adapter_model.safetensors     the adapter of the policy itself, where it has one
DIR/adapters/AGENT/...                                 those of single agents, each a directory of the same kind
DIR/agents.json                                        which agent learns what
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from agentlightning.errors import PolicyError
from agentlightning.models.lora.adapters import Adapter

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
FOLDER: Final = "adapters"
AGENTS: Final = "agents.json"
PREFIX: Final = "base_model.model."
"""What peft writes before the name of a layer."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """Writes the adapters of a policy to a directory, as `PreTrainedModel.save_pretrained` writes a model."""

    base: str
    """The directory or hub name of the model below the adapters."""
    own: Adapter | None
    """The adapter of the policy itself."""
    of_agents: Mapping[str, Adapter]
    agents: Mapping[str, Any]
    """What each agent learns, as JSON; empty where all learn the same."""

    def save_pretrained(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        if self.own is not None:
            write_adapter(directory, self.own, self.base)
        for name, adapter in self.of_agents.items():
            write_adapter(directory / FOLDER / folder_name(name), adapter, self.base)
        if self.agents:
            content = {"base_model_name_or_path": self.base, "agents": dict(self.agents)}
            (directory / AGENTS).write_text(json.dumps(content, indent=2))


def folder_name(agent: str) -> str:
    """A file name for an agent."""
    return quote(agent, safe=" ").replace(".", "%2E")


def write_adapter(directory: Path, adapter: Adapter, base: str) -> None:
    """Write one adapter, over a model that is a directory or hub name."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.r,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        **adapter.targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }
    (directory / CONFIG).write_text(json.dumps(config, indent=2))
    save_file(named_weights(adapter), directory / WEIGHTS, metadata={"format": "pt"})


def named_weights(adapter: Adapter) -> dict[str, torch.Tensor]:
    """The matrices by their names in a file."""
    weights: dict[str, torch.Tensor] = {}
    for layer, down, up in zip(adapter.layers, adapter.down, adapter.up, strict=True):
        weights[f"{PREFIX}{layer}.lora_A.weight"] = down.detach().cpu().contiguous()
        weights[f"{PREFIX}{layer}.lora_B.weight"] = up.detach().cpu().contiguous()
    return weights


def has_adapters(directory: Path) -> bool:
    """Whether a directory holds adapters and no model of its own."""
    return any((directory / name).is_file() for name in (CONFIG, AGENTS))


def read_adapter_config(directory: Path) -> dict[str, Any]:
    """`adapter_config.json`. Raises PolicyError where it is missing, cannot be read, or is no plain LoRA."""
    config = read_json(directory / CONFIG)
    unknown = [
        name
        for name in ("use_rslora", "use_dora", "fan_in_fan_out", "modules_to_save", "rank_pattern")
        if config.get(name)
    ]
    if config.get("peft_type") != "LORA" or unknown or config.get("bias", "none") != "none":
        what = ", ".join(unknown) or f"peft_type={config.get('peft_type')!r}, bias={config.get('bias')!r}"
        raise PolicyError(f"{directory / CONFIG} is no plain LoRA adapter ({what}); merge it into its model first")
    return config


def saved_targets(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The layers that `adapter_config.json` names."""
    parameters = config.get("target_parameters") or ()
    return (*config["target_modules"], *(name.removesuffix(".weight") for name in parameters))


def read_agents(directory: Path) -> dict[str, Any]:
    """What `AdapterFiles` wrote to `agents.json`; empty without that file. Raises PolicyError if it cannot be read."""
    return read_json(directory / AGENTS) if (directory / AGENTS).is_file() else {}


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PolicyError(f"{path} cannot be read: {error}; choose another checkpoint") from error
    if not isinstance(content, dict):
        raise PolicyError(f"{path} holds {type(content).__name__} instead of a table; choose another checkpoint")
    return content


def read_weights(directory: Path, adapter: Adapter) -> list[torch.Tensor]:
    """The matrices saved in `directory` in the order of `adapter.parameters()`. Raises PolicyError if they are damaged,
    or are those of another adapter."""
    path = directory / WEIGHTS
    try:
        saved = load_file(path)
    except (OSError, SafetensorError) as error:
        raise PolicyError(f"{path} cannot be read as an adapter: {error}; choose another checkpoint") from error
    own = named_weights(adapter)
    unlike = [
        name for name in {*own, *saved} if name not in own or name not in saved or saved[name].shape != own[name].shape
    ]
    if unlike:
        raise PolicyError(
            f"{directory} holds another adapter: {min(unlike)} and {len(unlike) - 1} more matrices differ in name or "
            "shape; continue with the r and targets it was saved with"
        )
    downs = [saved[f"{PREFIX}{layer}.lora_A.weight"] for layer in adapter.layers]
    return [*downs, *(saved[f"{PREFIX}{layer}.lora_B.weight"] for layer in adapter.layers)]


@torch.no_grad()
def set_weights(adapter: Adapter, weights: list[torch.Tensor]) -> None:
    """Give an adapter what `read_weights` returned."""
    for parameter, saved in zip((*adapter.down, *adapter.up), weights, strict=True):
        parameter.copy_(saved)
