"""Parts of other distributions, found by their entry points."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentlightning.errors import ConfigError, MissingExtraError
from agentlightning.util import plugins
from agentlightning.util.plugins import load_plugin, plugin_names


def install(folder: Path, distribution: str, entry: str, code: str = "class Part: ...") -> None:
    """A distribution with one module `NAME_part`, as pip leaves it in a directory of `sys.path`."""
    module = f"{distribution}_part"
    (folder / f"{module}.py").write_text(code)
    about = folder / f"{distribution}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[agentlightning.commands]\n{entry} = {module}:Part\n")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_part_of_another_distribution_is_found_by_its_name(folder: Path) -> None:
    install(folder, "found", "own")
    assert "own" in plugin_names("commands")
    assert load_plugin("commands", "own") is sys.modules["found_part"].Part


def test_two_distributions_of_one_name_are_both_named(folder: Path) -> None:
    install(folder, "first", "twice")
    install(folder, "second", "twice")
    with pytest.raises(ConfigError, match=r"(?s)first_part:Part of first.*second_part:Part of second|second.*first"):
        load_plugin("commands", "twice")


@pytest.mark.parametrize("code", ["import no_such_module", "Other = 1"], ids=["does not import", "has no such class"])
def test_a_part_that_cannot_be_loaded_names_its_place_and_leaves_the_other_verbs(folder: Path, code: str) -> None:
    from agentlightning.cli.main import build

    install(folder, "broken", "broken", code)
    with pytest.raises(ConfigError, match="broken_part:Part"):
        load_plugin("commands", "broken")
    result = CliRunner().invoke(build(), ["broken", "--any", "argument"])
    assert (result.exit_code, "broken_part:Part" in result.stderr) == (2, True), result.output
    assert CliRunner().invoke(build(), ["serve", "--help"]).exit_code == 0
    sys.modules.pop("broken_part", None)


def test_what_is_not_installed_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentlightning.cli.main import build

    with pytest.raises(MissingExtraError, match=r"pip install \./plugins/absent"):
        load_plugin("backends", "absent")
    entry_points = plugins.entry_points
    monkeypatch.setattr(plugins, "entry_points", lambda **given: entry_points(**{**given, "group": "nothing"}))
    result = CliRunner().invoke(build(), ["weights", "pull", "file:///x", "y", "--follow"])
    assert (result.exit_code, "pip install ./plugins/weights" in result.stderr) == (2, True), result.output
    result = CliRunner().invoke(build(), ["serve", "--port", "0", "--db", ":memory:", "--tinker", "x=nowhere"])
    assert (result.exit_code, "pip install ./plugins/tinker" in result.stderr) == (2, True), result.output
