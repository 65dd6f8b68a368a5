"""A figure of a run is the same wherever it is shown: terminal, --json, report, status, doctor and dashboard."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SETTINGS = (
    "algorithm.steps=2",
    "evaluation.every=1",
    "data.validation_share=0.2",
    "data.held_out_share=0.3",
    "runner.max_attempts=1",
    "runner.max_failed_share=1.0",
)
FAILS = """
from agent import say as well


def say(word: str) -> str:
    if word in ("gold", "pink"):  # a training task and a held-out one
        raise LookupError(f"no page {word}")
    return well(word)
"""


def called(job: Any, *words: str) -> subprocess.CompletedProcess[str]:
    return job.run([job.command()[0], *words])


def last(text: str) -> dict[str, Any]:
    return json.loads(text.splitlines()[-1])


def numbers(pattern: str, text: str) -> list[str]:
    found = re.search(pattern, text, re.MULTILINE)
    assert found is not None, f"{pattern} is not in:\n{text}"
    return list(found.groups())


@contextmanager
def dashboard(job: Any) -> Iterator[str]:
    """The link of the page of the run."""
    command = [job.command()[0], "dashboard", "run", "--port", "0", "--no-browser", "--json"]
    process = subprocess.Popen(command, cwd=job.directory, env=job.environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["link"]
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


@pytest.fixture
def trained(job: Any) -> tuple[Any, str]:
    """A finished run in `run`, some of whose rollouts failed, and what it printed."""
    (job.directory / "other.py").write_text(FAILS)
    done = job.run(job.command("--agent", "other.py:say", "--run", "run", *SETTINGS))
    assert done.returncode == 0, done.stderr
    return job, done.stdout


@pytest.mark.timeout(300)
def test_every_figure_of_a_run_is_the_same_wherever_it_is_shown(trained: tuple[Any, str]) -> None:
    job, terminal = trained
    run = job.directory / "run"
    report = json.loads((run / "report.json").read_text())
    text = called(job, "report", "run").stdout
    status, state = called(job, "status", "run").stdout, last(called(job, "status", "run", "--json").stdout)
    doctor, found = called(job, "doctor", "run").stdout, last(called(job, "doctor", "run", "--json").stdout)

    for mode, gain in report["held_out"].items():
        signed = [f"{each:+.3f}" for each in (gain["gain"], *gain["interval"])]
        shown = [f"{gain['before']:.3f}", f"{gain['after']:.3f}", *signed, str(gain["tasks"])]
        line = rf"held-out reward, {mode} +(\S+) -> (\S+)   gain (\S+)  \(95% interval (\S+) to (\S+), (\d+) tasks\)"
        assert numbers(line, terminal) == shown
        assert numbers(rf"^\| {mode} \| (\S+) \| (\S+) \| (\S+) \| (\S+) to (\S+) \| (\d+) \|$", text) == shown
        assert state["start"][mode] == pytest.approx(gain["before"])
        measured, of = state["start_tasks"][mode]
        assert numbers(rf"^start +{mode} (\S+), on (\d+) of (\d+) held-out tasks$", status) == [
            shown[0], str(measured), str(of)
        ]  # fmt: skip
        assert (measured, of) == (gain["tasks"], gain["tasks"] + gain["missing_before"])

    left_out = sum(report["rejected_rollouts"].values())
    rows = {"steps": report["steps"], "training rollouts": report["rollouts"], "rejected rollouts": left_out}
    rows |= {"failed rollouts": report["failed_rollouts"], "seconds": report["seconds"]}
    assert {name: numbers(rf"^\| {name} \| (\S+) \|$", text)[0] for name in rows} == {
        name: str(value) for name, value in rows.items()
    }
    steps, rollouts, failed, seconds = (
        str(report[each]) for each in ("steps", "rollouts", "failed_rollouts", "seconds")
    )
    assert int(failed) > 0
    assert numbers(r"^(\d+) steps, (\d+) rollouts, (\d+) failed.*, ([\d.]+) s", terminal) == [
        steps, rollouts, failed, f"{float(seconds):.1f}"
    ]  # fmt: skip
    assert numbers(r"^rollouts +(\d+), (\d+) failed, (\d+) rejected$", status) == [rollouts, failed, str(left_out)]
    assert numbers(r"^run: \w+, (\d+) steps, (\d+) rollouts, (\d+) failed", doctor) == [steps, rollouts, failed]
    for record in (state, found):
        assert (record["rollouts"], record["failed_rollouts"]) == (report["rollouts"], report["failed_rollouts"])
        assert record["failures"] == state["failures"]
    assert (state["step"], state["steps"], found["steps"]) == (report["steps"],) * 3
    assert state["seconds"] == pytest.approx(report["seconds"], abs=1.0)

    with dashboard(job) as link:
        elsewhere = last(called(job, "status", link, "--json").stdout)
    for name in ("step", "steps", "rollouts", "failed_rollouts", "rejected_rollouts", "reward", "start", "validation"):
        assert elsewhere[name] == pytest.approx(state[name]), name

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert (state["first_reward"], state["reward"]) == (lines[0]["reward"], lines[-1]["reward"])
    assert state["validation"] == {mode: lines[-1][f"validation_{mode}"] for mode in state["validation"]}
    causes = [(each["cause"], each["count"]) for each in state["failures"]]
    for cause, count in causes:
        for shown in (terminal, status, doctor):
            assert re.search(rf"{count}  {cause}", shown), shown
    warned = [*state["warnings"].values()]
    assert warned == report["warnings"][: len(warned)], "those of the result come after those of its steps"
    assert all(f"warning: {each}" in terminal for each in report["warnings"])
    assert all(f"warning     {each}" in status for each in warned)
    assert state["warnings"].keys() <= {*found["warnings"], *(sign["name"] for sign in found["signs"])}


@pytest.mark.timeout(300)
def test_the_json_of_a_run_is_its_report(trained: tuple[Any, str]) -> None:
    job, _ = trained
    before = json.loads((job.directory / "run" / "report.json").read_text())
    again = called(job, "train", "--resume", "run", "--json")
    assert again.returncode == 0, again.stderr
    shown = last(again.stdout)
    for name in ("steps", "rollouts", "failed_rollouts", "rejected_rollouts", "held_out"):
        assert shown[name] == before[name], name
