"""Promises of a run on recorded data that was interrupted: it goes on where it was, and ends as if it had not been."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import agentlightning as agl
from agentlightning.cli.main import build
from agentlightning.errors import ConfigError, ResumeError
from agentlightning.policy.config import OptimizerConfig
from agentlightning.training.run import TrainingRun

pytestmark = pytest.mark.integration

FAST = OptimizerConfig(lr=3e-3)
STEPS = 6


class Killed(Exception):
    """In place of kill -9, which the chaos tests send."""


@pytest.fixture
def kill(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ends the run within the next step after this many, when its metrics are written and its checkpoint is not."""

    def after(steps: int) -> None:
        add_step = TrainingRun.add_step

        def added(run: TrainingRun, line: Any) -> Any:
            record = add_step(run, line)
            if run.state.step > steps:
                monkeypatch.setattr(TrainingRun, "add_step", add_step)
                raise Killed
            return record

        monkeypatch.setattr(TrainingRun, "add_step", added)

    return after


def conversations(answers: list[str]) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": "question 0"}, {"role": "assistant", "content": answer}]}
        for answer in answers
    ]


def algorithm_of(kind: str, folder: Path) -> Any:
    if kind == "sft":
        path = folder / "conversations.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in conversations(["yes", "no", "perhaps"] * 3)))
        return agl.SFTAlgorithm(
            dataset=path, validation=path, validate_every=1, batch_size=2, steps=STEPS, optimizer=FAST
        )
    if kind == "dpo":
        return agl.DPO(steps=STEPS, tasks_per_step=2, optimizer=FAST)
    return agl.LightningRL(steps=STEPS, tasks_per_step=2, group_size=2, optimizer=FAST)


def weights(result: agl.TrainingResult) -> dict[str, torch.Tensor]:
    return load_file(result.checkpoint / "model.safetensors")


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", ["rl", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dpo", "sft"))])
def test_an_interrupted_run_ends_with_the_weights_of_one_that_was_not(
    kind: str, kill: Any, store: Any, fill: Any, add: Any, tiny: Path, tmp_path: Path
) -> None:
    fill(store, tokens=True)
    config = agl.TrainConfig(run=agl.config.RunConfig(checkpoint_every=2))
    made: dict[str, Any] = {"model": tiny, "store": store}

    def trainer(name: str) -> agl.Trainer:
        return agl.Trainer(config, algorithm=algorithm_of(kind, tmp_path), run_dir=tmp_path / name, **made)

    whole: Any = trainer("whole").train()
    kill(3)
    with pytest.raises(Killed):
        trainer("cut").train()
    assert [line["step"] for line in lines(tmp_path / "cut")] == [1, 2, 3, 4]
    asyncio.run(add(store, "question 0", "maybe", 1.0, tokens=True))  # A session of later changes nothing.
    resumed: Any = agl.Trainer.resume(tmp_path / "cut").train()
    left, right = weights(whole), weights(resumed)
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert resumed.steps == STEPS
    timeless = [
        {name: value for name, value in line.items() if "seconds" not in name} for line in lines(tmp_path / "cut")
    ]
    assert timeless == [
        {name: value for name, value in line.items() if "seconds" not in name} for line in lines(tmp_path / "whole")
    ]
    assert replace(resumed.recorded, metrics={}) == replace(whole.recorded, metrics={})
    assert resumed.best_step == whole.best_step
    assert f"step-{STEPS:06d}" in {entry.name for entry in (tmp_path / "cut" / "checkpoints").iterdir()}


def test_a_finished_run_goes_on_with_more_steps(store: Any, fill: Any, tiny: Path, tmp_path: Path) -> None:
    fill(store)
    made: Any = agl.Trainer(store=store, algorithm=algorithm_of("rl", tmp_path), model=tiny, run_dir=tmp_path / "run")
    assert made.train(2).steps == 2
    resumed: Any = agl.Trainer.resume(tmp_path / "run").train(4)
    assert (resumed.steps, [line["step"] for line in lines(tmp_path / "run")]) == (4, [1, 2, 3, 4])


def test_a_loss_that_has_changed_since_is_noticed(
    store: Any, fill: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store)
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "recorded_loss.py"
    own.write_text("from agentlightning.policy.losses import PPOLoss\n\nclass Mine(PPOLoss):\n    pass\n")
    algorithm = agl.LightningRL(steps=1, tasks_per_step=2, group_size=2, loss="recorded_loss.py:Mine", optimizer=FAST)
    agl.Trainer(store=store, algorithm=algorithm, model=tiny, run_dir=tmp_path / "run").train(method="awr")
    own.write_text(own.read_text() + "# another formula\n")
    with pytest.raises(ResumeError, match=r"Mine of algorithm.loss\S* has changed since the run began: .*loss.py"):
        agl.Trainer.resume(tmp_path / "run").train(2)


