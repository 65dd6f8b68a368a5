"""Runs that join servers, for the tests here: `agl serve` processes, trainers in this process or their own, and what
they have recorded."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from tests.support.model_server import ScriptedModelServer

import agentlightning as agl
from agentlightning import span as names
from agentlightning.config import EvaluationConfig, RunConfig, RunnerConfig, TrainConfig
from agentlightning.engine.servers.config import ServersConfig
from agentlightning.policy.config import PolicyConfig

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
    number = re.search(r"(\\d+)$", os.environ["AGL_ROLLOUT_ID"])
    return float(int(number.group(1)) % 3)
"""


def environment() -> dict[str, str]:
    return {**os.environ, "AGL_TOKEN": TOKEN, "NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1"}


class Hub:
    """An `agl serve` in a process of its own."""

    def __init__(self, directory: Path, port: int = 0, database: str = "hub.db") -> None:
        command = [AGL, "serve", "--port", str(port), "--store", database, "--json", "--grace-seconds", "1"]
        self.log = (directory / "hub.log").open("a")
        self.process = subprocess.Popen(
            command, cwd=directory, env=environment(), stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        assert self.process.stdout is not None
        self.url: str = json.loads(self.process.stdout.readline())["url"]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def metrics(self) -> dict[str, float]:
        text = httpx.get(f"{self.url}/metrics", headers={"authorization": f"Bearer {TOKEN}"}).text
        lines = [line.split() for line in text.splitlines() if line.startswith("agentlightning_joined")]
        return {line[0].removeprefix("agentlightning_joined_").removesuffix("_total"): float(line[1]) for line in lines}

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.log.close()

    def end(self) -> None:
        if self.process.poll() is not None:
            return
        self.process.terminate()
        self.process.communicate(timeout=60)
        self.log.close()


def settings(model_server: ScriptedModelServer, gateways: tuple[str, ...], **policy: Any) -> TrainConfig:
    """The scripted server's answers are not the model's, so that only the tolerance lets this run go on."""
    servers = ServersConfig(urls=(model_server.url,), tolerance=1e9)
    return TrainConfig(
        evaluation=EvaluationConfig(every=0, modes=("greedy",)),
        runner=RunnerConfig(timeout_seconds=60, hosts=1, concurrency=8),
        policy=PolicyConfig(engine="vllm", servers=servers, **policy),
        run=RunConfig(gateways=gateways),
    )


async def fit(
    directory: Path,
    name: str,
    config: TrainConfig,
    url: str,
    token: str = TOKEN,
    agent: str = AGENT,
    steps: int = STEPS,
    **options: Any,
) -> agl.TrainingResult:
    (directory / "agent.py").write_text(agent)
    store = agl.LightningStoreClient(url, token)
    algorithm = agl.LightningRL(steps=steps, tasks_per_step=4, group_size=4, optimizer={"lr": 1e-3}, **options)
    trainer = agl.Trainer(config, algorithm=algorithm, store=store, run_dir=directory / name)
    try:
        return await trainer.fit_async(f"{directory / 'agent.py'}:say", [{"word": word} for word in "abcdefghij"])
    finally:
        await store.close()


def command(directory: Path, name: str, model_server: ScriptedModelServer, url: str, lease: float) -> list[str]:
    """`agl train` of a run like those of `fit`, in a process of its own."""
    (directory / "agent.py").write_text(AGENT)
    (directory / "tasks.jsonl").write_text("".join(json.dumps({"word": word}) + "\n" for word in "abcdefghij"))
    given = {
        "algorithm.steps": 4,
        "algorithm.tasks_per_step": 4,
        "algorithm.group_size": 4,
        "algorithm.optimizer.lr": 1e-3,
        "evaluation.every": 0,
        "evaluation.modes": ["greedy"],
        "runner.timeout_seconds": 60,
        "runner.hosts": 1,
        "runner.concurrency": 8,
        "policy.engine": "vllm",
        "policy.servers.urls": [model_server.url],
        "policy.servers.tolerance": 1e9,
        "run.gateways": [url],
        "run.gateway_lease_seconds": lease,
    }
    words = [f"{setting}={value if isinstance(value, str) else json.dumps(value)}" for setting, value in given.items()]
    files = ["--agent", "agent.py:say", "--data", "tasks.jsonl"]
    return [AGL, "train", "--server", url, "--run", name, "--json", *files, *words]


async def start(directory: Path, words: list[str]) -> Process:
    """Start `agl` as a process whose errors are read."""
    return await asyncio.create_subprocess_exec(*words, cwd=directory, env=environment(), stdout=DEVNULL, stderr=PIPE)


async def said(process: Process) -> str:
    return (await process.communicate())[1].decode()


async def account(url: str, run_dir: Path) -> dict[str, Any]:
    """What a run has recorded: rollouts, calls and tokens by version, calls by model, and tokens trained."""
    run_id = json.loads((run_dir / "state.json").read_text())["run_id"]
    store = agl.LightningStoreClient(url, TOKEN)
    rollouts = await store.query_rollouts(rollout_id_contains=f"{run_id}-train-")
    calls, tokens, models = Counter[int](), Counter[int](), Counter[str]()
    for rollout in rollouts:
        for span in await store.query_spans(rollout.rollout_id):
            if (version := span.attributes.get(names.POLICY_VERSION)) is not None:
                calls[int(version)] += 1
                models[span.attributes["gen_ai.response.model"]] += 1
                tokens[int(version)] += len(span.attributes[names.RESPONSE_TOKEN_IDS])
    await store.close()
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [line["tokens_trained"] for line in lines if "tokens_trained" in line]
    states = Counter(rollout.status for rollout in rollouts)
    return {"rollouts": states, "calls": calls, "tokens": tokens, "models": models, "trained": trained}
