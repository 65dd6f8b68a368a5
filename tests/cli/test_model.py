"""`agl model`, and `agl export --to gguf`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.models.gguf.checkpoints import small_checkpoint

from agentlightning.models.gguf import write_gguf
from agentlightning.models.resolve import CACHE


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    write_gguf(small_checkpoint(tmp_path / "saved"), tmp_path / "small.gguf", "f16")
    return tmp_path / "small.gguf"


def test_a_model_is_fetched_and_its_directory_printed(invoke, gguf: Path) -> None:
    found = json.loads(invoke("model", "get", str(gguf), "--json").stdout.splitlines()[-1])
    assert found["name"] == str(gguf)
    assert (Path(found["directory"]) / "config.json").is_file()
    assert invoke("model", "get", str(gguf)).stdout.strip() == found["directory"]


@pytest.mark.parametrize(("name", "says"), [("./none", "./none is no directory"), ("tiny", "nothing to get")])
def test_what_cannot_be_fetched_is_named(invoke, name: str, says: str) -> None:
    result = invoke("model", "get", name)
    assert result.exit_code == 2
    assert says in result.stderr


def test_a_run_is_exported_as_one_file(invoke, gguf: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "saved").rename(run / "checkpoint")
    (run / "state.json").write_text("{}")
    command = ("export", str(run), "--to", "gguf", "--out", str(tmp_path / "out.gguf"))
    result = invoke(*command, "--precision", "q8_0", "--json")
    assert json.loads(result.stdout.splitlines()[-1])["files"] == ["out.gguf"]
    assert (tmp_path / "out.gguf").stat().st_size < gguf.stat().st_size
    assert "--overwrite" in invoke(*command).stderr
    said = invoke(*command, "--overwrite").stdout.splitlines()
    assert [line.partition(":")[0] for line in said[:-1]] == ["path", "files", "merged"]
    assert said[-1] == f"next  agl serve --allow-unattributed --model {tmp_path / 'out.gguf'}"
    refused = invoke("export", str(run), "--to", "hf", "--precision", "f32")
    assert "--precision is that of a GGUF file" in refused.stderr
