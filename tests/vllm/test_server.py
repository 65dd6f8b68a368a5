"""What a real vLLM draws for us is what the model's own forward pass gives, before, after and across an update."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentlightning.chat.base import ChatFormat
from agentlightning.chat.hf import load_chat_format
from agentlightning.engine.base import Sample, SamplingParams
from agentlightning.engine.local.sampler import top_k_top_p_mask
from agentlightning.engine.servers.clients.vllm import VllmServer
from agentlightning.engine.servers.config import ServersConfig
from agentlightning.engine.servers.pool import Replica, ReplicaPool, open_servers
from agentlightning.errors import ConfigError, ContextLengthError
from agentlightning.policy.config import LocalPolicyConfig
from agentlightning.policy.local import LocalPolicy
from agentlightning.transport import Transport
from agentlightning.weight_sync.disk import CheckpointFolder

NEAR = 1e-3
MESSAGES = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(scope="session")
def chat(models: list[Path]) -> ChatFormat:
    return asyncio.run(load_chat_format(models[0]))


@pytest.fixture
async def engine(server: str, chat: ChatFormat, weights: list[Path]) -> AsyncIterator[ReplicaPool]:
    engine = await open_servers(ServersConfig(urls=(server,)), chat, weights_change=True)
    await engine.set_weights(weights[0], 1)
    yield engine
    await engine.close()


@pytest.fixture(scope="session")
def weights(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The models, as they are written for servers."""

    async def write(model: Path) -> Path:
        policy = LocalPolicy.open(LocalPolicyConfig(model=model, device="cpu"))
        try:
            return await CheckpointFolder(tmp_path_factory.mktemp("weights")).write(policy)
        finally:
            await policy.close()

    return [asyncio.run(write(model)) for model in models]


@pytest.fixture
def prompt(chat: ChatFormat) -> list[int]:
    return chat.encode(chat.render(MESSAGES))


def logits_of(model: Path | Any, prompt: Sequence[int], sample: Sample) -> torch.Tensor:
    own = AutoModelForCausalLM.from_pretrained(model) if isinstance(model, Path) else model
    with torch.inference_mode():
        return own(torch.tensor([[*prompt, *sample.token_ids]])).logits[0, len(prompt) - 1 : -1].float()


def scores(logits: torch.Tensor, sample: Sample, params: SamplingParams) -> torch.Tensor:
    """The log-probabilities of the sample's tokens under what they were drawn from, by our own sampling code."""
    logits = logits / (params.temperature or 1.0)
    top_k = torch.tensor([[params.top_k]]).expand(len(logits), 1) if params.top_k else None
    top_p = torch.tensor([[params.top_p]]).expand(len(logits), 1) if params.top_p < 1 else None
    if top_k is not None or top_p is not None:
        logits = top_k_top_p_mask(logits, top_k, top_p)
    return logits.log_softmax(-1).gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]


def difference(model: Path | Any, prompt: Sequence[int], sample: Sample, params: SamplingParams) -> float:
    expected = scores(logits_of(model, prompt, sample), sample, params)
    return float((expected - torch.tensor(sample.logprobs)).abs().max())


PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=24),
    "plain": SamplingParams(max_tokens=24, seed=1),
    "cold": SamplingParams(temperature=0.5, max_tokens=24, seed=2),
    "top_k": SamplingParams(temperature=0.8, top_k=4, max_tokens=24, seed=3),
    "top_p": SamplingParams(temperature=0.8, top_p=0.7, max_tokens=24, seed=4),
    "both": SamplingParams(temperature=1.2, top_p=0.8, top_k=10, max_tokens=24, seed=5),
}


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("path", ["ids", "texts"])
async def test_log_probabilities_are_those_of_the_distribution_drawn_from(
    server: str, chat: ChatFormat, models: list[Path], weights: list[Path], prompt: list[int], name: str, path: str
):
    transport = Transport()
    backend = VllmServer(transport, server)
    if path == "texts":
        backend._has_generate = False  # As a server without --enable-scale-out.
    engine = await ReplicaPool.open([Replica(backend)], chat, transport, weights_change=True)
    await engine.set_weights(weights[0], 1)
    seen: list[int] = []
    sample = await engine.sample(prompt, PARAMS[name], seen.extend)
    assert sample.token_ids == tuple(seen)
    assert difference(models[0], prompt, sample, PARAMS[name]) < NEAR
    if name == "greedy":
        assert sample.token_ids == tuple(logits_of(models[0], prompt, sample).argmax(-1).tolist())
    else:
        whole = await engine.sample(prompt, PARAMS[name])
        assert (whole.token_ids, whole.finish_reason) == (sample.token_ids, sample.finish_reason)
    await engine.close()


async def test_greedy_and_sampled_answers_side_by_side_keep_their_own_distributions(
    engine: ReplicaPool, models: list[Path], prompt: list[int]
):
    samples = await asyncio.gather(*(engine.sample(prompt, params) for params in PARAMS.values()))
    for sample, params in zip(samples, PARAMS.values(), strict=True):
        assert difference(models[0], prompt, sample, params) < NEAR


async def test_top_logprobs_are_sorted(engine: ReplicaPool, models: list[Path], prompt: list[int]):
    params = SamplingParams(max_tokens=8, seed=1, top_logprobs=5)
    sample = await engine.sample(prompt, params)
    best = logits_of(models[0], prompt, sample).log_softmax(-1).topk(5)
    for place, (values, tokens) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
        assert [token for token, _ in sample.top_logprobs[place]] == tokens
        assert [value for _, value in sample.top_logprobs[place]] == pytest.approx(values, abs=NEAR)


