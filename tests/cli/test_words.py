"""What the program calls things: verbs in groups with examples that work, one name for each idea, earlier names too."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from agentlightning.cli.main import EARLIER, GROUPS, build
from agentlightning.config import TrainConfig
from agentlightning.util.settings import load_settings

AGL = str(Path(sys.executable).parent / "agl")


def verbs() -> Iterator[tuple[str, Any]]:
    """Each verb with its name below `agl`."""
    program: Any = get_command(build())
    for name in program.commands:
        loaded = program.load(name)
        below = getattr(loaded, "commands", {"": loaded})
        yield from ((f"{name} {each}".strip(), verb) for each, verb in below.items())


VERBS = dict(verbs())
OWN = [name for name in VERBS if name.split()[0] != "weights"]


def parsed(line: str) -> dict[str, Any]:
    """The parameters of a command line, none of which is run. Raises UsageError for what the program does not know."""
    words = [word for word in shlex.split(line) if "=" not in word or not word.startswith("AGL_")][1:]
    name = words[0] if words[0] in VERBS else " ".join(words[:2])
    return VERBS[name].make_context(name, words[len(name.split()) :]).params


def help_of(*words: str) -> str:
    done = CliRunner().invoke(build(), [*words, "--help"])
    assert done.exit_code == 0, done.output
    return done.stdout


# -- help --------------------------------------------------------------------------------------------------------------


def test_the_help_shows_every_verb_in_its_group_with_a_whole_sentence() -> None:
    shown = help_of()
    places = [shown.index(f"\n{title}:\n") for title in ("Train", "Measure", "Look", "Serve", "Move")]
    assert places == sorted(places)
    for title, names in GROUPS.items():
        block = shown[shown.index(f"\n{title}:\n") :].split("\n\n")[0]
        assert set(re.findall(r"^  (\w+) ", block, re.MULTILINE)) | {"weights"} == {*names, "weights"}
    assert "..." not in shown.partition("Options:")[2]


def test_the_help_imports_no_verb_and_nothing_that_is_slow() -> None:
    program = """
import sys
from agentlightning.cli.main import build
try:
    build()(["--help"])
except SystemExit:
    own = {name for name in sys.modules if name.startswith("agentlightning.")}
    slow = {"pydantic", "httpx", "torch", "opentelemetry"} & sys.modules.keys()
    print(slow | {name for name in own if name.startswith("agentlightning.cli.train")})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr


@pytest.mark.parametrize("name", OWN)
def test_every_verb_has_two_examples_that_the_program_understands(name: str) -> None:
    examples = re.findall(r"^  (?:\w+=\S+ )?(agl .+)$", VERBS[name].help.partition("Examples:")[2], re.MULTILINE)
    assert len(examples) >= 2
    for example in examples:
        assert f"agl {name}" in example
        if "runs/*" not in example:
            parsed(example)


@pytest.mark.parametrize("name", VERBS)
def test_every_option_says_what_it_is(name: str) -> None:
    assert not [each.name for each in VERBS[name].params if not each.help and not each.hidden]
    assert not re.search(r"^\w+: ", VERBS[name].help, re.MULTILINE)


def test_the_help_of_training_names_settings_that_exist() -> None:
    shown = help_of("train")
    for words in ("learning rate", "group_size", "LoRA", "All settings with their meaning: agl train --print-config"):
        assert words in shown
    given = re.findall(r"^    ([a-z_.]+=\S+)  ", shown, re.MULTILINE)
    assert len(given) >= 6
    load_settings(TrainConfig, overrides=given)


def test_the_help_of_training_names_installed_extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"commands": ["mine"], "losses": ["loss_of_mine", "another"]}
    monkeypatch.setattr("agentlightning.cli.main.installed", lambda: found)
    shown = help_of("train").partition("Installed extensions (agl env says more):")[2].split()
    assert shown == ["losses", "loss_of_mine,", "another"]
    assert "Installed extensions" not in help_of("eval")


# -- completion --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "found"), [("agl st", {"status", "store"}), ("agl train --da", {"--data"}), ("agl store pr", {"prune"})]
)
def test_a_shell_completes_verbs_and_options(line: str, found: set[str]) -> None:
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1), "_AGL_COMPLETE": "complete_bash"}
    done = subprocess.run([AGL], env={**os.environ, **words}, capture_output=True, text=True, timeout=60)
    assert set(done.stdout.split()) == found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_program_prints_the_completion_of_a_shell(shell: str) -> None:
    environment = {**os.environ, "_AGL_COMPLETE": f"source_{shell}"}
    done = subprocess.run([AGL], env=environment, capture_output=True, text=True, timeout=60)
    assert "_AGL_COMPLETE" in done.stdout


