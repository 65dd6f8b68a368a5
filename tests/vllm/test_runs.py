"""Whole training runs that sample from a real vLLM: killed and resumed, and updated under answers that go on."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentlightning import span as names
from agentlightning.algorithms.lightning_rl import LightningRLConfig
from agentlightning.config import EvaluationConfig, RunnerConfig, TrainConfig
from agentlightning.engine.servers.config import ServersConfig
from agentlightning.engine.servers.pool import WeightSource
from agentlightning.policy.config import OptimizerConfig, PolicyConfig
from agentlightning.policy.served import ServedPolicy
from agentlightning.span import Span
from agentlightning.store import LightningStore
from agentlightning.trainer import Trainer
from agentlightning.util.settings import dump_toml

NEAR = 1e-3
STEPS = 4
AGL = Path(sys.executable).parent / "agl"
WORDS = ("red", "green", "blue", "white", "black", "pink", "grey", "brown", "gold", "teal")
AGENT = '''
import os
import threading

from openai import OpenAI

CLIENT = OpenAI(api_key="unused", base_url="http://127.0.0.1:9")
RAMBLES = {rambles}


def ramble(client):
    """Goes on after its rollout has ended."""
    try:
        client.completions.create(model="policy", prompt="and so", max_tokens=800)
    except Exception as error:
        if "attempt" not in str(error):  # The rollout was over before the call began.
            os.write(2, f"FAILED {{error!r}}\\n".encode())


def say(word: str, base_url: str) -> str:
    client = CLIENT.with_options(base_url=base_url, max_retries=0)
    if RAMBLES:
        threading.Thread(target=ramble, args=(client,), daemon=True).start()
    messages = [{{"role": "user", "content": f"say {{word}}"}}]
    answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=12)
    return answer.choices[0].message.content or ""


def letters(task, output):
    return sum(character.isalpha() for character in output) / max(1, len(output))
'''

Weights = dict[str, torch.Tensor]


def config_of(folder: Path, model: Path, servers: ServersConfig, **policy: Any) -> TrainConfig:
    """A small run; with `in_flight` its agents leave calls behind that outlive them."""
    (folder / "agent.py").write_text(AGENT.format(rambles=bool(policy.get("in_flight"))))
    return TrainConfig(
        agent=f"{folder / 'agent.py'}:say",
        reward=f"{folder / 'agent.py'}:letters",
        policy=PolicyConfig(model=str(model), engine="vllm", servers=servers, **policy),
        algorithm=LightningRLConfig(steps=STEPS, tasks_per_step=4, group_size=4, optimizer=OptimizerConfig(lr=3e-3)),
        evaluation=EvaluationConfig(every=0),
        runner=RunnerConfig(timeout_seconds=300.0, concurrency=16),
    )


@pytest.fixture
def started(vllm: str, on_cpu: dict[str, str]) -> ServersConfig:
    return ServersConfig(command=vllm, args=("--enforce-eager",), env=on_cpu)


@pytest.fixture
def joined(server: str) -> ServersConfig:
    """It outlives a run that is killed, with whatever that run gave it."""
    return ServersConfig(urls=(server,))


@pytest.fixture(params=["started", "joined"])
def servers(request: pytest.FixtureRequest) -> ServersConfig:
    return request.getfixturevalue(request.param)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[int, Weights]:
    """The weights of each version that servers were given in this process."""
    kept: dict[int, Weights] = {}
    give = ServedPolicy._publish_weights

    async def watched(policy: ServedPolicy, held: WeightSource) -> None:
        copies: Weights = {}
        await policy.learner.lend(lambda weights: copies.update({name: each.clone() for name, each in weights.items()}))
        del copies["lm_head.weight"]  # The input embedding once more.
        kept[policy.learner.policy_version] = copies
        await give(policy, held)

    monkeypatch.setattr(ServedPolicy, "_publish_weights", watched)
    return kept


class Model:
    """The run's model, with whatever weights."""

    def __init__(self, path: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path)

    def differences(self, span: Span, weights: Weights) -> torch.Tensor:
        """How far each recorded log-probability is from what a forward pass with `weights` gives."""
        prompt, answer = (list(span.attributes[name]) for name in (names.PROMPT_TOKEN_IDS, names.RESPONSE_TOKEN_IDS))
        with torch.inference_mode():
            output = torch.func.functional_call(self._model, weights, (torch.tensor([[*prompt, *answer]]),))
        temperature = float(span.attributes.get(names.REQUEST_TEMPERATURE, 1.0)) or 1.0
        own = (output.logits[0, len(prompt) - 1 : -1].float() / temperature).log_softmax(-1)
        drawn = own.gather(1, torch.tensor(answer)[:, None])[:, 0]
        return (drawn - torch.tensor(list(span.attributes[names.LOGPROBS]))).abs()


