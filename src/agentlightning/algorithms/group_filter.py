"""Keeps the groups of a batch whose rewards differ most: those that teach, at the price of fewer rollouts in an update.

The uncertainty filter of StarPO-S (Wang et al. 2025, RAGEN, arXiv:2504.20073, section 4.2): groups are ordered by the
standard deviation of their rewards, and the first share of them is learned from.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from agentlightning.credit import group_trajectories
from agentlightning.credit.agent_rewards import team_score
from agentlightning.trajectory import Trajectory


def most_uncertain(
    groups: Sequence[list[Trajectory]], share: float, reward_weights: Mapping[str, float] | None = None
) -> list[list[Trajectory]]:
    """That share of the groups, rounded up, in their order. Of equal ones the earlier are kept."""
    count = math.ceil(share * len(groups))
    if count >= len(groups):
        return list(groups)
    spreads = [_spread(group, reward_weights) for group in groups]
    kept = sorted(sorted(range(len(groups)), key=lambda index: -spreads[index])[:count])
    return [groups[index] for index in kept]


def _spread(group: Sequence[Trajectory], weights: Mapping[str, float] | None) -> float:
    """The standard deviation of the rewards; -1 where none is known."""
    rewards = [reward for each in group if (reward := team_score(each, weights)) is not None]
    return statistics.pstdev(rewards) if rewards else -1.0


def groups_with_spread(trajectories: Sequence[Trajectory], weights: Mapping[str, float] | None) -> int:
    """The number of groups in which rewards differ."""
    rewards = [{team_score(each, weights) for each in group} for group in group_trajectories(trajectories)]
    return sum(len(each - {None}) > 1 for each in rewards)
