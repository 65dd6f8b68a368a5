"""Runs the rollouts of a dry run: a few tasks, each several times, as a step of training would; nothing is learned."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

from agentlightning.algorithms.base import Algorithm
from agentlightning.chat.base import ChatFormat
from agentlightning.config import TrackingConfig, TrainConfig, WarmStartConfig
from agentlightning.credit.agent_rewards import team_score
from agentlightning.credit.rejection import Rejection
from agentlightning.errors import AgentError, AgentLightningError, ConfigError
from agentlightning.models.resolve import TINY
from agentlightning.rollouts import Attempt
from agentlightning.runner import Runner
from agentlightning.task import load_dataset
from agentlightning.training.agent_runner import run_beside
from agentlightning.training.dry_run.checks import FEW_HELD_OUT, DryRun, DryRunCheck, checks_of
from agentlightning.training.dry_run.observation import DryRunRollout, observe_calls
from agentlightning.training.evaluate_tasks import without_reward
from agentlightning.training.persistence.run_dir import RunDir
from agentlightning.training.persistence.tasks import Tasks, read_tasks
from agentlightning.training.run import TrainingRun
from agentlightning.training.sources.collector import RolloutPlan, describe_failure
from agentlightning.training.starting_policy import has_random_weights
from agentlightning.training.tracking.tracking import check_installed
from agentlightning.trajectory import Trajectory

Datasets: TypeAlias = tuple[Sequence[Any] | None, Sequence[Any] | None, Sequence[Any] | None]
"""Tasks to learn from, for validation, held out; None: those of the settings."""

TASKS: Final = 4
REPEATS: Final = 2
"""Rollouts of each task: whether rewards differ shows in several."""


def settings_of(config: TrainConfig, resumed: Path | None = None) -> TrainConfig:
    """Those of a dry run: no warm start, no second attempts, and failures are counted only; the starting weights of a
    run that is `resumed`. Raises ConfigError where runners elsewhere have the agent, or a tracker is not installed."""
    if not config.runner.hosts:
        raise ConfigError("a dry run runs the agent here, and runner.hosts=0 leaves it to runners elsewhere")
    runner = config.runner.model_copy(update={"max_attempts": 1, "max_failed_share": 1.0})
    check_installed(config.tracking)
    tracking = TrackingConfig(transcripts=0)
    changes: dict[str, Any] = {"warm_start": WarmStartConfig(), "runner": runner, "tracking": tracking}
    changes["run"] = config.run.model_copy(update={"gateways": ()})  # Its store is its own.
    if resumed is not None and (resumed / "start").exists():
        changes["policy"] = config.policy.model_copy(update={"model": str(resumed / "start")})
    return config.model_copy(update=changes)


def tasks_of_run(run_dir: Path) -> Datasets:
    """Those that a run was started with."""
    opened = RunDir.open(run_dir)
    try:
        found = read_tasks(opened)
    finally:
        opened.close()
    return found.train, found.validation, found.held_out


@contextmanager
def directory() -> Generator[Path]:
    """Where the run of a dry run is, until it ends."""
    with tempfile.TemporaryDirectory(prefix="agl-dry-run-") as folder:
        yield Path(folder) / "run"


async def dry_run(
    config: TrainConfig,
    algorithm: Algorithm[Any],
    tasks: Tasks,
    wired: Callable[[], AbstractAsyncContextManager[tuple[Runner | None, TrainingRun]]],
) -> DryRun:
    """Check tasks, agent, reward and model, then a few rollouts. `config`: the settings of the run that is to follow.
    Raises ConfigError for settings that cannot work."""
    started, checks = time.monotonic(), [check_tasks(config, tasks)]
    try:
        async with wired() as (runner, run):
            checks += [check_imports(config), *([check_model(config)] if algorithm.learns_weights else [])]
            checks += check_tool_format(run.chat) if algorithm.learns_weights else []
            rollouts = await run_beside(runner, rehearse(run, algorithm))
    except ConfigError:
        raise
    except AgentLightningError as error:
        name = "agent" if isinstance(error, AgentError) else "model"
        checks.append(DryRunCheck(name, "failed", f"{type(error).__name__}: {error}"))
        return DryRun(tuple(checks), seconds=time.monotonic() - started)
    random = config.policy.model == TINY
    checks += checks_of(rollouts, trains=algorithm.learns_weights, random_weights=random)
    return DryRun(tuple(checks), rollouts, time.monotonic() - started)


def check_imports(config: TrainConfig) -> DryRunCheck:
    """Those that succeeded."""
    reward = "the number that it returns" if config.reward is None else config.reward
    return DryRunCheck("agent", "ok", f"{config.agent or 'the given object'} is loaded; its reward: {reward}")


def check_tool_format(chat: ChatFormat) -> list[DryRunCheck]:
    """Where tools stand, if it is not where the chat template has them."""
    if not chat.tools_in_messages:
        return []
    text = (
        "the chat template has no place for tools: those that the agent offers stand in its messages, in Hermes' format"
    )
    return [DryRunCheck("tool format", "ok", text)]


def check_model(config: TrainConfig) -> DryRunCheck:
    """What answered."""
    if config.policy.model != TINY:
        return DryRunCheck("model", "ok", f"{config.policy.model} answers")
    text = "tiny, with random weights"
    if has_random_weights(config):
        advice = "it learns next to nothing from rewards alone: give a model, or demonstrations (warm_start.dataset)"
        return DryRunCheck("model", "warning", text, advice)
    return DryRunCheck("model", "ok", f"{text}; the demonstrations are learned when training begins")


def check_tasks(config: TrainConfig, tasks: Tasks) -> DryRunCheck:
    """The numbers of tasks. Raises DatasetError where demonstrations cannot be read."""
    counts = f"{len(tasks.train)} to learn from, {len(tasks.validation)} for validation, {len(tasks.held_out)} held out"
    if config.warm_start.dataset is not None:
        counts += f"; {len(load_dataset(config.warm_start.dataset))} demonstrations"
    if shared := tasks.shared():
        return DryRunCheck("tasks", "warning", f"{counts}; {shared[0]}", "give each task to one part")
    if len(tasks.held_out) < FEW_HELD_OUT:
        advice = f"with {FEW_HELD_OUT} or more held-out tasks the interval of the gain is narrow enough to show one"
        return DryRunCheck("tasks", "warning", counts, advice)
    return DryRunCheck("tasks", "ok", counts)


async def rehearse(run: TrainingRun, algorithm: Algorithm[Any]) -> tuple[DryRunRollout, ...]:
    """Run the rollouts. None of them stops it."""
    collector, label = run.account.collector, f"{run.state.run_id}-dry-run"
    temperature = float(getattr(algorithm.config, "temperature", 1.0)) if hasattr(algorithm, "config") else 1.0
    resources_id = await run.checkpoints.publisher.write(label, {"temperature": temperature})
    chosen = enumerate(run.train_tasks[:TASKS])
    plans = [RolloutPlan(f"{label}-{i}-{j}", task, f"{label}-{i}") for i, task in chosen for j in range(REPEATS)]
    run.account.progress.phase("rollouts", len(plans))
    collected = await collector.collect(
        plans,
        resources_id=resources_id,
        check=lambda trajectories: without_reward(trajectories, algorithm.reward_weights),
        max_failed_share=1.0,
        max_rejected_share=1.0,
        on_progress=run.account.progress.update,
    )
    ids = [plan.rollout_id for plan in plans]
    attempts = {each.rollout_id: each for each in await collector.store.get_latest_attempts(ids)}
    spans = {rollout_id: found async for rollout_id, found in collector.store.iter_spans(ids)}
    rejected = {each.rollout_id: each for each in collected.rejected}
    scored = {each.rollout_id: each for each in collected.trajectories}
    model = collector.reader.model
    return tuple(
        DryRunRollout(
            plan.rollout_id,
            plan.task,
            **_attempt_fields(attempts.get(plan.rollout_id)),
            **_reward_fields(plan.rollout_id, scored, rejected, algorithm.reward_weights),
            **observe_calls(spans.get(plan.rollout_id, []), model),
        )
        for plan in plans
    )


def _attempt_fields(attempt: Attempt | None) -> dict[str, Any]:
    if attempt is None:
        return {"status": "failed", "seconds": 0.0, "failure": describe_failure(None)}
    ended = attempt.end_time if attempt.end_time is not None else attempt.start_time
    return {
        "status": attempt.status,
        "seconds": ended - attempt.start_time,
        "output": attempt.metadata.get("output"),
        "failure": None if attempt.status == "succeeded" else describe_failure(attempt),
    }


def _reward_fields(
    rollout_id: str,
    scored: Mapping[str, Trajectory],
    rejected: Mapping[str, Rejection],
    weights: Mapping[str, float] | None,
) -> dict[str, Any]:
    if rollout_id in scored:
        return {"reward": team_score(scored[rollout_id], weights)}
    if rollout_id in rejected:
        return {"rejection": rejected[rollout_id].message, "reason": rejected[rollout_id].reason}
    return {}
