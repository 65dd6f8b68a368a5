"""What a policy with an adapter for each agent promises: one batch, and everything else apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.models import tiny_checkpoint

from agentlightning.engine.base import Sample, SamplingParams
from agentlightning.errors import PolicyError
from agentlightning.policy.base import UpdateOptions
from agentlightning.policy.config import LocalPolicyConfig, Lora, OptimizerConfig
from agentlightning.policy.local import LocalPolicy
from agentlightning.trajectory import Node, TokenTree, TrainingSample

pytestmark = pytest.mark.integration

PROMPT = tuple(range(5, 45))
AGENTS = {
    "writer": Lora(r=4),
    "critic": Lora(r=2, targets=("q_proj", "v_proj")),
    "editor": "frozen",
    "planner": "shared",
}
NAMES = (*AGENTS, None)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


def open_policy(model: Path, **options: Any) -> LocalPolicy:
    config = {"device": "cpu", "optimizer": OptimizerConfig(lr=1e-2), "agents": AGENTS, **options}
    return LocalPolicy.open(LocalPolicyConfig.model_validate({"model": model, **config}))


@pytest.fixture
async def policy(checkpoint: Path) -> AsyncIterator[LocalPolicy]:
    """A policy whose agents have learned different things."""
    policy = open_policy(checkpoint)
    for adapter, token in (("writer", 7), ("critic", 8), (None, 9)):
        for _ in range(3):
            await policy.train([lesson(Sample((token,) * 4, (-5.0,) * 4, "stop", 0), adapter)])
    yield policy
    await policy.close()


def lesson(sample: Sample, adapter: str | None) -> TrainingSample:
    count = len(sample.token_ids)
    tree = TokenTree((Node(-1, PROMPT), Node(0, sample.token_ids, True, sample.logprobs, "ro", "call")))
    columns = {"advantages": ((), (1.0,) * count), "weights": ((), (1.0 / count,) * count)}
    return TrainingSample(tree, columns=columns, adapter=adapter)


def sampling(seed: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=8, seed=seed, ignore_eos=True, top_logprobs=5)


async def ask(policy: LocalPolicy, agent: str | None, seed: int = 0) -> Sample:
    return await policy.for_agent(agent).sample(PROMPT, sampling(seed))


def matrices(policy: LocalPolicy) -> dict[str, list[torch.Tensor]]:
    assert policy._learner.adapters is not None
    modules = {**policy._learner.adapters.by_name, "base": policy._model}
    return {name: [each.detach().clone() for each in module.parameters()] for name, module in modules.items()}


def changed(before: dict[str, list[torch.Tensor]], after: dict[str, list[torch.Tensor]]) -> set[str]:
    return {name for name in before if not all(map(torch.equal, before[name], after[name]))}


async def test_one_batch_of_all_agents_gives_what_each_gives_alone(policy: LocalPolicy) -> None:
    together = await asyncio.gather(*(ask(policy, agent, seed) for seed in range(3) for agent in NAMES))
    policy._generator.prefix_cache.clear()
    alone = [await ask(policy, agent, seed) for seed in range(3) for agent in NAMES]
    for mixed, single in zip(together, alone, strict=True):
        assert mixed.token_ids == single.token_ids
        assert mixed.logprobs == pytest.approx(single.logprobs, abs=1e-5)
    first = {agent: dict(sample.top_logprobs[0]) for agent, sample in zip(NAMES, alone, strict=False)}
    assert first["editor"] == pytest.approx(first[None]), "who is not listed is answered as one that is frozen"
    assert len({tuple(top.items()) for top in first.values()}) == 4


async def test_agents_share_no_prefix_of_the_cache(policy: LocalPolicy) -> None:
    """Each prompt is prefilled by its own weights, although all are the same tokens."""
    policy._generator.prefix_cache.clear()
    fresh = [await ask(policy, agent) for agent in NAMES]
    cached = [await ask(policy, agent) for agent in NAMES]
    assert [each.logprobs for each in cached] == [pytest.approx(each.logprobs, abs=1e-5) for each in fresh]
    hits = {
        name: policy._generator.prefix_cache.match(list(PROMPT), name).length for name in ("writer", "shared", None)
    }
    assert all(hits.values())
    await policy.train([lesson(fresh[0], "writer")])
    match = policy._generator.prefix_cache.match
    assert match(list(PROMPT), "writer").length == 0, "what the old weights computed is gone"
    assert match(list(PROMPT), "shared").length == hits["shared"], "and what others computed is not"


async def test_only_the_adapter_of_a_sample_changes(policy: LocalPolicy) -> None:
    for adapter, name in (("writer", "writer"), (None, "shared")):
        before, sample = matrices(policy), await ask(policy, "planner")
        metrics = await policy.train([lesson(sample, adapter)])
        assert changed(before, matrices(policy)) == {name}
        assert metrics["tokens_trained"] == 8


async def test_tokens_are_scored_by_the_adapter_that_learns_from_them(policy: LocalPolicy) -> None:
    for agent, adapter in (("writer", "writer"), ("planner", None)):
        sample = await ask(policy, agent)
        tree = lesson(sample, adapter).tree
        (own,) = (await policy.score([tree], {"logprobs"}, adapter=adapter))["logprobs"]
        assert own[1].tolist() == pytest.approx(sample.logprobs, abs=1e-4)
    frozen = await ask(policy, "editor")
    (below,) = (await policy.score([lesson(frozen, None).tree], {"ref_logprobs"}))["ref_logprobs"]
    assert below[1].tolist() == pytest.approx(frozen.logprobs, abs=1e-4), "the reference is the model below"
    with pytest.raises(PolicyError, match="adapter 'editor', which this policy does not train"):
        await policy.score([tree], {"logprobs"}, adapter="editor")


async def test_the_moving_average_of_an_adapter_is_its_own(policy: LocalPolicy) -> None:
    sample = await ask(policy, "writer")
    tree = lesson(sample, "writer").tree

    async def score(column: Any, adapter: str | None) -> list[float]:
        ((_, values),) = (await policy.score([tree], {column}, adapter=adapter))[column]
        return values.tolist()

    before = {name: await score("logprobs", name) for name in ("writer", "critic")}
    await policy.train([lesson(sample, "writer")], UpdateOptions(average=0.01))
    now = await score("logprobs", "writer")
    average = await score("average_logprobs", "writer")
    moved = [abs(a - b) for a, b in zip(now, before["writer"], strict=True)]
    lagged = [abs(a - b) for a, b in zip(average, before["writer"], strict=True)]
    assert sum(lagged) < 0.5 * sum(moved), "the average of these weights follows slowly"
    assert await score("logprobs", "writer") == now, "scoring with it changes nothing"
    assert await score("average_logprobs", "critic") == before["critic"], "no average yet: the present weights"


async def test_one_update_trains_several_adapters_with_their_own_optimisers_and_metrics(policy: LocalPolicy) -> None:
    before, sample = matrices(policy), await ask(policy, "planner")
    steps = {name: updater.optimizer.steps for name, updater in policy._learner.updaters.items()}
    metrics = await policy.train([lesson(sample, "writer"), lesson(sample, "critic"), lesson(sample, "writer")])
    assert changed(before, matrices(policy)) == {"writer", "critic"}
    now = {name: updater.optimizer.steps for name, updater in policy._learner.updaters.items()}
    assert {name: now[name] - steps[name] for name in now} == {"writer": 1, "critic": 1, "shared": 0}
    assert metrics["writer/tokens_trained"] == 2 * metrics["critic/tokens_trained"] == 16
    assert metrics["tokens_trained"] == 24
    assert metrics["writer/grad_norm"] != metrics["critic/grad_norm"]


async def test_versions_are_those_of_the_weights_that_sampled(policy: LocalPolicy) -> None:
    versions = {agent: (await ask(policy, agent)).policy_version for agent in NAMES}
    assert versions == {"writer": 3, "critic": 6, "editor": 0, "planner": 9, None: 0}
    await policy.train([lesson(await ask(policy, "writer"), "writer")])
    after = {agent: policy.for_agent(agent).policy_version for agent in AGENTS}
    assert (after["writer"], after["critic"], after["editor"]) == (10, 6, 0)
    assert policy.policy_version == 10, "of the newest weights"
    assert (await ask(policy, "planner")).policy_version == 9


async def test_answers_of_other_agents_go_on_across_an_update_of_one(policy: LocalPolicy) -> None:
    long = SamplingParams(max_tokens=60, ignore_eos=True, seed=3)
    expected = await policy.for_agent("critic").sample(PROMPT, long)
    seen = asyncio.Event()
    answers = [
        asyncio.ensure_future(policy.for_agent(agent).sample(PROMPT, long, lambda *_: seen.set()))
        for agent in ("writer", "critic")
    ]
    await seen.wait()
    await policy.train([lesson(expected, "writer")], in_flight=True)
    writer, critic = await asyncio.gather(*answers)
    assert [version for version, _ in writer.versions] == [3, 10]
    assert critic.versions == ()
    assert critic.token_ids == expected.token_ids


async def test_a_resume_restores_every_adapter_and_its_optimiser(
    policy: LocalPolicy, checkpoint: Path, tmp_path: Path
) -> None:
    sample = await ask(policy, "writer")
    await policy.save(tmp_path / "step", training_state=True)
    resumed = open_policy(checkpoint)
    await resumed.load(tmp_path / "step", above=policy.policy_version)
    assert changed(matrices(policy), matrices(resumed)) == set()
    for each in (policy, resumed):
        await each.train([lesson(sample, "writer"), lesson(sample, None)])
    assert changed(matrices(policy), matrices(resumed)) == set()
    assert resumed.policy_version > policy.policy_version
    await resumed.close()
    other = open_policy(checkpoint, agents={"writer": Lora(r=4)})
    with pytest.raises(PolicyError, match=r"holds the adapters \['critic', 'shared', 'writer'\], and \['writer'\]"):
        await other.load(tmp_path / "step")
    await other.close()


async def test_a_checkpoint_opens_with_the_agents_it_was_saved_with(policy: LocalPolicy, tmp_path: Path) -> None:
    await policy.save(tmp_path / "best")
    opened = LocalPolicy.open(LocalPolicyConfig(model=tmp_path / "best", device="cpu"))
    for agent in NAMES:
        ours, theirs = await ask(policy, agent), await ask(opened, agent)
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    await opened.close()
    (tmp_path / "best" / "agents.json").write_text('{"base_model_name_or_path": "x", "agents": {"a": "thawed"}}')
    with pytest.raises(PolicyError, match=r"the agents of .* cannot be read"):
        LocalPolicy.open(LocalPolicyConfig(model=tmp_path / "best"))


async def test_views_have_names_that_agents_may_request(policy: LocalPolicy, checkpoint: Path) -> None:
    assert sorted(policy.views) == ["policy:base", "policy:critic", "policy:writer"]
    assert policy.for_agent("planner") is policy
    assert policy.for_agent("editor") is policy.for_agent(None) is policy.views["policy:base"]
    alone = open_policy(checkpoint, agents={"writer": Lora(r=2), "editor": "frozen"})
    assert sorted(alone.views) == ["policy:writer"]
    assert alone.for_agent("editor") is alone, "the policy itself is what is frozen"
    await alone.close()
