"""Trainers and servers that are killed while a run trains: nothing is lost, and the run ends as it would have.

Real processes (`agl train`, `agl serve`) and `kill -9`; only the model server is scripted."""

from __future__ import annotations

import asyncio
import json
from asyncio.subprocess import Process
from pathlib import Path
from typing import Any

import pytest
from tests.support.model_server import ScriptedModelServer

from .runs import AGENT, Hub, account, command, fit, said, settings, start

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

LEASE = 6.0


async def reach_step(run_dir: Path, step: int, working: Process | asyncio.Task[Any]) -> None:
    async with asyncio.timeout(240):
        while True:
            ended = working.done() if isinstance(working, asyncio.Task) else working.returncode is not None
            assert not ended, "the run ended before anything was killed"
            state = run_dir / "state.json"
            if state.exists() and json.loads(state.read_bytes())["step"] >= step:
                return
            await asyncio.sleep(0.02)


async def test_a_killed_trainer_is_resumed_with_the_same_account_and_another_run_may_have_its_name_after_the_lease(
    tmp_path: Path, hub: Hub, model_server: ScriptedModelServer
) -> None:
    killed = await start(tmp_path, command(tmp_path, "killed", model_server, hub.url, LEASE))
    await reach_step(tmp_path / "killed", 1, killed)
    model_server.holds = lambda: True  # The run is not over before the other one has tried.
    refused = await start(tmp_path, command(tmp_path, "other", model_server, hub.url, LEASE))
    message = await said(refused)
    assert refused.returncode != 0
    assert "the model name 'policy' belongs to run" in message
    assert killed.returncode is None, "the run ended before it could be killed"
    killed.kill()
    await killed.communicate()

    model_server.holds = lambda: False
    await asyncio.sleep(LEASE + 1.0)
    assert hub.metrics()["gone"] == 1
    taken = await start(tmp_path, command(tmp_path, "calm", model_server, hub.url, LEASE))
    message = await said(taken)
    assert taken.returncode == 0, message

    words = command(tmp_path, "killed", model_server, hub.url, LEASE)
    resumed = await start(tmp_path, [*words[:4], "--resume", "killed"])
    message = await said(resumed)
    assert resumed.returncode == 0, message
    calm, rough = [await account(hub.url, tmp_path / name) for name in ("calm", "killed")]
    assert rough["rollouts"] == calm["rollouts"] == {"succeeded": 64}
    assert rough["trained"] == calm["trained"]
    assert sum(rough["calls"].values()) >= sum(calm["calls"].values()), "calls of attempts that the kill cut off stay"
    figures = hub.metrics()
    assert (figures["joins"], figures["left"], figures["runs"], figures["refused"]) == (3, 2, 0, 1)


async def test_a_server_that_is_killed_and_started_again_loses_nothing_of_a_run(
    tmp_path: Path, hub: Hub, model_server: ScriptedModelServer
) -> None:
    config = settings(model_server, (hub.url,))
    config = config.model_copy(update={"runner": config.runner.model_copy(update={"max_attempts": 5})})
    calm = await fit(tmp_path, "calm", config, hub.url, steps=4)
    model_server.delay = 0.05  # So that answers are under way.
    training = asyncio.create_task(fit(tmp_path, "rough", config, hub.url, steps=4))
    await reach_step(tmp_path / "rough", 1, training)
    hub.kill()
    await asyncio.sleep(1.0)
    again = await asyncio.to_thread(Hub, tmp_path, hub.port)
    try:
        rough = await training
        assert (rough.rollouts, rough.failed_rollouts) == (calm.rollouts, calm.failed_rollouts) == (64, 0)
        assert rough.gateways is not None
        assert rough.gateways["joins"] == 2
        own, elsewhere = await account(again.url, tmp_path / "calm"), await account(again.url, tmp_path / "rough")
        assert elsewhere["rollouts"] == own["rollouts"] == {"succeeded": 64}
        assert elsewhere["trained"] == own["trained"]
        assert sum(elsewhere["calls"].values()) >= sum(own["calls"].values())
        assert again.metrics()["left"] == 1
    finally:
        await asyncio.to_thread(again.end)


async def test_a_run_goes_on_without_a_gateway_that_is_killed(
    tmp_path: Path, hub: Hub, model_server: ScriptedModelServer
) -> None:
    """The gateways share a store; an agent whose gateway is gone asks the other, as behind a load balancer."""
    second = await asyncio.to_thread(Hub, tmp_path, 0, "hub.db")
    words = AGENT.replace("CLIENT = OpenAI()", both(hub.url, second.url)).replace("CLIENT.chat", "client(word).chat")
    config = settings(model_server, (hub.url, second.url))
    config = config.model_copy(update={"run": config.run.model_copy(update={"gateway_lease_seconds": 3.0})})
    training = asyncio.create_task(fit(tmp_path, "run", config, hub.url, agent=words, steps=4))
    try:
        await reach_step(tmp_path / "run", 2, training)
        assert min(each.metrics()["calls"] for each in (hub, second)) > 0
        second.kill()
        result = await training
        assert result.failed_rollouts == 0
        found = await account(hub.url, tmp_path / "run")
        assert found["rollouts"] == {"succeeded": 64}
        assert sum(found["calls"].values()) >= 128
    finally:
        await asyncio.to_thread(second.end)


def both(first: str, second: str) -> str:
    """Clients that divide the words of an agent between two gateways, and go to the first where the second is gone."""
    return f"""
import httpx


def client(word):
    url = os.environ["OPENAI_BASE_URL"]
    if ord(word[0]) % 2:
        moved = url.replace({first!r}, {second!r})
        try:
            httpx.get(moved)
            url = moved
        except httpx.HTTPError:
            pass
    return OpenAI(base_url=url)
"""