# -- one word for each idea --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "before"),
    [
        ("agl serve --store hub.db", "agl serve --db hub.db"),
        ("agl run --store calls.db -- true --db x", "agl run --db calls.db -- true --db x"),
        ("agl train --data t.jsonl --run runs/a", "agl train --dataset t.jsonl --run-dir runs/a"),
        ("agl train --data=t.jsonl --run=runs/a", "agl train --dataset=t.jsonl --run-dir=runs/a"),
        ("agl eval --data t.jsonl", "agl eval --dataset t.jsonl"),
        ("agl demo --run runs/a", "agl demo --run-dir runs/a"),
        ("agl sft --data t --out m --run r --model tiny", "agl sft --dataset t --output m --run-dir r --model tiny"),
        ("agl dpo --data p --run r", "agl dpo --data p --run-dir r"),
        ("agl runner --variable A=b --variable C=d", "agl runner --env A=b --env C=d"),
        ("agl export r --target-agent writer", "agl export r --agent writer"),
    ],
)
def test_the_earlier_name_of_an_option_works_and_is_said_to_have_a_new_one(
    now: str, before: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parsed(now) == parsed(before)
    renamed = [line for line in capsys.readouterr().err.splitlines() if line]
    earlier = {old: new for old, new in EARLIER.items() if f" {old} " in before or f" {old}=" in before}
    used = {old: new for old, new in earlier.items() if f" {new}" in now.partition(" -- ")[0]}
    assert set(renamed) == {f"{old} is called {new} now" for old, new in used.items()}


def test_the_options_of_a_command_that_is_run_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("agl run -- tool --db x --env y", "agl run tool --db x", "agl run -- tool --store x --server y"):
        assert parsed(line)["store"] is None
    assert parsed("agl run --store a -- prog --server b --store c")["store"] == "a"
    assert parsed("agl run --store a prog --server b --db c")["store"] == "a"
    assert capsys.readouterr().err == ""


def test_a_value_that_is_spelt_as_an_option_is_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed("agl rescore --store a --task --server --reward r.py:f")["task"] == "--server"
    assert parsed("agl store export --store a --queue --db -- --server")["queues"] == ["--db"]
    assert capsys.readouterr().err == ""


def test_a_store_is_named_by_its_place_also_on_a_server() -> None:
    for verb in ("store stats", "store vacuum", "rescore --reward r.py:f"):
        assert parsed(f"agl {verb} --server http://hub:4747")["store"] == "http://hub:4747"
        both = CliRunner().invoke(build(), f"{verb} --server http://hub:4747 --store=a.db".split())
        assert (both.exit_code, "--server and --store name the same; give only one of them" in both.output) == (2, True)


def test_an_option_is_not_given_by_two_of_its_names() -> None:
    both = CliRunner().invoke(build(), ["run", "--store", "a.db", "--db", "b.db", "--", "true"])
    assert (both.exit_code, "--db and --store name the same; give only one of them" in both.output) == (2, True)
    assert parsed("agl runner --variable A=b --env C=d")["variables"] == ["A=b", "C=d"]


def test_every_verb_that_reads_the_store_of_a_server_takes_its_token() -> None:
    for name in OWN:
        if any("--server" in each.opts for each in VERBS[name].params):
            assert any("--token" in each.opts for each in VERBS[name].params), name


def test_no_help_shows_an_earlier_name_and_no_option_has_two_meanings() -> None:
    options = {name: {opt: each.help for each in verb.params for opt in each.opts} for name, verb in VERBS.items()}
    for name in OWN:
        assert not {"--db", "--dataset", "--output", "--run-dir"} & options[name].keys()
    assert {name for name in OWN if "--env" in options[name]} == {"train", "eval"}
    assert {name for name in OWN if "--agent" in options[name]} == {"train", "eval", "runner"}
    assert len({options[name]["--env"] for name in ("train", "eval")}) == 1


@pytest.mark.parametrize("typed", ["--lr=1e-5", "--steps=3", "--group-size=4"])
def test_a_setting_that_is_given_as_an_option_leads_to_how_settings_are_written(typed: str) -> None:
    done = CliRunner().invoke(build(), ["train", typed])
    assert done.exit_code == 2
    assert "settings have no dashes and their full names, as in algorithm.steps=50" in done.output
    assert "settings have" not in CliRunner().invoke(build(), ["report", typed]).output
