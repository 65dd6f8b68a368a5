"""`agl env`: what a report of a fault needs, and no secrets."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest


def test_it_names_versions_extras_machine_devices_paths_and_variables(
    invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = json.loads(invoke("env", "--json").stdout)
    assert found["versions"]["agentlightning"] == version("agentlightning")
    assert {"python", "pydantic", "torch"} <= set(found["versions"])
    assert found["extras"]["train"] == ""
    assert "agentlightning" not in "".join(found["extras"].values())
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["memory_gb"] > 0
    assert found["torch"]["version"] == version("torch")
    assert isinstance(found["torch"]["devices"], list)
    assert found["paths"]["directory"] == str(tmp_path)
    assert (Path(found["paths"]["package"]) / "py.typed").exists()
    text = invoke("env").stdout
    for name in ("versions", "extras", "machine", "torch", "paths", "variables", "extension"):
        assert any(line.startswith(name) for line in text.splitlines()), name


def test_values_of_variables_and_passwords_are_not_printed(invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-hidden")
    monkeypatch.setenv("AGL_STORE", "postgresql://me:hidden@db/agl")
    for arguments in (["env"], ["env", "--json"]):
        text = invoke(*arguments).stdout
        assert "OPENAI_API_KEY" in text
        assert "postgresql://me@db/agl" in text
        assert "hidden" not in text


def test_extensions_are_listed_with_what_is_wrong_with_them(
    invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tmp_path / "lab-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[agentlightning.losses]\nplain = lab_gone:Plain\nppo = pathlib:Path\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    result = invoke("env")
    assert result.exit_code == 1, result.output
    assert "lab_gone:Plain (not found in" in result.stdout.replace("\n", "")
    assert "ppo is a name of this package" in result.stdout.replace("\n", " ")
