"""Rewards of several agents: whose reward each agent's calls are credited with.

R is the reward of the rollout, and R_a what was emitted for agent a alone (`emit_reward(..., agent=a)`):

- shared: every agent has R, or the sum of all R_a where there is no R: the reward of the team;
- own: agent a has R_a, or R where there is none for it;
- difference: agent a has R - R_a, where R_a is what the rollout would have earned without it: the difference rewards of
  Wolpert and Tumer 2001 (Optimal payoff functions for members of collectives, equation 4).

An agent is compared with the same agent of the other rollouts of the group.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

from agentlightning.assemble import scalar_reward
from agentlightning.assemble.trajectories import add_rewards
from agentlightning.errors import RewardError
from agentlightning.trajectory import Reward, RewardWeights, Trajectory

AgentRewards: TypeAlias = Literal["shared", "own", "difference"]


def check_agents(trajectory: Trajectory, mode: AgentRewards) -> None:
    """Raises RewardError for a reward of an agent that made no call, and for a missing reward that `mode` needs."""
    agents = {call.agent for call in trajectory.transitions}
    unknown = sorted(set(trajectory.agent_rewards) - agents)
    if unknown:
        raise RewardError(
            f"rollout {trajectory.rollout_id} has a reward for agent {unknown[0]!r}, which made no call; there are "
            f"{names_of(agents)}. Name the agent of the reward as agl.track_agent does"
        )
    if mode == "difference" and trajectory.agent_rewards and trajectory.reward is None:
        raise RewardError(
            f"rollout {trajectory.rollout_id} has rewards of agents and none of its own, which "
            'agent_rewards="difference" needs; emit one without agent='
        )


def names_of(agents: Iterable[str | None]) -> str:
    """The agents that calls were of, in words."""
    return ", ".join(sorted({"calls without a name" if each is None else repr(each) for each in agents})) or "no calls"


def team_reward(trajectory: Trajectory) -> Reward | None:
    """The reward of the rollout, or those of its agents added up, named dimensions by name. None where all are missing.
    Raises RewardError where plain and named rewards are mixed."""
    total = trajectory.reward
    for reward in trajectory.agent_rewards.values() if total is None else ():
        total = add_rewards(total, reward, f"rollout {trajectory.rollout_id}")
    return total


def team_score(trajectory: Trajectory, weights: RewardWeights = None) -> float | None:
    """`team_reward` as one number, its dimensions weighed; None where it is missing. Raises RewardError as both do."""
    return scalar_reward(team_reward(trajectory), weights)


def reward_of(trajectory: Trajectory, agent: str | None, mode: AgentRewards) -> Reward | None:
    """What the calls of an agent are credited with; None: nothing is known."""
    if mode == "shared":
        return team_reward(trajectory)
    own = trajectory.agent_rewards.get(agent) if agent is not None else None
    if own is None:
        return trajectory.reward
    return own if mode == "own" else _difference(trajectory, own)


def _difference(trajectory: Trajectory, without: Reward) -> Reward | None:
    reward = trajectory.reward
    if isinstance(reward, dict) and isinstance(without, dict):
        return {name: value - without.get(name, 0.0) for name, value in reward.items()}
    negated = {name: -value for name, value in without.items()} if isinstance(without, dict) else -without
    return None if reward is None else add_rewards(reward, negated, f"rollout {trajectory.rollout_id}")
