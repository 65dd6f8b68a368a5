"""Opening a causal language model and its tokenizer, and how long a context of it can be used."""

from __future__ import annotations

import logging
import math
import time
import timeit
from pathlib import Path
from typing import Any, Literal, cast

import torch
from pydantic import BaseModel, Field
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from agentlightning.errors import AgentLightningError, ConfigError, PolicyError
from agentlightning.models import checkpoint
from agentlightning.models.lora import AGENTS, CONFIG, has_adapters, read_adapter_config
from agentlightning.models.resolve import TOKENIZER_FILES, resolve_model
from agentlightning.policy.config import AgentSetting, LocalPolicyConfig, Lora

logger = logging.getLogger(__name__)

CORES = torch.get_num_threads()
"""The threads that torch chooses: physical cores, or what OMP_NUM_THREADS says."""
PROBE_SECONDS = 0.5
"""How long `fastest_threads` tries, one turn at least."""
LARGE = 50_000_000
"""Weights from which a model gains from bfloat16 and from threads: SmolLM2-135M does, the models of tests do not."""


class SavedAgents(BaseModel):
    """`agents.json`, beside the adapters of single agents."""

    base_model_name_or_path: str | None = None
    agents: dict[str, AgentSetting] = Field(default={})


def find_device(name: str) -> torch.device:
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f'device="{name}" cannot be used: {error}; use "auto" or "cpu"') from error
    return device


def with_resources(
    config: LocalPolicyConfig, dtype: Literal["auto", "float32", "bfloat16"], threads: int | None
) -> LocalPolicyConfig:
    """`config` with these, chosen by the size of the model where they are left open. A model whose shape cannot be read
    gets the defaults, since opening it says why."""
    if dtype == "auto" or threads is None:
        below, _ = with_adapters_of(config)
        try:
            model = checkpoint.empty_model(resolve_model(below.model, weights=False), torch.float32)
        except (OSError, ValueError, KeyError, ImportError, AgentLightningError):
            return config
        size, device = model.num_parameters(), find_device(config.sampling_device)
        large = size >= LARGE
        auto = "bfloat16" if large and _computes_bfloat16(device) else "float32"
        dtype = auto if dtype == "auto" else dtype
        if threads is None:
            hidden = cast(int, model.config.get_text_config(decoder=True).hidden_size)
            threads = fastest_threads(hidden, getattr(torch, dtype)) if large and device.type == "cpu" else 1
        if large:
            logger.warning(
                "%s has %.0fM weights: policy.dtype=%s, policy.threads=%d", config.model, size / 1e6, dtype, threads
            )
    return config.model_copy(update={"dtype": dtype, "threads": threads})


def _computes_bfloat16(device: torch.device) -> bool:
    if device.type == "cpu":
        names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        return any(getattr(torch.cpu, name, bool)() for name in names)
    return device.type == "cuda" and torch.cuda.is_bf16_supported()


def fastest_threads(hidden: int, dtype: torch.dtype) -> int:
    """1, or as many threads as torch chose for this machine if they multiply matrices clearly faster just now: those of
    an update, which takes longer than sampling and gains more from threads than the few rows of a forward step."""
    x, weight = torch.ones(512, hidden, dtype=dtype), torch.ones(hidden, hidden, dtype=dtype)
    before, seconds = torch.get_num_threads(), dict.fromkeys((1, CORES), math.inf)
    end = time.monotonic() + PROBE_SECONDS
    while time.monotonic() < end:  # The best turn counts: a moment of another program's must not decide for the run.
        for threads in seconds:
            torch.set_num_threads(threads)
            seconds[threads] = min(seconds[threads], timeit.timeit(lambda: nn.functional.linear(x, weight), number=1))
    torch.set_num_threads(before)
    return CORES if seconds[CORES] < 0.8 * seconds[1] else 1


def load_model(config: LocalPolicyConfig, *, weights: bool = True) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """The tokenizer and the model; without `weights`, this is one on the meta device. Raises PolicyError."""
    source = resolve_model(config.model, weights=weights)
    if not any((Path(source) / name).exists() for name in TOKENIZER_FILES):
        raise PolicyError(
            f"{source} holds no tokenizer; save the model's tokenizer there with tokenizer.save_pretrained"
        )
    with checkpoint.reading(source):
        tokenizer = AutoTokenizer.from_pretrained(source)
    model = checkpoint.load_model(source, getattr(torch, config.dtype), weights)
    text: Any = model.config.get_text_config(decoder=True)
    if getattr(text, "output_router_logits", False):
        text.output_router_logits = False  # For a loss that is not computed here, from a mask of another kind.
    return tokenizer, model


def usable_context_length(config: LocalPolicyConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    text_config = model.config.get_text_config(decoder=True)
    most = getattr(text_config, "max_position_embeddings", None) or tokenizer.model_max_length
    faithful = _faithful_length(text_config, most)
    if config.max_context is not None and config.max_context > faithful:
        reason = " faithfully: beyond, longrope RoPE changes the keys of earlier positions" if faithful < most else ""
        raise ConfigError(
            f"max_context={config.max_context} exceeds what {config.model} can hold{reason}; use at most {faithful}"
        )
    if config.max_context is None and faithful < most:
        logger.warning(
            "%s is used up to %d of its %d tokens: beyond, longrope RoPE changes every earlier position, and tokens "
            "would be sampled from one distribution and trained under another",
            config.model, faithful, most,
        )  # fmt: skip
    return min(config.max_context or faithful, faithful)


def _faithful_length(text_config: Any, most: int) -> int:
    """The longest sequence for which cached keys stay valid.

    LongRoPE changes the frequencies of all positions, those of cached keys included, once a sequence exceeds the
    original length. Dynamic RoPE does so beyond `max_position_embeddings`, which no sequence exceeds here.
    """
    parameters: dict[str, Any] = getattr(text_config, "rope_parameters", None) or {}
    for rope in [value for value in parameters.values() if isinstance(value, dict)] or [parameters]:
        if rope.get("rope_type") == "longrope":
            return min(most, int(rope.get("original_max_position_embeddings") or most))
    return most


def with_adapters_of(config: LocalPolicyConfig) -> tuple[LocalPolicyConfig, Path | None]:
    """The configuration of the model below, with the adapters that `config.model` holds unless it names its own, and
    the directory to read them from; `config` itself if its model is no directory of adapters. Raises PolicyError for
    files that cannot be read."""
    directory = Path(config.model)
    if not (directory.is_dir() and has_adapters(directory)):
        return config, None
    saved, lora = SavedAgents(), config.lora
    if (directory / AGENTS).is_file():
        try:
            saved = SavedAgents.model_validate_json((directory / AGENTS).read_bytes())
        except (OSError, ValueError) as error:
            raise PolicyError(
                f"the agents of {directory} cannot be read: {error}; choose another checkpoint"
            ) from error
    base = saved.base_model_name_or_path
    if (directory / CONFIG).is_file():
        own = read_adapter_config(directory)
        base = own.base_model_name_or_path or base
        lora = lora or Lora(r=own.r, alpha=own.lora_alpha, targets=own.targets or None)
    if base is None:
        raise PolicyError(f"{directory} does not name the model below its adapters (base_model_name_or_path)")
    agents = config.agents or saved.agents
    return config.model_copy(update={"model": base, "lora": lora, "agents": agents}), directory
