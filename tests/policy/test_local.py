"""What the local policy promises: it samples, learns and comes back, on real tiny models."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.support.models import tiny_checkpoint, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentlightning.engine.base import Sample, SamplingParams
from agentlightning.errors import ConfigError, ContextLengthError, PolicyError, UnfaithfulSampleError
from agentlightning.policy.base import UpdateOptions
from agentlightning.policy.config import LocalPolicyConfig, Lora, OptimizerConfig, PolicyConfig, ValueHeadConfig
from agentlightning.policy.local import LocalPolicy
from agentlightning.policy.open import policy_config
from agentlightning.policy.update.forward import Forward
from agentlightning.trajectory import Node, TokenTree, TrainingSample

MESSAGES = [{"role": "user", "content": "What is 12 + 30?"}]
PARAMS = SamplingParams(max_tokens=12)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def policy(checkpoint: Path) -> AsyncIterator[LocalPolicy]:
    policy = open_policy(checkpoint)
    yield policy
    await policy.close()


def open_policy(model: Path, **options: object) -> LocalPolicy:
    config = {"device": "cpu", "optimizer": OptimizerConfig(lr=1e-2), **options}
    return LocalPolicy.open(LocalPolicyConfig.model_validate({"model": model, **config}))


def prompt(policy: LocalPolicy) -> list[int]:
    return policy.chat.encode(policy.chat.render(MESSAGES))


def training_sample(prompt: Sequence[int], sample: Sample, *, temperature: float = 1.0) -> TrainingSample:
    count = len(sample.token_ids)
    sampled = Node(0, sample.token_ids, True, sample.logprobs, "ro", "call", temperature=temperature)
    tree = TokenTree((Node(-1, tuple(prompt)), sampled))
    return TrainingSample(tree, advantages=((), (1.0,) * count), weights=((), (1.0 / count,) * count))


def scored(model: torch.nn.Module, prompt: Sequence[int], sample: Sample) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *sample.token_ids]])
    with torch.inference_mode():
        logprobs = model(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
    return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]


async def test_log_probabilities_and_the_likeliest_tokens_are_told_with_each_token(policy: LocalPolicy) -> None:
    told: list[tuple[int, float, tuple[tuple[int, float], ...]]] = []

    def receive(
        tokens: Sequence[int], logprobs: Sequence[float], tops: Sequence[tuple[tuple[int, float], ...]]
    ) -> None:
        told.extend(zip(tokens, logprobs, tops, strict=True))

    params = SamplingParams(max_tokens=12, top_logprobs=3, stream_logprobs=True)
    sample = await policy.sample(prompt(policy), params, receive)
    assert told == list(zip(sample.token_ids, sample.logprobs, sample.top_logprobs, strict=True))
    for token, logprob, top in told:
        assert len(top) == 3
        assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
        assert logprob <= top[0][1]
        assert logprob < top[-1][1] or dict(top)[token] == logprob


async def test_the_format_of_tool_calls_is_found_or_chosen(checkpoint: Path) -> None:
    for chosen, found in ((None, "hermes"), ("mistral", "mistral")):
        policy = open_policy(checkpoint, tool_calls=chosen)
        assert policy.chat.tool_calls.name == found
        await policy.close()
    with pytest.raises(ConfigError, match="'hermse' is not a format of tool calls"):
        open_policy(checkpoint, tool_calls="hermse")


async def test_answers_drawn_together_are_faithful_and_streamed_in_order(policy: LocalPolicy) -> None:
    streams: list[list[int]] = [[] for _ in range(6)]

    def listen(index: int):
        return lambda tokens: streams[index].extend(tokens)

    ids = prompt(policy)
    samples = await asyncio.gather(*(policy.sample(ids, PARAMS, listen(i)) for i in range(6)))
    assert [tuple(stream) for stream in streams] == [sample.token_ids for sample in samples]
    assert len({sample.token_ids for sample in samples}) > 1
    for sample in samples:
        assert sample.policy_version == 0
        torch.testing.assert_close(torch.tensor(sample.logprobs), scored(policy._model, ids, sample), atol=1e-4, rtol=0)


async def test_training_changes_the_weights_that_are_sampled_and_raises_the_version(policy: LocalPolicy) -> None:
    ids = prompt(policy)
    before = await policy.sample(ids, PARAMS)
    metrics = await policy.train([training_sample(ids, before)])
    assert metrics["grad_norm"] > 0
    assert policy.policy_version == 1
    after = await policy.sample(ids, PARAMS)
    assert after.policy_version == 1
    torch.testing.assert_close(torch.tensor(after.logprobs), scored(policy._model, ids, after), atol=1e-4, rtol=0)
    assert scored(policy._model, ids, before).sum() > sum(before.logprobs)


async def test_recorded_tokens_are_scored_by_the_present_weights_and_by_a_reference(
    policy: LocalPolicy, checkpoint: Path
) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.7)
    sample = await policy.sample(prompt(policy), params)
    lesson = training_sample(prompt(policy), sample, temperature=0.7)
    before = await policy.score([lesson.tree], {"logprobs", "entropy"})
    await policy.train([lesson])
    after = await policy.score([lesson.tree], {"logprobs", "ref_logprobs"}, reference=checkpoint)
    assert (set(before), set(after)) == ({"logprobs", "entropy"}, {"logprobs", "ref_logprobs"})
    (own,), (reference,) = before["logprobs"], after["ref_logprobs"]
    assert [len(values) for values in own] == [0, len(sample.token_ids)]
    assert own[1].tolist() == pytest.approx(sample.logprobs, abs=1e-4)
    assert reference[1].tolist() == pytest.approx(sample.logprobs, abs=1e-4), "the starting weights"
    assert after["logprobs"][0][1].sum() > own[1].sum(), "what was rewarded is likelier now"
    assert (before["entropy"][0][1] > 0).all()
    assert TrainingSample(lesson.tree, columns=lesson.columns, ref_logprobs=reference).columns["ref_logprobs"]


async def test_a_column_that_cannot_be_given_says_what_is_missing(policy: LocalPolicy) -> None:
    with pytest.raises(PolicyError, match=r'no value head; set policy\.value_head = "linear"'):
        await policy.score([], {"values"})
    with pytest.raises(PolicyError, match="need a reference; give the directory"):
        await policy.score([], {"ref_logprobs"})


async def test_training_is_refused_while_answers_are_drawn(policy: LocalPolicy) -> None:
    ids = prompt(policy)
    sample = await policy.sample(ids, PARAMS)
    started = asyncio.Event()
    running = asyncio.create_task(policy.sample(ids, SamplingParams(max_tokens=200), lambda _: started.set()))
    await started.wait()
    with pytest.raises(PolicyError, match="in flight"):
        await policy.train([training_sample(ids, sample)])
    await running
    assert policy.policy_version == 0
    await policy.train([training_sample(ids, sample)])


async def test_a_failed_update_raises_its_own_error_and_leaves_no_gradient(
    policy: LocalPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(policy)
    sample = await policy.sample(ids, SamplingParams(temperature=0.0, max_tokens=4))
    with pytest.raises(UnfaithfulSampleError):
        await policy.train([training_sample(ids, sample, temperature=0.0)])
    with monkeypatch.context() as patch:
        patch.setattr(Forward, "logprobs", lambda *_: None)
        with pytest.raises(PolicyError, match="TypeError"):
            await policy.train([training_sample(ids, sample)])
    assert policy.policy_version == 0
    assert all(parameter.grad is None for parameter in policy._model.parameters())
    await policy.sample(ids, PARAMS)


async def test_a_run_continues_from_its_checkpoint_as_if_never_interrupted(
    policy: LocalPolicy, checkpoint: Path, tmp_path: Path
) -> None:
    ids = prompt(policy)
    await policy.train([training_sample(ids, await policy.sample(ids, PARAMS))])
    await policy.save(tmp_path / "deep" / "step-1", training_state=True)
    other = open_policy(checkpoint, seed=5)
    await other.load(tmp_path / "deep" / "step-1")
    futures: list[tuple[list[Sample], dict[str, float], Sample]] = []
    for each in (policy, other):
        # One after another: which answers share a batch changes the last bits of their log-probabilities.
        drawn = [await each.sample(ids, PARAMS) for _ in range(3)]
        metrics = await each.train([training_sample(ids, sample) for sample in drawn[:1]])
        after = await each.sample(ids, PARAMS)
        futures.append(([replace(s, policy_version=0) for s in drawn], dict(metrics), replace(after, policy_version=0)))
    await other.close()
    assert futures[0] == futures[1]


async def test_two_different_weights_never_share_a_version(policy: LocalPolicy, tmp_path: Path) -> None:
    ids = prompt(policy)
    sample = training_sample(ids, await policy.sample(ids, PARAMS))
    await policy.train([sample])
    await policy.save(tmp_path / "step-1", training_state=True)
    await policy.train([sample])
    assert policy.policy_version == 2
    await policy.load(tmp_path / "step-1")
    assert policy.policy_version == 3, "rolled back, and not the version of anything before"
    await policy.load(tmp_path / "step-1", above=9)
    assert policy.policy_version == (await policy.sample(ids, PARAMS)).policy_version == 10


@pytest.mark.parametrize("damage", ["weights", "state", "optimizer", "version"])
async def test_a_checkpoint_that_cannot_be_loaded_changes_nothing(
    policy: LocalPolicy, tmp_path: Path, damage: str
) -> None:
    ids = prompt(policy)
    sample = training_sample(ids, await policy.sample(ids, PARAMS))
    await policy.train([sample])
    await policy.save(tmp_path / "step", training_state=True)
    await policy.train([sample])
    weights, state = tmp_path / "step" / "model.safetensors", tmp_path / "step" / "training_state.pt"
    if damage == "weights":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "state":
        state.write_bytes(state.read_bytes()[:1000])
    elif damage == "version":
        torch.save({name: value for name, value in torch.load(state).items() if name != "policy_version"}, state)
    else:
        torch.save({**torch.load(state), "updater": {"steps": 1, "optimizers": []}}, state)
    before = await policy.sample(ids, SamplingParams(temperature=0.0, max_tokens=12))
    with pytest.raises((PolicyError, ConfigError), match=r"step|state|policy_version"):
        await policy.load(tmp_path / "step")
    assert await policy.sample(ids, SamplingParams(temperature=0.0, max_tokens=12)) == before
    assert before.policy_version == 2


async def test_bfloat16_weights_learn_at_the_learning_rates_of_large_models(checkpoint: Path, tmp_path: Path) -> None:
    """Steps of 1e-6 are far below what a bfloat16 weight can hold; they add up in float32 master weights."""
    models: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for dtype in ("float32", "bfloat16"):
        policy = open_policy(checkpoint, dtype=dtype, optimizer=OptimizerConfig(lr=1e-6))
        ids = prompt(policy)
        optimizer = policy._learner.updaters[None].optimizer
        before = torch.cat([master.detach().flatten().clone() for master in optimizer.masters])
        for _ in range(20):
            await policy.train([training_sample(ids, Sample((5, 6, 7, 8), (-3.0,) * 4, "stop", 0))])
        after = torch.cat([master.detach().flatten() for master in optimizer.masters])
        models[dtype] = (before, after)
        if dtype == "bfloat16":
            rounded = torch.cat([weight.detach().flatten() for weight in policy._model.parameters()])
            assert torch.equal(rounded, after.bfloat16())
            await policy.save(tmp_path / "step", training_state=True)
            resumed = open_policy(checkpoint, dtype=dtype, optimizer=OptimizerConfig(lr=1e-6))
            await resumed.load(tmp_path / "step")
            masters = torch.cat(
                [master.detach().flatten() for master in resumed._learner.updaters[None].optimizer.masters]
            )
            assert torch.equal(masters, after), "what bfloat16 cannot hold survives a resume"
            await resumed.close()
        await policy.close()
    moved = {dtype: (after - before).abs() for dtype, (before, after) in models.items()}
    shares = {dtype: (distance > 0).float().mean().item() for dtype, distance in moved.items()}
    assert shares["bfloat16"] == pytest.approx(shares["float32"], abs=0.05)
    assert moved["bfloat16"].sum().item() == pytest.approx(moved["float32"].sum().item(), rel=0.15)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}, 48),
        ({"rope_type": "dynamic", "factor": 4.0}, 96),
    ],
)
async def test_tokens_are_faithful_up_to_the_longest_context_of_any_rope(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rope: dict[str, Any], longest: int
) -> None:
    given = {**rope, "rope_theta": 1e4, "original_max_position_embeddings": 48}
    if rope["rope_type"] == "dynamic":
        del given["original_max_position_embeddings"]
    model = tiny_checkpoint(tmp_path / "model", context_length=96, rope=given)
    policy = open_policy(model)
    assert policy.context_length == longest
    assert ("longrope RoPE" in caplog.text) is (longest == 48), "a context that is not used is said"
    ids = prompt(policy)[-20:]
    params = SamplingParams(max_tokens=longest - len(ids))
    for sample in await asyncio.gather(*(policy.sample(ids, params) for _ in range(4))):
        torch.testing.assert_close(torch.tensor(sample.logprobs), scored(policy._model, ids, sample), atol=1e-4, rtol=0)
    await policy.close()
    with pytest.raises(ConfigError, match=f"use at most {longest}"):
        open_policy(model, max_context=longest + 1)


async def test_a_checkpoint_is_an_ordinary_model_and_replaces_an_older_one(policy: LocalPolicy, tmp_path: Path) -> None:
    ids = prompt(policy)
    target = tmp_path / "final"
    await policy.save(target, training_state=True)
    await policy.train([training_sample(ids, await policy.sample(ids, PARAMS))])
    await policy.save(target)
    loaded = AutoModelForCausalLM.from_pretrained(target)
    sample = await policy.sample(ids, PARAMS)
    torch.testing.assert_close(torch.tensor(sample.logprobs), scored(loaded, ids, sample), atol=1e-4, rtol=0)
    assert AutoTokenizer.from_pretrained(target).chat_template
    assert os.listdir(tmp_path) == ["final"]
    with pytest.raises(PolicyError, match="training_state=True"):
        await policy.load(target)


async def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(policy: LocalPolicy, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(PolicyError, match="cannot save"):
        await policy.save(tmp_path / "file" / "step")
    await policy.sample(prompt(policy), PARAMS)


async def test_a_checkpoint_of_another_model_is_refused(policy: LocalPolicy, tmp_path: Path) -> None:
    wider = open_policy(tiny_checkpoint(tmp_path / "wide", "qwen3"))
    await wider.save(tmp_path / "wide-1", training_state=True)
    await wider.close()
    with pytest.raises(PolicyError, match="another model"):
        await policy.load(tmp_path / "wide-1")


async def test_cancelling_a_call_frees_the_engine(policy: LocalPolicy) -> None:
    ids = prompt(policy)
    started = asyncio.Event()
    task = asyncio.create_task(policy.sample(ids, SamplingParams(max_tokens=200), lambda _: started.set()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await policy.train([training_sample(ids, Sample((5,), (-1.0,), "stop", 0))])
    assert policy.policy_version == 1


async def test_a_listener_that_fails_fails_only_its_own_call(policy: LocalPolicy) -> None:
    def broken(_: Sequence[int]) -> None:
        raise RuntimeError("the listener broke")

    ids = prompt(policy)
    bad, good = await asyncio.gather(
        policy.sample(ids, PARAMS, broken), policy.sample(ids, PARAMS), return_exceptions=True
    )
    assert isinstance(bad, RuntimeError)
    assert isinstance(good, Sample)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("the kernel broke"), "RuntimeError: the kernel broke"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory.*lower max_batch_size"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory"),
    ],
)
async def test_an_engine_that_failed_tells_every_caller_why_and_works_again(
    policy: LocalPolicy, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise error

    ids = prompt(policy)
    with monkeypatch.context() as patch:
        patch.setattr(policy._model.get_input_embeddings(), "forward", broken)
        failures = await asyncio.gather(*(policy.sample(ids, PARAMS) for _ in range(3)), return_exceptions=True)
    for failure in failures:
        with pytest.raises(PolicyError, match=words) as caught:
            raise failure
        assert caught.value.__cause__ is error
    sample = await policy.sample(ids, PARAMS)
    torch.testing.assert_close(torch.tensor(sample.logprobs), scored(policy._model, ids, sample), atol=1e-4, rtol=0)


async def test_an_engine_that_cannot_even_cancel_tells_every_caller_and_works_again(
    policy: LocalPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    ids, started = prompt(policy), asyncio.Event()
    left = asyncio.create_task(policy.sample(ids, SamplingParams(max_tokens=200), lambda _: started.set()))
    await started.wait()
    with monkeypatch.context() as patch:
        patch.setattr(policy._engine._batcher, "cancel", broken)
        other = asyncio.create_task(policy.sample(ids, SamplingParams(max_tokens=200)))
        await asyncio.sleep(0)
        left.cancel()
        with pytest.raises(PolicyError, match="out of memory"):
            await asyncio.wait_for(other, 10)
    assert isinstance(await asyncio.wait_for(policy.sample(ids, PARAMS), 10), Sample)


class NoRoom(PolicyError):
    """An error of one's own, which needs more than its message."""

    def __init__(self, message: str, *, missing: int) -> None:
        super().__init__(message)
        self.missing = missing


