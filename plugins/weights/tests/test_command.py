"""`agl weights pull` brings what a run publishes to another host, through the public entries of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("zstandard", reason="pip install ./plugins/weights")

from tests.support.model_server import ScriptedModelServer

import agentlightning as agl
from agentlightning.cli.main import build
from agentlightning.config import EvaluationConfig, RunnerConfig, TrainConfig

TASKS = [{"word": word} for word in ("red", "green", "blue", "white", "black", "pink", "grey", "brown")]


def say(task: Any, llm: Any) -> float:
    from openai import OpenAI

    client = OpenAI(base_url=llm.endpoint, api_key="unused")
    messages: Any = [{"role": "user", "content": f"say {task['word']}"}]
    answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
    return float(len(answer.choices[0].message.content or "")) % 7


def pull(*arguments: str) -> Any:
    return CliRunner().invoke(build(), ["weights", "pull", *arguments])


@pytest.mark.slow
def test_the_weights_of_a_run_reach_another_host_with_their_cost_in_the_metrics(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    url = f"file://{tmp_path}/bucket"
    settings = TrainConfig(
        policy={"weights": {"url": url, "full_every": 3}},
        algorithm={"type": "lightning_rl", "steps": 2, "tasks_per_step": 2, "group_size": 4},
        evaluation=EvaluationConfig(every=0, modes=("greedy",)),
        runner=RunnerConfig(concurrency=8, max_attempts=1),
    )
    agl.Trainer(settings, run_dir=tmp_path / "run").fit(agl.rollout(say), TASKS)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    costs = [each for each in metrics if "weights_bytes" in each]
    assert [each["weights_full"] for each in costs] == [0.0, 0.0], "the start is full, the updates are differences"
    assert all(0 < each["weights_bytes"] < each["weights_size"] for each in costs)
    assert all(each["weights_seconds"] > 0 for each in costs)
    result = pull(url, str(tmp_path / "host"), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["version"], found["steps"]) == (2, 3)
    ours = load_file(Path(found["directory"]) / "model.safetensors")
    theirs = load_file(sorted((tmp_path / "run" / "checkpoints").iterdir())[-1] / "model.safetensors")
    assert {name: tensor.tobytes() for name, tensor in ours.items()} == {n: t.tobytes() for n, t in theirs.items()}
    again = pull(url, str(tmp_path / "host"))
    assert "version 2 is here" in again.stdout


@pytest.mark.slow
def test_a_bucket_that_cannot_be_written_ends_the_run_before_it_trains(tmp_path: Path) -> None:
    (tmp_path / "bucket").write_text("no folder")
    settings = TrainConfig(
        policy={"weights": {"url": f"file://{tmp_path}/bucket"}},
        algorithm={"type": "lightning_rl", "steps": 1, "tasks_per_step": 2, "group_size": 2},
        evaluation=EvaluationConfig(every=0, modes=("greedy",)),
    )
    with pytest.raises(agl.errors.PolicyError, match=r"cannot .* at file://"):
        agl.Trainer(settings, run_dir=tmp_path / "run").fit(agl.rollout(say), TASKS)


async def test_a_model_server_is_told_to_load_what_was_pulled(tmp_path: Path) -> None:
    import asyncio

    from agentlightning_weights.publish import WeightPublisher

    (tmp_path / "v0").mkdir()
    (tmp_path / "v0" / "config.json").write_text("{}")
    url = f"file://{tmp_path}/bucket"
    WeightPublisher(url).publish(tmp_path / "v0", 0)
    async with ScriptedModelServer() as server:
        arguments = (url, str(tmp_path / "host"), "--model-server", server.url)
        result = await asyncio.to_thread(pull, *arguments)
        assert result.exit_code == 0, result.output
        loaded = [body for path, body in server.calls if path.startswith("/collective_rpc")]
        assert loaded[-1]["kwargs"]["weights_path"] == str(tmp_path / "host" / "version-000000")
        assert server.label == "version-0"


def test_nothing_published_yet_and_a_wrong_address_are_said_so(tmp_path: Path) -> None:
    result = pull(f"file://{tmp_path}/none", str(tmp_path / "host"))
    assert (result.exit_code, "nothing is published" in result.stderr) == (2, True), result.output
    result = pull("nothing://x", str(tmp_path / "host"))
    assert (result.exit_code, "cannot be opened" in result.stderr) == (2, True), result.output
