"""Scoring in chunks gives what scoring at once gives, and never holds the logits of all positions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.support.models import tiny_model
from transformers import (
    BertConfig,
    BertLMHeadModel,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
)

from agentlightning.policy.update import forward
from agentlightning.policy.update.forward import Chosen, OutputHead, logprobs_from_logits, token_logprobs

torch.set_num_threads(1)  # more threads cost more than they bring at this size

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny_model,
    "gpt2": lambda: tiny_model("gpt2"),
    "gemma2, which caps its logits": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=3.0)
    ),
    "cohere, which scales them": lambda: CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.3)),
    "granite, which divides them": lambda: GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=2.5)),
    "an adapter around llama": lambda: get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"])),
    "an adapter of the head": lambda: get_peft_model(
        untied(), LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
    ),
    "an untied head": lambda: untied(),
    "a head with a bias": lambda: PhiForCausalLM(PhiConfig(**SHAPE)),
    "opt, whose decoder is inside of its model": lambda: OPTForCausalLM(
        OPTConfig(**SHAPE, ffn_dim=24, word_embed_proj_dim=16, max_position_embeddings=64)
    ),
    "minicpm3, which scales hidden states": lambda: MiniCPM3ForCausalLM(
        MiniCPM3Config(
            **{**SHAPE, "num_key_value_heads": 2},
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=8,
        )
    ),
    "bert, which transforms them": lambda: BertLMHeadModel(BertConfig(**SHAPE, is_decoder=True)),
    "a frozen head": lambda: frozen_head(untied()),
}
LINEAR = {
    "llama",
    "gpt2",
    "an adapter around llama",
    "an untied head",
    "a head with a bias",
    "a frozen head",
    "opt, whose decoder is inside of its model",
}
"""Those whose logits are those of a linear layer: their chunks share a buffer."""


def untied() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False))


def frozen_head(model: PreTrainedModel) -> PreTrainedModel:
    model.get_output_embeddings().requires_grad_(False)
    return model


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("name", MODELS)
def test_chunks_give_the_same_probabilities_and_gradients_as_all_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    head = OutputHead(model)
    ids = torch.randint(0, 30, (2, 7))
    chosen, temperatures = ids[:, 1:].flatten(), torch.rand(12) + 0.5
    logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    expected, entropy = logprobs_from_logits(logits, Chosen(chosen, temperatures, False))
    expected.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]

    model.zero_grad()
    monkeypatch.setattr(forward, "CHUNK_LOGITS", 5 * head.vocabulary)
    assert (head.linear is not None) == (name in LINEAR)
    widths: list[int] = []
    hidden = head.decoder(input_ids=ids)[0][:, :-1].flatten(0, 1)
    measure = forward._measure
    record = lambda logits, *rest: (widths.append(len(logits)), measure(logits, *rest))[1]  # noqa: E731
    monkeypatch.setattr(forward, "_measure", record)
    found, found_entropy = token_logprobs(head, hidden, Chosen(chosen, temperatures))
    found.sum().backward()
    assert widths[:3] == [5, 5, 2]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found_entropy, entropy, atol=1e-3, rtol=1e-5)
    for mine, theirs in zip((p.grad for p in model.parameters() if p.grad is not None), gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_a_hook_on_the_head_is_not_passed_over() -> None:
    """An adapter that is added later changes its logits."""
    model = untied().eval()
    head = OutputHead(model)
    hidden, chosen = torch.randn(3, 16), torch.tensor([1, 2, 3])
    before = token_logprobs(head, hidden, Chosen(chosen))[0]
    hook = model.get_output_embeddings().register_forward_hook(lambda _m, _a, logits: 2 * logits)
    doubled = token_logprobs(head, hidden, Chosen(chosen, torch.full((3,), 2.0)))[0]
    torch.testing.assert_close(doubled, before)
    hook.remove()
    assert torch.equal(token_logprobs(head, hidden, Chosen(chosen))[0], before)


PROGRAM = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from agentlightning.policy.update.forward import Chosen, logprobs_from_logits
from agentlightning.policy.update.forward import OutputHead, token_logprobs
torch.set_num_threads(1)
config = LlamaConfig(vocab_size=32768, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                     num_attention_heads=2, num_key_value_heads=2)
model = LlamaForCausalLM(config)
head = OutputHead(model)
hidden = torch.randn(4096, 16, requires_grad=True)
chosen, temperatures = torch.zeros(4096, dtype=torch.long), torch.ones(4096)

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])

open("/proc/self/clear_refs", "w").write("5")  # forget the peak of the imports
before = peak()
logprobs, entropy = {call}
(logprobs + entropy).sum().backward()
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures resident memory as Linux counts it")
def test_memory_is_that_of_a_chunk_and_not_of_all_positions() -> None:
    def peak(call: str) -> int:
        program = PROGRAM.replace("{call}", call)
        return int(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout) * 1024

    all_logits, chunk = 4096 * 32768 * 4, forward.CHUNK_LOGITS * 4
    assert peak("logprobs_from_logits(head(hidden), Chosen(chosen, temperatures, True))") > all_logits
    assert peak("token_logprobs(head, hidden, Chosen(chosen, temperatures, True))") < 1.25 * chunk