async def test_an_error_of_ones_own_reaches_whoever_borrowed_the_weights(policy: LocalPolicy) -> None:
    def use(weights: object) -> None:
        raise NoRoom("the disk is full", missing=5)

    with pytest.raises(NoRoom, match="the disk is full") as caught:
        await asyncio.wait_for(policy.lend(use), 10)
    assert caught.value.missing == 5
    assert isinstance(await asyncio.wait_for(policy.sample(prompt(policy), PARAMS), 10), Sample)


async def test_an_idle_policy_uses_no_processor_time(policy: LocalPolicy) -> None:
    await policy.sample(prompt(policy), PARAMS)
    await asyncio.sleep(0.1)
    start = time.process_time()
    await asyncio.sleep(0.4)
    assert time.process_time() - start < 0.2


async def test_closing_fails_those_who_wait_and_can_be_done_twice(checkpoint: Path) -> None:
    policy = open_policy(checkpoint)
    ids = prompt(policy)
    started = asyncio.Event()
    task = asyncio.create_task(policy.sample(ids, SamplingParams(max_tokens=230), lambda _: started.set()))
    await started.wait()
    await policy.close()
    await policy.close()
    with pytest.raises(PolicyError, match="closed"):
        await task
    with pytest.raises(PolicyError, match="closed"):
        await policy.sample(ids, PARAMS)


