"""What adapters promise: they change a model as peft does, whatever rows a batch mixes, and leave its weights alone."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.models import tiny_checkpoint, tiny_model
from transformers import (
    AutoModelForCausalLM,
    CTRLConfig,
    CTRLLMHeadModel,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from agentlightning.errors import ConfigError, PolicyError
from agentlightning.models.lora import WEIGHTS, Adapters, read_adapter_config, read_weights, write_adapter

IDS = torch.arange(4, 16).view(2, 6)


def adapters_of(model: torch.nn.Module, **targets: tuple[str, ...] | None) -> Adapters:
    """Adapters of different ranks and layers, with weights that are not those of a new one."""
    adapters = Adapters(model)
    for number, (name, layers) in enumerate(targets.items()):
        adapter = adapters.add(name, r=2 + number, alpha=8.0, targets=layers)
        with torch.no_grad():
            for up in adapter.up:
                up.normal_(generator=torch.Generator().manual_seed(number))
    return adapters


@torch.no_grad()
def logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids).logits


def test_a_new_adapter_changes_nothing_and_the_weights_of_the_model_never_learn() -> None:
    model = tiny_model()
    expected, names = logits(model, IDS), set(model.state_dict())
    adapters = Adapters(model)
    adapter = adapters.add("writer", r=4, alpha=8.0)
    with adapters.use("writer"):
        torch.testing.assert_close(logits(model, IDS), expected)
        model(input_ids=IDS).logits.sum().backward()
    assert set(model.state_dict()) == names
    assert all(up.grad is not None and up.grad.any() for up in adapter.up)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_batch_may_mix_adapters_and_no_adapter() -> None:
    model = tiny_model()
    adapters = adapters_of(model, writer=None, editor=("q_proj", "down_proj"))
    rows = ("editor", None, "writer", "editor")
    ids = torch.randint(3, 300, (4, 7), generator=torch.Generator().manual_seed(0))
    with adapters.use_rows(rows):
        mixed = logits(model, ids)
    for row, name in enumerate(rows):
        with adapters.use(name):
            torch.testing.assert_close(mixed[row], logits(model, ids[row : row + 1])[0], atol=1e-4, rtol=1e-5)
    assert not torch.allclose(mixed[0], logits(model, ids[:1])[0], atol=0.1), "adapters make a difference"


def test_matrices_that_changed_are_used_at_once() -> None:
    model = tiny_model()
    adapters = adapters_of(model, writer=None, editor=None)
    with adapters.use_rows(("writer", "editor")):
        before = logits(model, IDS)
    with torch.no_grad():
        adapters.by_name["writer"].up[0].zero_()
    with adapters.use_rows(("writer", "editor")):
        after = logits(model, IDS)
    assert not torch.allclose(after[0], before[0], atol=1e-3)
    torch.testing.assert_close(after[1], before[1])


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_peft_and_transformers_load_what_is_saved(architecture: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    base = tiny_checkpoint(tmp_path / "base", architecture)
    model = AutoModelForCausalLM.from_pretrained(base)
    adapters = adapters_of(model, writer=None)
    write_adapter(tmp_path / "adapter", adapters.by_name["writer"], str(base))
    with adapters.use("writer"):
        expected = logits(model, IDS)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded, IDS), expected, atol=1e-4, rtol=1e-5)
    assert not torch.allclose(expected, logits(model, IDS), atol=0.1)


def test_a_saved_adapter_comes_back_exactly_and_only_into_one_of_its_shape(tmp_path: Path) -> None:
    model = tiny_model()
    adapters = adapters_of(model, writer=("q_proj", "v_proj"), other=None)
    adapter = adapters.by_name["writer"]
    write_adapter(tmp_path, adapter, "base")
    config = read_adapter_config(tmp_path)
    assert (config.r, config.target_modules) == (2, ["q_proj", "v_proj"])
    fresh = Adapters(tiny_model()).add("writer", r=2, alpha=8.0, targets=("q_proj", "v_proj"))
    fresh.load_state_dict(read_weights(tmp_path, fresh))
    assert all(torch.equal(own, saved) for own, saved in zip(adapter.parameters(), fresh.parameters(), strict=True))
    with pytest.raises(PolicyError, match="holds another adapter"):
        read_weights(tmp_path, adapters.by_name["other"])
    (tmp_path / WEIGHTS).write_bytes(b"cut")
    with pytest.raises(PolicyError, match=r"adapter_model\.safetensors cannot be read"):
        read_weights(tmp_path, adapter)


UNLIKE_LORA: list[dict[str, object]] = [
    {"use_dora": True},
    {"peft_type": "IA3"},
    {"bias": "all"},
    {"modules_to_save": ["lm_head"]},
    {"rank_pattern": {"q_proj": 4}},
    {"alpha_pattern": {"q_proj": 16.0}},
]


@pytest.mark.parametrize("change", UNLIKE_LORA, ids=lambda change: next(iter(change)))
def test_adapters_that_are_no_plain_lora_are_refused_by_name(change: dict[str, object], tmp_path: Path) -> None:
    adapters = adapters_of(tiny_model(), writer=None)
    write_adapter(tmp_path, adapters.by_name["writer"], "base")
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(PolicyError, match=next(iter(change))):
        read_adapter_config(tmp_path)


def test_an_adapter_as_peft_writes_it_with_everything_at_its_default_is_read(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj"], modules_to_save=[])
    config.save_pretrained(tmp_path)
    assert read_adapter_config(tmp_path).targets == ("q_proj",)


def test_adapters_that_a_model_cannot_have_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"r=4000 of adapter 'writer' exceeds the size of .*use at most"):
        Adapters(tiny_model()).add("writer", r=4000, alpha=8.0)
    with pytest.raises(ConfigError, match=r"no linear layer 'c_attn'; it has .*q_proj"):
        Adapters(tiny_model()).add("writer", r=4, alpha=8.0, targets=("c_attn",))
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has no linear layer that an adapter could change"):
        Adapters(tiny_model("gpt2")).add("writer", r=4, alpha=8.0)


def test_the_same_seed_gives_the_same_adapter_and_names_give_different_ones() -> None:
    first, second = (adapters_of(tiny_model(), writer=None, editor=None) for _ in range(2))
    assert torch.equal(first.by_name["writer"].down[0], second.by_name["writer"].down[0])
    assert not torch.equal(first.by_name["writer"].down[0][:2], first.by_name["editor"].down[0][:2])


def mixture(kind: str) -> PreTrainedModel:
    """A tiny mixture with shared experts, or a model whose layers are called like other modules."""
    shape: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": 8}
    if kind == "qwen2_moe":
        return Qwen2MoeForCausalLM(
            Qwen2MoeConfig(**shape, **experts, num_experts=4, shared_expert_intermediate_size=16, num_key_value_heads=2)
        )
    if kind == "glm4_moe":
        one = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
        return Glm4MoeForCausalLM(Glm4MoeConfig(**shape, **experts, **one, num_key_value_heads=2))
    if kind == "ernie4_5_moe":
        one = {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1}
        return Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(**shape, **experts, **one, num_key_value_heads=2))
    return CTRLLMHeadModel(CTRLConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4, dff=32))


@pytest.mark.parametrize("kind", ["qwen2_moe", "glm4_moe", "ernie4_5_moe", "ctrl"])
def test_peft_loads_all_layers_of_a_mixture_with_shared_experts(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        mixture(kind).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    adapters = Adapters(model)
    adapter = adapters.add("writer", r=2, alpha=8.0)
    with torch.no_grad():
        for up in adapter.up:
            up.normal_(std=0.5, generator=torch.Generator().manual_seed(0))
    assert ("leaves out 2 layers narrower than r=2: shared_expert_gate" in caplog.text) == (kind == "qwen2_moe")
    write_adapter(tmp_path / "adapter", adapter, str(tmp_path / "base"))
    with adapters.use("writer"):
        expected = logits(model, IDS)
    assert not torch.allclose(expected, logits(model, IDS), atol=1e-2)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "adapter"), IDS), expected)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # Of peft and transformers, about one another.
        loaded = peft.PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
        )
    torch.testing.assert_close(logits(loaded.eval(), IDS), expected)
    fresh = Adapters(model).add("again", r=2, alpha=8.0, targets=read_adapter_config(tmp_path / "adapter").targets)
    assert fresh.layers == adapter.layers


def test_a_rank_beyond_most_layers_names_what_they_hold() -> None:
    with pytest.raises(ConfigError, match=r"r=20 .*use at most 16"):
        Adapters(mixture("qwen2_moe")).add("writer", r=20, alpha=8.0)
    with pytest.raises(ConfigError, match=r"shared_expert_gate, which is 1 x 32.*leave such layers out of targets"):
        Adapters(mixture("qwen2_moe")).add("writer", r=2, alpha=8.0, targets=("shared_expert_gate", "q_proj"))
