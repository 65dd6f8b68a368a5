"""A run on two machines: a trainer with its vLLM on one; a server on PostgreSQL, which answers the model calls, and its
runners on the other, which sees no file of the first."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.postgres import PostgresCluster, PostgresNotFoundError

from agentlightning.algorithms.lightning_rl import LightningRLConfig
from agentlightning.config import EvaluationConfig, RunConfig, RunnerConfig, TrainConfig
from agentlightning.engine.servers.config import ServersConfig
from agentlightning.policy.config import Lora, OptimizerConfig, PolicyConfig
from agentlightning.span import POLICY_VERSION, RESPONSE_TOKEN_IDS, Span
from agentlightning.store import LightningStore
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.http.client import LightningStoreClient
from agentlightning.trainer import Trainer

from .test_runs import AGL, NEAR, WORDS, Model, Weights, given, versions_of

__all__ = ["given"]

STEPS = 2
TOKEN = "token-of-both-machines"
TASKS = [{"word": word} for word in WORDS]
AGENT = """
from openai import OpenAI


def say(word: str) -> str:
    client = OpenAI()
    messages = [{"role": "user", "content": f"say {word}"}]
    texts = []
    for _ in range(2):
        answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=8)
        texts.append(answer.choices[0].message.content or "")
        messages += [{"role": "assistant", "content": texts[-1]}, {"role": "user", "content": "again"}]
    return " ".join(texts)


def letters(task, output):
    return sum(character.isalpha() for character in output) / max(1, len(output))
