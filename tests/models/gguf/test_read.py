"""GGUF files of others: converted whole, or refused by name."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from tests.models.gguf.checkpoints import small_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentlightning.errors import AgentLightningError, PolicyError
from agentlightning.models.gguf import convert, write_gguf
from agentlightning.models.resolve import resolve_model
from agentlightning.policy.config import LocalPolicyConfig
from agentlightning.policy.local import LocalPolicy


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(small_checkpoint(folder / "saved"), folder / "small.gguf", "f32")
    return folder / "small.gguf"


def test_a_file_cut_anywhere_is_refused(gguf: Path, tmp_path: Path) -> None:
    content = gguf.read_bytes()
    for share in (0.0, 0.0001, 0.01, 0.03, 0.5, 0.999):
        (tmp_path / "cut.gguf").write_bytes(content[: int(share * len(content))])
        with pytest.raises(PolicyError, match=r"cut\.gguf .*fetch it again"):
            convert(tmp_path / "cut.gguf", tmp_path / "read")
    assert [each.name for each in tmp_path.iterdir()] == ["cut.gguf"]


def test_what_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("no model" * 1000)
    with pytest.raises(PolicyError, match="cannot be read as a GGUF file"):
        convert(tmp_path / "text.gguf", tmp_path / "read")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"family": "mamba9"}, "architecture 'mamba9', not read from GGUF .llama, "),
        ({"pre": "made-up"}, "tokenizer .gpt2, made-up. that transformers would read wrongly"),
        ({"model": "bert"}, "tokenizer .bert, gpt-2."),
        ({"scaling": "yarn"}, "scales its positions .yarn."),
        ({"tensor": "rope_factors_long.weight"}, "scales its positions .rope_factors_long.weight."),
    ],
)
def test_what_would_be_read_wrongly_is_refused_by_name(tmp_path: Path, changes: dict[str, str], says: str) -> None:
    path = tmp_path / "other.gguf"
    writer = GGUFWriter(path, changes.get("family", "llama"))
    writer.add_tokenizer_model(changes.get("model", "gpt2"))
    writer.add_tokenizer_pre(changes.get("pre", "gpt-2"))
    writer.add_string("llama.rope.scaling.type", changes.get("scaling", "none"))
    writer.add_tensor(changes.get("tensor", "token_embd.weight"), torch.ones(32, 2).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(PolicyError, match=says):
        convert(path, tmp_path / "read")


def test_a_file_that_lacks_weights_is_refused(gguf: Path, tmp_path: Path) -> None:
    content = gguf.read_bytes()
    assert content.count(b"blk.1.ffn_down.weight") == 1
    (tmp_path / "lacks.gguf").write_bytes(content.replace(b"blk.1.ffn_down.weight", b"blk.1.ffn_xxxx.weight"))
    with pytest.raises(PolicyError, match=r"lacks 1 weights of its model, such as model\.layers\.1\.mlp\.down_proj"):
        convert(tmp_path / "lacks.gguf", tmp_path / "read")


def test_a_full_disk_leaves_nothing(gguf: Path, tmp_path: Path) -> None:
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(PolicyError, match="free space"):
            convert(gguf, tmp_path / "read")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())
    convert(gguf, tmp_path / "read")
    assert (tmp_path / "read" / "config.json").exists()


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 99999999999 }}",
        "{{ messages.__class__.__mro__ }}",
    ],
    ids=["an endless loop", "a huge text", "a way out of the sandbox"],
)
@pytest.mark.timeout(60)
def test_a_hostile_chat_template_is_stopped(tmp_path: Path, template: str) -> None:
    saved = small_checkpoint(tmp_path / "saved", template=template)
    write_gguf(saved, tmp_path / "hostile.gguf", "f16")
    convert(tmp_path / "hostile.gguf", tmp_path / "read")
    with pytest.raises(AgentLightningError, match="template"):
        LocalPolicy.open(LocalPolicyConfig(model=tmp_path / "read"))


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_smollm2_of_the_package_index_is_itself() -> None:
    directory = Path(resolve_model("smollm2-135m"))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    turn = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert tokenizer.decode(prompt.input_ids[0]).startswith("<|im_start|>system\nYou are a helpful AI assistant named")
    # What the published tokenizer gives.
    assert tokenizer.encode("Hello world 1234") == [19556, 905, 216, 33, 34, 35, 36]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt.input_ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
