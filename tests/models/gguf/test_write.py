"""GGUF files that are written are those that were read, and llama.cpp's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.models.gguf.checkpoints import CONFIGS, TEXTS, small_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentlightning.errors import PolicyError
from agentlightning.models.gguf import PRE_TOKENIZERS, convert, write_gguf
from agentlightning.models.resolve import resolve_model
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


LLAMA_CPP = """
import json, sys
from llama_cpp import Llama
texts, prompt = map(json.loads, sys.argv[2:])
model = Llama(sys.argv[1], n_ctx=256, verbose=False, n_threads=1)
tokens = [model.tokenize(text.encode(), add_bos=False, special=True) for text in texts]
answer = [token for token, _ in zip(model.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0), range(20))]
print(json.dumps([tokens, answer]))
"""


def _llama_cpp(path: Path, texts: list[str], prompt: list[int]) -> tuple[list[list[int]], list[int]]:
    """The tokens of texts and the greedy answer of llama.cpp, in the environment of LLAMA_CPP_PYTHON."""
    python = os.environ.get("LLAMA_CPP_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import llama_cpp"], capture_output=True, check=False).returncode:
        pytest.skip("llama-cpp-python is not installed; LLAMA_CPP_PYTHON names a Python that has it")
    command = [python, "-c", LLAMA_CPP, str(path), json.dumps(texts), json.dumps(prompt)]
    tokens, answer = json.loads(subprocess.run(command, capture_output=True, check=True).stdout.splitlines()[-1])
    return tokens, answer


@pytest.mark.slow
@pytest.mark.parametrize("family", list(CONFIGS))
@pytest.mark.parametrize("words", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
def test_llama_cpp_reads_texts_and_answers_alike(tmp_path: Path, family: str, words: str) -> None:
    saved = small_checkpoint(tmp_path / "saved", family, words)
    write_gguf(saved, tmp_path / "out.gguf", "f32")
    texts = [*TEXTS[:4], "<|im_start|>user\n12345  678<|im_end|>\n", "a\r\n\r\nb  \n", "  x=3.14e-10;", "don't WE'VE"]
    tokenizer, model = AutoTokenizer.from_pretrained(saved), AutoModelForCausalLM.from_pretrained(saved)
    prompt = tokenizer.encode("<|im_start|>user\nTom's 3 apples<|im_end|>\n")
    tokens, answer = _llama_cpp(tmp_path / "out.gguf", texts, prompt)
    assert tokens == [tokenizer.encode(text) for text in texts]
    found = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=-1)
    assert found[0, len(prompt) :].tolist() == answer


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_llama_cpp_answers_as_smollm2_does(tmp_path: Path) -> None:
    directory = Path(resolve_model("smollm2-135m"))
    write_gguf(directory, tmp_path / "out.gguf", "f16")
    tokenizer, model = AutoTokenizer.from_pretrained(directory), AutoModelForCausalLM.from_pretrained(directory)
    turn = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
    texts = [*TEXTS[:4], "<|im_start|>user\n12345  678<|im_end|>\n"]
    tokens, answer = _llama_cpp(tmp_path / "out.gguf", texts, prompt)
    assert tokens == [tokenizer.encode(text) for text in texts]
    found = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :].tolist()
    assert found == answer[: len(found)]
