"""A process that trains is killed, five times, at random moments; the run names it, and ends as if nothing had
happened."""

from __future__ import annotations

import json
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

STEPS = 12
KILLS = 5
RANKS = ("policy.kind=fsdp", "policy.processes=2", "policy.device=cpu")


@pytest.mark.chaos
@pytest.mark.timeout(3000)
def test_a_run_whose_ranks_are_killed_five_times_ends_like_an_undisturbed_one(job: Any) -> None:
    arguments = ("--json", f"algorithm.steps={STEPS}", *RANKS)
    calm = job.run(job.command("--run-dir", "calm", *arguments))
    assert calm.returncode == 0, calm.stderr

    chance = random.Random(time.time_ns())
    command = job.command("--run-dir", "rough", *arguments)
    for kill in range(KILLS):
        process = subprocess.Popen(
            command,
            cwd=job.directory,
            env=job.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        killed = kill_a_rank(job.directory / "rough", process, 2 * kill, chance)
        _, words = process.communicate(timeout=600)
        assert process.returncode != 0
        assert f"process {killed} on" in words or "was killed by SIGKILL before it had joined" in words, words
        command = [command[0], "train", "--resume", "rough", "--json"]
    finished = job.run(command)
    assert finished.returncode == 0, finished.stderr

    reports = [json.loads((job.directory / name / "report.json").read_bytes()) for name in ("calm", "rough")]
    assert [report["steps"] for report in reports] == [STEPS, STEPS]
    assert reports[0]["rollouts"] == reports[1]["rollouts"] == STEPS * 16
    assert optimizer_steps(job.directory / "rough") == optimizer_steps(job.directory / "calm") == STEPS
    lines = (job.directory / "rough" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))


def kill_a_rank(run_dir: Path, process: subprocess.Popen[str], step: int, chance: random.Random) -> int:
    """One of the ranks, at a random moment after a step. Returns its process."""
    deadline = time.monotonic() + 600
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


def ranks_of(pid: int) -> list[psutil.Process]:
    return [each for each in psutil.Process(pid).children() if "agentlightning.policy.fsdp.rank" in each.cmdline()]


def optimizer_steps(run_dir: Path) -> int:
    state = json.loads((run_dir / "state.json").read_bytes())
    saved = torch.load(run_dir / state["checkpoint"] / "training_state.pt", weights_only=True)
    return saved["ranks"]["model"]["steps"]
