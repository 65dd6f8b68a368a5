"""Whole runs that train adapters of a real tiny model: server, gateway, store and training are the real ones.

Coroutines of the test stand in for the runner and its agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from tests.support.model_server import ScriptedModelServer
from tests.support.models import tiny_checkpoint

from agentlightning import span as names
from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.attempt_address import attempt_key, attempt_path, attempt_secret
from agentlightning.config import EvaluationConfig, RunConfig, RunnerConfig, TrainConfig
from agentlightning.engine.servers.config import ServersConfig
from agentlightning.errors import ConfigError
from agentlightning.policy.config import LocalPolicyConfig, Lora, OptimizerConfig, PolicyConfig
from agentlightning.policy.local import LocalPolicy
from agentlightning.resources import ProxyLLM
from agentlightning.rollouts import AttemptedRollout
from agentlightning.store import InMemoryLightningStore
from agentlightning.trainer import Trainer
from agentlightning.training import tracking
from agentlightning.training.report.result import TrainingResult
from agentlightning.util.settings import dump_toml, load_settings

pytestmark = pytest.mark.integration

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
    monkeypatch.setattr(tracking, "draw_curve", lambda *_: None)


async def one_call(ask: Ask) -> float:
    return float(len(await ask("What is 1 + 2?")) % 3)


async def test_a_run_trains_an_adapter_continues_and_leaves_one_that_opens(tmp_path: Path) -> None:
    job = Job(tmp_path, one_call)
    await job.fit(2, {"lora": Lora(r=4)})
    result = await job.resume(**{"algorithm.steps": 3})
    assert [line["step"] for line in job.metrics] == [1, 2, 3]
    opened = LocalPolicy.open(LocalPolicyConfig(model=result.checkpoint))
    assert opened.config.lora == Lora(r=4, alpha=8.0, targets=LINEAR_LAYERS)
    assert any(up.any() for up in opened._learner.adapters.by_name["shared"].up)
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


async def three_agents(ask: Ask) -> float:
    """A plan by one agent, a text by another, and a correction by a third."""
    plan = await ask("Make a plan.", agent="planner")
    text = await ask(f"Write about {plan[:8]}", agent="writer")
    corrected = await ask(f"Correct {text[:8]}", agent="editor", model="gpt-4o")
    return float((len(plan) + 2 * len(text) + len(corrected)) % 5)


AGENTS: dict[str, Any] = {"writer": Lora(r=4), "editor": "frozen", "planner": "shared"}


def adapters_in(checkpoint: Path) -> dict[str, dict[str, torch.Tensor]]:
    files = {"shared": checkpoint / "adapter_model.safetensors"}
    files |= {path.name: path / "adapter_model.safetensors" for path in (checkpoint / "adapters").iterdir()}
    return {name: load_file(path) for name, path in files.items()}


async def test_a_run_trains_adapters_that_a_server_samples_from(tmp_path: Path) -> None:
    """The scripted server's answers are not the model's, so that only the tolerance lets this run go on."""
    rewards = itertools.count()

    async def agent(ask: Ask) -> float:
        await three_agents(ask)
        return float(next(rewards) % 3)

    job = Job(tmp_path, agent)
    async with ScriptedModelServer(context_length=512) as server:
        servers = ServersConfig(urls=(server.url,), tolerance=1e9)
        result = await job.fit(2, {"engine": "vllm", "servers": servers}, agents=AGENTS)
        bodies = [body for path, body in server.calls if path.startswith("/inference/v1/generate")]
        asked = {str(body["model"]).rpartition(".")[0] for body in bodies if "sampling_params" in body}
        assert asked >= {"writer@0", "writer@1", "shared@0", "shared@1", ""}
        assert not server.adapters
    for line in job.metrics:
        assert line["calls_frozen"] == 4
        assert line["adapters_published"] == 2
        assert line["publish_bytes"] > 0
    assert adapters_in(Path(result.checkpoint or "")).keys() == {"shared", "writer"}
    seen: dict[tuple[str, str], set[int]] = {}
    for rollout in await job.store.query_rollouts():
        for span in await job.store.query_spans(rollout.rollout_id):
            if (version := span.attributes.get(names.POLICY_VERSION)) is not None:
                place = str(span.attributes[names.AGENT_NAME]), str(span.attributes[names.REQUEST_MODEL])
                seen.setdefault(place, set()).add(int(version))
    assert {agent for agent, _ in seen} == set(AGENTS)
    assert any({0, 1} <= versions for (agent, _), versions in seen.items() if agent == "writer")
    assert all(versions == {0} for (agent, _), versions in seen.items() if agent == "editor")
    await job.store.close()


@pytest.mark.slow
async def test_a_run_trains_several_agents_at_once(tmp_path: Path) -> None:
    job = Job(tmp_path, three_agents)
    result = await job.fit(3, agents=AGENTS)
    for line in job.metrics:
        assert line["calls_frozen"] == 4
        assert line["calls_unlisted"] == 0
        if line["groups_trained"]:
            assert line["writer/tokens_trained"] + line["shared/tokens_trained"] == line["tokens_trained"]
            assert line["writer/grad_norm"] > 0
            assert line["staleness"] == 0
    ids = [rollout.rollout_id for rollout in await job.store.query_rollouts()]
    every = [span for rollout_id in ids for span in await job.store.query_spans(rollout_id)]
    spans = [span for span in every if span.attributes.get("gen_ai.response.model")]
    answered = {(s.attributes.get("gen_ai.agent.name"), s.attributes["gen_ai.response.model"]) for s in spans}
    assert answered == {("planner", "policy"), ("writer", "policy:writer"), ("editor", "policy:base")}
    versions = {s.attributes["gen_ai.response.model"]: set() for s in spans}
    for span in spans:
        versions[span.attributes["gen_ai.response.model"]].add(span.attributes["agentlightning.policy_version"])
    assert versions["policy:base"] == {0}
    assert len(versions["policy:writer"]) > 1
    learned = adapters_in(result.checkpoint)
    assert set(learned) == {"shared", "writer"}
    assert all(any(matrix.any() for name, matrix in own.items() if "lora_B" in name) for own in learned.values())
    resources = await job.store.get_resources_by_id((await job.store.query_rollouts())[0].resources_id or "")
    assert resources is not None
    assert {name: llm.model for name, llm in resources.resources.items()} == {
        "llm": "policy",
        "llm:base": "policy:base",
        "llm:writer": "policy:writer",
    }
    await job.resume(**{"algorithm.steps": 4})
    assert [line["step"] for line in job.metrics] == [1, 2, 3, 4]
    opened = LocalPolicy.open(LocalPolicyConfig(model=result.checkpoint))
    assert opened.for_agent("writer").model == "policy:writer"
    await opened.close()
    await job.store.close()


@pytest.mark.slow
async def test_two_agents_learn_from_feedback_with_corrected_ratios_and_continue(tmp_path: Path) -> None:
    async def two_agents(ask: Ask) -> float:
        plan = await ask("Plan.", agent="planner")
        return float((len(plan) + 2 * len(await ask("Write.", agent="writer"))) % 5)

    job = Job(tmp_path, two_agents)
    settings: dict[str, Any] = {"loss": ["ppo", "sdpo"], "mismatch": "truncate"}
    await job.fit(2, agents={"writer": Lora(r=4), "planner": "shared"}, **settings)
    result = await job.resume(**{"algorithm.steps": 3})
    assert [line["step"] for line in job.metrics] == [1, 2, 3]
    assert sum(line["calls_with_feedback"] for line in job.metrics) > 0
    for line in job.metrics:
        assert line["feedback_left_out"] == 0
        if line["groups_trained"]:
            for agent in ("writer", "shared"):
                assert line[f"{agent}/tokens_trained"] > 0
                assert line[f"{agent}/mismatch_ratio"] == pytest.approx(1.0, abs=1e-3), "scored by what sampled it"
    learned = adapters_in(result.checkpoint)
    assert all(any(matrix.any() for name, matrix in own.items() if "lora_B" in name) for own in learned.values())
    await job.store.close()


async def test_target_agent_selects_which_adapter_learns(tmp_path: Path) -> None:
    job = Job(tmp_path, three_agents)
    result = await job.fit(2, agents=AGENTS, target_agent="writer")
    learned = adapters_in(result.checkpoint)
    assert any(matrix.any() for name, matrix in learned["writer"].items() if "lora_B" in name)
    assert not any(matrix.any() for name, matrix in learned["shared"].items() if "lora_B" in name)
    await job.store.close()


async def test_an_adapter_of_an_agent_that_the_first_batch_lacks_ends_the_run(tmp_path: Path) -> None:
    job = Job(tmp_path, three_agents)
    with pytest.raises(ConfigError, match=r"adapter to 'writter'.*there are 'editor', 'planner', 'writer'"):
        await job.fit(2, agents={"writter": Lora(r=4)})
    await job.store.close()


async def test_an_adapter_larger_than_the_model_is_refused_at_the_start(tmp_path: Path) -> None:
    job = Job(tmp_path, three_agents)
    with pytest.raises(ConfigError, match=r"r=5000 of adapter 'writer' exceeds the size of"):
        await job.fit(2, agents={"writer": Lora(r=5000)})
    await job.store.close()
