"""A training process is killed, three times, at random moments; the run ends as if nothing had happened."""

import json
import random
import sqlite3
import subprocess
import time

import pytest

STEPS = 12


@pytest.mark.slow
def test_a_run_killed_three_times_ends_like_an_undisturbed_one(job):
    arguments = ("--json", f"algorithm.steps={STEPS}", "evaluation.every=4")
    undisturbed = job.run(job.command("--run-dir", "calm", *arguments))
    assert undisturbed.returncode == 0, undisturbed.stderr

    chance = random.Random(time.time_ns())
    command, seen = job.command("--run-dir", "rough", *arguments), {}
    for kill in range(3):
        process = subprocess.Popen(
            command, cwd=job.directory, env=job.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        reach_step(job.directory / "rough", process, 1 + 3 * kill)
        time.sleep(chance.uniform(0, 1.0))
        process.kill()
        process.wait()
        seen |= spans(job.directory / "rough")
        command = [command[0], "train", "--resume", "rough", "--json"]
    finished = job.run(command)
    assert finished.returncode == 0, finished.stderr

    calm, rough = (json.loads((job.directory / name / "report.json").read_bytes()) for name in ("calm", "rough"))
    assert rough["steps"] == calm["steps"] == STEPS
    assert rough["rollouts"] == calm["rollouts"] == STEPS * 16
    assert optimizer_steps(job.directory / "rough") == optimizer_steps(job.directory / "calm")
    assert finished_rollouts(job.directory / "rough") == finished_rollouts(job.directory / "calm")
    kept = spans(job.directory / "rough")
    assert seen.items() <= kept.items(), "a span that was there before a kill is gone or changed"
    steps = [json.loads(line)["step"] for line in (job.directory / "rough" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))


def reach_step(run_dir, process, step: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before it could be killed"
        state = run_dir / "state.json"
        if state.exists() and json.loads(state.read_bytes())["step"] >= step:
            return
        time.sleep(0.01)
    raise AssertionError(f"step {step} was never reached")


def rows(run_dir, query: str) -> list[tuple]:
    with sqlite3.connect(f"file:{run_dir / 'store.db'}?mode=ro", uri=True) as connection:
        return connection.execute(query).fetchall()


def spans(run_dir) -> dict[str, tuple]:
    return {row[0]: row[1:] for row in rows(run_dir, "SELECT span_id, rollout_id, attempt_id, name FROM spans")}


def finished_rollouts(run_dir) -> list[tuple]:
    """(status, count), whatever the run's own id."""
    return sorted(rows(run_dir, "SELECT status, count(*) FROM rollouts GROUP BY status"))


def optimizer_steps(run_dir) -> int:
    import torch

    state = json.loads((run_dir / "state.json").read_bytes())
    saved = torch.load(run_dir / state["checkpoint"] / "training_state.pt", weights_only=False)
    return saved["policy_version"]
