"""A local policy scores recorded tokens under other models: a teacher of another shape, and its own moving average."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.models import tiny_checkpoint, tiny_model

from agentlightning.engine.base import Sample, SamplingParams
from agentlightning.errors import PolicyError
from agentlightning.models.tiny import make_tiny
from agentlightning.policy.base import UpdateOptions
from agentlightning.policy.config import LocalPolicyConfig, Lora, OptimizerConfig
from agentlightning.policy.learner import Learner
from agentlightning.policy.local import LocalPolicy
from agentlightning.training.persistence.run_dir import RunState
from agentlightning.training.run import TrainingRun
from agentlightning.trajectory import Node, TokenTree, TrainingSample

PARAMS = SamplingParams(max_tokens=6)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def policy(checkpoint: Path) -> AsyncIterator[LocalPolicy]:
    policy = LocalPolicy.open(LocalPolicyConfig(model=checkpoint, device="cpu", optimizer=OptimizerConfig(lr=1e-2)))
    yield policy
    await policy.close()


def prompt(policy: LocalPolicy) -> list[int]:
    return policy.chat.encode(policy.chat.render([{"role": "user", "content": "What is 12 + 30?"}]))


def lesson(prompt: Sequence[int], sample: Sample) -> TrainingSample:
    count = len(sample.token_ids)
    sampled = Node(0, sample.token_ids, True, sample.logprobs, "ro", "call")
    tree = TokenTree((Node(-1, tuple(prompt)), sampled))
    return TrainingSample(tree, advantages=((), (1.0,) * count), weights=((), (1.0 / count,) * count))


async def test_a_teacher_may_have_another_shape_but_not_another_tokenizer(policy: LocalPolicy, tmp_path: Path) -> None:
    ids = prompt(policy)
    sample = await policy.sample(ids, PARAMS)
    tree = lesson(ids, sample).tree
    teacher = tiny_checkpoint(tmp_path / "teacher", "qwen3", seed=7)
    (scores,) = (await policy.score([tree], {"ref_logprobs"}, reference=teacher))["ref_logprobs"]
    with torch.inference_mode():
        logits = tiny_model("qwen3", seed=7)(torch.tensor([[*ids, *sample.token_ids]])).logits[0, len(ids) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.from_numpy(scores[1]), expected, atol=1e-4, rtol=0)

    stranger = make_tiny(tmp_path / "stranger", ["quite other words: xylophone, zephyr"], seed=0)
    with pytest.raises(PolicyError, match="another tokenizer"):
        await policy.score([tree], {"ref_logprobs"}, reference=stranger)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, False),
        ({"lora": Lora(r=2)}, True),
        ({"agents": {"a": Lora(r=2)}}, True),
        ({"agents": {"a": Lora(r=2), "b": "shared"}, "lora": Lora(r=3)}, True),
        ({"agents": {"a": "shared", "b": "frozen"}}, True),
        ({"agents": {"a": "shared"}, "lora": Lora(r=3)}, True),
        ({"agents": {"a": "shared"}}, False),
    ],
)
async def test_with_adapters_the_model_below_is_what_a_run_started_from(
    checkpoint: Path, tmp_path: Path, settings: dict[str, Any], expected: bool
) -> None:
    config = LocalPolicyConfig(model=checkpoint, device="cpu", optimizer=OptimizerConfig(lr=1e-2), **settings)
    policy = LocalPolicy.open(config)
    learner = Learner(policy, nullcontext, 100)  # type: ignore[arg-type]
    directory = SimpleNamespace(start=tmp_path / "start", reference=tmp_path / "reference")
    run: Any = SimpleNamespace(run_dir=directory, state=RunState("r"), _learner=lambda: learner)
    reference = await TrainingRun.starting_weights(run)
    assert (policy.capabilities.starts_at_base, reference) == (expected, None if expected else directory.reference)
    assert directory.reference.exists() == (not expected), "no copy of the weights is written"
    if "shared" in config.agents.values() and config.lora is not None:
        assert policy.config.adapters["shared"].r == 3, "policy.lora is that of the shared agents"
    sample = await policy.sample(prompt(policy), PARAMS)
    own = replace(
        lesson(prompt(policy), sample), adapter=next((n for n in policy.config.adapters if n != "shared"), None)
    )
    start = (await policy.score([own.tree], {"logprobs"}, adapter=own.adapter))["logprobs"][0][1]
    await policy.train([own])
    now = await policy.score([own.tree], {"logprobs", "ref_logprobs"}, reference=reference, adapter=own.adapter)
    assert now["ref_logprobs"][0][1].tolist() == pytest.approx(start.tolist(), abs=1e-4)
    assert now["logprobs"][0][1].sum() > start.sum() + 1e-3
    await policy.close()


async def test_a_policy_that_opens_saved_adapters_does_not_start_at_the_model_below(
    checkpoint: Path, tmp_path: Path
) -> None:
    policy = LocalPolicy.open(LocalPolicyConfig(model=checkpoint, device="cpu", lora=Lora(r=2)))
    await policy.save(tmp_path / "adapters")
    await policy.close()
    again = LocalPolicy.open(LocalPolicyConfig(model=tmp_path / "adapters", device="cpu"))
    assert set(again.config.adapters) == {"shared"}
    assert not again.capabilities.starts_at_base
    await again.close()


async def test_adapters_that_were_saved_are_a_reference(checkpoint: Path, tmp_path: Path) -> None:
    policy = LocalPolicy.open(LocalPolicyConfig(model=checkpoint, device="cpu", lora=Lora(r=2)))
    sample = await policy.sample(prompt(policy), PARAMS)
    await policy.save(tmp_path / "reference")
    tree = lesson(prompt(policy), sample).tree
    (scores,) = (await policy.score([tree], {"ref_logprobs"}, reference=tmp_path / "reference"))["ref_logprobs"]
    assert scores[1].tolist() == pytest.approx(sample.logprobs, abs=1e-4)
    await policy.close()


async def test_tokens_are_scored_under_the_moving_average_of_the_weights(policy: LocalPolicy) -> None:
    sample = await policy.sample(prompt(policy), PARAMS)
    own = lesson(prompt(policy), sample)
    start = (await policy.score([own.tree], {"average_logprobs"}))["average_logprobs"][0][1]
    assert start.tolist() == pytest.approx(sample.logprobs, abs=1e-4)
    for _ in range(2):
        await policy.train([own], UpdateOptions(average=0.05))
    scores = await policy.score([own.tree], {"logprobs", "average_logprobs"})
    now, average = (scores[name][0][1].sum() for name in ("logprobs", "average_logprobs"))
    assert start.sum() < average < now, "it follows more slowly"
