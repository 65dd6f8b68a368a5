"""Merges an adapter into the weights of the model below it: W + (alpha / r) B A (Hu et al. 2021, arXiv:2106.09685)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentlightning.errors import PolicyError
from agentlightning.models.lora.files import AGENTS, CONFIG, read_adapter_config
from agentlightning.models.resolve import resolve_model

PREFIX = "base_model.model."


def merge(adapter: Path, directory: Path) -> None:
    """Write the merged model and its tokenizer. Raises PolicyError for adapters of single agents, of which a model can
    hold one, and for weights that do not fit."""
    if not (adapter / CONFIG).is_file() or (adapter / AGENTS).exists():
        raise PolicyError(
            f"{adapter} holds adapters of single agents, which are no one model; serve them with `agl serve --model"
            f" {adapter}`, or train with one shared adapter"
        )
    config = read_adapter_config(adapter)
    base = resolve_model(str(config.get("base_model_name_or_path")))
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    weights = load_file(adapter / "adapter_model.safetensors")
    scale = float(config["lora_alpha"]) / int(config["r"])
    with torch.no_grad():
        for name, down in weights.items():
            if not name.endswith("lora_A.weight"):
                continue
            up = weights[name.replace("lora_A", "lora_B")]
            target = model.get_submodule(name.removeprefix(PREFIX).removesuffix(".lora_A.weight")).weight
            if target.shape != (up.shape[0], down.shape[1]):
                raise PolicyError(f"{name} of {adapter} has another shape than the weights of {base}")
            target += (scale * (up.float() @ down.float())).to(target.dtype)
    model.save_pretrained(directory)
    has_own = (adapter / "tokenizer_config.json").exists()
    tokenizer: Any = AutoTokenizer.from_pretrained(adapter if has_own else base)
    tokenizer.save_pretrained(directory)
