"""Trials: single rollouts with resources that are being tried, reported with what the agent said and did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from agentlightning.algorithms.training import Collected, RolloutReport
from agentlightning.credit.agent_rewards import team_reward, team_score
from agentlightning.training.measurements import without_reward
from agentlightning.training.sources.collector import RolloutCollector, RolloutPlan, describe_failure


async def run_trials(
    collector: RolloutCollector,
    label: str,
    tasks: Mapping[str, Any],
    resources_id: str,
    reward_weights: Mapping[str, float] | None,
    metadata: Mapping[str, Any] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> tuple[Collected, list[RolloutReport]]:
    """One rollout of each task; ids begin with `label` and the key of the task. However many fail, the rest counts."""
    plans = [RolloutPlan(f"{label}-{name}", task, name, metadata or {}) for name, task in tasks.items()]
    collected = await collector.collect(
        plans,
        resources_id=resources_id,
        check=lambda trajectories: without_reward(trajectories, reward_weights),
        max_failed_share=1.0,
        on_progress=on_progress,
    )
    scored = {each.rollout_id: each for each in collected.trajectories}
    unusable = {each.rollout_id: each.message for each in collected.rejected}
    ids = [*scored, *unusable, *(each.rollout_id for each in collected.failed)]
    attempts = {each.rollout_id: each for each in await collector.store.get_latest_attempts(ids)}
    spans = {rollout_id: found async for rollout_id, found in collector.store.iter_spans(ids)}
    reports: dict[str, RolloutReport] = {}
    for rollout_id in ids:
        name = rollout_id.removeprefix(f"{label}-").partition("-again")[0]
        attempt, trajectory = attempts.get(rollout_id), scored.get(rollout_id)
        report = RolloutReport(
            rollout_id,
            output=None if attempt is None else attempt.metadata.get("output"),
            spans=tuple(spans.get(rollout_id, ())),
        )
        if trajectory is None:
            reports[name] = replace(report, failure=unusable.get(rollout_id) or describe_failure(attempt))
        else:
            score, reward = team_score(trajectory, reward_weights), team_reward(trajectory)
            reports[name] = replace(report, score=score, reward=reward)
    return collected, [reports[name] for name in tasks]
