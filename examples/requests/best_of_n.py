"""Best of n at each step of the agent, learned by preference.

From the question, and then from each later call of one rollout, `n` answers are sampled from the same point. An answer
is worth the mean reward of the rollouts that went through it, and the best at a point is preferred to the worst (DPO,
arXiv:2305.18290; the reference is the policy that sampled both, so before the update the margin of each pair is 0).
"""

import statistics

import numpy as np
from pydantic import Field

import agentlightning as agl
from agentlightning.algorithms.training import Collected
from agentlightning.assemble import token_tree
from agentlightning.credit import group_trajectories
from agentlightning.policy.base import UpdateOptions
from agentlightning.policy.losses import COUNT, FACTOR, MARGIN
from agentlightning.trajectory import TrainingSample


class BestOfNConfig(agl.config.AlgorithmConfig):
    steps: int = Field(default=12, ge=1)
    """Updates."""
    tasks_per_step: int = Field(default=16, ge=1)
    """Tasks of each."""
    n: int = Field(default=6, ge=2)
    """Answers from each point."""
    optimizer: agl.config.OptimizerConfig = Field(default_factory=agl.config.OptimizerConfig)
    """How weights are updated."""


class BestOfN(agl.Algorithm[BestOfNConfig]):
    config_class = BestOfNConfig

    @property
    def total_steps(self) -> int:
        return self.config.steps

    async def run(self, training: agl.Training) -> None:
        while training.step < self.total_steps:
            collected = await training.collect(tasks=self.config.tasks_per_step, group_size=self.config.n)
            groups = group_trajectories(collected.trajectories)
            wants = [want for group in groups for want in later_points(group, self.config.n - 1)]
            if wants:
                collected += await training.collect(wants)
            pairs = [pair for group in group_trajectories(collected.trajectories) for pair in best_and_worst(group)]
            metrics = {"pairs": float(len(pairs)), "reward": mean_reward(collected)}
            if pairs:
                samples = [as_sample(*pair, share=1 / len(pairs)) for pair in pairs]
                metrics |= await training.update(samples, UpdateOptions(loss="dpo"))
            await training.finish_step(collected, metrics)


def later_points(group: list[agl.Trajectory], n: int) -> list[agl.Want]:
    """`n` further answers at each call but the first of the rollout with the most calls."""
    longest = max(group, key=lambda each: len(each.transitions))
    points = [agl.BranchPoint(call.rollout_id, call.span_id) for call in longest.transitions[1:]]
    return [agl.Want(branch=point, n=n) for point in points]


def best_and_worst(group: list[agl.Trajectory]) -> list[tuple[agl.Transition, agl.Transition]]:
    """Of each point of a task's tree, the answer that is worth most and the one that is worth least."""
    points: dict[tuple[int, ...], dict[tuple[int, ...], list[tuple[agl.Transition, float]]]] = {}
    for trajectory in group:
        for call in trajectory.transitions:
            answers = points.setdefault(call.prompt_token_ids, {})
            answers.setdefault(call.response_token_ids, []).append((call, reward_of(trajectory)))
    pairs: list[tuple[agl.Transition, agl.Transition]] = []
    for answers in points.values():
        worth = [(statistics.fmean(reward for _, reward in own), own[0][0]) for own in answers.values()]
        high, low = max(worth, key=lambda each: each[0]), min(worth, key=lambda each: each[0])
        if high[0] > low[0]:
            pairs.append((high[1], low[1]))
    return pairs


def as_sample(best: agl.Transition, worst: agl.Transition, share: float) -> TrainingSample:
    """Both answers below their common prompt, with what a preference loss reads of each token."""
    own = [agl.Trajectory(call.rollout_id, call.attempt_id, (call,)) for call in (best, worst)]
    tree = token_tree(own)
    signs = {best.span_id: 1.0, worst.span_id: -1.0}
    tokens = len(best.response_token_ids) + len(worst.response_token_ids)
    columns: dict[str, list[np.ndarray]] = {"weights": [], MARGIN: [], FACTOR: [], COUNT: []}
    for node in tree.nodes:
        values = {"weights": share, MARGIN: 0.0, FACTOR: signs.get(node.call or "", 0.0), COUNT: float(tokens)}
        for name, value in values.items():
            columns[name].append(np.full(len(node.token_ids) if node.sampled else 0, value, np.float32))
    return TrainingSample(tree, columns=columns, share=share)


def reward_of(trajectory: agl.Trajectory) -> float:
    return trajectory.reward if isinstance(trajectory.reward, float) else 0.0


def mean_reward(collected: Collected) -> float:
    return statistics.fmean(map(reward_of, collected.trajectories)) if collected.trajectories else 0.0
