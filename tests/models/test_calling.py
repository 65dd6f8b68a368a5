"""The key-value cache is passed by the name that the installed transformers asks for, without a warning."""

from __future__ import annotations

from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from agentlightning.models.checkpoint import cache_argument


def test_a_model_takes_its_cache_by_that_name() -> None:
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model, cache = LlamaForCausalLM(config), DynamicCache(config=config)
    model(input_ids=torch.zeros(1, 3, dtype=torch.long), use_cache=True, **{cache_argument(model): cache})
    assert cache.get_seq_length() == 3


def test_both_names_are_known() -> None:
    def new(input_ids: Any, cache: Any = None) -> None: ...

    def old(input_ids: Any, past_key_values: Any = None) -> None: ...

    @wraps(new)
    def decorated(*args: Any, **inputs: Any) -> None: ...

    def patched(*args: Any, **inputs: Any) -> None: ...

    models = [SimpleNamespace(forward=each) for each in (new, decorated, old, patched)]
    assert [cache_argument(each) for each in models] == ["cache", "cache", "past_key_values", "past_key_values"]
    adapted = SimpleNamespace(forward=patched, get_base_model=lambda: models[0])
    assert cache_argument(adapted) == "cache"
