"""What reading and writing GGUF have in common: how a tokenizer divides text, and how positions are scaled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from tokenizers import Regex, pre_tokenizers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LLAMA3_ROPE: Final = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""How Llama 3.1 and later scale positions, but for the factor."""
CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(numbers: str) -> Callable[[], Any]:
    return lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CONTRACTIONS + numbers + REST), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


PRE_TOKENIZERS: Final[dict[str, Callable[[], Any]]] = {
    "smollm": _smollm,
    "llama-bpe": _split(r"\p{N}{1,3}"),
    "qwen2": _split(r"\p{N}"),
    "gpt-2": _gpt2,
    "deepseek-r1-qwen": _split(r"\p{N}"),
}
"""How the words of a byte-level tokenizer are found, by the name that llama.cpp has for it."""


def rope_factors(config: Any) -> torch.Tensor:
    """What the frequency of each pair of dimensions is divided by, as `rope_freqs.weight` of a GGUF file has it."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    even = torch.arange(0, 2 * len(scaled), 2, dtype=torch.float32)
    return config.rope_parameters["rope_theta"] ** (-even / (2 * len(scaled))) / scaled
