"""Promises of `algorithm.type` on recorded data: `agl train`, `Trainer(algorithm=...)` and the verbs run the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import agentlightning as agl
from agentlightning.cli.main import build
from agentlightning.errors import ConfigError, DatasetError
from agentlightning.training.run import TrainingRun

pytestmark = pytest.mark.integration

SETTINGS: dict[str, Any] = {
    "sft": {"steps": 4, "batch_size": 2},
    "rejection": {"steps": 4, "tasks_per_step": 2, "success_threshold": 0.9},
    "dpo": {"steps": 4, "tasks_per_step": 2},
    "lightning_rl": {"steps": 1, "tasks_per_step": 3, "group_size": 4},
}


class Killed(Exception):
    """In place of kill -9."""


@pytest.fixture
def kill(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Ends the run between the metrics of the step after this many and its checkpoint."""

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


def toml(name: str, tiny: Path, sessions: Path, **more: Any) -> str:
    lines = [f"{key} = {json.dumps(value)}" for key, value in {"type": name, **SETTINGS[name], **more}.items()]
    lines += ["optimizer.lr = 3e-3", "[policy]", f'model = "{tiny}"', "[data]", f'sessions = "{sessions}"']
    return "\n".join(["[algorithm]", *lines, "[run]", "checkpoint_every = 2"])


def run(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(build(), ["train", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "checkpoint" / "model.safetensors")


def differ(left: Path, right: Path) -> bool:
    one, other = weights(left), weights(right)
    return any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "name", ["rejection", *(pytest.param(each, marks=pytest.mark.slow) for each in ("sft", "dpo"))]
)
def test_agl_train_learns_from_sessions_and_goes_on_after_it_was_killed(
    name: str, kill: Any, store: Any, fill: Any, tiny: Path, tmp_path: Path
) -> None:
    fill(store)
    settings = tmp_path / "settings.toml"
    settings.write_text(toml(name, tiny, tmp_path / "sessions.db"))
    whole = run("--config", str(settings), "--run", str(tmp_path / "whole"))
    assert (whole["steps"], whole["recorded"]["algorithm"]) == (4, name)
    trained, start = weights(tmp_path / "whole"), load_file(tiny / "model.safetensors")
    assert any(not torch.equal(trained[key], start[key]) for key in trained)
    kill(3)
    with pytest.raises(Killed):
        CliRunner().invoke(
            build(), ["train", "--config", str(settings), "--run", str(tmp_path / "cut")], catch_exceptions=False
        )
    run("--resume", str(tmp_path / "cut"))
    assert not differ(tmp_path / "whole", tmp_path / "cut")
    longer = run("--resume", str(tmp_path / "cut"), "algorithm.steps=5")
    assert longer["steps"] == 5, "a setting that changes, as for any run"


def test_the_trainer_takes_an_algorithm_by_its_name(store: Any, fill: Any, tiny: Path, tmp_path: Path) -> None:
    fill(store)
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "question 0", "chosen": "yes", "rejected": "no"}) + "\n")
    for place, algorithm in enumerate(
        (
            "rejection",
            agl.RejectionSampling(steps=1, tasks_per_step=2),
            agl.config.SFTConfig(steps=1),
            agl.config.DPOConfig(steps=1, data=str(pairs)),
        )
    ):
        made = agl.Trainer(algorithm=algorithm, model=tiny, store=store, run_dir=tmp_path / str(place))  # pyright: ignore[reportArgumentType]
        result = made.train(1)
        assert result.recorded is not None
        assert (result.steps, result.recorded.algorithm) == (1, getattr(algorithm, "type", None) or made.algorithm.name)


