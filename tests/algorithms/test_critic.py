"""PPO with a critic through LightningRL: real sampling, values, credit, both losses and both optimisers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.support.models import tiny_checkpoint

from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.training import Collected
from agentlightning.engine.base import SamplingParams
from agentlightning.errors import ConfigError
from agentlightning.policy.config import LocalPolicyConfig, OptimizerConfig
from agentlightning.policy.local import LocalPolicy
from agentlightning.trajectory import Trajectory, Transition

pytestmark = pytest.mark.integration

TOKENS = 2
"""Of each answer."""


class Run:
    """A training run on four tasks, each a prompt of its own: half of the answers' tokens, those below 160, are right,
    and half of the tasks are easy."""

    def __init__(self, policy: LocalPolicy) -> None:
        self.learner, self.step, self.target_agent = policy, 0, None
        self.metrics: list[dict[str, float]] = []

    async def collect(self, *, tasks: int, group_size: int, **_request: Any) -> Collected:
        made = [self._rollout(task, i) for task in range(tasks) for i in range(group_size)]
        return Collected(tuple(await asyncio.gather(*made)))

    async def _rollout(self, task: int, i: int) -> Trajectory:
        prompt = (10 + task, 20 + task, 30 + task)
        params = SamplingParams(max_tokens=TOKENS, seed=1000 * self.step + 10 * task + i, ignore_eos=True)
        sample = await self.learner.sample(prompt, params)
        name = f"{self.step}-{task}-{i}"
        call = Transition(name, "at", name, 1, prompt, sample.token_ids, sample.logprobs)
        share = sum(token < 160 for token in sample.token_ids) / len(sample.token_ids)
        return Trajectory(name, "at", (call,), share + task % 2, f"{self.step}-{task}")

    async def update(self, samples: Any, options: Any) -> Any:
        return await self.learner.train(samples, options)

    async def finish_step(self, collected: Any, metrics: Any) -> None:
        self.step += 1
        self.metrics.append(dict(metrics))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


def open_policy(checkpoint: Path, value_head: Any) -> LocalPolicy:
    optimizer = OptimizerConfig(lr=3e-3)
    return LocalPolicy.open(
        LocalPolicyConfig(model=checkpoint, device="cpu", optimizer=optimizer, value_head=value_head)
    )


def algorithm(steps: int) -> LightningRL:
    return LightningRL(steps=steps, tasks_per_step=4, group_size=8, credit="value", loss=["ppo", "value"])


async def test_the_policy_learns_and_its_critic_explains_ever_more_of_the_returns(checkpoint: Path) -> None:
    policy = open_policy(checkpoint, {"type": "linear", "lr": 1e-2})
    run: Any = Run(policy)
    await algorithm(40).run(run)
    rewards = [each["reward"] for each in run.metrics]
    explained = [each["explained_variance"] for each in run.metrics]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.2
    assert explained[0] == pytest.approx(0.0, abs=1e-6)
    assert sum(explained[-4:]) / 4 > 0.4, "it tells easy tasks from hard ones"
    assert run.metrics[-1]["value_loss"] < run.metrics[0]["value_loss"] / 2
    assert policy.policy_version == 40
    await policy.close()


async def test_without_a_value_head_the_first_step_names_the_setting(checkpoint: Path) -> None:
    policy = open_policy(checkpoint, None)
    run: Any = Run(policy)
    with pytest.raises(ConfigError, match=r'set policy\.value_head = "linear"'):
        await algorithm(1).run(run)
    assert policy.policy_version == 0
    await policy.close()
