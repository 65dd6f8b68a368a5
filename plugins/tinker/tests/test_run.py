"""A training run whose policy is on a server of the Tinker API, from its settings to a resume."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.config import EvaluationConfig, RunnerConfig, TrainConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("key"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
TASKS = [{"word": word} for word in ("red", "green", "blue", "white", "black", "pink", "grey", "brown")]


def say(task: Any, llm: Any) -> float:
    from openai import OpenAI

    client = OpenAI(base_url=llm.endpoint, api_key="unused")
    messages: Any = [{"role": "user", "content": f"say {task['word']}"}]
    answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=6)
    return float(len(answer.choices[0].message.content or "")) % 7


async def test_a_run_trains_on_the_server_and_is_resumed_after_its_restart(
    model: Path, serving: Any, tmp_path: Path
) -> None:
    def settings(url: str) -> TrainConfig:
        return TrainConfig(
            policy={
                "kind": "tinker",
                "model": str(model),
                "lora": {"r": 4},
                "tinker": {"url": url, "base_model": "tiny"},
                "max_context": 128,
            },
            algorithm={
                "type": "lightning_rl",
                "steps": 2,
                "tasks_per_step": 2,
                "group_size": 4,
                "optimizer": {"lr": 1e-2},
            },
            evaluation=EvaluationConfig(every=0, modes=("greedy",)),
            runner=RunnerConfig(concurrency=8, max_attempts=1),
        )

    async with serving() as server:
        trainer = agl.Trainer(settings(server.url), run_dir=tmp_path / "run")
        result = await asyncio.to_thread(trainer.fit, agl.rollout(say), TASKS)
        assert result.steps == 2
        port = server.port
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [each for each in metrics if "grad_norm" in each]
    assert [each["lr"] for each in steps] == [1e-2, 1e-2]
    assert all(each["grad_norm"] > 0 for each in steps)
    async with serving(port):
        resumed = agl.Trainer.resume(tmp_path / "run", changes=["algorithm.steps=3"])
        result = await asyncio.to_thread(resumed.fit, agl.rollout(say))
        assert result.steps == 3


def test_a_warm_start_is_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="warm_start"):
        TrainConfig(policy={"kind": "tinker", "model": str(model)}, warm_start={"dataset": "x.jsonl"})