def test_a_file_of_conversations_needs_no_store(tiny: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    turns = [{"role": "user", "content": "question 0"}, {"role": "assistant", "content": "yes"}]
    data.write_text(json.dumps({"messages": turns}) + "\n")
    given = ["algorithm.type=sft", f"algorithm.dataset={data}", "algorithm.steps=1", "algorithm.lora.r=2"]
    run(f"policy.model={tiny}", *given, "--run", str(tmp_path / "run"))
    assert list((tmp_path / "run" / "checkpoint").rglob("adapter_config.json")), "algorithm.lora is that of the policy"
    assert run("--resume", str(tmp_path / "run"), "algorithm.steps=2")["steps"] == 2


def test_reinforcement_learning_chooses_its_loss_by_the_data_as_from_python(
    store: Any, fill: Any, tiny: Path, tmp_path: Path
) -> None:
    fill(store, tokens=True)
    settings = tmp_path / "settings.toml"
    settings.write_text(toml("lightning_rl", tiny, tmp_path / "sessions.db"))
    run("--config", str(settings), "--run", str(tmp_path / "run"))
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    made = agl.LightningRL(**SETTINGS["lightning_rl"], optimizer={"lr": 3e-3})
    agl.Trainer(algorithm=made, model=tiny, store=store, run_dir=tmp_path / "python").train()
    same = json.loads((tmp_path / "python" / "metrics.jsonl").read_text().splitlines()[0])
    assert (metrics["loss"], metrics["reward"]) == (same["loss"], same["reward"])


def test_the_settings_say_how_sessions_are_learned_from(store: Any, fill: Any, tiny: Path, tmp_path: Path) -> None:
    fill(store, tokens=True)
    settings = tmp_path / "settings.toml"
    settings.write_text(toml("lightning_rl", tiny, tmp_path / "sessions.db"))
    chosen = ["data.method=rejection", "data.success_threshold=0.9"]
    result = run("--config", str(settings), *chosen, "--run", str(tmp_path / "run"))
    assert (result["recorded"]["method"], result["recorded"]["sessions"]) == ("rejection", 6)
    following = ["data.follow=true", "data.follow_timeout=0.1", "algorithm.steps=9"]
    result = run("--config", str(settings), *following, "--run", str(tmp_path / "following"))
    assert (result["steps"], result["recorded"]["method"]) == (1, "importance"), "12 sessions a step, and then none"
    kept = CliRunner().invoke(build(), ["train", "--resume", str(tmp_path / "run"), "data.method=awr"])
    assert "data.method: a resumed run keeps this" in kept.output
    with pytest.raises(ConfigError, match=r"data\.follow: fit\(\) runs an agent, and train\(\) learns from recorded"):
        agl.Trainer(agl.TrainConfig(data={"follow": True}), run_dir=tmp_path / "live").fit(print, [1])


def test_the_agent_of_the_settings_measures_where_sessions_are_learned_from(
    store: Any, fill: Any, tiny: Path, tmp_path: Path
) -> None:
    fill(store)
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"reward": 0.5}\n')
    settings = tmp_path / "settings.toml"
    settings.write_text(
        'agent = "tests.support.agents:reward_of_task"\n' + toml("rejection", tiny, tmp_path / "sessions.db", steps=1)
    )
    result = run("--config", str(settings), f"data.held_out={held_out}", "--run", str(tmp_path / "run"))
    assert result["held_out"]["greedy"]["before"] == 0.5


def test_what_cannot_go_together_is_refused(store: Any, add: Any, tiny: Path, tmp_path: Path) -> None:
    asyncio.run(add(store, "question", "no", 0.0))
    config = agl.TrainConfig(data={"sessions": str(tmp_path / "sessions.db")}, policy={"model": str(tiny)})
    made: dict[str, Any] = {"algorithm": "rejection", "run_dir": tmp_path / "run"}
    with pytest.raises(DatasetError, match=r"none of 1 sessions has a reward of 0.5 or more; lower success_threshold"):
        agl.Trainer(config, **made).train()
    with pytest.raises(ConfigError, match=r"data.sessions: fit\(\) runs an agent"):
        agl.Trainer(config, **made).fit(print, [1])
    with pytest.raises(ConfigError, match="a dry run runs an agent"):
        agl.Trainer(config, **made).dry_run()
    missing = agl.TrainConfig(data={"sessions": str(tmp_path / "none.db")}, policy={"model": str(tiny)})
    with pytest.raises(DatasetError, match=r"no store at .*none.db"):
        agl.Trainer(missing, **made).train()
    with pytest.raises(ConfigError, match=r"there is no algorithm 'rejectoin'; did you mean 'rejection'\?.*dpo.*sft"):
        agl.Trainer(algorithm="rejectoin")


def test_pairs_that_a_run_with_an_agent_would_not_learn_from_are_refused(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "Hi", "chosen": "Hello", "rejected": "No"}) + "\n")
    config = agl.TrainConfig(algorithm={"type": "dpo", "data": str(pairs)}, policy={"model": "tiny"})
    with pytest.raises(ConfigError, match="DPO was given data, and with an agent it learns from preferences between"):
        agl.Trainer(config, run_dir=tmp_path / "run").fit(lambda task: 1.0, [{"n": 1}] * 9)
    assert not (tmp_path / "run").exists()
