"""GGUF files that are written are those that were read, and llama.cpp's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from tests.models.gguf.checkpoints import CONFIGS, TEXTS, small_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentlightning.errors import PolicyError
from agentlightning.models.gguf.layout import PRE_TOKENIZERS
from agentlightning.models.gguf.read import convert
from agentlightning.models.gguf.write import write_gguf
from agentlightning.models.tiny import make_tiny


@pytest.mark.parametrize("family", list(CONFIGS))
def test_what_is_written_is_read_again(tmp_path: Path, family: str) -> None:
    saved = small_checkpoint(tmp_path / "saved", family)
    write_gguf(saved, tmp_path / "out.gguf", "f32")
    convert(tmp_path / "out.gguf", tmp_path / "read")
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("saved", "read"))
    assert one.config.rope_parameters == two.config.rope_parameters
    tokens = torch.tensor([[1, *range(5, 40)]])
    torch.testing.assert_close(one(tokens).logits, two(tokens).logits)
    assert two.generation_config.eos_token_id == [2]
    tokenizers = [AutoTokenizer.from_pretrained(tmp_path / name) for name in ("saved", "read")]
    assert len({each.chat_template for each in tokenizers}) == 1
    for name in ("eos_token", "bos_token", "pad_token", "unk_token"):
        assert len({getattr(each, name) for each in tokenizers}) == 1


@pytest.mark.parametrize("words", list(PRE_TOKENIZERS))
def test_every_division_into_words_comes_back(tmp_path: Path, words: str) -> None:
    saved = small_checkpoint(tmp_path / "saved", words=words)
    write_gguf(saved, tmp_path / "out.gguf", "f16")
    convert(tmp_path / "out.gguf", tmp_path / "read")
    one, two = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("saved", "read"))
    for text in (*TEXTS, "<|im_start|>user\n12345  678<|im_end|>\n"):
        assert one.encode(text) == two.encode(text), text


@pytest.mark.parametrize(("precision", "tolerance"), [("f16", 1e-3), ("q8_0", 0.02)])
def test_precisions_keep_the_weights(tmp_path: Path, precision, tolerance: float) -> None:
    saved = small_checkpoint(tmp_path / "saved")
    write_gguf(saved, tmp_path / "out.gguf", precision)
    convert(tmp_path / "out.gguf", tmp_path / "read")
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("saved", "read"))
    for name, weight in one.items():
        assert (weight - two[name]).abs().max() < tolerance, name


def test_what_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    make_tiny(tmp_path / "tiny", ["some text"])
    with pytest.raises(PolicyError, match=r"tokenizer of .*tiny divides text.*gguf-ready"):
        write_gguf(tmp_path / "tiny", tmp_path / "out.gguf", "f16")
    saved = small_checkpoint(tmp_path / "saved")
    settings = json.loads((saved / "config.json").read_text())
    for change, says in (
        ({"model_type": "gpt2"}, "family 'gpt2'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "positions by linear"),
    ):
        (saved / "config.json").write_text(json.dumps(settings | change))
        with pytest.raises(PolicyError, match=says):
            write_gguf(saved, tmp_path / "out.gguf", "f16")
    assert not list(tmp_path.glob("*.gguf"))
    assert not list(tmp_path.glob(".*"))


def test_a_full_disk_leaves_an_older_file(tmp_path: Path) -> None:
    saved = small_checkpoint(tmp_path / "saved")
    (tmp_path / "out.gguf").write_text("older")
    (tmp_path / "readonly").mkdir()
    if os.geteuid() == 0:
        pytest.importorskip("resource")
    import resource
    import signal

    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(PolicyError, match=r"out\.gguf.*free space"):
            write_gguf(saved, tmp_path / "out.gguf", "f32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "out.gguf").read_text() == "older"
    assert not list(tmp_path.glob(".*"))
