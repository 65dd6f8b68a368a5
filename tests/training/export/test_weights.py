"""The weights of a run as a directory for other programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentlightning.errors import ConfigError
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
