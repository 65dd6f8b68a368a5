"""Training runs whose model calls are answered by `agl serve` processes: real processes, HTTP and a real trainer; only
the model server is scripted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

import agentlightning as agl
from agentlightning import span as names
from agentlightning.config import EvaluationConfig, RunConfig, RunnerConfig, TrainConfig
from agentlightning.engine.servers.config import ServersConfig
from agentlightning.engine.servers.joining import BASE_PATH
from agentlightning.errors import ConfigError
from agentlightning.policy.config import PolicyConfig
from agentlightning.testing.model_server import ScriptedModelServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

AGL = str(Path(sys.executable).parent / "agl")
TOKEN = "hub-token"
STEPS = 2
AGENT = """
import os
import re
from openai import OpenAI

CLIENT = OpenAI()


def say(word: str) -> float:
    messages = [{"role": "user", "content": f"say {word}"}]
    for _ in range(2):
        answer = CLIENT.chat.completions.create(model="policy", messages=messages, max_tokens=6)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        messages.append({"role": "user", "content": "again"})
    number = re.search(r"(\\d+)/attempt/", os.environ["OPENAI_BASE_URL"])
    return float(int(number.group(1)) % 3)
"""


class Hub:
    """An `agl serve` in a process of its own."""

    def __init__(self, directory: Path, port: int = 0) -> None:
        environment = {**os.environ, "AGL_TOKEN": TOKEN, "NO_PROXY": "127.0.0.1"}
        command = [AGL, "serve", "--port", str(port), "--db", "hub.db", "--json", "--grace-seconds", "1"]
        self.log = (directory / "hub.log").open("a")
        self.process = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        assert self.process.stdout is not None
        self.url: str = json.loads(self.process.stdout.readline())["url"]

    def metrics(self) -> dict[str, float]:
        text = httpx.get(f"{self.url}/metrics", headers={"authorization": f"Bearer {TOKEN}"}).text
        lines = [line.split() for line in text.splitlines() if line.startswith("agentlightning_joined")]
        return {line[0].removeprefix("agentlightning_joined_").removesuffix("_total"): float(line[1]) for line in lines}

    def end(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=30)
        self.log.close()


@pytest.fixture
def hub(tmp_path: Path) -> Generator[Hub]:
    running = Hub(tmp_path)
    yield running
    running.end()


@pytest.fixture
async def model_server() -> AsyncGenerator[ScriptedModelServer]:
    async with ScriptedModelServer(context_length=512) as server:
        yield server


def settings(model_server: ScriptedModelServer, gateways: tuple[str, ...], **policy: Any) -> TrainConfig:
    """The scripted server's answers are not the model's, so that only the tolerance lets this run go on."""
    servers = ServersConfig(urls=(model_server.url,), tolerance=1e9)
    return TrainConfig(
        evaluation=EvaluationConfig(every=0, modes=("greedy",)),
        runner=RunnerConfig(timeout_seconds=60, hosts=1, concurrency=8),
        policy=PolicyConfig(engine="vllm", servers=servers, **policy),
        run=RunConfig(gateways=gateways),
    )


async def fit(directory: Path, name: str, config: TrainConfig, url: str, token: str = TOKEN) -> agl.TrainingResult:
    (directory / "agent.py").write_text(AGENT)
    store = agl.LightningStoreClient(url, token)
    algorithm = agl.LightningRL(steps=STEPS, tasks_per_step=4, group_size=4, optimizer={"lr": 1e-3})
    trainer = agl.Trainer(config, algorithm=algorithm, store=store, run_dir=directory / name)
    try:
        return await trainer.fit_async(f"{directory / 'agent.py'}:say", [{"word": word} for word in "abcdefghij"])
    finally:
        await store.close()


async def account(url: str, run_dir: Path) -> dict[str, Any]:
    """What a run has recorded: rollouts, calls and tokens by version, and tokens trained."""
    run_id = json.loads((run_dir / "state.json").read_text())["run_id"]
    store = agl.LightningStoreClient(url, TOKEN)
    rollouts = await store.query_rollouts(rollout_id_contains=f"{run_id}-train-")
    calls, tokens = Counter[int](), Counter[int]()
    for rollout in rollouts:
        for span in await store.query_spans(rollout.rollout_id):
            if (version := span.attributes.get(names.POLICY_VERSION)) is not None:
                calls[int(version)] += 1
                tokens[int(version)] += len(span.attributes[names.RESPONSE_TOKEN_IDS])
    await store.close()
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [line["tokens_trained"] for line in lines if "tokens_trained" in line]
    states = Counter(rollout.status for rollout in rollouts)
    return {"rollouts": states, "calls": calls, "tokens": tokens, "trained": trained}


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


def test_a_server_of_another_protocol_version_says_so(hub: Hub) -> None:
    answer = httpx.post(
        f"{hub.url}{BASE_PATH}/policy",
        json={"run_id": "r1", "protocol": 99},
        headers={"authorization": f"Bearer {TOKEN}"},
    )
    assert answer.status_code == 422
    assert "install the same version of agentlightning on both" in answer.json()["error"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": PolicyConfig()}, "the gateways sample from model servers"),
        ({"policy": PolicyConfig(engine="vllm")}, "running model servers"),
        ({"policy": PolicyConfig(engine="vllm", lora={}, servers={"urls": ["http://x"]})}, "adapters"),  # type: ignore[arg-type]
        ({"gateway": agl.GatewayConfig(structured_output="never")}, r"settings of \[gateway\]"),
    ],
)
async def test_settings_that_a_server_cannot_serve_are_refused(
    tmp_path: Path, hub: Hub, model_server: ScriptedModelServer, change: dict[str, Any], message: str
) -> None:
    config = settings(model_server, (hub.url,)).model_copy(update=change)
    with pytest.raises(ConfigError, match=message):
        await fit(tmp_path, "run", config, hub.url)