"""


class Machine:
    """A process group with a directory of its own, which does not see the directories `hidden`."""

    def __init__(self, directory: Path, hidden: Sequence[Path]) -> None:
        self.directory = directory
        directory.mkdir()
        (directory / "agent.py").write_text(AGENT)
        mounts = " && ".join(f"mount -t tmpfs none '{path}'" for path in hidden)
        self._alone = ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh"]
        self._started: list[subprocess.Popen[str]] = []
        tried = subprocess.run([*self._alone, "ls", str(hidden[0])], capture_output=True, text=True)
        if tried.returncode or tried.stdout:
            pytest.skip(f"this process may not hide directories from others: {tried.stderr}")

    def start(self, *words: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "AGL_TOKEN": TOKEN, "NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        with (self.directory / "log").open("a") as log:
            process = subprocess.Popen(
                [*self._alone, AGL, *words], cwd=self.directory, env=environment, stdout=subprocess.PIPE, stderr=log,
                text=True, start_new_session=True,
            )  # fmt: skip
        self._started.append(process)
        return process

    def end(self) -> None:
        for process in reversed(self._started):
            process.terminate()
            process.wait(60)
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def other(tmp_path: Path, models: list[Path]) -> Generator[Machine]:
    mine = tmp_path / "trainer"
    mine.mkdir()
    machine = Machine(tmp_path / "server", [mine, models[0].parent])
    yield machine
    machine.end()


@pytest.fixture
def database() -> Generator[str]:
    try:
        with PostgresCluster() as cluster:
            yield cluster.new_database()
    except PostgresNotFoundError as error:
        pytest.skip(str(error))


def settings(model: Path, server: str, run: RunConfig, runner: dict[str, Any]) -> TrainConfig:
    return TrainConfig(
        policy=PolicyConfig(model=str(model), engine="vllm", servers=ServersConfig(urls=(server,))),
        algorithm=LightningRLConfig(steps=STEPS, tasks_per_step=4, group_size=4, optimizer=OptimizerConfig(lr=3e-3)),
        evaluation=EvaluationConfig(every=0, modes=("greedy",)),
        runner=RunnerConfig(timeout_seconds=300.0, concurrency=8, **runner),
        run=run,
    )


async def calls_of(store: LightningStoreBase, run: Path) -> list[Span]:
    run_id = json.loads((run / "state.json").read_bytes())["run_id"]
    found = await store.query_rollouts(rollout_id_contains=run_id)
    assert {rollout.status for rollout in found} == {"succeeded"}
    spans = [span for rollout in found for span in await store.query_spans(rollout.rollout_id)]
    return [span for span in spans if span.attributes.get(RESPONSE_TOKEN_IDS)]


async def metrics_of(url: str) -> str:
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {TOKEN}"}) as client:
        return (await client.get(f"{url}/metrics")).text


def by_version(spans: Sequence[Span]) -> Counter[int]:
    return Counter(int(span.attributes[POLICY_VERSION]) for span in spans)


async def test_a_run_on_two_machines_has_the_account_of_one_on_one_machine(
    database: str, other: Machine, server: str, models: list[Path], tmp_path: Path, given: dict[int, Weights]
):
    hub = other.start("serve", "--port", "0", "--store", database, "--json")
    assert hub.stdout is not None
    url: str = json.loads(hub.stdout.readline())["url"]
    words = ("runner", "--server", url, "--agent", "agent.py:say", "--reward", "agent.py:letters", "--json")
    runners = [other.start(*words) for _ in range(2)]
    store = LightningStoreClient(url, TOKEN)
    config = settings(models[0], server, RunConfig(gateways=(url,)), {"hosts": 0})
    apart = tmp_path / "trainer" / "run"
    result = await Trainer(config, store=store, run_dir=apart).fit_async(train_dataset=TASKS)
    spans, weights = await calls_of(store, apart), dict(given)
    metrics = await metrics_of(url)
    await store.close()
    for runner in runners:
        runner.terminate()
    done = [json.loads(runner.communicate(timeout=60)[0].strip().splitlines()[-1]) for runner in runners]
    assert sum(each["failed"] for each in done) == 0

    one = tmp_path / "trainer" / "one"
    (tmp_path / "trainer" / "agent.py").write_text(AGENT)
    agent = str(tmp_path / "trainer" / "agent.py")
    together = settings(models[0], server, RunConfig(), {})
    together = together.model_copy(update={"agent": f"{agent}:say", "reward": f"{agent}:letters"})
    expected = await Trainer(together, run_dir=one).fit_async(train_dataset=TASKS)
    own_store = LightningStore(one / "store.db")
    own = await calls_of(own_store, one)
    await own_store.close()

    assert (result.rollouts, result.failed_rollouts, result.steps) == (expected.rollouts, 0, STEPS)
    assert (expected.failed_rollouts, result.rejected_rollouts) == (0, expected.rejected_rollouts)
    assert by_version(spans) == by_version(own)
    assert result.gateways is not None
    assert STEPS <= result.gateways["updates"] <= STEPS + 2, "and where a checkpoint is loaded"
    assert result.gateways["failed"] == 0
    assert result.gateways["calls"] == len(spans)
    assert result.gateways["tokens"] == sum(len(span.attributes[RESPONSE_TOKEN_IDS]) for span in spans)
    assert f"agentlightning_joined_calls_total {float(len(spans))}" in metrics

    model = Model(models[0])
    for span in spans:
        ((version, _),) = versions_of(span)
        assert float(model.differences(span, weights[version]).max()) < NEAR
    print(f"\n{len(spans)} calls on two machines, {len(own)} on one; by version {dict(by_version(spans))}")  # noqa: T201


async def test_adapters_learn_where_the_calls_of_their_agents_are_answered_on_another_machine(
    other: Machine, fresh_server: str, models: list[Path], tmp_path: Path
):
    """Two agents of one run: the writer has an adapter of its own, and all others share one."""
    asking = AGENT.replace('model="policy"', 'model=("writer" if len(word) % 2 else "critic") + "@policy"')
    (other.directory / "agent.py").write_text(asking)
    hub = other.start("serve", "--port", "0", "--store", "hub.db", "--json")
    assert hub.stdout is not None
    url: str = json.loads(hub.stdout.readline())["url"]
    other.start("runner", "--server", url, "--agent", "agent.py:say", "--reward", "agent.py:letters", "--json")
    store = LightningStoreClient(url, TOKEN)
    config = settings(models[0], fresh_server, RunConfig(gateways=(url,)), {"hosts": 0})
    agents = {"writer": Lora(r=4), "critic": "shared"}
    config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"agents": agents})})
    run = tmp_path / "trainer" / "run"
    result = await Trainer(config, store=store, run_dir=run).fit_async(train_dataset=TASKS)
    spans = await calls_of(store, run)
    await store.close()

    assert (result.failed_rollouts, result.steps) == (0, STEPS)
    assert result.gateways is not None
    assert (result.gateways["failed"], result.gateways["calls"]) == (0, len(spans))
    answered = {(span.attributes["gen_ai.response.model"], span.attributes[POLICY_VERSION]) for span in spans}
    assert {("policy:writer", 1), ("policy", 1)} <= answered, "both were changed, and their agents asked again"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [line["mismatch_kl"] for line in lines if "mismatch_kl" in line]
    assert len(kept) == STEPS
    near = NEAR**2 / 2  # The KL divergence (k3) of log-probabilities that differ by so much.
    assert max(map(abs, kept)) < near, "what the trainer computes of the tokens is what the servers recorded"
    async with httpx.AsyncClient() as client:
        served = [model["id"] for model in (await client.get(f"{fresh_server}/v1/models")).json()["data"]]
    assert not [name for name in served if "@" in name], "adapters are unloaded at the end"
    print(f"\n{len(spans)} calls by {sorted(answered)}; KL divergence of server and trainer {max(map(abs, kept)):.1e}")  # noqa: T201
