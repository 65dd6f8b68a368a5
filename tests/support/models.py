"""Tiny random models of several architectures, and their ChatML tokenizer. Nothing is downloaded.

The weights are scaled up, so that the next token is rarely a near tie and greedy decoding does not depend on how it is
computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentlightning.models.tiny import make_tokenizer

Architecture = Literal["llama", "qwen3", "gpt2", "mistral"]
"""mistral: with a sliding window of 16 tokens."""

TEXTS = ("What is 12 + 30?", "Tom has 3 apples and buys 4 more.", '{"name": "calculator"}', "### ANSWER: 42 ###")


@cache
def model_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a ChatML template. Shared: do not modify it."""
    return make_tokenizer(TEXTS, vocabulary=320)


def tiny_model(
    architecture: Architecture = "llama",
    *,
    seed: int = 0,
    context_length: int = 256,
    rope: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """A new two-layer model for the vocabulary of `model_tokenizer`. `rope`: its RoPE parameters (llama)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _build(architecture, context_length, rope)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(5)
    return model.eval()


def tiny_checkpoint(
    directory: Path,
    architecture: Architecture = "llama",
    *,
    seed: int = 0,
    context_length: int = 256,
    rope: Mapping[str, Any] | None = None,
) -> Path:
    """Save model and tokenizer in the format of `transformers`."""
    tiny_model(architecture, seed=seed, context_length=context_length, rope=rope).save_pretrained(directory)
    model_tokenizer().save_pretrained(directory)
    return directory


def _build(architecture: Architecture, context_length: int, rope: Mapping[str, Any] | None = None) -> PreTrainedModel:
    tokenizer = model_tokenizer()
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
    }
    if architecture == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=context_length, **common))
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context_length,
    }
    if architecture == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape, **common, rope_parameters=dict(rope) if rope else None))
    if architecture == "mistral":
        return MistralForCausalLM(MistralConfig(**shape, **common, head_dim=8, sliding_window=16))
    return Qwen3ForCausalLM(Qwen3Config(**shape, **common, head_dim=16))
