"""Evaluates an agent outside a training run: builds a store, a runner and, if there is a model, a server for it.

A cache keeps the rollouts in a directory, so that the same one is not run again, after a crash neither. A rollout's id
is then a digest of the task, the number of its repetition, and what produces the reward: agent, reward function, model,
mode, and the runner's settings that agents see. Code is known by the file it is in and by what it closes over; a change
in a file that it imports is not seen. A failed rollout is run again.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import pickle
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal, cast

from agentlightning.algorithms.training import Collected
from agentlightning.config import RunnerConfig
from agentlightning.credit.rejection import FAILED, describe_reasons
from agentlightning.engine.base import Engine
from agentlightning.errors import ConfigError, DatasetError, RewardError
from agentlightning.evaluation.evaluation import Evaluation, slice_members
from agentlightning.evaluation.intervals import check_bounds, check_failed_as
from agentlightning.policy import open as opening
from agentlightning.policy.config import PolicyConfig
from agentlightning.policy.open import require_training
from agentlightning.resources import LLM, NamedResources, Resource, as_resources, named_resources
from agentlightning.rollouts import PRIVATE_QUEUE
from agentlightning.server.serve import serve
from agentlightning.store import InMemoryLightningStore, LightningStore
from agentlightning.store.base import LightningStoreBase
from agentlightning.task import load_dataset, overlaps, task_key
from agentlightning.training.agent_runner import credentials, load_agent, make_runner, rollout_config, run_beside
from agentlightning.training.sources.collector import (
    EVALUATION_ADVICE,
    TEMPERATURES,
    RolloutCollector,
    TrajectoryReader,
    evaluate_tasks,
)
from agentlightning.trajectory import RewardWeights
from agentlightning.util.event_loop import run_sync
from agentlightning.util.file_lock import lock_file
from agentlightning.util.plugins import find_module
from agentlightning.util.progress import Progress


def evaluate(
    agent: Any,
    dataset: str | Path | Sequence[Any],
    *,
    model: str | Path | None = None,
    reward: Any | None = None,
    mode: Literal["greedy", "sampled"] = "greedy",
    limit: int | None = None,
    reward_weights: RewardWeights = None,
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
    if trained_on is not None and (shared := overlaps({"training": load_dataset(trained_on), "evaluation": tasks})):
        raise DatasetError(f"{shared[0]}. Evaluate on tasks that the agent has not learned from")
    fields, keys = [slices] if isinstance(slices, str) else slices, tuple(map(task_key, tasks))
    members = {field: slice_members(tasks, field) for field in fields}
    before = _previous(compare, keys)
    config = runner or RunnerConfig()
    if concurrency is not None:
        config = config.model_copy(update={"concurrency": concurrency})
    if config.max_calls is not None and model is None:
        raise ConfigError(
            f"runner.max_calls={config.max_calls} limits the answers of a model that is evaluated, and there is none:"
            " give model, or leave it out"
        )
    given = as_resources(resources or {})
    progress = progress or Progress(enabled=False)
    measuring = _evaluate(agent, tasks, model, reward, mode, reward_weights, repeats, cache, config, given, progress)
    measured = run_sync(measuring)
    result = replace(measured, failed_as=failed, bounds=bounds, tasks=keys, members=members)
    _ = result.mean
    return result if before is None else replace(result, comparison=result.compare(before))


SEEN_BY_AGENTS = {"env", "hide", "cwd", "timeout_seconds", "fresh_process", "max_calls"}
"""Settings of the runner that tell cached rollouts apart."""


def _previous(compare: Evaluation | str | Path | None, keys: Sequence[str]) -> Evaluation | None:
    """The evaluation to compare with, once it is sure that it has tasks in common: before anything is run."""
    before = Evaluation.load(compare) if isinstance(compare, str | Path) else compare
    if before is not None and before.tasks and not set(before.tasks) & set(keys):
        raise DatasetError("the evaluation to compare with has none of these tasks; measure the same tasks")
    if before is not None and not before.tasks and len(before.rewards) != len(keys):
        raise DatasetError(f"the evaluation to compare with has {len(before.rewards)} tasks, and there are {len(keys)}")
    return before


async def _evaluate(
    agent: Any,
    tasks: Sequence[Any],
    model: str | Path | None,
    reward: Any | None,
    mode: str,
    reward_weights: RewardWeights,
    repeats: int,
    cache_directory: str | Path | None,
    config: RunnerConfig,
    resources: NamedResources,
    progress: Progress,
) -> Evaluation:
    token, secret = credentials()
    if model is not None:
        require_training()
    async with AsyncExitStack() as stack:
        stack.enter_context(progress)
        store, cache, ids = InMemoryLightningStore(), None, None
        stack.push_async_callback(store.close)
        if cache_directory is not None:
            seen = config.model_dump(mode="json", include=SEEN_BY_AGENTS)
            known = named_resources.dump_python(resources, mode="json")
            cache = _open_cache(Path(cache_directory), stack, agent, reward, model, mode, seen, known)
            store, ids = cache.store, cache.rollout_ids(tasks, repeats)
        queue, redirect = cache and cache.queue, model is not None
        runner = make_runner(config, store, agent, reward, secret, redirect=redirect, queue=queue)
        listener = await load_agent(runner, stack, policy=model is not None)
        engines: dict[str, Engine] | None = None
        if model is not None:
            directory = await opening.directory_of(str(model), stack)
            policy = await opening.open_policy(opening.policy_config(PolicyConfig(), directory))
            stack.push_async_callback(policy.close)
            engines = {policy.model: policy}
        server = await stack.enter_async_context(serve(store, engines, secret=secret, token=token, listener=listener))
        if engines is not None:
            sampling = {"temperature": TEMPERATURES[mode]}
            given: Any = {"sampling_parameters": sampling, "max_calls": config.max_calls}
            llm = LLM(endpoint=server.url, model=PolicyConfig().name, **given)
            resources = {**resources, "llm": llm}
        if cache is None:
            resources_id = (await store.add_resources(resources)).resources_id
        else:
            resources_id = (await store.update_resources(f"eval-{cache.settings}", resources)).resources_id
        done = set[str]() if cache is None else await cache.begin()
        await runner.start(server.url)
        stack.push_async_callback(runner.stop)
        progress.phase("evaluating", len(tasks) * repeats)
        collector = RolloutCollector(
            TrajectoryReader(store, weights=reward_weights),
            rollout_config(config),
            queue=queue,
            max_failed_share=config.max_failed_share,
            advice=EVALUATION_ADVICE,
        )
        work = evaluate_tasks(
            collector,
            tasks,
            name="evaluation",
            resources_id=resources_id,
            repeats=repeats,
            rollout_ids=ids,
            on_progress=progress.update,
            on_collected=lambda collected: _note_first(collector, collected, progress),
        )
        result = await run_beside(runner, work)
        found = [reward for each in result.rollouts for reward in each]
        known = [rollout_id for rollout_id, reward in zip(ids or (), found, strict=False) if reward is not None]
        return replace(result, cached=len(done.intersection(known)))


async def _note_first(collector: RolloutCollector, collected: Collected, progress: Progress) -> None:
    firsts = await collector.first_of_each_reason(collected)
    for reason, first in firsts.items():
        count, kind = collected.left_out[reason], reason.replace("_", " ")
        progress.note(f"{count} without a reward ({kind}); the first, {first.rollout_id}: {first.message}")
    if not collected.trajectories and (first := firsts.get(FAILED)) is not None:
        raise RewardError(
            f"no rollout has a reward ({describe_reasons(collected.left_out)}). The first one, {first.rollout_id}: "
            f"{first.message}"
        )


# -- cache -------------------------------------------------------------------------------------------------------------

DIGITS = 32


@dataclass(frozen=True, slots=True)
class _Cache:
    """The part of a cache for one combination of agent, reward, model and settings."""

    store: LightningStoreBase
    settings: str
    """Digest of what produces rewards, beside the task."""

    @property
    def queue(self) -> str:
        """Only rollouts of these settings, so that no other agent runs what an interrupted evaluation left."""
        return f"{PRIVATE_QUEUE}eval-{self.settings}"

    def rollout_ids(self, tasks: Sequence[Any], repeats: int) -> list[str]:
        """An id for each rollout, task by task. Tasks of equal content are further repetitions."""
        seen: Counter[str] = Counter()
        ids: list[str] = []
        for key in map(task_key, tasks):
            for _ in range(repeats):
                ids.append(f"eval-{_digest([self.settings, key, seen[key]])}")
                seen[key] += 1
        return ids

    async def begin(self) -> set[str]:
        """Cancel what an interrupted evaluation left waiting, to be queued again where it is asked for. Returns the
        ids of the rollouts that have succeeded already."""
        left = await self.store.query_rollouts(
            status_in=["queuing", "requeuing", "preparing", "running"], queue_in=[self.queue]
        )
        for rollout in left:
            await self.store.cancel_rollout(rollout.rollout_id)
        done = await self.store.query_rollouts(status_in=["succeeded"], queue_in=[self.queue])
        return {rollout.rollout_id for rollout in done}


def _open_cache(
    directory: Path, stack: AsyncExitStack, agent: Any, reward: Any, model: str | Path | None, *settings: Any
) -> _Cache:
    """Open the cache in a directory; `settings`: what else tells results apart, as JSON values. Raises ConfigError
    where another process uses it, or nothing can be written."""
    files = None if model is None else _files(Path(model))
    known = _digest([_identity(agent), _identity(reward), files, *settings])
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = stack.enter_context((directory / "lock").open("w"))
    except OSError as error:
        raise ConfigError(f"cache={str(directory)!r} cannot be written: {error}") from error
    if not lock_file(lock.fileno()):
        raise ConfigError(f"another evaluation uses cache={str(directory)!r}; wait for it, or use another directory")
    store = LightningStore(directory / "store.db")
    stack.push_async_callback(store.close)
    return _Cache(store, known)


def _identity(part: Any) -> Any:
    """What tells an agent or a reward function from another, as JSON. Raises ConfigError where that cannot be told."""
    if isinstance(part, str):
        return _named(part)
    try:
        return _described(part)
    except (TypeError, AttributeError, RecursionError, pickle.PicklingError) as error:
        raise ConfigError(
            f"the cache cannot tell this {type(part).__name__} from another ({error}); give the agent and the reward as"
            " module:name, or leave out cache"
        ) from error


def _described(value: Any) -> str:
    """The digest of what `_Describer` writes."""
    written = io.BytesIO()
    _Describer(written).dump(value)
    return hashlib.sha256(written.getvalue()).hexdigest()[:DIGITS]


class _Describer(pickle.Pickler):
    """Writes an object with its state, functions with their code and what they close over, and where classes are."""

    def persistent_id(self, obj: Any) -> Any:
        """Of a set: its elements in an order that does not change with the process, as that of strings does."""
        if not isinstance(obj, set | frozenset):
            return None
        return type(obj).__qualname__, sorted(map(_described, cast("set[Any]", obj)))

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType):
            cells = [cell.cell_contents for cell in obj.__closure__ or ()]
            parts = [_source(obj), obj.__code__, cells, obj.__defaults__, obj.__kwdefaults__]
        elif isinstance(obj, CodeType):
            parts = obj.co_code, obj.co_consts, obj.co_names
        elif isinstance(obj, ModuleType):
            parts = obj.__name__
        elif inspect.isclass(obj) and obj.__module__ != "builtins":
            parts = _source(obj)
        else:
            return NotImplemented
        return object, (), parts  # Nobody reads it back: what counts are the parts.


def _named(spec: str) -> Any:
    """A name or a command, with the digests of the files in it."""
    module = spec.partition(":")[0]
    files = [Path(module), *map(Path, shlex.split(spec))]
    if (found := find_module(module)) is not None and found.origin is not None:
        files.append(Path(found.origin))
    return [spec, sorted({_file(path) for path in files if path.is_file()})]


def _source(value: Any) -> Any:
    """The name of a function or a class, and the digest of its file where it has one."""
    name = [getattr(value, "__module__", None), value.__qualname__]
    try:
        return [*name, _file(Path(inspect.getfile(value)))]
    except (TypeError, OSError):
        return name


def _file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:DIGITS]


def _files(directory: Path) -> Any:
    """The names, sizes and times of a model's files: their content may be many gigabytes."""
    found = sorted(path for path in directory.rglob("*") if path.is_file())
    stats = [(str(path.relative_to(directory)), path.stat()) for path in found]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:DIGITS]
