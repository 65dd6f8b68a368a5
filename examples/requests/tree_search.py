"""A tree search that branches where the policy is unsure, learned by reinforcement.

A step begins with `roots` rollouts of each task. In each round, the `branches` calls of the whole batch whose tokens
the policy was least sure of (the largest mean of -log p) each get one more rollout: it is given the answers before that
call again, and samples from there on. The next round sees those rollouts, too: trees grow deeper where doubt is left;
tasks that the policy is sure of get no more rollouts. All rollouts of a task are one group; its mean is the baseline.
"""

import statistics
from collections import Counter

from pydantic import Field

import agentlightning as agl
from agentlightning.algorithms.training import Collected
from agentlightning.credit import group_trajectories, training_samples
from agentlightning.policy.base import UpdateOptions


class TreeSearchConfig(agl.config.AlgorithmConfig):
    steps: int = Field(default=12, ge=1)
    """Updates."""
    tasks_per_step: int = Field(default=16, ge=1)
    """Tasks of each."""
    roots: int = Field(default=4, ge=1)
    """Rollouts of each task from its beginning."""
    rounds: int = Field(default=2, ge=0)
    """How often a step branches."""
    branches: int = Field(default=32, ge=1)
    """Rollouts of each round."""
    optimizer: agl.config.OptimizerConfig = Field(default_factory=agl.config.OptimizerConfig)
    """How weights are updated."""


class TreeSearch(agl.Algorithm[TreeSearchConfig]):
    config_class = TreeSearchConfig

    @property
    def total_steps(self) -> int:
        return self.config.steps

    async def run(self, training: agl.Training) -> None:
        config = self.config
        while training.step < self.total_steps:
            collected = await training.collect(tasks=config.tasks_per_step, group_size=config.roots)
            branched = Counter[agl.BranchPoint]()
            for _ in range(config.rounds):
                points = least_sure(collected.trajectories, config.branches, branched)
                branched.update(points)
                if points:
                    collected += await training.collect([agl.Want(branch=point) for point in points])
            groups = group_trajectories(collected.trajectories)
            samples, report = training_samples(groups, aggregate="token", equal_groups="filter")
            metrics = {**report.metrics(), "reward": mean_reward(collected)}
            if samples:
                metrics |= await training.update(samples, UpdateOptions(loss="ppo"))
            await training.finish_step(collected, metrics)


def least_sure(
    trajectories: tuple[agl.Trajectory, ...], count: int, branched: Counter[agl.BranchPoint]
) -> list[agl.BranchPoint]:
    """The calls with the largest doubt, shared by the rollouts that go through them already. Answers that were given
    again are the same points as those they repeat."""
    doubts: dict[agl.BranchPoint, float] = {}
    for call in (call for each in trajectories for call in each.transitions):
        if call.replays is None and call.logprobs:
            point = agl.BranchPoint(call.rollout_id, call.span_id)
            doubts[point] = -statistics.fmean(call.logprobs) / (1 + branched[point])
    return sorted(doubts, key=lambda point: -doubts[point])[:count]


def mean_reward(collected: Collected) -> float:
    rewards = [each.reward for each in collected.trajectories if isinstance(each.reward, float)]
    return statistics.fmean(rewards) if rewards else 0.0
