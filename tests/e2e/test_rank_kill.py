"""A process that trains is killed, five times, at random moments; the run names it, and ends as if nothing had
happened."""

from __future__ import annotations

import json
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import ranks_of

STEPS = 8
KILLS = 5
ROLLOUTS = 16
"""Of a step."""
RANKS = ("policy.kind=fsdp", "policy.processes=3", "policy.device=cpu")


@pytest.mark.chaos
@pytest.mark.timeout(7200)
def test_a_run_whose_ranks_are_killed_five_times_counts_what_an_undisturbed_one_counts(job: Any) -> None:
    chance = random.Random(time.time_ns())
    command = job.command("--run", "run", "--json", f"algorithm.steps={STEPS}", *RANKS)
    resume = [command[0], "train", "--resume", "run", "--json"]
    for kill in range(KILLS):
        with subprocess.Popen(
            command,
            cwd=job.directory,
            env=job.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            killed = kill_a_rank(job.directory / "run", process, kill, chance)
            _, words = process.communicate(timeout=1200)
        assert process.returncode != 0
        assert f"process {killed} on" in words, words
        if (job.directory / "run").exists():  # Nothing is left of a run that ended before it had begun.
            command = resume
    finished = subprocess.run(
        command, cwd=job.directory, env=job.environment, capture_output=True, text=True, timeout=1200
    )
    assert finished.returncode == 0, finished.stderr

    report = json.loads((job.directory / "run" / "report.json").read_bytes())
    assert (report["steps"], report["rollouts"]) == (STEPS, STEPS * ROLLOUTS)
    assert optimizer_steps(job.directory / "run") == STEPS
    lines = (job.directory / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))


def kill_a_rank(run_dir: Path, process: subprocess.Popen[str], step: int, chance: random.Random) -> int:
    """One of the ranks, at a random moment after a step. Returns its process."""
    deadline = time.monotonic() + 1200
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before a rank could be killed"
        state = run_dir / "state.json"
        ranks = ranks_of(process.pid)
        if ranks and state.exists() and json.loads(state.read_bytes())["step"] >= step:
            time.sleep(chance.uniform(0, 2.0))
            if ranks := ranks_of(process.pid):
                victim = chance.choice(ranks)
                victim.kill()
                return victim.pid
        time.sleep(0.02)
    raise AssertionError(f"step {step} was never reached")


def optimizer_steps(run_dir: Path) -> int:
    state = json.loads((run_dir / "state.json").read_bytes())
    saved = torch.load(run_dir / state["checkpoint"] / "training_state.pt", weights_only=True)
    return saved["ranks"]["model"]["steps"]
