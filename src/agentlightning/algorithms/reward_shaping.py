"""What a step does to its rewards and groups before credit: truncation, penalties, and which groups are learned
from."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from pydantic import PositiveFloat, model_validator

from agentlightning.algorithms.columns import Models, scores, with_shared
from agentlightning.algorithms.training import Collected, Training
from agentlightning.assemble import OVERRIDDEN_CALLS, TURN_LIMIT_REACHED, token_tree
from agentlightning.credit import group_trajectories, is_target
from agentlightning.credit.agent_rewards import team_score
from agentlightning.credit.base import by_call
from agentlightning.policy.losses import REF_LOGPROBS
from agentlightning.trajectory import RewardWeights, TrainingSample, Trajectory
from agentlightning.util.settings import AtLeastOne, Section

# -- truncation ------------------------------------------------------------------------------------------------------

# Rollouts that were cut off, by the token limit of an answer or by the limit on turns, and what is learned from
# them.

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


# -- group filter ----------------------------------------------------------------------------------------------------

# Keeps the groups of a batch whose rewards differ most: those that teach, at the price of fewer rollouts in an update.
#
# The uncertainty filter of StarPO-S (Wang et al. 2025, RAGEN, arXiv:2504.20073, section 4.2): groups are ordered by the
# standard deviation of their rewards, and the first share of them is learned from.


def most_uncertain(
    groups: Sequence[list[Trajectory]], share: float, reward_weights: RewardWeights = None
) -> list[list[Trajectory]]:
    """That share of the groups, rounded up, in their order. Of equal ones the earlier are kept."""
    count = math.ceil(share * len(groups))
    if count >= len(groups):
        return list(groups)
    spreads = [_spread(group, reward_weights) for group in groups]
    kept = sorted(sorted(range(len(groups)), key=lambda index: -spreads[index])[:count])
    return [groups[index] for index in kept]


def _spread(group: Sequence[Trajectory], weights: RewardWeights) -> float:
    """The standard deviation of the rewards; -1 where none is known."""
    rewards = [reward for each in group if (reward := team_score(each, weights)) is not None]
    return statistics.pstdev(rewards) if rewards else -1.0


def groups_with_spread(trajectories: Sequence[Trajectory], weights: RewardWeights) -> int:
    """The number of groups in which rewards differ."""
    rewards = [{team_score(each, weights) for each in group} for group in group_trajectories(trajectories)]
    return sum(len(each - {None}) > 1 for each in rewards)


class OverlongPenalty(Section):
    """A penalty for rollouts with too many sampled tokens, which grows from 0 over the last `buffer` tokens."""

    max_tokens: AtLeastOne
    """Sampled tokens of a rollout from which the whole penalty applies."""
    buffer: AtLeastOne
    """The number of tokens before these over which it grows."""
    penalty: PositiveFloat = 1.0
    """What is taken from the reward of a rollout that is too long."""

    @model_validator(mode="after")
    def _check_buffer(self) -> OverlongPenalty:
        if self.buffer > self.max_tokens:
            raise ValueError(f"buffer={self.buffer} is longer than max_tokens={self.max_tokens}; make it shorter")
        return self

    def of_length(self, tokens: int) -> float:
        """What is added to the reward, 0 or negative."""
        free = self.max_tokens - self.buffer
        return self.penalty * max(-1.0, min(0.0, (free - tokens) / self.buffer))


def with_overlong_penalty(
    trajectories: Sequence[Trajectory],
    setting: OverlongPenalty,
    target_agent: str | None = None,
    weights: RewardWeights = None,
) -> tuple[list[Trajectory], dict[str, float]]:
    """The trajectories with the penalty in their rewards, and its mean and the number of rollouts it applies to."""
    penalties = [setting.of_length(sampled_tokens(each, target_agent)) for each in trajectories]
    shaped = [_add(each, penalty, weights) for each, penalty in zip(trajectories, penalties, strict=True)]
    return shaped, {
        "overlong_penalty": _mean(penalties),
        "overlong_rollouts": float(sum(penalty < 0 for penalty in penalties)),
    }


async def with_kl_penalty(
    training: Training,
    trajectories: Sequence[Trajectory],
    coefficient: float,
    models: Models,
    target_agent: str | None = None,
    weights: RewardWeights = None,
) -> tuple[list[Trajectory], dict[str, float]]:
    """The trajectories with `coefficient` times their divergence from the reference taken from their rewards, and the
    mean divergence of a rollout in nats."""
    groups = group_trajectories(trajectories)
    trees = [token_tree(group) for group in groups]
    columns = await scores(training, trees, REF_LOGPROBS, models)
    reference = with_shared(by_call(trees, columns), groups)
    divergence = [
        sum(
            sum(call.logprobs) - float(reference[call.call_id].sum(dtype="float64"))
            for call in each.transitions
            if call.call_id in reference and is_target(call.agent, target_agent)
        )
        for each in trajectories
    ]
    shaped = [_add(each, -coefficient * own, weights) for each, own in zip(trajectories, divergence, strict=True)]
    return shaped, {"reward_kl": _mean(divergence)}


def sampled_tokens(trajectory: Trajectory, target_agent: str | None = None) -> int:
    """The number of tokens that the agents to train sampled."""
    calls = trajectory.transitions
    return sum(len(call.response_token_ids) for call in calls if is_target(call.agent, target_agent))


def _add(trajectory: Trajectory, change: float, weights: RewardWeights) -> Trajectory:
    reward = team_score(trajectory, weights)
    return trajectory if reward is None or not change else replace(trajectory, reward=reward + change)


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / max(1, len(numbers))


def reward_metrics(collected: Collected, weights: RewardWeights) -> Mapping[str, float]:
    """Mean reward of a batch, without missing rewards, and counts of its calls."""
    known = [reward for trajectory in collected.trajectories if (reward := team_score(trajectory, weights)) is not None]
    calls = sum(len(trajectory.transitions) for trajectory in collected.trajectories)
    return {
        "reward": sum(known) / len(known) if known else float("nan"),
        "calls_per_rollout": calls / max(1, len(collected.trajectories)),
        "calls_overridden": sum(each.metadata.get(OVERRIDDEN_CALLS, 0) for each in collected.trajectories),
    }
