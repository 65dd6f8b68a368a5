"""Training runs whose model calls are answered by `agl serve` processes: real processes, HTTP and a real trainer; only
the model server is scripted."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.model_server import ScriptedModelServer

import agentlightning as agl
from agentlightning.engine.servers.joining import BASE_PATH
from agentlightning.errors import ConfigError
from agentlightning.policy.config import PolicyConfig

from .runs import AGENT, STEPS, TOKEN, Hub, account, command, fit, said, settings, start

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


async def test_a_run_that_joins_a_server_has_the_same_account_as_one_that_answers_its_own_calls(
    tmp_path: Path, hub: Hub, model_server: ScriptedModelServer
) -> None:
    alone = await fit(tmp_path, "alone", settings(model_server, ()), hub.url)
    joined = await fit(tmp_path, "joined", settings(model_server, (hub.url,)), hub.url)
    assert alone.gateways is None
    assert (joined.rollouts, joined.failed_rollouts) == (alone.rollouts, alone.failed_rollouts) == (32, 0)
    own, elsewhere = await account(hub.url, tmp_path / "alone"), await account(hub.url, tmp_path / "joined")
    assert elsewhere == own
    assert sorted(elsewhere["calls"]) == [0, 1]
    assert joined.gateways is not None
    assert joined.gateways["urls"] == [hub.url]
    assert (joined.gateways["failed"], joined.gateways["joins"]) == (0, 1)
    assert joined.gateways["updates"] >= STEPS, "and one for the return to the best checkpoint"
    assert joined.gateways["calls"] >= sum(elsewhere["calls"].values())
    figures = hub.metrics()
    assert (figures["joins"], figures["left"], figures["runs"], figures["gone"]) == (1, 1, 0, 0)
    assert figures["calls"] == joined.gateways["calls"]


@pytest.mark.parametrize("in_flight", [False, True])
async def test_a_run_with_adapters_that_joins_a_server_has_the_same_account(
    tmp_path: Path, hub: Hub, model_server: ScriptedModelServer, in_flight: bool
) -> None:
    """Two agents: the writer has an adapter of its own, and all others share one."""
    agents = {"writer": agl.Lora(r=4), "critic": "shared"}
    words = AGENT.replace('model="policy"', 'model=("writer" if ord(word[0]) % 2 else "critic") + "@policy"')
    options: dict[str, Any] = {"agent": words, "agents": agents}
    alone = await fit(tmp_path, "alone", settings(model_server, (), in_flight=in_flight), hub.url, **options)
    assert not model_server.adapters
    joining = settings(model_server, (hub.url,), in_flight=in_flight)
    joined = await fit(tmp_path, "joined", joining, hub.url, **options)
    assert (joined.rollouts, joined.failed_rollouts) == (alone.rollouts, alone.failed_rollouts) == (32, 0)
    own, elsewhere = await account(hub.url, tmp_path / "alone"), await account(hub.url, tmp_path / "joined")
    assert elsewhere == own
    assert set(own["models"]) == {"policy", "policy:writer"}
    assert sorted(own["calls"]) == [0, 1]
    assert joined.gateways is not None
    assert (joined.gateways["failed"], joined.gateways["joins"]) == (0, 1)
    assert not model_server.adapters, "they are unloaded at the end"


async def test_two_trainers_share_a_server_with_model_servers_of_their_own(
    tmp_path: Path, hub: Hub, model_server: ScriptedModelServer
) -> None:
    """Their agents ask for a model that nobody has: the rollout says whose policy answers."""
    async with ScriptedModelServer(context_length=512) as second:
        words = {
            "one": command(tmp_path, "one", model_server, hub.url, 60.0),
            "two": [*command(tmp_path, "two", second, hub.url, 60.0), "policy.name=other"],
        }
        (tmp_path / "agent.py").write_text(AGENT.replace('"policy"', '"gpt-4o"'))
        trainers = [await start(tmp_path, each) for each in words.values()]
        for trainer, message in zip(trainers, await asyncio.gather(*map(said, trainers)), strict=True):
            assert trainer.returncode == 0, message
    one, two = [await account(hub.url, tmp_path / name) for name in words]
    assert one["rollouts"] == two["rollouts"] == {"succeeded": 64}
    assert set(one["models"]) == {"policy"}
    assert set(two["models"]) == {"other"}
    figures = hub.metrics()
    assert (figures["joins"], figures["left"], figures["runs"], figures["failed"]) == (2, 2, 0, 0)


async def test_answers_that_go_on_across_an_update_name_the_version_of_each_token(
    tmp_path: Path, hub: Hub, model_server: ScriptedModelServer
) -> None:
    config = settings(model_server, (hub.url,), in_flight=True)
    config = config.model_copy(update={"run": config.run.model_copy(update={"max_staleness": 1})})
    model_server.delay = 0.02
    result = await fit(tmp_path, "run", config, hub.url)
    assert result.failed_rollouts == 0
    found = await account(hub.url, tmp_path / "run")
    assert set(found["calls"]) <= {0, 1, 2}
    assert set(found["rollouts"]) <= {"succeeded", "cancelled"}


async def test_a_wrong_token_is_refused_before_anything_runs(
    tmp_path: Path, hub: Hub, model_server: ScriptedModelServer
) -> None:
    async with httpx.AsyncClient(headers={"authorization": "Bearer other"}) as client:
        refused = await client.post(f"{hub.url}{BASE_PATH}/policy", json={})
    assert refused.status_code == 401
    with pytest.raises(ConfigError, match="check AGL_TOKEN"):
        await fit(tmp_path, "run", settings(model_server, (hub.url,)), hub.url, token="other")


@pytest.mark.parametrize("action", ["/check", ""])
def test_a_server_of_another_version_says_so(hub: Hub, action: str) -> None:
    answer = httpx.post(
        f"{hub.url}{BASE_PATH}/policy{action}",
        json={"run_id": "r1", "package": "9.9"},
        headers={"authorization": f"Bearer {TOKEN}"},
    )
    assert answer.status_code == 422
    assert f"this server has agentlightning {version('agentlightning')}" in answer.json()["detail"]
    assert "and the run 9.9; install the same version on both" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": PolicyConfig()}, "the gateways sample from model servers"),
        ({"policy": PolicyConfig(engine="vllm")}, "running model servers"),
        (
            {"gateway": agl.config.GatewayConfig(models={"judge": "dir"})},
            r"gateway.models is for all callers .*agl serve --routes",
        ),
        ({"gateway": agl.config.GatewayConfig(accept_any_model=True)}, "gateway.accept_any_model is not needed"),
    ],
)
async def test_settings_that_a_server_cannot_serve_are_refused(
    tmp_path: Path, hub: Hub, model_server: ScriptedModelServer, change: dict[str, Any], message: str
) -> None:
    config = settings(model_server, (hub.url,)).model_copy(update=change)
    with pytest.raises(ConfigError, match=message):
        await fit(tmp_path, "run", config, hub.url)