def versions_of(span: Span) -> list[tuple[int, int]]:
    """(version, how many tokens it drew), in order."""
    numbers: Sequence[int] | None = span.attributes.get(names.POLICY_VERSIONS)
    if numbers is None:
        return [(span.attributes[names.POLICY_VERSION], len(span.attributes[names.RESPONSE_TOKEN_IDS]))]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


async def spans_of(run: Path) -> dict[str, Span]:
    """Calls of the model, by id."""
    store = LightningStore(run / "store.db")
    try:
        found = [span for each in await store.query_rollouts() for span in await store.query_spans(each.rollout_id)]
    finally:
        await store.close()
    return {span.span_id: span for span in found if span.attributes.get(names.RESPONSE_TOKEN_IDS)}


async def test_a_killed_run_resumes_with_its_checkpoints_weights_in_the_servers_before_anything_is_drawn(
    servers: ServersConfig, models: list[Path], tmp_path: Path, given: dict[int, Weights]
):
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"word": word}) + "\n" for word in WORDS))
    (tmp_path / "train.toml").write_text(dump_toml(config_of(tmp_path, models[0], servers)))
    run = tmp_path / "run"
    await asyncio.to_thread(train_and_kill, tmp_path, 2)
    state = json.loads((run / "state.json").read_bytes())
    reached = state["step"]
    assert reached < STEPS
    saved = AutoModelForCausalLM.from_pretrained(run / state["checkpoint"]).state_dict()
    before = await spans_of(run)

    result = await Trainer.resume(run).fit_async()

    assert (result.steps, result.failed_rollouts) == (STEPS, 0)
    ((_, loaded),) = json.loads((run / "state.json").read_bytes())["resumes"]  # Loading gives weights a new version.
    last = loaded + STEPS - reached
    assert sorted(given) == list(range(loaded, last + 1))
    assert all(saved[name].equal(tensor) for name, tensor in given[loaded].items())
    after = {span_id: span for span_id, span in (await spans_of(run)).items() if span_id not in before}
    drew = {version for span in after.values() for version, _ in versions_of(span)}
    assert {last - 1, last} <= drew <= set(given)  # What was drawn for a step before the kill is not drawn again.
    model, start = Model(models[0]), weights_of(models[0])
    for span in after.values():
        ((version, _),) = versions_of(span)
        assert float(model.differences(span, given[version]).max()) < NEAR
    assert max(float(model.differences(span, start).max()) for span in after.values()) > 100 * NEAR
    assert await spans_of(run) == {**before, **after}
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))


def weights_of(model: Path) -> Weights:
    weights = AutoModelForCausalLM.from_pretrained(model).state_dict()
    return {name: each for name, each in weights.items() if name != "lm_head.weight"}


def train_and_kill(folder: Path, step: int) -> None:
    words = ["train", "--config", "train.toml", "--dataset", "tasks.jsonl", "--run-dir", "run", "--json"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([AGL, *words], cwd=folder, stdout=log, stderr=log)
        try:
            reach_step(folder / "run", process, step)
            time.sleep(random.uniform(0, 0.5))
        finally:
            process.kill()
            process.wait()


def reach_step(run: Path, process: subprocess.Popen[bytes], step: int) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end:
        assert process.poll() is None, f"the run ended before it could be killed: {(run.parent / 'log').read_text()}"
        state = run / "state.json"
        if state.exists() and json.loads(state.read_bytes())["step"] >= step:
            return
        time.sleep(0.01)
    raise AssertionError(f"step {step} was never reached")


async def test_answers_continue_across_the_updates_of_a_run_with_token_versions(
    started: ServersConfig, models: list[Path], tmp_path: Path, given: dict[int, Weights]
):
    config = config_of(tmp_path, models[0], started, in_flight=True)
    run = tmp_path / "run"
    result = await Trainer(config, run_dir=run).fit_async(train_dataset=[{"word": word} for word in WORDS])

    assert (result.steps, result.failed_rollouts) == (STEPS, 0)
    assert "FAILED" not in (run / "agent.log").read_text()
    spans = (await spans_of(run)).values()
    crossed = [span for span in spans if len(versions_of(span)) > 1]
    assert crossed
    model, apart = Model(models[0]), 0.0
    for span in spans:
        start = 0
        for version, count in versions_of(span):
            part = slice(start, start := start + count)
            assert float(model.differences(span, given[version])[part].max()) < NEAR
            others = [weights for other, weights in given.items() if abs(other - version) == 1]
            apart = max([apart, *(float(model.differences(span, weights)[part].max()) for weights in others)])
        assert start == len(span.attributes[names.RESPONSE_TOKEN_IDS])
    assert apart > 10 * NEAR
    figures = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(each["server_difference"] for each in figures) < NEAR
    assert {each["staleness"] for each in figures} == {0.0}
    print(f"\n{len(crossed)} of {len(spans)} answers crossed an update")  # noqa: T201
