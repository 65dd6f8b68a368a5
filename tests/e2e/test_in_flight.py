"""The rollouts that run at the same time follow the load of a model server, as its metrics report it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.support.model_server import ScriptedModelServer

import agentlightning as agl
from agentlightning.config import EvaluationConfig, RunConfig, RunnerConfig, TrainConfig
from agentlightning.policy.config import PolicyConfig
from agentlightning.training.sources import stream as in_flight_limit

from .conftest import AGL, Job

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

STEPS, TASKS, GROUP = 4, 12, 2
FULL = 8
"""Answers that fill the server's cache: a third of a step."""

REMOTE_AGENT = """
from openai import OpenAI


def say(word: str) -> str:
    answer = OpenAI().chat.completions.create(
        model="policy", messages=[{"role": "user", "content": f"say {word}"}], max_tokens=6
    )
    return answer.choices[0].message.content or ""
"""

Lines = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight_limit, "READ_SECONDS", 0.05)
    monkeypatch.setattr(in_flight_limit, "SETTLE_SECONDS", 0.3)


async def train(
    job: Job,
    server: ScriptedModelServer,
    *,
    full: int | None = FULL,
    hub: str | None = None,
    max_staleness: int = 0,
    **runner: Any,
) -> Lines:
    """Train with answers of `server` and runners here, or those of `hub`. Returns the metrics of each step."""
    server.cache_answers, server.delay = full, 0.01
    servers: Any = {"urls": (server.url,), "tolerance": 1000.0}
    config = TrainConfig(
        policy=PolicyConfig(engine="vllm", servers=servers),
        run=RunConfig(max_staleness=max_staleness),
        runner=RunnerConfig(cwd=str(job.directory), **runner),
        evaluation=EvaluationConfig(every=0, modes=("greedy",)),
    )
    here: dict[str, Any] = {"reward": f"{job.directory}/reward.py:letters"}
    elsewhere: dict[str, Any] = {"store": hub and agl.LightningStoreClient(hub), "n_runners": 0}
    trainer = agl.Trainer(
        config,
        algorithm=agl.LightningRL(steps=STEPS, tasks_per_step=TASKS, group_size=GROUP),
        model="tiny",
        run_dir=job.directory / "run",
        **(elsewhere if hub else here),
    )
    tasks = [{"word": str(number)} for number in range(20)]
    result = await trainer.fit_async(None if hub else f"{job.directory}/agent.py:say", tasks)
    assert (result.rollouts, result.failed_rollouts) == (STEPS * TASKS * GROUP, 0), "each was learned from once"
    return [json.loads(line) for line in (job.directory / "run" / "metrics.jsonl").read_text().splitlines()]


def overfill(server: ScriptedModelServer) -> None:
    """No answer of `server` goes on while more run than fit, and none until more have run: only cancellation helps."""
    server.holds = lambda: server.most_running <= FULL or server.running > FULL


def run_all_at_once(server: ScriptedModelServer) -> None:
    """No answer of `server` goes on until all those of a step have run at the same time."""
    server.holds = lambda: server.most_running < TASKS * GROUP


def assert_followed(lines: Lines, unlimited: int = TASKS) -> None:
    assert lines[0]["kv_cache_usage"] > 0.9
    assert lines[0]["groups_cancelled"] > 0
    assert all(line["groups"] == TASKS for line in lines), "a step has its groups, however few run at the same time"
    assert lines[0]["groups_limit"] < unlimited


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_fewer_rollouts_run_at_the_same_time_where_the_cache_is_full(job: Job, max_staleness: int) -> None:
    async with ScriptedModelServer() as server:
        overfill(server)
        lines = await train(job, server, max_staleness=max_staleness)
    assert_followed(lines, unlimited=(max_staleness + 1) * TASKS)


async def test_without_the_limit_all_rollouts_of_a_step_run_at_the_same_time(job: Job) -> None:
    async with ScriptedModelServer() as server:
        run_all_at_once(server)
        lines = await train(job, server, limit_by_load=False)
    assert server.most_running == TASKS * GROUP
    assert not any("groups_limit" in line or "groups_cancelled" in line for line in lines)


async def test_a_server_that_reports_no_load_limits_nothing(job: Job) -> None:
    async with ScriptedModelServer() as server:
        run_all_at_once(server)
        lines = await train(job, server, full=None)
    assert server.most_running == TASKS * GROUP
    assert not any("kv_cache_usage" in line or "groups_limit" in line for line in lines)


async def test_rollouts_of_remote_runners_are_limited_too(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_TOKEN", "hub-token")
    (job.directory / "agent.py").write_text(REMOTE_AGENT)
    serve = await start(job, "serve", "--port", "0", "--store", "hub.db", "--json")
    assert serve.stdout is not None
    hub = json.loads(await serve.stdout.readline())["url"]
    agent = ("--agent", "agent.py:say", "--reward", "reward.py:letters", "--concurrency", "32")
    runner = await start(job, "runner", "--server", hub, *agent)
    try:
        async with ScriptedModelServer() as server:
            overfill(server)
            lines = await train(job, server, hub=hub)
        assert_followed(lines)
    finally:
        for process in (runner, serve):
            process.terminate()
            await process.communicate()


async def start(job: Job, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        AGL,
        *arguments,
        cwd=job.directory,
        env={**job.environment, "AGL_TOKEN": "hub-token"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