@pytest.mark.slow
def test_the_reward_before_is_not_measured_again(kill: Any, store: Any, fill: Any, tiny: Path, tmp_path: Path) -> None:
    fill(store)
    calls = tmp_path / "calls"

    @agl.rollout
    def agent(task: Any) -> float:
        with calls.open("a") as file:
            file.write("once\n")
        return float(task["value"])

    tasks = [{"value": 0.25}]
    measured: dict[str, Any] = {"eval_agent": agent, "held_out_dataset": tasks}
    kill(0)
    made = agl.Trainer(store=store, algorithm=algorithm_of("rl", tmp_path), model=tiny, run_dir=tmp_path / "run")
    with pytest.raises(Killed):
        made.train(1, **measured)
    assert len(calls.read_text().splitlines()) == 2
    with pytest.raises(ConfigError, match=r"an agent that was an object.*train\(eval_agent=...\), or --eval-agent"):
        agl.Trainer.resume(tmp_path / "run").train()
    resumed: Any = agl.Trainer.resume(tmp_path / "run").train(eval_agent=agent)
    assert len(calls.read_text().splitlines()) == 4
    assert resumed.held_out["greedy"].before == 0.25


def test_what_a_resumed_run_cannot_bring_back_is_named(
    kill: Any, store: Any, fill: Any, tiny: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    sft = agl.SFTAlgorithm(dataset=conversations(["yes"]), steps=2, optimizer=FAST)
    kill(0)
    with pytest.raises(Killed):
        agl.Trainer(algorithm=sft, model=tiny, run_dir=run_dir).train()
    with pytest.raises(
        ResumeError, match=r"trained by .*SFTAlgorithm, not by one made from settings; give.*algorithm=\.\.\."
    ):
        agl.Trainer.resume(run_dir).train()
    with pytest.raises(ConfigError, match=r"algorithm\.type, .*a resumed run keeps this"):
        agl.Trainer.resume(run_dir, algorithm=agl.DPO()).train()
    with pytest.raises(ConfigError, match="without an agent"):
        agl.Trainer.resume(run_dir, algorithm=sft).train(agent=print)
    with pytest.raises(ResumeError, match=r"learns from recorded data.*agl train --resume"):
        agl.Trainer.resume(run_dir, algorithm=sft).fit(print)
    with pytest.raises(ConfigError, match=r"data\.success_threshold: a resumed run keeps this"):
        agl.Trainer.resume(run_dir, algorithm=sft).train(success_threshold=0.9)
    with pytest.raises(ConfigError, match=r"already holds a run; continue it"):
        agl.Trainer(algorithm=sft, model=tiny, run_dir=run_dir).train()
    result: Any = agl.Trainer.resume(run_dir, algorithm=sft).train()
    assert (result.steps, result.recorded.sessions) == (2, 1)


def test_sessions_that_are_gone_are_counted(
    kill: Any, store: Any, fill: Any, tiny: Path, tmp_path: Path, capfd: Any
) -> None:
    fill(store)
    kill(0)
    made = agl.Trainer(store=store, algorithm=algorithm_of("rl", tmp_path), model=tiny, run_dir=tmp_path / "run")
    with pytest.raises(Killed):
        made.train(1)
    other = agl.LightningStore(tmp_path / "other.db")
    fill(other, 1)
    agl.Trainer.resume(tmp_path / "run", store=store).train()
    state = json.loads((tmp_path / "run" / "state.json").read_text())
    assert (state["step"], len(state["recorded"]["rollouts"])) == (1, 12)
    state["recorded"]["rollouts"].append("ro-9")
    (tmp_path / "run" / "state.json").write_text(json.dumps(state))
    agl.Trainer.resume(tmp_path / "run", store=store).train(2)
    assert "1 sessions of this run are no longer in the store" in capfd.readouterr().err


@pytest.mark.slow
def test_an_interrupted_run_that_follows_learns_from_no_session_twice(
    kill: Any, store: Any, fill: Any, tiny: Path, tmp_path: Path
) -> None:
    fill(store, 2, tokens=True)
    learning = agl.LightningRL(tasks_per_step=1, group_size=2, optimizer=FAST)
    config = agl.TrainConfig(run=agl.config.RunConfig(checkpoint_every=1))
    kill(1)
    with pytest.raises(Killed):
        agl.Trainer(config, store=store, algorithm=learning, model=tiny, run_dir=tmp_path / "run").train(
            9, follow=True, follow_timeout=0.1
        )
    resumed: Any = agl.Trainer.resume(tmp_path / "run").train()
    assert resumed.steps == 4, "8 sessions, two at a time"
    learned = json.loads((tmp_path / "run" / "state.json").read_text())["recorded"]["source"]["learned"]
    assert len(learned) == len(set(learned)) == 8


def test_a_resumed_run_follows_the_query_that_it_is_given(
    kill: Any, store: Any, fill: Any, tiny: Path, tmp_path: Path
) -> None:
    fill(store)

    def trained(threshold: float) -> Any:
        query = store.get_successful_trajectories(threshold=threshold)
        return agl.SFTAlgorithm(dataset=query, steps=2, batch_size=2, optimizer=FAST)

    kill(0)
    with pytest.raises(Killed):
        agl.Trainer(algorithm=trained(0.5), model=tiny, run_dir=tmp_path / "run").train()
    resumed: Any = agl.Trainer.resume(tmp_path / "run", algorithm=trained(-1.0)).train()
    assert resumed.recorded.sessions == 6, "right and wrong answers of three tasks, each once"


def test_agl_sft_and_dpo_resume(kill: Any, store: Any, fill: Any, tiny: Path, tmp_path: Path) -> None:
    fill(store)
    run = str(tmp_path / "run")
    sft = ["sft", "steps=3", "--checkpoint-every", "1", "--model", str(tiny)]
    kill(1)
    done = CliRunner().invoke(build(), [*sft, "--store", str(tmp_path / "sessions.db"), "--run", run])
    assert isinstance(done.exception, Killed)
    resumed = CliRunner().invoke(build(), ["sft", "--resume", run, "--json"])
    assert resumed.exit_code == 0, resumed.output
    assert json.loads(resumed.stdout)["steps"] == 3
    both = CliRunner().invoke(build(), ["sft", "steps=5", "--resume", run])
    assert "--resume uses the run's own settings" in both.output
    missing = CliRunner().invoke(build(), ["sft", "--data", "data.jsonl"])
    assert "--model is missing" in missing.output
    nothing = CliRunner().invoke(build(), ["dpo", "--resume", str(tmp_path / "none")])
    assert "holds no run" in nothing.output


def test_an_interrupted_run_measures_the_weights_that_it_began_with_once(
    kill: Any, store: Any, fill: Any, tiny: Path, tmp_path: Path
) -> None:
    fill(store)
    kill(1)
    config = agl.TrainConfig(run=agl.config.RunConfig(checkpoint_every=1))
    algorithm, run_dir = algorithm_of("rl", tmp_path), tmp_path / "run"
    made = agl.Trainer(config, store=store, algorithm=algorithm, model=tiny, run_dir=run_dir)
    with pytest.raises(Killed):
        made.train(3, held_out_dataset=[{"reward": 0.5}], eval_agent="tests.support.agents:reward_of_task")
    before = json.loads((run_dir / "state.json").read_text())["evaluations"]
    assert before == {"before-greedy": [0.5], "before-sampled": [0.5]}
    resumed: Any = agl.Trainer.resume(run_dir).train()
    assert (resumed.steps, resumed.held_out["greedy"].before) == (3, 0.5)


TRACKER = """
from agentlightning.training.tracking import Tracker

class Steps(Tracker):
    def start(self, run):
        self.path = run.run_dir / "steps"
        return str(self.path)

    def log(self, step, metrics):
        with self.path.open("a") as file:
            file.write(str(step))
"""


def test_what_shows_any_run_shows_one_on_recorded_data(store: Any, fill: Any, tiny: Path, tmp_path: Path) -> None:
    fill(store)
    run_dir, tracker = tmp_path / "run", tmp_path / "kept_steps.py"
    tracker.write_text(TRACKER)
    config = agl.TrainConfig(tracking={"trackers": (f"{tracker}:Steps",)})
    made = agl.Trainer(config, store=store, algorithm=algorithm_of("rl", tmp_path), model=tiny, run_dir=run_dir)
    made.train(2)
    assert (run_dir / "steps").read_text() == "12"
    assert json.loads((run_dir / "report.json").read_text())["recorded"]["sessions"] == 12
    shown = CliRunner().invoke(build(), ["status", str(run_dir)])
    assert (shown.exit_code, "2" in shown.output) == (0, True), shown.output
    assert "sessions    12" in shown.output
    assert CliRunner().invoke(build(), ["doctor", str(run_dir)]).exit_code == 0


@pytest.mark.parametrize("section", ["guard", "gate", "group_reward", "run", "curriculum"])
def test_settings_for_rollouts_are_refused(section: str, store: Any, fill: Any, tiny: Path, tmp_path: Path) -> None:
    fill(store, 1)
    given: Any = {"guard": {}, "gate": {"tasks": "none.jsonl"}, "group_reward": "a:b"}
    given |= {"run": {"gateways": ["http://127.0.0.1:1"]}, "curriculum": {"tasks": "learnability"}}
    config = agl.TrainConfig(**{section: given[section]})
    with pytest.raises(ConfigError, match=f"{section}.*for rollouts of an agent"):
        agl.Trainer(config, store=store, model=tiny, run_dir=tmp_path / "run").train(1)
    assert not (tmp_path / "run").exists()
