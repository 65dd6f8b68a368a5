"""`agl init` makes a folder that works as it is, for each kind of agent, and never overwrites."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentlightning.cli.main import build
from agentlightning.cli.start import INSTRUCTIONS, KINDS

pytestmark = pytest.mark.integration

AGL = str(Path(sys.executable).parent / "agl")
FILES = {"agent.py", "reward.py", "tasks.jsonl", "demonstrations.jsonl", "agl.toml", "README.md"}
SHORT = (
    "warm_start.steps=8",
    "algorithm.steps=1",
    "algorithm.optimizer.warmup_steps=0",
    "evaluation.every=0",
    "evaluation.held_out_tasks=4",
)


def init(*arguments: str):
    return CliRunner().invoke(build(), ["init", *arguments])


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_has_everything_that_training_needs(kind, tmp_path, monkeypatch):
    done = init(str(tmp_path / "mine"), "--kind", kind, "--json")
    found = json.loads(done.stdout)
    assert (
        {Path(each).name for each in found["files"]} == FILES == {each.name for each in (tmp_path / "mine").iterdir()}
    )
    monkeypatch.chdir(tmp_path / "mine")
    printed = CliRunner().invoke(build(), ["train", "--print-config"])
    assert printed.exit_code == 0, printed.output
    settings = tomllib.loads(printed.stdout)
    assert (settings["agent"], settings["reward"]) == (KINDS[kind].agent, "reward.py:score")
    assert settings["runner"]["hide"] == ["team"]
    compile(Path("agent.py").read_text(), "agent.py", "exec")
    subprocess.run([str(Path(AGL).parent / "ruff"), "check", "--isolated", "."], check=True)


def test_the_model_is_told_the_same_in_the_demonstrations_as_by_the_agent(tmp_path):
    for kind in KINDS:
        init(str(tmp_path / kind), "--kind", kind)
        assert INSTRUCTIONS in (tmp_path / kind / "agent.py").read_text()
    tasks, shown = (lines(tmp_path / "function" / name) for name in ("tasks.jsonl", "demonstrations.jsonl"))
    assert {each["messages"][0]["content"] for each in shown} == {INSTRUCTIONS}
    assert not {each["message"] for each in tasks} & {each["messages"][1]["content"] for each in shown}
    assert len({each["message"] for each in tasks}) == len(tasks) == 200


def test_nothing_is_overwritten_and_nothing_is_written_beside_it(tmp_path):
    (tmp_path / "reward.py").write_text("mine = 1\n")
    done = init(str(tmp_path), "--kind", "function")
    assert done.exit_code == 2
    assert "has reward.py already, and nothing is overwritten" in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["reward.py"]
    assert (tmp_path / "reward.py").read_text() == "mine = 1\n"


def test_without_a_terminal_the_kind_must_be_given(tmp_path):
    done = init(str(tmp_path / "mine"))
    assert done.exit_code == 2
    assert "--kind function|command|langgraph|openai-agents" in done.stderr
    assert not (tmp_path / "mine").exists()


def test_on_a_terminal_the_kind_is_asked_for(tmp_path):
    ours, theirs = pty.openpty()
    process = subprocess.Popen([AGL, "init", "mine"], cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.write(ours, b"2\n")
    assert process.wait(60) == 0
    os.close(ours)
    assert 'agent = "python3 agent.py"' in (tmp_path / "mine" / "agl.toml").read_text()


def agl(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [AGL, "train", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_folder_ends_when_it_has_learned_and_does_not_warn_against_itself(tmp_path):
    assert init(str(tmp_path), "--kind", "function").exit_code == 0
    trained = agl(tmp_path, "--run", "runs/first", "--json")
    assert trained.returncode == 0, trained.stderr
    result = json.loads(trained.stdout.splitlines()[-1])
    assert result["warnings"] == []
    assert result["held_out"]["greedy"]["after"] > 0.8
    assert result["held_out"]["greedy"]["interval"][0] > 0.2
    examined = subprocess.run([AGL, "doctor"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (examined.returncode, examined.stderr) == (0, "run: runs/first, the newest\n"), examined.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_passes_its_dry_run_and_trains(kind, tmp_path):
    if missing := KINDS[kind].missing:
        pytest.skip(f"{', '.join(missing)} is not installed here")
    assert init(str(tmp_path), "--kind", kind).exit_code == 0
    checked = agl(tmp_path, "--dry-run", "--json")
    assert checked.returncode == 0, checked.stderr
    found = json.loads(checked.stdout.splitlines()[-1])
    assert {each["name"]: each["outcome"] for each in found["checks"] if each["name"] != "reward"} == dict.fromkeys(
        ("tasks", "agent", "model", "rollouts", "calls", "tokens"), "ok"
    )
    assert [each["policy_calls"] for each in found["rollouts"]] == [1] * 8
    assert sorted(each.name for each in tmp_path.iterdir() if not each.name.startswith("__")) == sorted(FILES)
    trained = agl(tmp_path, "--run", "run", "--json", *SHORT)
    assert trained.returncode == 0, trained.stderr
    result = json.loads(trained.stdout.splitlines()[-1])
    assert (result["steps"], result["failed_rollouts"], result["rejected_rollouts"]) == (1, 0, {})
