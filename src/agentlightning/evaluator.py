"""Evaluates an agent outside a training run: builds a store, a runner and, if there is a model, a server for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

from agentlightning.algorithms.training import Collected
from agentlightning.config import RunnerConfig
from agentlightning.engine.base import Engine
from agentlightning.errors import ConfigError
from agentlightning.evaluation.evaluation import Evaluation
from agentlightning.policy import open as opening
from agentlightning.policy.config import PolicyConfig
from agentlightning.policy.requirements import require_training
from agentlightning.resources import LLM, NamedResources
from agentlightning.server.serve import serve
from agentlightning.store import InMemoryLightningStore
from agentlightning.task import load_dataset
from agentlightning.training.agent_runner import credentials, load_agent, make_runner, rollout_config, run_beside
from agentlightning.training.evaluate_tasks import TEMPERATURES, evaluate_tasks
from agentlightning.training.sources.collector import EVALUATION_ADVICE, RolloutCollector
from agentlightning.training.sources.reader import TrajectoryReader
from agentlightning.util.event_loop import run_sync
from agentlightning.util.progress import Progress


def evaluate(
    agent: Any,
    dataset: str | Path | Sequence[Any],
    *,
    model: str | Path | None = None,
    reward: Any | None = None,
    mode: Literal["greedy", "sampled"] = "greedy",
    limit: int | None = None,
    reward_weights: Mapping[str, float] | None = None,
    runner: RunnerConfig | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """The reward of `agent` on the tasks of `dataset`, one rollout each; compares and prints like its score.

    With `model`, a directory that transformers loads, that model answers the agent's model calls, greedily or sampled
    at temperature 1; without one, they are not redirected. `limit`: only the first tasks. `reward_weights`: weights of
    the named dimensions of a reward. A task whose rollout fails is part of the result.

    Raises ConfigError for arguments that cannot work, RewardError if no task has a reward, and TrainingStopped if more
    rollouts fail than `runner.max_failed_share` allows.

        >>> @agl.rollout
        ... def agent(task):
        ...     return 1.0 if task["question"].endswith("?") else 0.0
        >>> agl.evaluate(agent, [{"question": "Why?"}, {"question": "So."}]).mean
        0.5
    """
    if mode not in TEMPERATURES:
        raise ConfigError(f"mode={mode!r} is not one of {', '.join(TEMPERATURES)}")
    if limit is not None and limit < 1:
        raise ConfigError(f"limit={limit} leaves no task; use at least 1, or None for all")
    if model is not None:
        opening.check_model(model)
    tasks = load_dataset(dataset)[:limit]
    settings = runner or RunnerConfig()
    work = _evaluate(agent, tasks, model, reward, mode, reward_weights, settings, progress or Progress(enabled=False))
    result = run_sync(work)
    _ = result.mean
    return result


async def _evaluate(
    agent: Any,
    tasks: Sequence[Any],
    model: str | Path | None,
    reward: Any | None,
    mode: str,
    reward_weights: Mapping[str, float] | None,
    config: RunnerConfig,
    progress: Progress,
) -> Evaluation:
    token, secret = credentials()
    if model is not None:
        require_training()
    async with AsyncExitStack() as stack:
        stack.enter_context(progress)
        store = InMemoryLightningStore()
        stack.push_async_callback(store.close)
        runner = make_runner(config, store, agent, reward, secret, redirect=model is not None)
        listener = await load_agent(runner, stack, policy=model is not None)
        engines = None if model is None else await _open_engines(str(model), stack)
        server = await stack.enter_async_context(serve(store, engines, secret=secret, token=token, listener=listener))
        resources: NamedResources = {}
        if engines is not None:
            sampling = {"temperature": TEMPERATURES[mode]}
            resources["llm"] = LLM(endpoint=server.url, model=PolicyConfig().name, sampling_parameters=sampling)
        resources_id = (await store.add_resources(resources)).resources_id
        await runner.start(server.url)
        stack.push_async_callback(runner.stop)
        progress.phase("evaluating", len(tasks))
        collector = RolloutCollector(
            TrajectoryReader(store),
            rollout_config(config),
            max_failed_share=config.max_failed_share,
            advice=EVALUATION_ADVICE,
        )
        work = evaluate_tasks(
            collector,
            tasks,
            name="evaluation",
            resources_id=resources_id,
            reward_weights=reward_weights,
            require_reward=True,
            on_progress=progress.update,
            on_collected=lambda collected: _note_first(collector, collected, progress),
        )
        return await run_beside(runner, work)


async def _note_first(collector: RolloutCollector, collected: Collected, progress: Progress) -> None:
    for reason, first in (await collector.first_of_each_reason(collected)).items():
        count, kind = collected.left_out[reason], reason.replace("_", " ")
        progress.note(f"{count} without a reward ({kind}); the first, {first.rollout_id}: {first.message}")


async def _open_engines(model: str, stack: AsyncExitStack) -> dict[str, Engine]:
    policy = await opening.open_policy(opening.policy_config(PolicyConfig(), model))
    stack.push_async_callback(policy.close)
    return {policy.model: policy}
