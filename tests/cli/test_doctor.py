"""`agl doctor`: what it says of a run, and its exit status."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import AgentError, ExtensionError
from agentlightning.evaluation.intervals import Gain
from agentlightning.store import LightningStore
from agentlightning.training.health.step_record import StepRecord
from agentlightning.training.persistence.run_dir import RunDir, RunState, append_lines
from agentlightning.training.report.result import closing_warnings
from agentlightning.util.progress import Progress

HEALTHY = {"reward": 0.5, "groups": 8, "groups_trained": 8, "rollouts_trained": 64, "grad_norm": 1.0, "entropy": 1.0}
FLAT = {"reward": 0.0, "groups": 8, "groups_without_spread": 8, "groups_failed": 8}


def make_run(path: Path, lines: list[dict[str, Any]], **state: Any) -> Path:
    run_dir = RunDir.create(path)
    run_dir.write_state(RunState(run_id="r1", step=len(lines), **state))
    for step, line in enumerate(lines, 1):
        append_lines(run_dir.path / "metrics.jsonl", {"step": step, **line})
    run_dir.close()
    return path


def test_a_healthy_run_has_status_zero(invoke, tmp_path):
    done = invoke("doctor", str(make_run(tmp_path / "run", [HEALTHY] * 5, rollouts=320)))
    assert done.exit_code == 0, done.output
    assert "unfinished, 5 steps, 320 rollouts" in done.output
    assert "no sign of trouble" in done.output


def test_each_sign_is_said_with_its_first_step_and_what_to_try(invoke, tmp_path):
    path = make_run(tmp_path / "run", [HEALTHY] * 4 + [FLAT] * 6, warnings={"random_weights": "it is tiny"})
    done = invoke("doctor", str(path))
    assert done.exit_code == 1, done.output
    assert "rewards_without_spread (since step 7, 4 steps until 10)" in done.output
    assert "  try   use easier tasks" in done.output
    assert "it is tiny" in done.output, "what the run itself has said is said again"
    record = json.loads(invoke("doctor", str(path), "--json").stdout)
    sign = next(each for each in record["signs"] if each["name"] == "rewards_without_spread")
    assert (sign["name"], sign["since"], sign["until"], sign["count"]) == ("rewards_without_spread", 7, 10, 4)
    assert (record["healthy"], record["status"], record["steps"]) == (False, "unfinished", 10)


def test_a_sign_is_said_as_it_is_now_and_not_as_it_began(invoke, tmp_path):
    lines = [FLAT | {"reward": 0.1 * step, "reward_lowest": 0.0, "reward_highest": 1.0} for step in range(1, 8)]
    output = invoke("doctor", str(make_run(tmp_path / "run", lines))).output
    assert "since step 1, 7 steps until 7" in output
    assert "mean 0.6)" in output
    assert "mean 0.1)" not in output


def finished(path: Path, lines: list[dict[str, Any]], gain: Gain) -> Path:
    """A run that has said at its end what it did not achieve."""
    records = [StepRecord.read(line) for line in lines]
    make_run(path, lines, warnings=closing_warnings(records, {"greedy": gain}))
    (path / "report.json").write_text("{}")
    return path


def between(low: float, high: float) -> Gain:
    return Gain(0.5, 0.5 + (low + high) / 2, (low + high) / 2, (low, high), 40)


def test_a_finished_run_without_a_gain_is_not_healthy(invoke, tmp_path):
    gained = invoke("doctor", str(finished(tmp_path / "gained", [HEALTHY] * 5, between(0.1, 0.3))))
    assert (gained.exit_code, "no sign of trouble" in gained.output) == (0, True)
    unsure = invoke("doctor", str(finished(tmp_path / "unsure", [HEALTHY] * 5, between(-0.1, 0.2))))
    assert unsure.exit_code == 1
    assert "no_gain_greedy" in unsure.output
    assert "train for more steps" in unsure.output
    slow = [HEALTHY | {"lr": 1e-9, "optimizer_steps": 1}] * 80
    assert (
        "the weights hardly moved: 80 updates"
        in invoke("doctor", str(finished(tmp_path / "slow", slow, between(-1, 1)))).output
    )
    worse = invoke("doctor", str(finished(tmp_path / "worse", [HEALTHY] * 5, between(-0.3, -0.1)))).output
    assert "worse than the one it started from" in worse


def test_a_finished_run_that_nothing_can_be_compared_in_says_so(invoke, tmp_path):
    unknown = Gain(math.nan, math.nan, math.nan, (math.nan, math.nan), 0, missing_before=1, missing_after=12)
    path = finished(tmp_path / "run", [HEALTHY] * 5, unknown)
    done = invoke("doctor", str(path))
    assert done.exit_code == 1
    assert "greedy: 1 have none before, 12 none after" in done.output


def test_what_a_run_has_not_achieved_is_in_its_status(invoke, tmp_path):
    @agl.rollout
    def agent(task: str) -> float:
        return 0.5

    path, tasks = tmp_path / "run", [f"task {number}" for number in range(6)]
    agl.Trainer(run_dir=path, progress=Progress(enabled=False)).dev(agent, tasks)
    assert "no gain is shown" in json.loads(invoke("status", str(path), "--json").stdout)["warnings"]["no_gain_greedy"]
    assert "no_gain_greedy" in invoke("doctor", str(path)).output


def test_a_run_in_progress_is_examined_beside_it(invoke, tmp_path):
    run_dir = RunDir.create(tmp_path / "run")
    run_dir.write_state(RunState(run_id="r1"))
    (tmp_path / "run" / "metrics.jsonl").write_bytes(b'{"step": 1, "reward": 0.5}\n{"step": 2, "rew')
    done = invoke("doctor", str(tmp_path / "run"))
    run_dir.close()
    assert done.exit_code == 0, done.output
    assert "running, 1 steps" in done.output, "a line that is being written is not damaged"
    (tmp_path / "run" / "report.json").write_text("{}")
    assert "finished, 1 steps" in invoke("doctor", str(tmp_path / "run")).output


def test_damaged_lines_are_named_and_the_others_judged(invoke, tmp_path):
    path = make_run(tmp_path / "run", [HEALTHY] * 2)
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b'\x00\x00\x00\n[1]\n{"step": "x"}\n{"step": 3, "reward": null, "grad_norm": null}\n')
    done = invoke("doctor", str(path))
    assert done.exit_code == 1
    assert "cannot be read and were left out: 3, 4, 5" in done.output
    assert "not_finite (since step 3)" in done.output


async def fail_some(path: Path) -> None:
    store = LightningStore(path)
    for index, kind in enumerate(["ValueError", "ValueError", "TimeoutError"]):
        await store.enqueue_rollout({"n": 1}, rollout_id=f"r1-train-{index}")
        rollout = await store.dequeue_rollout()
        assert rollout is not None
        error = {"error": {"type": kind, "message": f"line\nbad {index}"}}
        await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="failed", metadata=error)
    await store.close()


def test_failures_are_counted_by_cause_with_an_example(invoke, tmp_path):
    path = make_run(tmp_path / "run", [HEALTHY] * 3, rollouts=192, failed_rollouts=3)
    asyncio.run(fail_some(path / "store.db"))
    record = json.loads(invoke("doctor", str(path), "--json").stdout)
    assert [(each["cause"], each["count"]) for each in record["failures"]] == [("ValueError", 2), ("TimeoutError", 1)]
    assert record["failures"][1]["example"] == "r1-train-2: bad 2"
    assert record["healthy"], "some rollouts may fail"


def test_a_run_whose_rollouts_failed_before_its_first_step_is_in_trouble(invoke, tmp_path):
    path = make_run(tmp_path / "run", [])
    asyncio.run(fail_some(path / "store.db"))
    done = invoke("doctor", str(path))
    assert done.exit_code == 1
    assert "2  ValueError" in done.output
    assert "no sign of trouble" not in done.output


def test_a_run_that_was_killed_before_its_first_step_says_so_and_what_to_do(invoke, tmp_path):
    path = make_run(tmp_path / "run", [])
    done = invoke("doctor", str(path))
    assert done.exit_code == 1
    assert "ended before the first step and left no error: it was interrupted or killed" in done.output
    assert f"next  agl train --resume {path}" in done.output
    assert "no sign of trouble" not in done.output
    record = json.loads(invoke("doctor", str(path), "--json").stdout)
    assert (record["healthy"], list(record["warnings"])) == (False, ["ended"])


@pytest.mark.integration
def test_a_training_that_fails_keeps_its_error_and_doctor_says_it(invoke, tmp_path, monkeypatch):
    class Fails(agl.Algorithm[Any]):
        total_steps = 1
        learns_weights = False

        async def run(self, training: agl.Training) -> None:
            raise LookupError("no page 3")

    monkeypatch.chdir(tmp_path)
    trainer = agl.Trainer(algorithm=Fails(), run_dir="run", progress=Progress(enabled=False))
    with pytest.raises(ExtensionError):
        trainer.fit(lambda task: 1.0, [{"n": n} for n in range(10)])
    done = invoke("doctor", "run")
    assert done.exit_code == 1
    assert "ended with an error" in done.output
    assert "LookupError" in (tmp_path / "run" / "error.txt").read_text()


@pytest.mark.parametrize("steps", [0, 5])
def test_the_error_that_ended_a_run_is_said_until_it_is_resumed(invoke, tmp_path, steps):
    path = make_run(tmp_path / "run", [HEALTHY] * steps)
    run_dir = RunDir.open(path)
    run_dir.write_error(AgentError("agent a.py:f could not be imported: OSError: no \x1b[31m disk\nTraceback"))
    run_dir.close()
    done = invoke("doctor", str(path))
    assert done.exit_code == 1
    assert (
        "ended with an error: agent a.py:f could not be imported: OSError: no \\x1b[31m disk (all of it" in done.output
    )
    assert "Traceback" not in done.output
    RunDir.open(path).close()
    assert "ended with an error" not in invoke("doctor", str(path)).output


def test_a_run_that_was_killed_after_some_steps_is_said_to_be_unfinished(invoke, tmp_path):
    path = make_run(tmp_path / "run", [HEALTHY] * 5)
    done = invoke("doctor", str(path))
    assert done.exit_code == 0
    assert f"note: it is not finished, and no process works on it; go on with agl train --resume {path}" in done.output
    (path / "report.json").write_text('{"held_out": {}}')
    assert "it is not finished" not in invoke("doctor", str(path)).output


def test_what_cannot_be_examined_is_said(invoke, tmp_path):
    run_dir = RunDir.create(tmp_path / "new")
    run_dir.write_state(RunState(run_id="r1"))
    nothing_yet = invoke("doctor", str(tmp_path / "new"))
    run_dir.close()
    assert nothing_yet.exit_code == 0
    assert "no step is finished yet" in nothing_yet.output
    elsewhere = invoke("doctor", str(make_run(tmp_path / "hub", [HEALTHY], failed_rollouts=2)))
    assert "its rollouts are in another store" in elsewhere.output
    broken = make_run(tmp_path / "broken", [HEALTHY])
    (broken / "store.db").write_bytes(b"this is no database at all, whatever its name says" * 100)
    assert "failures are not listed by cause" in invoke("doctor", str(broken)).output


@pytest.mark.parametrize(
    ("prepare", "complaint"),
    [
        (lambda path: None, "is no directory; give that of a run"),
        (lambda path: path.mkdir(), "holds no run"),
        (lambda path: (path.mkdir(), (path / "state.json").write_text("{")), "cannot be read"),
        (lambda path: path.write_text("x"), "is no directory"),
    ],
)
def test_what_is_no_run_is_refused_in_a_sentence(invoke, tmp_path, prepare, complaint):
    prepare(tmp_path / "run")
    done = invoke("doctor", str(tmp_path / "run"))
    assert done.exit_code == 2
    assert complaint in done.output + done.stderr


def test_without_a_run_there_is_nothing_to_examine(invoke, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = invoke("doctor")
    assert (done.exit_code, "there is no run below runs" in done.stderr) == (2, True)
