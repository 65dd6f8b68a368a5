"""Parts of other distributions, found by their entry points."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentlightning.errors import ConfigError, MissingExtraError
from agentlightning.policy.losses import LOSSES, token_losses
from agentlightning.util import plugins
from agentlightning.util.plugins import load_plugin, plugin_names


def install(folder: Path, distribution: str, entry: str, code: str = "class Part: ...", kind: str = "commands") -> None:
    """A distribution with one module `NAME_part`, as pip leaves it in a directory of `sys.path`."""
    module = f"{distribution}_part"
    (folder / f"{module}.py").write_text(code)
    about = folder / f"{distribution}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[agentlightning.{kind}]\n{entry} = {module}:Part\n")


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
    with pytest.raises(ConfigError, match=r"first_part:Part of first \(.*first_part.py\).*second_part|second.*first"):
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
    result = CliRunner().invoke(build(), ["serve", "--port", "0", "--store", ":memory:", "--tinker", "x=nowhere"])
    assert (result.exit_code, "pip install ./plugins/tinker" in result.stderr) == (2, True), result.output


LOSS = """
from agentlightning.policy.losses import LossValue, TokenLoss

class Part(TokenLoss):
    needs = frozenset()
    beta: float = 0.5

    def __call__(self, tokens):
        return LossValue(-(tokens.weights * tokens.trained_logprobs).sum(), {})
"""


def test_what_a_distribution_announces_is_known_by_its_name(folder: Path) -> None:
    install(folder, "announced", "mine", LOSS, "losses")
    assert {"mine", "ppo"} <= {*LOSSES.names()}
    (found,) = token_losses({"type": "mine", "beta": 0.25})
    assert (type(found), found.type, dict(found)["beta"]) == (sys.modules["announced_part"].Part, "mine", 0.25)
    assert token_losses(found) == (found,), "its name brings it back"
    with pytest.raises(ConfigError, match="there is no loss 'mind'; did you mean 'mine'"):
        token_losses("mind")


def test_two_announced_losses_of_one_name_and_one_that_is_none_name_their_files(folder: Path) -> None:
    for distribution in ("one", "other"):
        install(folder, distribution, "same", LOSS, "losses")
    with pytest.raises(
        ConfigError, match=r"'same' in agentlightning.losses: .*(one_part.py.*other_part.py|other.*one)"
    ):
        token_losses("same")
    install(folder, "wrong", "wrong", kind="losses")
    with pytest.raises(ConfigError, match=r"wrong_part:Part \(.*wrong_part.py\) is no loss; it should be a subclass"):
        token_losses("wrong")


def test_a_name_of_this_package_stays_its_own(folder: Path) -> None:
    install(folder, "shadow", "ppo", LOSS, "losses")
    assert type(token_losses("ppo")[0]) is LOSSES["ppo"]


def test_files_of_one_name_in_three_folders_are_three_modules(tmp_path: Path) -> None:
    found: list[str] = []
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own_loss_of_three.py").write_text(f"class Mine:\n    folder = {folder!r}\n")
        found.append(plugins.load(f"{tmp_path}/{folder}/own_loss_of_three.py:Mine").folder)
    assert found == ["a", "b", "c"]


def test_env_names_every_kind_that_is_installed(folder: Path) -> None:
    from agentlightning.cli.main import build

    install(folder, "routes", "lab", "def Part(): ...", "server_routes")
    install(folder, "unloadable", "lab", "import no_such_module", "publishers")
    result = CliRunner().invoke(build(), ["env"])
    lines = [line for line in result.output.splitlines() if "lab" in line]
    assert any(line.startswith("extension  server_routes  lab  routes_part:Part") for line in lines), result.output
    assert (result.exit_code, "unloadable_part.py" in result.output.replace("\n", "")) == (1, True), result.output


def test_a_decorated_function_is_named_with_the_file_that_it_stands_in() -> None:
    @contextmanager
    def routes() -> Generator[None]:
        yield

    assert plugins.described(routes).endswith(f"({__file__})")


def test_a_module_is_found_without_importing_the_packages_that_it_is_in(folder: Path) -> None:
    below = folder / "fails_to_import" / "below"
    below.mkdir(parents=True)
    (folder / "fails_to_import" / "__init__.py").write_text("raise LookupError('no key')")
    (below / "part.py").touch()
    assert plugins.file_of("fails_to_import.below.part:Part") == str(below / "part.py")
    assert plugins.file_of("fails_to_import.part:Part") is None
    for name in ("", ".part", "a b", "fails_to_import.py", "json.decoder.py"):
        assert plugins.find_module(name) is None
