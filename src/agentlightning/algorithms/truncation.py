"""Rollouts that were cut off, by the token limit of an answer or by the limit on turns, and what is learned from
them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from agentlightning.assemble import TURN_LIMIT_REACHED
from agentlightning.credit import is_target
from agentlightning.trajectory import TrainingSample, Trajectory

LENGTH = "length"
"""The finish reason of an answer that reached its limit."""


def truncated_rollouts(trajectories: Sequence[Trajectory], target_agent: str | None = None) -> frozenset[str]:
    """The ids of rollouts in which an answer of an agent to train was cut off, or a further call was refused."""
    return frozenset(
        each.rollout_id
        for each in trajectories
        if TURN_LIMIT_REACHED in each.metadata
        or any(call.finish_reason == LENGTH and is_target(call.agent, target_agent) for call in each.transitions)
    )


def with_reward(trajectories: Sequence[Trajectory], rollouts: Collection[str], reward: float) -> list[Trajectory]:
    """The trajectories, some rollouts with another reward."""
    return [replace(each, reward=reward) if each.rollout_id in rollouts else each for each in trajectories]


def without_weight(samples: Sequence[TrainingSample], rollouts: Collection[str]) -> list[TrainingSample]:
    """The samples with weight 0 for some rollouts. The others weigh what they did."""
    return [
        replace(
            sample,
            weights=[
                weights * (node.rollout_id not in rollouts)
                for node, weights in zip(sample.tree.nodes, sample.weights, strict=True)
            ],
            share=sample.share,
        )
        for sample in samples
    ]
