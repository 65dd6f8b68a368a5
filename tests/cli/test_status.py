"""`agl status` and `agl store list`: the state of a run and its rollouts, from its directory alone."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import agentlightning as agl
from agentlightning.cli.look import server_of
from agentlightning.cli.main import build
from agentlightning.util.progress import Progress


class Measure(agl.Algorithm):
    """Two steps without a model."""

    total_steps = 2
    learns_weights = False

    async def run(self, training):
        while training.step < self.total_steps:
            collected = await training.collect(tasks=2, group_size=2, temperature=1.0)
            await training.finish_step(collected, {"reward": 0.25 + training.step / 2})


async def agent(task: dict) -> float:
    await asyncio.sleep(0)
    if task["number"] == 3:
        raise LookupError("no page 3")
    return task["number"] / 10


@pytest.fixture
def run(tmp_path: Path) -> Path:
    settings = agl.TrainConfig(runner={"max_attempts": 1, "max_failed_share": 1.0}, evaluation={"every": 1})
    trainer = agl.Trainer(settings, algorithm=Measure(), run_dir=tmp_path / "run", progress=Progress(enabled=False))
    tasks = [{"number": number} for number in range(8)]
    trainer.fit(agent, tasks, tasks[4:], held_out_dataset=tasks[:4])
    return tmp_path / "run"


def agl_program(*arguments: str):
    return CliRunner().invoke(build(), list(arguments))


@pytest.mark.slow
def test_the_state_of_a_run_and_its_rollouts(run: Path) -> None:
    shown = agl_program("status", str(run))
    assert shown.exit_code == 0, shown.output
    assert "finished, step 2" in shown.stdout
    assert "reward      0.750  ▁█  from 0.250, best 0.750" in shown.stdout
    assert "validation  greedy 0.550  (step 2)" in shown.stdout
    assert "start       greedy 0.100, on 3 of 4 held-out tasks" in shown.stdout, "the agent fails at one"
    record = json.loads(agl_program("status", str(run), "--json").stdout)
    assert (record["status"], record["step"], record["reward"], record["seconds_left"]) == ("finished", 2, 0.75, None)
    assert [each["cause"] for each in record["failures"]] == ["LookupError"]

    failed = json.loads(agl_program("store", "list", "--run", str(run), "--status", "failed", "--json").stdout)
    assert {row["status"] for row in failed["rollouts"]} == {"failed"}
    assert failed["matching"] == len(failed["rollouts"]) > 0
    ranked = json.loads(agl_program("store", "list", "--run", str(run), "--sort", "reward", "--json").stdout)[
        "rollouts"
    ]
    rewards = [row["reward_number"] for row in ranked if row["reward_number"] is not None]
    assert rewards == sorted(rewards)
    assert rewards[0] == 0.0
    newest = agl_program("store", "show", "--run", str(run))
    assert newest.exit_code == 0
    assert "attempt 1" in newest.stdout

    rows = [json.loads(line) for line in (run / "transcripts.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1] * 8 + [2] * 8, "four tasks, in two modes, at each validation"
    assert {row["output"] for row in rows} >= {"null"} or rows[0]["reward"] == 0.4


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for command in (["status", str(tmp_path)], ["store", "list", "--run", str(tmp_path)]):
        done = agl_program(*command)
        assert done.exit_code == 2
        assert "no run" in done.stderr or "no state.json" in done.stderr or "no store.db" in done.stderr


def test_the_address_of_a_server_is_read_from_any_link_of_its_dashboard() -> None:
    for path in ("", "/", "/dashboard", "/dashboard/runs/a?step=1", "?step=1"):
        assert server_of(f"http://host:4747{path}#token=t", None) == ("http://host:4747", "t")
