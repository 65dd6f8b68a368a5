"""Evaluates an agent outside a training run: builds a store, a runner and, if there is a model, a server for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from agentlightning.algorithms.training import Collected
from agentlightning.config import RunnerConfig
from agentlightning.engine.base import Engine
from agentlightning.errors import ConfigError, DatasetError
from agentlightning.evaluation.comparison import check_failed_as
from agentlightning.evaluation.evaluation import Evaluation, slice_members
from agentlightning.evaluation.intervals import check_bounds
from agentlightning.policy import open as opening
from agentlightning.policy.config import PolicyConfig
from agentlightning.policy.open import require_training
from agentlightning.resources import LLM, NamedResources, Resource, as_resources, named_resources
from agentlightning.server.serve import serve
from agentlightning.store import InMemoryLightningStore
from agentlightning.task import load_dataset, overlaps, task_key
from agentlightning.training.agent_runner import credentials, load_agent, make_runner, rollout_config, run_beside
from agentlightning.training.evaluation_cache import open_cache
from agentlightning.training.measurements import TEMPERATURES, evaluate_tasks
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
    repeats: int = 1,
    failed: Literal["lowest", "exclude"] | float = "lowest",
    bounds: tuple[float, float] | None = None,
    slices: str | Sequence[str] = (),
    compare: Evaluation | str | Path | None = None,
    cache: str | Path | None = None,
    concurrency: int | None = None,
    trained_on: str | Path | Sequence[Any] | None = None,
    runner: RunnerConfig | None = None,
    resources: Mapping[str, Resource | str] | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """The reward of `agent` on the tasks of `dataset`; compares and prints like its score.

    With `model`, named as `PolicyConfig.model` (`tiny` is a new one with random weights), that model answers the
    agent's model calls, greedily or sampled at temperature 1; without one, they are not redirected. `resources`: what
    the agent is given, by name: prompt templates, also as texts. `limit`: only the first tasks. `reward_weights`:
    weights of the named dimensions of a reward. `repeats`: rollouts of each task. A rollout that fails is part of the
    result; `failed` says how it counts in the score: as the lowest reward, as a given one, or not at all ("exclude").
    `bounds`: the lowest and highest reward possible, where they are not 0 and 1: the intervals are for rewards between
    them.

    `slices`: fields of tasks, by whose values the result is divided (`Evaluation.slices`). `compare`: an earlier
    evaluation of these tasks, or its file; the result has a `comparison`. `cache`: a directory in which rollouts are
    kept, so that the same is not run again; an interrupted evaluation continues there. `concurrency`: rollouts at the
    same time, in place of `runner.concurrency`. `trained_on`: tasks that the agent has learned from, which must not be
    among those it is evaluated on.

    Raises ConfigError for arguments that cannot work, DatasetError for tasks that the agent was trained on or that
    `compare` has none of, RewardError if no task has a reward, and TrainingStopped if more rollouts fail than
    `runner.max_failed_share` allows.

        >>> @agl.rollout
        ... def agent(task):
        ...     return 1.0 if task["question"].endswith("?") else 0.0
        >>> agl.evaluate(agent, [{"question": "Why?"}, {"question": "So."}]).mean
        0.5
    """
    if mode not in TEMPERATURES:
        raise ConfigError(f"mode={mode!r} is not one of {', '.join(TEMPERATURES)}")
    for name, value in (("repeats", repeats), ("concurrency", 1 if concurrency is None else concurrency)):
        if value < 1:
            raise ConfigError(f"{name}={value} runs nothing; use at least 1")
    if limit is not None and limit < 1:
        raise ConfigError(f"limit={limit} leaves no task; use at least 1, or None for all")
    check_failed_as(failed)
    check_bounds(bounds)
    if model is not None:
        opening.check_model(model)
    tasks = load_dataset(dataset)[:limit]
    _check_unseen(tasks, trained_on)
    members, keys = slice_members(tasks, [slices] if isinstance(slices, str) else slices), tuple(map(task_key, tasks))
    before = _previous(compare, keys)
    config = runner or RunnerConfig()
    if concurrency is not None:
        config = config.model_copy(update={"concurrency": concurrency})
    if config.max_calls is not None and model is None:
        raise ConfigError(
            f"runner.max_calls={config.max_calls} limits the answers of a model that is evaluated, and there is none:"
            " give model, or leave it out"
        )
    job = _Job(agent, tasks, model, reward, mode, reward_weights, repeats, cache, config, as_resources(resources or {}))
    measured = run_sync(_evaluate(job, progress or Progress(enabled=False)))
    result = replace(measured, failed_as=failed, bounds=bounds, tasks=keys, members=members)
    _ = result.mean
    return result if before is None else replace(result, comparison=result.compare(before))


SEEN_BY_AGENTS = {"env", "hide", "cwd", "timeout_seconds", "fresh_process", "max_calls"}
"""Settings of the runner that tell cached rollouts apart."""


@dataclass(frozen=True, slots=True)
class _Job:
    agent: Any
    tasks: Sequence[Any]
    model: str | Path | None
    reward: Any | None
    mode: str
    reward_weights: Mapping[str, float] | None
    repeats: int
    cache: str | Path | None
    config: RunnerConfig
    resources: NamedResources


def _check_unseen(tasks: Sequence[Any], trained_on: str | Path | Sequence[Any] | None) -> None:
    if trained_on is None:
        return
    shared = overlaps({"training": load_dataset(trained_on), "evaluation": tasks})
    if shared:
        raise DatasetError(f"{shared[0]}. Evaluate on tasks that the agent has not learned from")


def _previous(compare: Evaluation | str | Path | None, keys: Sequence[str]) -> Evaluation | None:
    """The evaluation to compare with, once it is sure that it has tasks in common: before anything is run."""
    before = Evaluation.load(compare) if isinstance(compare, str | Path) else compare
    if before is not None and before.tasks and not set(before.tasks) & set(keys):
        raise DatasetError("the evaluation to compare with has none of these tasks; measure the same tasks")
    if before is not None and not before.tasks and len(before.rewards) != len(keys):
        raise DatasetError(f"the evaluation to compare with has {len(before.rewards)} tasks, and there are {len(keys)}")
    return before


async def _evaluate(job: _Job, progress: Progress) -> Evaluation:
    config, model = job.config, job.model
    token, secret = credentials()
    if model is not None:
        require_training()
    async with AsyncExitStack() as stack:
        stack.enter_context(progress)
        store, cache, ids = InMemoryLightningStore(), None, None
        stack.push_async_callback(store.close)
        if job.cache is not None:
            seen = config.model_dump(mode="json", include=SEEN_BY_AGENTS)
            known = named_resources.dump_python(job.resources, mode="json")
            cache = open_cache(Path(job.cache), stack, job.agent, job.reward, model, job.mode, seen, known)
            store, ids = cache.store, cache.rollout_ids(job.tasks, job.repeats)
        queue, redirect = None if cache is None else cache.queue, model is not None
        runner = make_runner(config, store, job.agent, job.reward, secret, redirect=redirect, queue=queue)
        listener = await load_agent(runner, stack, policy=model is not None)
        engines = None if model is None else await _open_engines(str(model), stack)
        server = await stack.enter_async_context(serve(store, engines, secret=secret, token=token, listener=listener))
        resources = dict(job.resources)
        if engines is not None:
            sampling = {"temperature": TEMPERATURES[job.mode]}
            given: Any = {"sampling_parameters": sampling, "max_calls": config.max_calls}
            resources["llm"] = LLM(endpoint=server.url, model=PolicyConfig().name, **given)
        if cache is None:
            resources_id = (await store.add_resources(resources)).resources_id
        else:
            resources_id = (await store.update_resources(cache.resources_id, resources)).resources_id
        done = set[str]() if cache is None else await cache.begin()
        await runner.start(server.url)
        stack.push_async_callback(runner.stop)
        progress.phase("evaluating", len(job.tasks) * job.repeats)
        collector = RolloutCollector(
            TrajectoryReader(store),
            rollout_config(config),
            queue=queue,
            max_failed_share=config.max_failed_share,
            advice=EVALUATION_ADVICE,
        )
        work = evaluate_tasks(
            collector,
            job.tasks,
            name="evaluation",
            resources_id=resources_id,
            repeats=job.repeats,
            rollout_ids=ids,
            reward_weights=job.reward_weights,
            require_reward=True,
            on_progress=progress.update,
            on_collected=lambda collected: _note_first(collector, collected, progress),
        )
        result = await run_beside(runner, work)
        found = [reward for each in result.rollouts for reward in each]
        known = [rollout_id for rollout_id, reward in zip(ids or (), found, strict=False) if reward is not None]
        return replace(result, cached=len(done.intersection(known)))


async def _note_first(collector: RolloutCollector, collected: Collected, progress: Progress) -> None:
    for reason, first in (await collector.first_of_each_reason(collected)).items():
        count, kind = collected.left_out[reason], reason.replace("_", " ")
        progress.note(f"{count} without a reward ({kind}); the first, {first.rollout_id}: {first.message}")


async def _open_engines(model: str, stack: AsyncExitStack) -> dict[str, Engine]:
    directory = await opening.directory_of(model, stack)
    policy = await opening.open_policy(opening.policy_config(PolicyConfig(), directory))
    stack.push_async_callback(policy.close)
    return {policy.model: policy}
