"""The skill for coding agents, followed literally in the repository of an agent that somebody else has made."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from tests.skills.triage import make_data
from typer.main import get_command

from agentlightning.cli.main import build
from agentlightning.config import TrainConfig
from agentlightning.util.settings import load_settings

pytestmark = pytest.mark.integration

SKILL = Path(__file__).parents[2] / "skills" / "agentlightning" / "SKILL.md"
FENCE = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```", re.MULTILINE | re.DOTALL)
SLOW = ("--dry-run", "agl run", "agl sft", "agl eval", "agl train --json", "agl doctor", "agl report", "agl store")
"""Blocks with a model, and those that read what these have made."""


class Block(NamedTuple):
    language: str
    file: str
    body: str


def blocks() -> list[Block]:
    return [Block(*found) for found in FENCE.findall(SKILL.read_text())]


def commands() -> list[list[str]]:
    """The words of each `agl` command, without those of the shell and of the command that `agl run` runs."""
    lines = [line for block in blocks() for line in block.body.splitlines() if line.startswith("agl ")]
    found = []
    for line in lines:
        words = shlex.split(line.partition(" > ")[0].partition(" || ")[0])[1:]
        found.append(words[: words.index("--")] if "--" in words else words)
    return found


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    agent = Path(__file__).with_name("triage") / "agent.py"
    shutil.copy(agent, tmp_path)
    (instructions,) = re.findall(r'INSTRUCTIONS = "(.*)"', agent.read_text())
    make_data.write(tmp_path, instructions)
    return tmp_path


def follow(block: Block, folder: Path) -> str:
    """What a block prints."""
    if block.file:
        (folder / block.file).write_text(block.body)
        return ""
    assert block.language == "bash", block.language
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {"PATH": path, "HOME": str(folder), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.body], cwd=folder, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{block.body}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def result(printed: str) -> dict[str, Any]:
    """What the first command of a block printed."""
    return json.loads(next(line for line in printed.splitlines() if line.startswith("{")))


def test_the_skill_has_what_loaders_read() -> None:
    front = yaml.safe_load(SKILL.read_text().split("---\n")[1])
    assert front["name"] == SKILL.parent.name
    assert 50 < len(front["description"]) < 1024
    assert len(SKILL.read_text().splitlines()) < 500


def test_every_command_and_option_of_the_skill_exists() -> None:
    program: Any = get_command(build())
    assert len(commands()) >= 8
    for words in commands():
        if words == ["--version"]:
            continue
        verb = program.load(words[0])
        if hasattr(verb, "commands"):
            verb = verb.commands[words[1]]
        known = {option for parameter in verb.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, words


def test_the_settings_of_the_skill_exist() -> None:
    given = re.findall(r"`((?:policy|runner|algorithm)\.[\w.]+=[\w.]+)`", SKILL.read_text())
    assert len(given) >= 4
    for setting in given:
        load_settings(TrainConfig, overrides=[setting.replace("=NAME", "=writer")])


def test_the_fast_steps_run_in_the_order_of_the_skill(repository: Path) -> None:
    printed = [follow(each, repository) for each in blocks() if not any(verb in each.body for verb in SLOW)]
    assert "40 test.jsonl" in "".join(printed)
    train, test = ((repository / f"{name}.jsonl").read_text().splitlines() for name in ("train", "test"))
    assert len(set(train) & set(test)) == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_skill_ends_with_a_verified_gain(repository: Path) -> None:
    printed = {each.body.splitlines()[0]: follow(each, repository) for each in blocks()}
    recorded, before, trained, after = (
        result(next(text for line, text in printed.items() if line.startswith(start)))
        for start in ("agl run", "agl eval --json --agent", "agl train --json", "agl eval --json --run")
    )
    checked = result(next(text for line, text in printed.items() if line.endswith("--dry-run --json")))
    assert checked["ready"]
    assert recorded["calls"] == 1
    assert recorded["reward"] is not None
    assert recorded["advice"] == []
    assert before["missing"] == 0
    assert trained["checkpoint"]
    comparison = after["comparison"]
    assert comparison["significant"], comparison
    assert comparison["interval"][0] > 0, comparison
    assert "agentlightning" not in (repository / "agent.py").read_text()
