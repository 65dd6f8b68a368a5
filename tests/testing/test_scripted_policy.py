"""A policy without a model: it learns by counting, and its checkpoints bring the count back."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.scripted_policy import ScriptedPolicy, scripted_weights

from agentlightning.engine.base import SamplingParams
from agentlightning.errors import PolicyError
from agentlightning.policy.base import UpdateOptions
from agentlightning.trajectory import Node, TokenTree, TrainingSample

TREE = TokenTree((Node(-1, (5, 6)), Node(0, (7,), sampled=True, logprobs=(-0.5,))))


async def test_updates_change_its_answers_and_a_checkpoint_brings_them_back(tmp_path: Path) -> None:
    policy = ScriptedPolicy(lambda messages, updates: f"{updates} updates")
    prompt = policy.chat.encode(policy.chat.render([{"role": "user", "content": "hi"}]))

    async def answer() -> str:
        return policy.chat.decode((await policy.sample(prompt, SamplingParams())).token_ids, True)

    await policy.save(tmp_path)
    sample = TrainingSample(TREE, advantages=[(0.0, 0.0), (1.0,)], weights=[(0.0, 0.0), (1.0,)])
    assert await policy.train([sample], UpdateOptions(loss="ppo")) == {"loss": 1.0}
    assert (await answer(), policy.policy_version) == ("1 updates", 1)
    assert policy.recorded[0].options.loss == "ppo"
    await policy.load(tmp_path)
    assert (await answer(), policy.policy_version) == ("0 updates", 2), "versions only grow"
    assert scripted_weights(tmp_path) == {"updates": 0, "version": 0}
    with pytest.raises(PolicyError, match="no checkpoint of a ScriptedPolicy"):
        await policy.load(tmp_path / "missing")


async def test_it_scores_tokens_as_they_were_sampled() -> None:
    scores = await ScriptedPolicy(lambda messages, updates: "").score([TREE], {"logprobs", "entropy"})
    assert [row.tolist() for row in scores["logprobs"][0]] == [[], [-0.5]]
    assert [row.tolist() for row in scores["entropy"][0]] == [[], [0.0]]
