"""The decoder against the model whose forward pass it replaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentlightning.engine.base import SamplingParams
from agentlightning.engine.local.scheduler import ContinuousBatcher
from agentlightning.models.lora import Adapters

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
FAMILY = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE)),
    "llama with biases": (LlamaForCausalLM, LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
    "llama 3.1's rotation": (
        LlamaForCausalLM,
        LlamaConfig(
            **SHAPE,
            rope_parameters={
                "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            },
        ),
    ),
    "mistral": (MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=None)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SHAPE)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True)),
}  # fmt: skip


def make(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    kind, config = FAMILY[name]
    model = kind(config).to(dtype)
    with torch.no_grad():  # Norms of 1 and biases of 0 would hide that one is left out.
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def batcher(model: PreTrainedModel, **options: Any) -> ContinuousBatcher:
    return ContinuousBatcher(model, eos_token_ids=frozenset(), decode=lambda tokens: "", context_length=512, **options)


def answers(engine: ContinuousBatcher, prompts: Sequence[list[int]], adapters: Sequence[str | None] = ()) -> list[Any]:
    """Sampled tokens with their log-probabilities, for prompts that run together."""
    params = SamplingParams(max_tokens=12, seed=1)
    of_each = adapters or [None] * len(prompts)
    requests = [engine.submit(prompt, params, adapter) for prompt, adapter in zip(prompts, of_each, strict=True)]
    while not engine.idle:
        engine.step()
    return [(request.sampled, request.logprobs) for request in requests]


def by_the_model(model: PreTrainedModel, prompt: list[int], sampled: list[int]) -> list[float]:
    """Log-probabilities of the sampled tokens from one plain forward pass."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + sampled]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, torch.tensor(sampled)[:, None])[:, 0].tolist()


PROMPTS = [[5, 6, 7], list(range(20, 120)), [9], [*range(20, 100), 7], list(range(3, 40))]


@pytest.mark.parametrize("name", FAMILY)
def test_log_probabilities_are_those_of_the_model(name: str) -> None:
    model = make(name)
    engine = batcher(model)
    assert engine._decoder is not None
    for prompt, (sampled, logprobs) in zip(PROMPTS, answers(engine, PROMPTS), strict=True):
        assert logprobs == pytest.approx(by_the_model(model, prompt, sampled), abs=1e-4)


def test_a_shared_prefix_is_read_once_for_all_rows() -> None:
    model = make("llama")
    engine = batcher(model)
    prompts = [[*range(3, 260), token] for token in range(10, 26)]
    found = answers(engine, prompts)
    for prompt, (sampled, logprobs) in zip(prompts, found, strict=True):
        assert logprobs == pytest.approx(by_the_model(model, prompt, sampled), abs=1e-4)


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 products for this processor"
)
def test_bfloat16_stays_within_its_rounding() -> None:
    model = make("llama", torch.bfloat16)
    engine = batcher(model)
    assert engine._decoder is not None
    for prompt, (sampled, logprobs) in zip(PROMPTS, answers(engine, PROMPTS), strict=True):
        assert logprobs == pytest.approx(by_the_model(model, prompt, sampled), abs=0.15)


def test_changed_weights_are_used_at_once() -> None:
    model = make("qwen3")
    engine = batcher(model)
    answers(engine, PROMPTS)
    engine.invalidate_cache()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    for prompt, (sampled, logprobs) in zip(PROMPTS, answers(engine, PROMPTS), strict=True):
        assert logprobs == pytest.approx(by_the_model(model, prompt, sampled), abs=1e-4)


def test_each_row_has_its_own_adapter() -> None:
    model = make("qwen2")
    adapters = Adapters(model)
    for name in ("a", "b"):
        adapter = adapters.add(name, r=4, alpha=8.0, seed=ord(name))
        with torch.no_grad():
            for up in adapter.up:
                up.normal_(std=0.2)
    engine = batcher(model, adapters=adapters)
    assert engine._decoder is not None
    of_each = ["a", None, "b", "a", "b"]
    for prompt, adapter, (sampled, logprobs) in zip(PROMPTS, of_each, answers(engine, PROMPTS, of_each), strict=True):
        with adapters.use(adapter):
            assert logprobs == pytest.approx(by_the_model(model, prompt, sampled), abs=1e-4)


@pytest.mark.parametrize(
    "change", [{"hidden_act": "gelu"}, {"head_dim": 48, "num_key_value_heads": 1}, {"sliding_window": 8}]
)
def test_what_it_does_not_know_is_left_to_the_model(change: dict[str, Any]) -> None:
    torch.manual_seed(0)
    kind, config = (MistralForCausalLM, MistralConfig) if "sliding_window" in change else FAMILY["llama"]
    model = kind((config if isinstance(config, type) else LlamaConfig)(**(SHAPE | change)))
    engine = batcher(model)
    assert (engine._decoder is None) == ("head_dim" not in change)
    for prompt, (sampled, logprobs) in zip(PROMPTS, answers(engine, PROMPTS), strict=True):
        assert logprobs == pytest.approx(by_the_model(model, prompt, sampled), abs=1e-4)


def test_a_model_that_differs_from_its_class_is_left_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    attention: Any = model.model.layers[1].self_attn
    forward = attention.forward
    monkeypatch.setattr(attention, "forward", lambda *args, **kwargs: (forward(*args, **kwargs)[0] * 0.5, None))
    engine = batcher(model)
    assert engine._decoder is None