async def test_an_answer_ends_at_end_tokens_and_stop_strings(engine: ReplicaPool, prompt: list[int]):
    drawn = await engine.sample(prompt, SamplingParams(max_tokens=40, seed=6))
    text = engine.chat.decode(drawn.token_ids)
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    stopped = await engine.sample(prompt, SamplingParams(max_tokens=40, seed=6, stop=(stop,)))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == drawn.token_ids[: len(stopped.token_ids)]
    assert stop in engine.chat.decode(stopped.token_ids)
    assert stop not in engine.chat.decode(stopped.token_ids[:-1])
    end = min(engine.chat.eos_token_ids)
    certain = SamplingParams(max_tokens=40, logit_bias=((end, 100.0),))
    ended = await engine.sample(prompt, certain)
    assert (ended.token_ids, ended.finish_reason) == ((end,), "stop")


async def test_long_prompts_and_invalid_params_are_the_callers_errors(engine: ReplicaPool, prompt: list[int]):
    with pytest.raises(ContextLengthError, match="1024"):
        await engine.sample([5] * 1024, SamplingParams())
    engine.context_length = 4096
    with pytest.raises(ContextLengthError, match="no room"):
        await engine.sample([5] * 1100, SamplingParams())
    with pytest.raises(ConfigError, match="cannot sample with these"):
        await engine.sample(prompt, SamplingParams(top_p=2.0))


async def test_an_answer_can_be_constrained_by_a_schema(engine: ReplicaPool, prompt: list[int]):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    assert await engine.can_enforce(json.dumps(schema))
    assert not await engine.can_enforce('{"type": "of no kind"}')
    sample = await engine.sample(prompt, SamplingParams(json_schema=json.dumps(schema), max_tokens=200))
    assert sample.finish_reason == "stop"
    assert json.loads(engine.chat.decode(sample.token_ids, skip_special_tokens=True))["n"] in (1, 2)
    assert min(sample.logprobs) > -50


async def until_running(server: str, count: int) -> None:
    """Until the server says that it draws so many answers."""

    def running() -> float:
        with urllib.request.urlopen(f"{server}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))

    async with asyncio.timeout(100):
        while await asyncio.to_thread(running) != count:  # noqa: ASYNC110  another process's state
            await asyncio.sleep(0.02)


async def test_cancelling_frees_the_server(engine: ReplicaPool, server: str, prompt: list[int]):
    long = SamplingParams(logit_bias=tuple((end, -100.0) for end in engine.chat.eos_token_ids))
    for watch in (None, lambda _: None):
        call = asyncio.create_task(engine.sample(prompt, long, watch))
        await until_running(server, 1)
        call.cancel()
        await until_running(server, 0)


async def test_an_update_also_replaces_cached_prompts(
    engine: ReplicaPool, models: list[Path], weights: list[Path], prompt: list[int]
):
    params = SamplingParams(max_tokens=24, seed=1)
    for version, which in ((2, 1), (3, 0), (4, 1)):
        await engine.set_weights(weights[which], version)
        sample = await engine.sample(prompt, params)
        assert sample.policy_version == version
        assert difference(models[which], prompt, sample, params) < NEAR
        assert difference(models[1 - which], prompt, sample, params) > 100 * NEAR


async def test_answers_continue_across_an_update_with_token_versions(
    engine: ReplicaPool, server: str, models: list[Path], weights: list[Path], prompt: list[int]
):
    params = SamplingParams(logit_bias=tuple((end, -100.0) for end in engine.chat.eos_token_ids), max_tokens=900)
    watched: list[int] = []
    watches = (watched.extend, None, None, None)
    calls = [asyncio.create_task(engine.sample(prompt, params, watch)) for watch in watches]
    await until_running(server, len(calls))
    async with asyncio.timeout(60):
        while len(watched) < 30:  # noqa: ASYNC110  the server says it only by tokens
            await asyncio.sleep(0.002)
    await engine.set_weights(weights[1], 2)
    for sample in await asyncio.gather(*calls):
        assert [version for version, _ in sample.versions] == [1, 2]
        assert len(sample.token_ids) == sum(count for _, count in sample.versions) == 900
        old = sample.versions[0][1]
        for model, part in ((models[0], slice(0, old)), (models[1], slice(old, None))):
            logits = logits_of(model, prompt, sample).clone()
            logits[:, sorted(engine.chat.eos_token_ids)] -= 100.0
            expected = scores(logits, sample, SamplingParams())[part]
            assert float((expected - torch.tensor(sample.logprobs)[part]).abs().max()) < NEAR


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's own, at its import
async def test_an_adapter_samples_like_the_merged_model(
    engine: ReplicaPool, models: list[Path], weights: list[Path], prompt: list[int], tmp_path: Path
):
    from peft import LoraConfig, PeftModel, get_peft_model

    adapted: list[Any] = []
    for seed in range(2):
        torch.manual_seed(seed)
        config = LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(models[0]), config)
        model.save_pretrained(tmp_path / str(seed))
        adapted.append(model.eval())
    params = SamplingParams(max_tokens=24, seed=1)
    adapter = await engine.load_adapter("critic", tmp_path / "0")
    for version in range(2):
        sample = await adapter.sample(prompt, params)
        assert sample.policy_version == version
        assert difference(adapted[version], prompt, sample, params) < NEAR
        assert difference(models[0], prompt, sample, params) > 10 * NEAR
        assert difference(models[0], prompt, await engine.sample(prompt, params), params) < NEAR
        await engine.load_adapter("critic", tmp_path / "1")
    await engine.set_weights(weights[1], 2)
    on_new = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(models[1]), tmp_path / "1")
    assert difference(on_new, prompt, await adapter.sample(prompt, params), params) < NEAR
    await engine.unload_adapters()
