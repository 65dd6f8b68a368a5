"""A local policy trains on what top-k and top-p sampled, with the probabilities it was sampled with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.models import tiny_checkpoint

from agentlightning.engine.base import Sample, SamplingParams
from agentlightning.policy.base import UpdateOptions
from agentlightning.policy.config import LocalPolicyConfig, OptimizerConfig, PolicyConfig
from agentlightning.policy.local import LocalPolicy
from agentlightning.policy.open import policy_config
from agentlightning.trajectory import Node, TokenTree, TrainingSample

pytestmark = pytest.mark.integration

PARAMS = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, top_k=40, record_kept=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def policy(checkpoint: Path) -> AsyncIterator[LocalPolicy]:
    policy = open_policy(checkpoint)
    yield policy
    await policy.close()


def open_policy(model: Path, **options: object) -> LocalPolicy:
    config = {"model": model, "device": "cpu", "optimizer": OptimizerConfig(lr=1e-2), **options}
    return LocalPolicy.open(LocalPolicyConfig.model_validate(config))


def prompt(policy: LocalPolicy) -> list[int]:
    return policy.chat.encode(policy.chat.render([{"role": "user", "content": "What is 12 + 30?"}]))


async def sampled(policy: LocalPolicy, params: SamplingParams = PARAMS, count: int = 6) -> list[Sample]:
    ids = prompt(policy)
    return await asyncio.gather(*(policy.sample(ids, replace(params, seed=seed)) for seed in range(count)))


def tree(policy: LocalPolicy, samples: list[Sample], temperature: float = PARAMS.temperature) -> TokenTree:
    nodes = (
        Node(0, each.token_ids, True, each.logprobs, f"r{i}", "c", temperature=temperature, kept_sets=each.kept_sets)
        for i, each in enumerate(samples)
    )
    return TokenTree((Node(-1, tuple(prompt(policy))), *nodes))


@pytest.mark.parametrize("params", [{}, {"top_k": 0}, {"top_p": 1.0}, {"top_k": 1}], ids=["both", "p", "k", "one"])
async def test_recorded_probabilities_are_those_of_the_trainer_over_the_same_sets(
    policy: LocalPolicy, params: dict[str, float]
) -> None:
    samples = await sampled(policy, replace(PARAMS, **params))
    scores = (await policy.score([tree(policy, samples)], {"logprobs"}))["logprobs"][0]
    for own, sample in zip(scores[1:], samples, strict=True):
        np.testing.assert_allclose(own, sample.logprobs, atol=1e-5)
        assert sample.kept_sets is not None
        for token, kept in zip(sample.token_ids, sample.kept_sets.lists(), strict=True):
            assert token in kept
            assert len(kept) <= (params.get("top_k", 40) or policy.vocab_size)
    if params.get("top_k") != 1:
        without = await policy.score([tree(policy, [replace(s, kept_sets=None) for s in samples])], {"logprobs"})
        assert np.abs(np.concatenate(without["logprobs"][0]) - np.concatenate(scores)).max() > 0.01


async def test_recorded_tokens_stay_trainable_once_the_weights_would_keep_others(policy: LocalPolicy) -> None:
    samples = await sampled(policy)
    nodes = tree(policy, samples)
    ones = [[1.0 if node.sampled else 0.0] * len(node.token_ids) for node in nodes.nodes]
    away = [[-each for each in own] for own in ones]
    before = await policy.train([TrainingSample(nodes, away, ones)])
    assert before["mismatch_kl"] < 1e-8
    assert before["tokens_with_kept_sets"] == sum(len(each.token_ids) for each in samples)
    for _ in range(3):
        metrics = await policy.train([TrainingSample(nodes, away, ones)], UpdateOptions(loss="importance"))
        assert (metrics["rollouts_not_finite"], metrics["skipped_steps"]) == (0, 0)
        assert np.isfinite(metrics["loss"])
    now = (await policy.score([nodes], {"logprobs"}))["logprobs"][0]
    assert np.isfinite(np.concatenate(now)).all()
    assert np.concatenate(now).mean() < np.concatenate([each.logprobs for each in samples]).mean()


async def test_only_what_asks_for_it_is_recorded(policy: LocalPolicy) -> None:
    for other in ({"record_kept": False}, {"top_p": 1.0, "top_k": 0}, {"temperature": 0.0}, {"min_p": 0.1}):
        assert [each.kept_sets for each in await sampled(policy, replace(PARAMS, **other), 2)] == [None, None]


async def test_rows_that_record_do_not_change_the_others(policy: LocalPolicy) -> None:
    ids = prompt(policy)
    plain = SamplingParams(max_tokens=12, seed=3)
    alone = await policy.sample(ids, plain)
    both = await asyncio.gather(policy.sample(ids, plain), policy.sample(ids, PARAMS), policy.sample(ids, plain))
    assert [both[0].token_ids, both[2].token_ids] == [alone.token_ids] * 2
    assert (both[0].kept_sets, both[2].kept_sets) == (None, None)
    assert both[1].kept_sets is not None


async def test_a_set_of_every_token_takes_no_room(policy: LocalPolicy) -> None:
    samples = await sampled(policy, replace(PARAMS, top_p=1.0, top_k=policy.vocab_size))
    assert {each.kept_sets and each.kept_sets.ids for each in samples} == {b""}


async def test_an_answer_with_a_larger_set_than_allowed_is_not_recorded(checkpoint: Path) -> None:
    policy = open_policy(checkpoint, max_kept_tokens=8)
    for top_k, recorded in ((8, True), (9, False)):
        samples = await sampled(policy, replace(PARAMS, top_p=1.0, top_k=top_k))
        assert {each.kept_sets is not None for each in samples} == {recorded}
    await policy.close()
    none = open_policy(checkpoint, max_kept_tokens=0)
    assert {each.kept_sets for each in await sampled(none, replace(PARAMS, top_k=1))} == {None}
    await none.close()


def test_the_limit_arrives_from_the_settings_of_a_run(checkpoint: Path) -> None:
    assert policy_config(PolicyConfig(max_kept_tokens=7), checkpoint, seed=0).max_kept_tokens == 7


async def test_sets_stay_aligned_where_the_weights_change_during_an_answer(policy: LocalPolicy) -> None:
    ids, first = prompt(policy), await sampled(policy, count=1)
    nodes = tree(policy, first)
    ones = [[1.0 if node.sampled else 0.0] * len(node.token_ids) for node in nodes.nodes]
    started = asyncio.Event()
    params = replace(PARAMS, max_tokens=60, seed=5)
    running = asyncio.create_task(policy.sample(ids, params, lambda *_: started.set()))
    await started.wait()
    await policy.train([TrainingSample(nodes, ones, ones)], in_flight=True)
    sample = await running
    assert sample.policy_version == 1
    assert sample.kept_sets is not None
    assert len(sample.kept_sets) == len(sample.token_ids)
    assert all(token in kept for token, kept in zip(sample.token_ids, sample.kept_sets.lists(), strict=True))