def test_one_policy_serves_several_event_loops(checkpoint: Path) -> None:
    policy = open_policy(checkpoint)
    ids = prompt(policy)
    for _ in range(2):
        assert asyncio.run(policy.sample(ids, PARAMS)).token_ids
    asyncio.run(policy.close())


async def test_what_a_request_asks_is_checked_before_it_waits(policy: LocalPolicy) -> None:
    with pytest.raises(ContextLengthError, match="context holds 256"):
        await policy.sample([5] * 256, PARAMS)
    with pytest.raises(ConfigError, match="top_p=2"):
        await policy.sample([5], SamplingParams(top_p=2.0))


async def test_the_context_can_be_made_shorter_but_not_longer(checkpoint: Path) -> None:
    short = open_policy(checkpoint, max_context=64)
    assert short.context_length == 64
    await short.close()
    with pytest.raises(ConfigError, match="at most 256"):
        open_policy(checkpoint, max_context=512)


def test_a_model_that_cannot_be_opened_is_named_with_the_way_out(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"nowhere is no directory"):
        open_policy(tmp_path / "nowhere")
    bare = tmp_path / "bare"
    tiny_model().save_pretrained(bare)
    with pytest.raises(PolicyError, match=r"bare holds no tokenizer"):
        open_policy(bare)
    broken = tiny_checkpoint(tmp_path / "broken")
    (broken / "config.json").unlink()
    with pytest.raises(PolicyError, match=r"broken cannot be loaded"):
        open_policy(broken)
    mute = tiny_checkpoint(tmp_path / "mute")
    tokenizer = AutoTokenizer.from_pretrained(mute)
    tokenizer.chat_template = None
    (mute / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(mute)
    with pytest.raises(ConfigError, match=r"no chat template"):
        open_policy(mute)
    with pytest.raises(ConfigError, match='device="abacus"'):
        open_policy(checkpoint, device="abacus")
    with pytest.raises(ValidationError, match="no_such_key"):
        LocalPolicyConfig.model_validate({"model": "x", "no_such_key": 1})


@pytest.mark.gpu
async def test_an_accelerator_samples_and_learns_as_the_processor_does(checkpoint: Path, tmp_path: Path) -> None:
    policy = open_policy(checkpoint, device="auto")
    assert policy._model.device.type != "cpu"
    ids = prompt(policy)
    samples = await asyncio.gather(*(policy.sample(ids, PARAMS) for _ in range(6)))
    await policy.train([training_sample(ids, samples[0])])
    after = await policy.sample(ids, PARAMS)
    await policy.save(tmp_path / "step", training_state=True)
    await policy.load(tmp_path / "step")
    await policy.close()
    model = policy._model.cpu()
    torch.testing.assert_close(torch.tensor(after.logprobs), scored(model, ids, after), atol=1e-3, rtol=0)


def returns_sample(prompt: Sequence[int], sample: Sample, values: Any) -> TrainingSample:
    lesson = training_sample(prompt, sample)
    ones = ((), (1.0,) * len(sample.token_ids))
    return TrainingSample(lesson.tree, columns=lesson.columns, returns=ones, values=values)


async def test_the_critic_values_recorded_tokens_and_learns_in_training(checkpoint: Path) -> None:
    policy = open_policy(checkpoint, value_head="mlp")
    ids = prompt(policy)
    sample = await policy.sample(ids, PARAMS)
    tree = training_sample(ids, sample).tree
    for _ in range(20):
        found = await policy.score([tree], {"values", "logprobs"})
        metrics = await policy.train(
            [returns_sample(ids, sample, found["values"][0])], UpdateOptions(loss=["ppo", "value"])
        )
    (values,) = (await policy.score([tree], {"values"}))["values"]
    assert [(each.dtype, len(each)) for each in values] == [("float32", 0), ("float32", len(sample.token_ids))]
    assert values[1].min() > 0.3, "it starts at 0 and learns a return of 1"
    assert metrics["value_loss"] < 0.5
    await policy.close()


async def test_a_critic_is_saved_beside_the_model_and_continues_exactly(checkpoint: Path, tmp_path: Path) -> None:
    policy = open_policy(checkpoint, value_head="mlp")
    ids = prompt(policy)
    sample = await policy.sample(ids, PARAMS)
    lesson = returns_sample(ids, sample, ((), (0.0,) * len(sample.token_ids)))
    await policy.train([lesson], UpdateOptions(loss=["ppo", "value"]))
    await policy.save(tmp_path / "step", training_state=True)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "step")
    found = [path.name for path in (tmp_path / "step").glob("*.safetensors")]
    assert found == ["model.safetensors"], "servers load all of these"

    resumed = open_policy(checkpoint, value_head="mlp", seed=7)
    opened = open_policy(tmp_path / "step", value_head="mlp")
    await resumed.load(tmp_path / "step")
    for other in (resumed, opened):
        assert (await other.score([lesson.tree], {"values"}))["values"][0][1].tolist() == (
            (await policy.score([lesson.tree], {"values"}))["values"][0][1].tolist()
        )
    assert await policy.train([lesson], UpdateOptions(loss=["ppo", "value"])) == await resumed.train(
        [lesson], UpdateOptions(loss=["ppo", "value"])
    )
    assert (await policy.score([lesson.tree], {"values"}))["values"][0][1].tolist() == (
        (await resumed.score([lesson.tree], {"values"}))["values"][0][1].tolist()
    )
    for each in (policy, resumed, opened):
        await each.close()


