"""`agl eval`: every option reaches the evaluation, and what it prints is what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentlightning.cli.main import build

AGENT = """
def solve(task):
    if task.get("fails"):
        raise ValueError("no luck")
    return float(task["n"] % 2 == 0)

def better(task):
    return 1.0
"""


def run(*arguments: str, status: int = 0) -> Any:
    done = CliRunner().invoke(build(), ["eval", "--json", *arguments])
    assert done.exit_code == status, done.output
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text(AGENT)
    tasks = [{"n": n, "level": "easy" if n < 8 else "hard", **({"fails": True} if n == 9 else {})} for n in range(10)]
    Path("tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return ["--dataset", "tasks.jsonl"]


@pytest.mark.slow
def test_every_option_reaches_the_evaluation(job: list[str]) -> None:
    options = ["--repeats", "2", "--slice", "level", "--failed", "1", "--cache", "cache", "--concurrency", "2"]
    first = run("--agent", "agent.py:solve", *job, *options, "--out", "first.json")
    assert (first["repeats"], first["missing_rollouts"], first["reasons"]) == (2, 2, {"failed": 2})
    assert first["score"] == 0.6
    assert first["pass_at_k"]["2"] == 0.6
    assert {value: part["tasks"] for value, part in first["slices"]["level"].items()} == {"easy": 8, "hard": 2}
    again = run("--agent", "agent.py:solve", *job, *options, "--compare", "first.json", "--aa")
    assert (again["repeats"], again["cached"]) == (4, 18)
    assert (again["comparison"]["gain"], again["comparison"]["significant"]) == (0.0, False)
    assert (again["aa"]["rollouts"], again["aa"]["difference"], again["aa"]["noise"]) == (2, 0.0, 0.0)
    assert again["aa"]["smallest_gain"] == pytest.approx(0.6)


@pytest.mark.slow
def test_what_people_read_names_the_gain(job: list[str]) -> None:
    run("--agent", "agent.py:solve", *job, "--out", "first.json", "--failed", "0")
    arguments = [*job, "--compare", "first.json", "--failed", "0", "--aa", "--slice", "level"]
    done = CliRunner().invoke(build(), ["eval", "--agent", "agent.py:better", *arguments])
    assert "gain +0.500" in done.output
    assert "5 better, 0 worse" in done.output
    assert "no difference is shown" in done.output
    assert "level=hard: 1.000" in done.output
    assert "the agent against itself: +0.000" in done.output
    assert "pass@2 1.000   pass^2 1.000" in done.output


def test_bounds_reach_the_interval_and_the_file(job: list[str]) -> None:
    found = run("--agent", "agent.py:solve", *job, "--bounds", "0", "100", "--out", "first.json")
    assert found["interval"][1] > 10
    assert json.loads(Path("first.json").read_text())["bounds"] == [0, 100]


def test_tasks_that_were_trained_on_are_refused(job: list[str]) -> None:
    found = run("--agent", "agent.py:solve", *job, "--trained-on", "tasks.jsonl", status=2)
    assert "10 evaluation tasks are training tasks, too: rows 1 (= 1), 2 (= 2)" in found["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--failed", "highest"], "failed='highest' is not"),
        (["--bounds", "1", "0"], "bounds=(1.0, 0.0) are not the lowest and the highest"),
        (["--slice", "colour"], "no task has a field 'colour' to slice by"),
        (["--compare", "missing.json"], "no evaluation can be read from missing.json"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_runs(
    job: list[str], arguments: list[str], complaint: str
) -> None:
    assert complaint in run("--agent", "agent.py:solve", *job, *arguments, status=2)["error"]["message"]
