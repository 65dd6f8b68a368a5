"""Whole runs that train adapters of a real tiny model: server, gateway, store and training are the real ones.

Coroutines of the test stand in for the runner and its agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.attempt_address import attempt_key, attempt_path, attempt_secret
from agentlightning.config import EvaluationConfig, RunConfig, RunnerConfig, TrainConfig
from agentlightning.errors import ConfigError
from agentlightning.policy.config import PolicyConfig
from agentlightning.policy.local import LocalPolicy
from agentlightning.policy.local_config import LocalPolicyConfig
from agentlightning.policy.lora_config import Lora
from agentlightning.policy.optimizer_config import OptimizerConfig
from agentlightning.resources import ProxyLLM
from agentlightning.rollouts import AttemptedRollout
from agentlightning.store import InMemoryLightningStore
from agentlightning.testing.models import tiny_checkpoint
from agentlightning.trainer import Trainer
from agentlightning.training.report import write_report
from agentlightning.training.report.result import TrainingResult
from agentlightning.util.settings import dump_toml, load_settings

Ask = Callable[..., Awaitable[str]]
"""ask(text, agent=None, model=None) -> answer"""
Agent = Callable[[Ask], Awaitable[float]]

LINEAR_LAYERS = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
TASKS = [{"n": n} for n in range(4)]


class Job:
    """Runs of one agent in one directory."""

    def __init__(self, directory: Path, agent: Agent) -> None:
        self.directory, self.agent = directory, agent
        self.store = InMemoryLightningStore()
        self.model = tiny_checkpoint(directory / "model")

    def config(self, steps: int, **policy: Any) -> TrainConfig:
        return TrainConfig(
            policy=PolicyConfig(model=str(self.model), device="cpu", **policy),
            runner=RunnerConfig(hosts=0, max_attempts=1),
            evaluation=EvaluationConfig(modes=("greedy",), every=0),
            run=RunConfig(checkpoint_every=1, keep_checkpoints=9),
        )

    async def fit(self, steps: int, policy: dict[str, Any] | None = None, **settings: Any) -> TrainingResult:
        algorithm = LightningRL(
            steps=steps, tasks_per_step=1, group_size=4, optimizer=OptimizerConfig(lr=1e-2), **settings
        )
        trainer = Trainer(
            self.config(steps, **(policy or {})), algorithm=algorithm, store=self.store, run_dir=self.directory / "run"
        )
        return await self._run(trainer.fit_async(None, TASKS, TASKS[:1], held_out_dataset=TASKS[:1]))

    async def resume(self, **changes: Any) -> TrainingResult:
        return await self._run(Trainer.resume(self.directory / "run", changes=changes, store=self.store).fit_async())

    async def _run(self, training: Awaitable[TrainingResult]) -> TrainingResult:
        async with httpx.AsyncClient(trust_env=False) as client:
            work = asyncio.create_task(self._work(client))
            try:
                return await training
            finally:
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await work

    async def _work(self, client: httpx.AsyncClient) -> None:
        while True:
            if (rollout := await self.store.dequeue_rollout(timeout=5)) is not None:
                await self._roll_out(client, rollout)

    async def _roll_out(self, client: httpx.AsyncClient, rollout: AttemptedRollout) -> None:
        ids = rollout.rollout_id, rollout.attempt.attempt_id
        found = await self.store.get_resources_by_id(rollout.resources_id or "")
        assert found is not None
        llm = found.resources["llm"]
        assert isinstance(llm, ProxyLLM)

        async def ask(text: str, agent: str | None = None, model: str | None = None) -> str:
            body = {"model": model or llm.model, "max_tokens": 6, "messages": [{"role": "user", "content": text}]}
            headers = {} if agent is None else {"x-agentlightning-agent": agent}
            reply = await client.post(f"{llm.get_base_url(*ids)}/chat/completions", json=body, headers=headers)
            reply.raise_for_status()
            return reply.json()["choices"][0]["message"]["content"] or ""

        event = {"event_type": "reward", "data": {"value": await self.agent(ask)}}
        key = {"authorization": f"Bearer {attempt_key(attempt_secret(None), *ids)}"}
        (await client.post(f"{llm.root_url}{attempt_path(*ids)}/events", json=event, headers=key)).raise_for_status()
        await self.store.update_attempt(*ids, status="succeeded")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_report, "draw_curve", lambda *_: None)


async def one_call(ask: Ask) -> float:
    return float(len(await ask("What is 1 + 2?")) % 3)


async def test_a_run_trains_an_adapter_continues_and_leaves_one_that_opens(tmp_path: Path) -> None:
    job = Job(tmp_path, one_call)
    await job.fit(2, {"lora": Lora(r=4)})
    result = await job.resume(**{"algorithm.steps": 3})
    assert [line["step"] for line in job.metrics] == [1, 2, 3]
    opened = LocalPolicy.open(LocalPolicyConfig(model=result.checkpoint))
    assert opened.config.lora == Lora(r=4, alpha=8.0, targets=LINEAR_LAYERS)
    assert any(up.any() for up in opened._weights.adapters.by_name["shared"].up)
    await opened.close()
    with pytest.raises(ConfigError, match=r"policy.lora.r: a resumed run keeps this"):
        await job.resume(**{"policy.lora.r": 8})
    await job.store.close()


def test_a_file_or_the_command_line_sets_the_adapter(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[policy.lora]\nr = 8\n")
    assert load_settings(TrainConfig, toml=file).policy.lora == Lora(r=8)
    config = load_settings(TrainConfig, overrides=["policy.lora.r=4", "policy.lora.optimizer.lr=1e-3"])
    assert config.policy.lora == Lora(r=4, optimizer=OptimizerConfig(lr=1e-3))
    file.write_text(dump_toml(config))
    assert load_settings(TrainConfig, toml=file) == config, "what a run writes it reads back"


async def test_servers_are_refused_with_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy.lora needs policy.engine"):
        await Job(tmp_path, one_call).fit(
            1, {"lora": Lora(r=4), "engine": "vllm", "servers": {"urls": ("http://127.0.0.1:9",)}}
        )
