"""Rewards that come from a function of each group, such as a judge that ranks its rollouts.

The function gets the rollouts of a group (`JudgedRollout`) and returns one reward for each, None for none. It may be
async. A group that it raises for has no rewards: its rollouts are rejected, counted and named like any others without.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from agentlightning.algorithms.training import Collected, RolloutRequest
from agentlightning.credit import group_trajectories
from agentlightning.credit.rejection import MISSING_REWARD, Rejection, rejection
from agentlightning.errors import MissingRewardError, RewardError
from agentlightning.rewards.judges import JudgedRollout
from agentlightning.runner.agents.reward import check_reward
from agentlightning.store.base import LightningStoreBase
from agentlightning.training.sources.collector import checked, read_recordings, transcript_of
from agentlightning.trajectory import Reward, Trajectory

CONCURRENCY: Final = 4
"""Groups that are judged at the same time."""
GroupReward = Callable[[Sequence[JudgedRollout]], Any]


async def judged(
    collect: Callable[[RolloutRequest], Awaitable[Collected]],
    request: RolloutRequest,
    function: GroupReward,
    store: LightningStoreBase,
) -> Collected:
    """What is requested, with the rewards that a function of each group gives."""
    collected = await collect(replace(request, check=None))
    limit = asyncio.Semaphore(CONCURRENCY)

    async def judge(group: Sequence[Trajectory]) -> tuple[list[Trajectory], list[Rejection]]:
        async with limit:
            return await _judge(group, function, store)

    groups = await asyncio.gather(*map(judge, group_trajectories(collected.trajectories)))
    rejected = [each for _, own in groups for each in own]
    usable, unusable = await checked([each for kept, _ in groups for each in kept], request.check)
    return replace(
        collected,
        trajectories=usable,
        rejected=(*collected.rejected, *rejected, *unusable),
        metrics={**collected.metrics, "group_rewards_missing": float(len(rejected))},
    )


async def _judge(
    group: Sequence[Trajectory], function: GroupReward, store: LightningStoreBase
) -> tuple[list[Trajectory], list[Rejection]]:
    try:
        rewards = await _rewards(group, function, store)
    except Exception as error:  # noqa: BLE001  The boundary of the user's function, which may raise anything.
        reason = str(error) if isinstance(error, MissingRewardError) else f"{type(error).__name__}: {error}"
        message = f"the group reward gave its group none: {reason}"
        return [], [Rejection(each.rollout_id, MISSING_REWARD, message) for each in group]
    kept: list[Trajectory] = []
    rejected: list[Rejection] = []
    for each, reward in zip(group, rewards, strict=True):
        try:
            if reward is None:
                raise MissingRewardError(f"the group reward gave rollout {each.rollout_id} none")
            kept.append(replace(each, reward=check_reward(reward, "the group reward"), agent_rewards={}))
        except RewardError as error:
            rejected.append(rejection(each.rollout_id, error))
    return kept, rejected


async def _rewards(
    group: Sequence[Trajectory], function: GroupReward, store: LightningStoreBase
) -> Sequence[Reward | None]:
    recorded = await read_recordings(store, [each.rollout_id for each in group])
    rollouts = [
        JudgedRollout(each.rollout_id, each.task, found.output, transcript_of(found.spans))
        for each, found in zip(group, recorded.values(), strict=True)
    ]
    found = await asyncio.to_thread(function, rollouts)
    rewards = list(await found if inspect.isawaitable(found) else found)
    if len(rewards) != len(group):
        raise RewardError(f"the group reward gave {len(rewards)} rewards for {len(group)} rollouts; give one for each")
    return rewards
