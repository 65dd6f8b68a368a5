"""A training process is killed, three times, at random moments; the run ends as if nothing had happened."""

import asyncio
import json
import random
import subprocess
import time
from collections import Counter

import pytest

from agentlightning.span import Span
from agentlightning.store import LightningStore

STEPS = 12


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_run_killed_three_times_ends_like_an_undisturbed_one(job, max_staleness):
    arguments = ("--json", f"algorithm.steps={STEPS}", "evaluation.every=4", f"run.max_staleness={max_staleness}")
    undisturbed = job.run(job.command("--run", "calm", *arguments))
    assert undisturbed.returncode == 0, undisturbed.stderr

    chance = random.Random(time.time_ns())
    command, seen = job.command("--run", "rough", *arguments), {}
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
    stored = spans(job.directory / "rough")
    lost = [span for span_id, span in seen.items() if stored.get(span_id) != span]
    assert not lost, f"{len(lost)} of {len(seen)} spans that were there before a kill are gone or changed"
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


async def read(run_dir) -> tuple[dict[str, Span], Counter[str]]:
    """Every span by its id, and how many rollouts there are in each status."""
    store = LightningStore(run_dir / "store.db")
    try:
        rollouts = await store.query_rollouts()
        stored = [span for rollout in rollouts for span in await store.query_spans(rollout.rollout_id)]
        return {span.span_id: span for span in stored}, Counter(rollout.status for rollout in rollouts)
    finally:
        await store.close()


def spans(run_dir) -> dict[str, Span]:
    return asyncio.run(read(run_dir))[0]


def finished_rollouts(run_dir) -> Counter[str]:
    return asyncio.run(read(run_dir))[1]


def optimizer_steps(run_dir) -> int:
    import torch

    state = json.loads((run_dir / "state.json").read_bytes())
    saved = torch.load(run_dir / state["checkpoint"] / "training_state.pt", weights_only=False)
    return saved["updater"]["steps"]
