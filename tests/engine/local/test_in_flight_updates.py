"""Answers that go on while the weights change: each token is drawn by the weights that are recorded for it."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from tests.support.models import Architecture, model_tokenizer, tiny_checkpoint, tiny_model
from transformers import PreTrainedModel

from agentlightning.credit import training_samples
from agentlightning.engine.base import Sample, SamplingParams
from agentlightning.engine.local import cascade_attention
from agentlightning.engine.local.scheduler import ContinuousBatcher, Request
from agentlightning.errors import PolicyError, UnfaithfulSampleError
from agentlightning.policy.base import UpdateOptions
from agentlightning.policy.config import LocalPolicyConfig, OptimizerConfig
from agentlightning.policy.local import LocalPolicy
from agentlightning.policy.update.updater import Updater
from agentlightning.trajectory import Node, TokenTree, TrainingSample, Trajectory, Transition

pytestmark = pytest.mark.integration

ARCHITECTURES: tuple[Architecture, ...] = ("llama", "qwen3", "gpt2", "mistral")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def decode(tokens: Sequence[int]) -> str:
    return model_tokenizer().decode(list(tokens), skip_special_tokens=False)


def generator(model: PreTrainedModel, **options: int) -> ContinuousBatcher:
    length = model.config.max_position_embeddings
    return ContinuousBatcher(model, eos_token_ids=frozenset(), decode=decode, context_length=length, **options)


def drain(engine: ContinuousBatcher) -> None:
    for _ in range(5000):
        if engine.idle:
            return
        engine.step()
    raise AssertionError("the generator does not come to an end")


def prompts_of(count: int, *, seed: int = 0, shortest: int = 1, longest: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 300) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]


def by_transformers(model: PreTrainedModel, prompt: Sequence[int], new: int) -> list[int]:
    ids = torch.tensor([list(prompt)])
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return out[0, len(prompt) :].tolist()


class Weights:
    """A model whose weights change under its generator, and what it was before each change."""

    def __init__(self, model: PreTrainedModel, engine: ContinuousBatcher) -> None:
        self.model, self.engine = model, engine
        self.by_version = {0: copy.deepcopy(model)}

    def change(self, scale: float = 0.05) -> None:
        self.engine.invalidate_cache(in_flight=True)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * scale)
        self.engine.policy_version += 1
        self.by_version[self.engine.policy_version] = copy.deepcopy(self.model)

    def assert_faithful(self, request: Request | Sample, prompt: Sequence[int], temperature: float = 1.0) -> None:
        assert_faithful(self.by_version, request, prompt, temperature)


def assert_faithful(
    by_version: dict[int, PreTrainedModel], drawn: Request | Sample, prompt: Sequence[int], temperature: float = 1.0
) -> None:
    """Each token's log-probability is that of one plain forward of the weights recorded for it over all before it."""
    tokens = drawn.sampled if isinstance(drawn, Request) else list(drawn.token_ids)
    runs = drawn.versions or ((drawn.policy_version, len(tokens)),)
    assert sum(count for _, count in runs) == len(tokens) == len(drawn.logprobs)
    assert runs[-1][0] == drawn.policy_version
    ids, start = torch.tensor([[*prompt, *tokens]]), 0
    for version, count in runs:
        with torch.inference_mode():
            logprobs = (by_version[version](ids).logits.float() / temperature).log_softmax(-1)[0]
        places = torch.arange(start, start + count) + len(prompt)
        expected = logprobs[places - 1].gather(1, ids[0, places, None])[:, 0]
        torch.testing.assert_close(
            torch.tensor(drawn.logprobs[start : start + count]), expected, atol=1e-4, rtol=0, msg=f"version {version}"
        )
        start += count


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_token_matches_its_recorded_version(architecture: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different lengths and prompts in common join and leave; the slots are scarce; four changes."""
    monkeypatch.setattr(cascade_attention, "MIN_SAVED_BYTES", 0)
    torch.manual_seed(0)
    model, rng = tiny_model(architecture), random.Random(4)
    roomy = generator(model)._cache.layout.bytes_per_token
    engine = generator(model, max_batch_size=9, prefill_tokens=48, kv_cache_bytes=6 * 128 * roomy)
    weights = Weights(model, engine)
    base = prompts_of(3, seed=5, shortest=20, longest=60)
    prompts = [[*base[i % 3], *rng.choices(range(3, 300), k=rng.randrange(12))] for i in range(16)]
    requests: list[Request] = []
    for step, each in enumerate(prompts):
        limit = rng.randrange(1, 60)
        requests.append(engine.submit(each, SamplingParams(temperature=0.8, max_tokens=limit, seed=step)))
        for _ in range(rng.randrange(4)):
            engine.step()
        if step % 4 == 3:
            weights.change()
    drain(engine)
    assert sum(bool(request.versions) for request in requests) > 4
    assert max(len(request.versions) for request in requests) > 2
    for request, each in zip(requests, prompts, strict=True):
        assert request.finish_reason is not None
        weights.assert_faithful(request, each, temperature=0.8)


def test_a_greedy_answer_continues_with_the_new_weights() -> None:
    model = tiny_model()
    engine = generator(model)
    weights, ids = Weights(model, engine), prompts_of(1, shortest=30)[0]
    request = engine.submit(ids, GREEDY)
    for _ in range(5):
        engine.step()
    so_far = list(request.tokens)
    weights.change(0.2)
    drain(engine)
    assert request.versions == ((0, 5), (1, 7))
    assert request.sampled[:5] == by_transformers(weights.by_version[0], ids, 5)
    assert request.sampled[5:] == by_transformers(model, so_far, 7)


def test_an_answer_begun_after_an_update_uses_only_new_weights() -> None:
    model = tiny_model()
    engine = generator(model, max_batch_size=1, prefill_tokens=8)
    weights, ids = Weights(model, engine), prompts_of(2, shortest=50)
    first, second = (engine.submit(each, GREEDY) for each in ids)
    weights.change()
    third = engine.submit(ids[0], GREEDY)
    drain(engine)
    for request, each in ((first, ids[0]), (second, ids[1]), (third, ids[0])):
        assert (request.policy_version, request.versions) == (1, ())
        weights.assert_faithful(request, each)


def test_a_partly_prefilled_prompt_is_prefilled_again() -> None:
    model = tiny_model()
    engine = generator(model, prefill_tokens=16)
    weights, ids = Weights(model, engine), prompts_of(1, shortest=160, longest=160)[0]
    short = engine.submit([5, 6, 7], SamplingParams(max_tokens=60, seed=1))
    engine.step()
    long = engine.submit(ids, GREEDY)
    engine.step()
    assert 0 < long.cached < 159
    weights.change()
    drain(engine)
    assert long.versions == ()
    assert long.policy_version == 1
    weights.assert_faithful(long, ids)
    weights.assert_faithful(short, [5, 6, 7])


def test_an_update_costs_one_prefill_with_shared_prefixes_once() -> None:
    model = tiny_model()
    engine = generator(model)
    weights, ids = Weights(model, engine), prompts_of(1, shortest=60, longest=60)[0]
    requests = [engine.submit(ids, SamplingParams(max_tokens=20, seed=seed)) for seed in range(4)]
    for _ in range(8):
        engine.step()
    weights.change()
    computed: list[int] = []
    model.register_forward_pre_hook(
        lambda _, args, given: computed.append(given["input_ids"].numel()), with_kwargs=True
    )
    engine.step()
    assert sum(computed) <= 60 + 4 * 8 + 4
    drain(engine)
    for request in requests:
        assert request.versions == ((0, 8), (1, 12))


def test_a_failed_update_leaves_one_version() -> None:
    model = tiny_model()
    engine = generator(model)
    ids = prompts_of(1, shortest=30)[0]
    request = engine.submit(ids, GREEDY)
    engine.step()
    engine.invalidate_cache(in_flight=True)
    engine.step()
    engine.invalidate_cache(in_flight=True)
    drain(engine)
    assert (request.policy_version, request.versions) == (0, ())
    assert request.sampled == by_transformers(model, ids, 12)


def test_stop_strings_and_length_limits_work_across_an_update() -> None:
    model = tiny_model(context_length=64)
    ids = prompts_of(1, shortest=10, longest=20)[0]
    free = generator(model)
    reference = free.submit(ids, SamplingParams(max_tokens=40, seed=3))
    drain(free)
    stop = decode(reference.sampled)[20:23]
    engine = generator(model)
    stopped = engine.submit(ids, SamplingParams(max_tokens=40, seed=3, stop=(stop,)))
    endless = engine.submit(ids, SamplingParams(seed=3))
    while stop[:1] not in decode(stopped.sampled) and not stopped.finish_reason:
        engine.step()
        engine.invalidate_cache(in_flight=True)  # The same weights: only the slots are lost.
    drain(engine)
    assert stopped.finish_reason == "stop"
    assert stop in decode(stopped.sampled)
    assert stop not in decode(stopped.sampled[:-1])
    assert (endless.finish_reason, len(endless.tokens)) == ("length", 64)


def test_a_request_cancelled_without_a_slot_is_dropped() -> None:
    model = tiny_model()
    engine = generator(model, prefill_tokens=16)
    weights, ids = Weights(model, engine), prompts_of(3, shortest=40)
    drawing = engine.submit(ids[0], SamplingParams(max_tokens=40))
    while not drawing.sampled:
        engine.step()
    prefilling, gone = (engine.submit(each, GREEDY) for each in ids[1:])
    engine.step()
    engine.cancel(gone)
    weights.change()
    engine.cancel(drawing)
    drain(engine)
    assert (drawing.finish_reason, gone.finish_reason) == (None, None)
    weights.assert_faithful(prefilling, ids[1])


def test_slots_are_freed_during_a_weight_update() -> None:
    engine = generator(tiny_model())
    request = engine.submit(prompts_of(1)[0], GREEDY)
    engine.step()
    engine.invalidate_cache(in_flight=True)
    engine.release_memory()
    assert (engine._cache.slots, len(engine.prefix_cache)) == (0, 0)
    drain(engine)
    assert request.finish_reason == "length"


@pytest.mark.parametrize("sharing", ["rows", "merged", "shared"])
def test_token_versions_do_not_change_gradients(sharing: Literal["rows", "merged", "shared"]) -> None:
    """Two calls of one conversation, the first drawn by three versions; and a second rollout of the group."""

    def trajectory(rollout: str, sampled: tuple[int, ...], runs: tuple[tuple[int, int], ...]) -> Trajectory:
        first, rest = tuple(range(10, 30)), (40, 41)
        logprobs = (-5.0,) * len(sampled)
        calls = (
            Transition(rollout, "at", "1", 1, first, sampled, logprobs, 3, runs),
            Transition(rollout, "at", "2", 2, (*first, *sampled, *rest), (50, 51), (-5.0, -5.0), 3),
        )
        return Trajectory(rollout, "at", calls, reward=float(len(sampled)), group="g")

    def gradient(runs: tuple[tuple[int, int], ...]) -> torch.Tensor:
        group = [trajectory("a", (60, 61, 62, 63, 64), runs), trajectory("b", (60, 70), ())]
        samples, _ = training_samples([group])
        updater = Updater(tiny_model())
        updater.accumulate(updater.forward.plan(samples, sharing=sharing))
        return torch.cat([parameter.grad.flatten() for parameter in updater.model.parameters()])

    whole, split = gradient(()), gradient(((1, 2), (2, 1), (3, 2)))
    assert whole.abs().max() > 1e-3
    torch.testing.assert_close(split, whole, atol=1e-6, rtol=1e-4)


# -- the policy ------------------------------------------------------------------------------------------------------


@pytest.fixture
async def policy(tmp_path):
    model = tiny_checkpoint(tmp_path / "model")
    policy = LocalPolicy.open(LocalPolicyConfig(model=model, device="cpu", optimizer=OptimizerConfig(lr=1e-2)))
    yield policy
    await policy.close()


def prompt(policy: LocalPolicy) -> list[int]:
    return policy.chat.encode(policy.chat.render([{"role": "user", "content": "What is 12 + 30?"}]))


def training_sample(prompt: Sequence[int], sample: Sample, *, temperature: float = 1.0) -> TrainingSample:
    count = len(sample.token_ids)
    sampled = Node(0, sample.token_ids, True, sample.logprobs, "ro", "call", temperature=temperature)
    tree = TokenTree((Node(-1, tuple(prompt)), sampled))
    return TrainingSample(tree, advantages=((), (1.0,) * count), weights=((), (1.0 / count,) * count))


class Listener:
    """Hears tokens, and says when there are enough of them."""

    def __init__(self, enough: int) -> None:
        self.tokens: list[int] = []
        self.heard = asyncio.Event()
        self._enough = enough

    def __call__(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)
        if len(self.tokens) >= self._enough:
            self.heard.set()


async def test_training_runs_with_answers_in_flight(policy: LocalPolicy) -> None:
    ids = prompt(policy)
    sample = await policy.sample(ids, SamplingParams(max_tokens=12))
    listeners = [Listener(5 + i) for i in range(6)]
    params = SamplingParams(max_tokens=150, stop=("never",))
    running = [asyncio.create_task(policy.sample(ids, params, each)) for each in listeners]
    by_version = {0: copy.deepcopy(policy._model)}
    for version in (1, 2):
        await asyncio.gather(*(each.heard.wait() for each in listeners))
        await policy.train([training_sample(ids, sample)], in_flight=True)
        by_version[version] = copy.deepcopy(policy._model)
        late = await policy.sample(ids, SamplingParams(max_tokens=3))
        assert (late.policy_version, late.versions) == (version, ())
        for each in listeners:
            each.heard.clear()
    drawn = await asyncio.gather(*running)
    for each, listener in zip(drawn, listeners, strict=True):
        assert tuple(listener.tokens) == each.token_ids
        assert len({version for version, _ in each.versions}) == 3 or len(each.token_ids) < 150
        assert_faithful(by_version, each, ids)
    assert any(len(each.versions) == 3 for each in drawn)


async def test_a_constraint_holds_across_an_update(policy: LocalPolicy) -> None:
    """A JSON schema, penalties and the likeliest tokens: what they need of the tokens so far is not lost."""
    ids, listeners = prompt(policy), [Listener(4) for _ in range(4)]
    sample = await policy.sample(ids, SamplingParams(max_tokens=8))
    schema = json.dumps({"type": "array", "items": {"enum": ["yes", "no"]}, "minItems": 12, "maxItems": 12})
    params = [
        SamplingParams(seed=seed, json_schema=schema, presence_penalty=0.5, top_logprobs=2)
        for seed in range(len(listeners))
    ]
    running = [
        asyncio.create_task(policy.sample(ids, each, listener))
        for each, listener in zip(params, listeners, strict=True)
    ]
    await asyncio.gather(*(each.heard.wait() for each in listeners))
    await policy.train([training_sample(ids, sample)], in_flight=True)
    drawn = await asyncio.gather(*running)
    assert any(each.versions for each in drawn)
    for each in drawn:
        answer = json.loads(policy.chat.decode(each.token_ids, skip_special_tokens=True))
        assert len(answer) == 12
        assert set(answer) <= {"yes", "no"}
        assert len(each.top_logprobs) == len(each.token_ids)
        for token, logprob, likeliest in zip(each.token_ids, each.logprobs, each.top_logprobs, strict=True):
            if token in dict(likeliest):
                assert dict(likeliest)[token] == pytest.approx(logprob, abs=1e-4)


async def test_without_in_flight_updates_are_rejected_during_answers(policy: LocalPolicy, tmp_path) -> None:
    ids, listener = prompt(policy), Listener(1)
    await policy.save(tmp_path / "kept", training_state=True)
    sample = await policy.sample(ids, SamplingParams(max_tokens=4))
    running = asyncio.create_task(policy.sample(ids, SamplingParams(max_tokens=200), listener))
    await listener.heard.wait()
    for change in (policy.train([training_sample(ids, sample)]), policy.load(tmp_path / "kept")):
        with pytest.raises(PolicyError, match="in_flight=True"):
            await change
    assert (await running).versions == ()


async def test_a_checkpoint_loads_while_answers_are_in_flight(policy: LocalPolicy, tmp_path) -> None:
    ids, listener = prompt(policy), Listener(3)
    await policy.save(tmp_path / "kept", training_state=True)
    sample = await policy.sample(ids, SamplingParams(max_tokens=12))
    by_version = {0: copy.deepcopy(policy._model)}
    await policy.train([training_sample(ids, sample)])
    by_version[1] = copy.deepcopy(policy._model)
    by_version[2] = by_version[0]  # The same weights again, under a version of their own.
    running = asyncio.create_task(policy.sample(ids, SamplingParams(max_tokens=200, seed=1), listener))
    await listener.heard.wait()
    await policy.load(tmp_path / "kept", in_flight=True)
    drawn = await running
    assert [version for version, _ in drawn.versions] == [1, 2]
    assert_faithful(by_version, drawn, ids)


async def test_a_failed_update_keeps_answers_in_flight(policy: LocalPolicy) -> None:
    ids, listener = prompt(policy), Listener(2)
    greedy = await policy.sample(ids, SamplingParams(temperature=0.0, max_tokens=30))
    sample = await policy.sample(ids, SamplingParams(max_tokens=4))
    running = asyncio.create_task(policy.sample(ids, SamplingParams(temperature=0.0, max_tokens=30), listener))
    await listener.heard.wait()
    with pytest.raises(UnfaithfulSampleError):
        await policy.train([training_sample(ids, sample, temperature=0.0)], in_flight=True)
    drawn = await running
    assert (drawn.token_ids, drawn.policy_version, drawn.versions) == (greedy.token_ids, 0, ())
    assert drawn.logprobs == pytest.approx(greedy.logprobs, abs=1e-4)


async def test_weights_that_a_failed_update_has_changed_are_a_new_version(
    policy: LocalPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two optimiser steps fails."""
    ids = prompt(policy)
    sample = training_sample(ids, await policy.sample(ids, SamplingParams(max_tokens=8)))
    updater = policy._learner.updaters[None]
    accumulate, calls = updater.accumulate, []

    def fail_second(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("the device is lost")
        return accumulate(*arguments)

    monkeypatch.setattr(updater, "accumulate", fail_second)
    with pytest.raises(PolicyError, match="the device is lost"):
        await policy.train([sample, sample], UpdateOptions(minibatches=2))
    assert policy.policy_version == 1
    after = await policy.sample(ids, SamplingParams(max_tokens=4))
    assert_faithful({1: policy._model}, after, ids)


async def test_calls_cancelled_during_an_update_free_the_engine(policy: LocalPolicy) -> None:
    ids, listener = prompt(policy), Listener(2)
    sample = await policy.sample(ids, SamplingParams(max_tokens=8))
    running = [asyncio.create_task(policy.sample(ids, SamplingParams(max_tokens=200), listener)) for _ in range(3)]
    await listener.heard.wait()
    update = asyncio.create_task(policy.train([training_sample(ids, sample)], in_flight=True))
    await asyncio.sleep(0)
    for task in running[:2]:
        task.cancel()
    await update
    drawn = await running[2]
    assert drawn.policy_version == 1
    assert policy._generator.idle
    assert all(task.cancelled() for task in running[:2])
    assert model_tokenizer().decode(drawn.token_ids)
