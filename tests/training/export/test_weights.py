"""The weights of a run as a directory for other programs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load
from tests.models.gguf.checkpoints import small_checkpoint

from agentlightning.errors import ConfigError
from agentlightning.models.gguf import convert, write_gguf
from agentlightning.models.resolve import CACHE
from agentlightning.policy.config import LocalPolicyConfig, Lora
from agentlightning.policy.local import LocalPolicy
from agentlightning.training.export import export_weights

FILES = {"config.json": "{}", "model.safetensors": "", "tokenizer.json": "{}"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run" / "checkpoint").mkdir(parents=True)
    (tmp_path / "run" / "state.json").write_text("{}")
    for name, content in FILES.items():
        (tmp_path / "run" / "checkpoint" / name).write_text(content)
    return tmp_path / "run"


@pytest.mark.parametrize("form", ["hf", "gguf-ready"])
def test_a_checkpoint_is_copied_whole(run: Path, tmp_path: Path, form: str) -> None:
    found = export_weights(run, form, tmp_path / "out")  # type: ignore[arg-type]
    assert set(found.files) == set(FILES)
    assert not found.merged


@pytest.mark.parametrize(
    ("missing", "says"), [("tokenizer.json", "tokenizer.model"), ("model.safetensors", "safetensors")]
)
def test_what_the_converter_needs_is_checked(run: Path, tmp_path: Path, missing: str, says: str) -> None:
    (run / "checkpoint" / missing).unlink()
    with pytest.raises(ConfigError, match=says):
        export_weights(run, "gguf-ready", tmp_path / "out")


def test_contents_are_not_overwritten(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(ConfigError, match="has contents"):
        export_weights(run, "hf", tmp_path / "out")


def test_a_run_without_weights_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        export_weights(tmp_path, "hf", tmp_path / "out")
    (run / "checkpoint" / "config.json").unlink()
    with pytest.raises(ConfigError, match="holds no weights"):
        export_weights(run, "hf", tmp_path / "out")


async def test_an_adapter_over_a_gguf_file_is_exported_as_one(run: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    write_gguf(small_checkpoint(tmp_path / "saved"), tmp_path / "base.gguf", "f32")
    policy = LocalPolicy.open(LocalPolicyConfig(model=str(tmp_path / "base.gguf"), lora=Lora(r=2)))
    for part in (run / "checkpoint").iterdir():
        part.unlink()
    (run / "checkpoint").rmdir()
    await policy.save(run / "checkpoint")
    await policy.close()
    found = export_weights(run, "gguf", tmp_path / "out.gguf", "f32")
    assert (found.files, found.merged) == (("out.gguf",), True)
    convert(tmp_path / "out.gguf", tmp_path / "read")
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("saved", "read"))
    assert load(one).keys() == load(two).keys()
    for name, weight in load(one).items():  # A new adapter changes nothing.
        torch.testing.assert_close(weight, load(two)[name], msg=name)
