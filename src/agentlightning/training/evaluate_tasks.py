"""Evaluates an agent on tasks: one rollout or several for each, collected through the store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentlightning.algorithms.training import Collected
from agentlightning.credit import rejection as rejections
from agentlightning.credit.agent_rewards import team_score
from agentlightning.credit.rejection import Rejection, describe_reasons, rejection
from agentlightning.errors import RewardError
from agentlightning.evaluation.evaluation import WITHOUT_REWARD, Evaluation
from agentlightning.training.sources.collector import RolloutCollector, RolloutPlan
from agentlightning.trajectory import Trajectory

TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}
"""Sampling temperature of each evaluation mode."""


async def evaluate_tasks(
    collector: RolloutCollector,
    tasks: Sequence[Any],
    *,
    name: str,
    resources_id: str,
    repeats: int = 1,
    rollout_ids: Sequence[str] | None = None,
    reward_weights: Mapping[str, float] | None = None,
    max_failed_share: float | None = None,
    require_reward: bool = False,
    on_progress: Callable[[int], None] | None = None,
    on_collected: Callable[[Collected], Awaitable[None]] | None = None,
) -> Evaluation:
    """The rewards of each task's rollouts, `repeats` of them. Rollout ids begin with `name`, unless they are given,
    task by task: a repeated call continues an interrupted evaluation.

    Raises TrainingStopped as `RolloutCollector.collect` does where too many rollouts fail, and with `require_reward`
    RewardError where rollouts succeed and none has a usable reward.
    """
    plans = _plans(tasks, name, repeats)
    if rollout_ids is not None:
        plans = [replace(plan, rollout_id=each) for plan, each in zip(plans, rollout_ids, strict=True)]
    collected = await collector.collect(
        plans,
        resources_id=resources_id,
        mode="val",
        check=lambda trajectories: without_reward(trajectories, reward_weights),
        max_failed_share=max_failed_share,
        max_rejected_share=1.0,
        on_progress=on_progress,
    )
    if require_reward and collected.rejected and not collected.trajectories:
        first = collected.rejected[0]
        raise RewardError(
            f"none of {len(tasks)} tasks has a reward ({describe_reasons(collected.left_out)}). The first rollout,"
            f" {first.rollout_id}: {first.message}"
        )
    if on_collected is not None:
        await on_collected(collected)
    rewards = {each.group: team_score(each, reward_weights) for each in collected.trajectories}
    found = [rewards.get(plan.group) for plan in plans]
    return Evaluation.of_rollouts(
        [found[start : start + repeats] for start in range(0, len(found), repeats)],
        seconds=collected.seconds,
        reasons=collected.left_out,
    )


def _plans(tasks: Sequence[Any], name: str, repeats: int) -> list[RolloutPlan]:
    if repeats == 1:
        return [RolloutPlan(f"{name}-{index:05d}", task, f"{name}-{index}") for index, task in enumerate(tasks)]
    return [
        RolloutPlan(f"{name}-{index:05d}-{repeat}", task, f"{name}-{index}-{repeat}")
        for index, task in enumerate(tasks)
        for repeat in range(repeats)
    ]


def without_reward(trajectories: Sequence[Trajectory], weights: Mapping[str, float] | None) -> list[Rejection]:
    """The rollouts without a reward that is, or can be made, one number."""
    found: list[Rejection] = []
    for each in trajectories:
        try:
            reward = team_score(each, weights)
        except RewardError as error:
            found.append(rejection(each.rollout_id, error))
        else:
            if reward is None:
                found.append(rejections.without_reward(each, f"it has no reward: {WITHOUT_REWARD}"))
    return found
