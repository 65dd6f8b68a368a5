"""Two adapters over one model, trained with a real vLLM sampling: what it samples from is what is trained.

Run with -s to see the differences."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agentlightning.engine.base import Engine, Sample, SamplingParams
from agentlightning.engine.servers.config import ServersConfig
from agentlightning.policy.config import LocalPolicyConfig, Lora, OptimizerConfig
from agentlightning.policy.local import LocalPolicy
from agentlightning.policy.served import ServedPolicy
from agentlightning.trajectory import Node, TokenTree, TrainingSample

NEAR = 1e-3
STEPS = 3
AGENTS: dict[str, Any] = {"writer": Lora(r=4), "critic": Lora(r=12, targets=("q_proj", "v_proj")), "editor": "frozen"}
QUESTIONS = {"writer": "Tom has 3 apples and buys 4 more. How many now?", "critic": "What is 12 + 30?"}


@pytest.fixture
async def policy(vllm: str, models: list[Path], on_cpu: dict[str, str], tmp_path: Path) -> AsyncIterator[ServedPolicy]:
    config = {"model": str(models[0]), "device": "cpu", "agents": AGENTS, "optimizer": OptimizerConfig(lr=3e-2)}
    learner: Any = LocalPolicy.open(LocalPolicyConfig.model_validate(config))
    servers = ServersConfig(command=vllm, args=("--enforce-eager",), env=on_cpu)
    policy = await ServedPolicy.open(learner, servers, tmp_path / "servers", dtype="float32")
    yield policy
    await policy.close()


def prompt_of(policy: ServedPolicy, question: str) -> list[int]:
    return policy.chat.encode(policy.chat.render([{"role": "user", "content": question}]))


def sampled(prompt: Sequence[int], sample: Sample, adapter: str | None) -> TrainingSample:
    node = Node(0, sample.token_ids, True, sample.logprobs, "ro", "call")
    tree = TokenTree((Node(-1, tuple(prompt)), node))
    count = len(sample.token_ids)
    columns = {"advantages": ((), (1.0,) * count), "weights": ((), (1.0 / count,) * count)}
    return TrainingSample(tree, columns=columns, adapter=adapter)


async def ask(policy: ServedPolicy, agent: str, seed: int) -> TrainingSample:
    engine: Engine = policy.for_agent(agent)
    prompt = prompt_of(policy, QUESTIONS[agent])
    sample = await engine.sample(prompt, SamplingParams(max_tokens=24, seed=seed))
    assert sample.policy_version == engine.policy_version
    return sampled(prompt, sample, agent)


async def difference(policy: ServedPolicy, sample: TrainingSample, adapter: str | None) -> float:
    """How far the recorded log-probabilities are from those of `Policy.score`."""
    scored = (await policy.score([sample.tree], {"logprobs"}, adapter=adapter))["logprobs"][0][1]
    recorded = sample.tree.nodes[1].logprobs
    return float(np.abs(np.asarray(scored) - np.asarray(recorded)).max())


async def test_two_adapters_train_while_vllm_samples_from_them(policy: ServedPolicy, tmp_path: Path):
    before = await ask(policy, "writer", 0)
    served: list[float] = []
    for step in range(STEPS):
        samples = [await ask(policy, agent, seed) for agent in QUESTIONS for seed in range(4 * step, 4 * step + 4)]
        served += [await difference(policy, each, each.adapter) for each in samples]
        trained = samples if step else [each for each in samples if each.adapter == "writer"]
        metrics = await policy.train(trained)
        assert metrics["server_difference"] < NEAR
        assert metrics["adapters_published"] == (2 if step else 1), "only what has changed"
    assert policy.versions == {"policy": 0, "policy:writer": STEPS, "policy:critic": STEPS}
    after = await ask(policy, "writer", 0)
    assert await difference(policy, after, "writer") < NEAR
    assert await difference(policy, before, "writer") > 10 * NEAR, "the weights have changed"
    assert await difference(policy, after, "critic") > 10 * NEAR, "each agent is answered by its own adapter"
    assert max(served) < NEAR

    await policy.save(tmp_path / "saved")
    for agent in QUESTIONS:
        weights = load_file(tmp_path / "saved" / "adapters" / agent / "adapter_model.safetensors")
        assert all(bool(torch.any(weight)) for name, weight in weights.items() if "lora_B" in name)

    frozen = await policy.for_agent("editor").sample(
        prompt_of(policy, "Hello"), SamplingParams(temperature=0, max_tokens=16)
    )
    learner: Any = policy.learner
    own = await learner.sample_adapter(None, prompt_of(policy, "Hello"), SamplingParams(temperature=0, max_tokens=16))
    assert (frozen.token_ids, frozen.policy_version) == (own.token_ids, 0)
    assert np.abs(np.asarray(frozen.logprobs) - np.asarray(own.logprobs)).max() < NEAR
    info = await policy.servers.replicas[0].server.model_info()
    assert len(info.adapters) == 2, "replaced versions are unloaded"
    print(f"\nserved log-probabilities differ from Policy.score by up to {max(served):.1e}")  # noqa: T201