async def test_an_adapter_has_a_critic_of_its_own_that_is_saved_with_it(checkpoint: Path, tmp_path: Path) -> None:
    policy = open_policy(checkpoint, value_head="linear", lora=Lora(r=2))
    ids = prompt(policy)
    sample = await policy.sample(ids, PARAMS)
    lesson = returns_sample(ids, sample, ((), (0.0,) * len(sample.token_ids)))
    for _ in range(3):
        metrics = await policy.train([lesson], UpdateOptions(loss=["ppo", "value"]))
    assert metrics["value_grad_norm"] > 0
    await policy.save(tmp_path / "step")
    opened = open_policy(tmp_path / "step", value_head="linear")
    found = [(await each.score([lesson.tree], {"values"}))["values"][0][1].tolist() for each in (policy, opened)]
    assert found[0] == pytest.approx(found[1], abs=1e-6)
    assert min(found[0]) > 0
    for each in (policy, opened):
        await each.close()
    with pytest.raises(ConfigError, match=r"value_head is the critic of one policy, and the adapters shared, writer"):
        open_policy(checkpoint, value_head="linear", agents={"writer": Lora(r=2), "editor": "shared"})


async def test_a_checkpoint_without_a_critic_or_with_another_is_named(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, linear, mlp = (open_policy(checkpoint, value_head=head) for head in (None, "linear", "mlp"))
    await plain.save(tmp_path / "plain", training_state=True)
    await linear.save(tmp_path / "linear", training_state=True)
    await linear.load(tmp_path / "plain")
    assert "plain holds no value head" in caplog.text
    await plain.load(tmp_path / "linear")
    assert "is not used: policy.value_head is not set" in caplog.text
    with pytest.raises(PolicyError, match="holds another value head"):
        await mlp.load(tmp_path / "linear")
    assert mlp.policy_version == 0
    for each in (plain, linear, mlp):
        await each.close()


async def test_gradient_checkpointing_arrives_in_the_update_and_changes_nothing_else(checkpoint: Path) -> None:
    config = policy_config(PolicyConfig(gradient_checkpointing=True, value_head="mlp"), str(checkpoint))
    assert (config.gradient_checkpointing, config.value_head) == (True, ValueHeadConfig(type="mlp"))
    plain, again = (open_policy(checkpoint, gradient_checkpointing=each) for each in (False, True))
    layer = again._model.model.layers[0]
    calls: list[bool] = []
    layer.self_attn.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    lesson = training_sample(prompt(plain), Sample((5, 6, 7, 8), (-3.0,) * 4, "stop", 0))
    metrics = [await each.train([lesson]) for each in (plain, again)]
    assert sum(calls) == 2, "forward, and again in the backward pass"
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4)
    for mine, theirs in zip(plain._model.parameters(), again._model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
    for each in (plain, again):
        await each.close()
