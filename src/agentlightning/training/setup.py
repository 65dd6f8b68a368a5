"""What a run needs before its first rollout: its tasks, split, and its starting policy."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from agentlightning.algorithms.base import Algorithm
from agentlightning.config import TrainConfig
from agentlightning.engine.base import Engine
from agentlightning.engine.servers.config import ServedModel
from agentlightning.errors import ConfigError, DatasetError, PolicyError, ResumeError
from agentlightning.gateway.local.update_gate import CANNOT_GO_ON
from agentlightning.policy.base import Policy
from agentlightning.policy.optimizer_config import Objective, OptimizerConfig
from agentlightning.policy.requirements import require_training
from agentlightning.store.base import LightningStoreBase
from agentlightning.task import load_dataset, split
from agentlightning.training.run import Tasks, newest_version
from agentlightning.training.run_dir import RunDir, RunState, write_atomically
from agentlightning.util.progress import Progress
from agentlightning.util.settings import settings_from

if TYPE_CHECKING:
    from agentlightning.policy.local import LocalPolicyConfig

PARTS = ("train", "validation", "held_out")
TINY = "tiny"
"""The model name that makes a small policy on the spot."""


def check_model(model: object) -> None:
    """Raises ConfigError for anything but the name of a model."""
    if not isinstance(model, str | Path):
        raise ConfigError(
            f"model is a {type(model).__name__} object, and it is opened here by its name; give the directory of one"
            " that transformers loads (save_pretrained writes it), or its hub name"
        )


# -- settings --------------------------------------------------------------------------------------------------------


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """The same configuration, so that a run can be resumed from any directory. Raises ConfigError where its model
    servers cannot be had."""
    model, demonstrations = config.policy.model, config.warm_start.dataset
    changes: dict[str, Any] = {
        "runner": config.runner.model_copy(update={"cwd": str(Path(config.runner.cwd or ".").resolve())})
    }
    policy: dict[str, Any] = {"servers": config.policy.servers.with_absolute_paths()}
    if config.policy.engine != "local":
        policy["servers"].check(config.policy.engine)
    if Path(model).exists():
        policy["model"] = str(Path(model).resolve())
    changes["policy"] = config.policy.model_copy(update=policy)
    if demonstrations is not None:
        path = str(Path(demonstrations).resolve())
        changes["warm_start"] = config.warm_start.model_copy(update={"dataset": path})
    return config.model_copy(update=changes)


# -- tasks -----------------------------------------------------------------------------------------------------------


def load_tasks(
    config: TrainConfig,
    train: Sequence[Any] | None,
    validation: Sequence[Any] | None,
    held_out: Sequence[Any] | None,
) -> Tasks:
    """The tasks given, or those the configuration names; parts not given are set aside from the training tasks."""
    data = config.data
    given = train if train is not None else data.train
    if given is None:
        raise ConfigError("no tasks: pass train_dataset to fit(), or set data.train (--dataset FILE)")
    tasks = Tasks(load_dataset(given))
    for part, value in (("validation", validation or data.validation), ("held_out", held_out or data.held_out)):
        if value is not None:
            setattr(tasks, part, load_dataset(value))
    return _set_aside(tasks, config)


def _set_aside(tasks: Tasks, config: TrainConfig) -> Tasks:
    shares = {
        "validation": 0.0 if tasks.validation else config.data.validation_share,
        "held_out": 0.0 if tasks.held_out else config.data.held_out_share,
    }
    if any(shares.values()):
        rest = 1.0 - sum(shares.values())
        parts = split(tasks.train, [rest, *shares.values()], config.run.seed)
        tasks.train = parts[0]
        tasks.validation = tasks.validation or parts[1]
        tasks.held_out = tasks.held_out or parts[2]
    for part in ("train", "held_out"):
        if not getattr(tasks, part):
            raise DatasetError(
                f"no {part} task is left after splitting; give more tasks, a file of its own (data.{part}),"
                " or smaller data.validation_share and data.held_out_share"
            )
    return tasks


def keep_tasks(run_dir: RunDir, tasks: Tasks) -> None:
    run_dir.data("train").parent.mkdir(exist_ok=True)
    for part in PARTS:
        lines = b"".join(orjson.dumps(task) + b"\n" for task in getattr(tasks, part))
        write_atomically(run_dir.data(part), lines)


def read_tasks(run_dir: RunDir) -> Tasks:
    """Those a run was started with. Raises ResumeError where they cannot be read."""
    try:
        parts = {part: [orjson.loads(line) for line in run_dir.data(part).read_bytes().splitlines()] for part in PARTS}
    except (OSError, ValueError) as error:
        raise ResumeError(f"the tasks of {run_dir.path} cannot be read: {error}; start a new run") from error
    return Tasks(**parts)


# -- the starting policy ---------------------------------------------------------------------------------------------


def start_path(config: TrainConfig, run_dir: RunDir) -> str:
    """Where the starting policy is: in the run directory, if the run had to make one."""
    return str(run_dir.start) if _is_made(config) else config.policy.model


def _is_made(config: TrainConfig) -> bool:
    return config.policy.model == TINY or config.warm_start.dataset is not None


async def make_start(config: TrainConfig, run_dir: RunDir, tasks: Tasks, progress: Progress) -> None:
    """Make the starting policy, unless it is there: a tiny one, or the model named after its warm start."""
    if run_dir.start.exists() or not _is_made(config):
        return
    conversations = load_dataset(config.warm_start.dataset) if config.warm_start.dataset else []
    model = config.policy.model
    if model == TINY:
        progress.phase("making a tiny policy", 1)
        model = str(await _make_tiny(config, run_dir, [*tasks.train, *conversations]))
    warm_start = config.warm_start
    steps = warm_start.steps or math.ceil(len(conversations) / warm_start.batch_size)
    policy = await open_policy(policy_config(config, model, warm_start.optimizer, max(1, steps), "supervised"))
    try:
        if conversations:
            await _warm_up(policy, config, conversations, steps, progress)
        await policy.save(run_dir.start)
    finally:
        await policy.close()


async def _warm_up(
    policy: Policy, config: TrainConfig, conversations: Sequence[Any], steps: int, progress: Progress
) -> None:
    from agentlightning.algorithms.sft import SFTAlgorithm

    def show(step: int, figures: Mapping[str, float]) -> None:
        progress.update(step, loss=figures["loss"])

    progress.phase("warm start", steps)
    settings = config.warm_start
    await SFTAlgorithm(
        model=policy,
        dataset=conversations,
        steps=steps,
        batch_size=settings.batch_size,
        shuffle=settings.shuffle,
        seed=config.run.seed,
        token_budget=config.policy.token_budget,
        on_step=show,
    ).run()


async def _make_tiny(config: TrainConfig, run_dir: RunDir, records: Iterable[Any]) -> Path:
    from agentlightning.models.tiny import make_tiny

    directory = run_dir.path / TINY
    return await asyncio.to_thread(make_tiny, directory, records, seed=config.run.seed)


def policy_config(
    config: TrainConfig,
    path: str,
    optimizer: OptimizerConfig,
    steps: int,
    objective: Objective = "reinforcement",
) -> LocalPolicyConfig:
    """The settings of a local policy that takes `steps` optimiser steps. Raises MissingExtraError, and ConfigError
    for a warmup that is longer."""
    require_training()
    from agentlightning.policy.local import LocalPolicyConfig

    settings = config.policy
    return LocalPolicyConfig(
        model=path,
        name=settings.name,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        max_batch_size=settings.max_batch_size,
        max_context=settings.max_context,
        tool_calls=settings.tool_calls,
        seed=config.run.seed,
        optimizer=settings_from(OptimizerConfig, {"total_steps": steps}, base=optimizer),
        objective=objective,
    )


async def open_policy(config: LocalPolicyConfig) -> Policy:
    """Raises PolicyError for a model that cannot be loaded."""
    from safetensors import SafetensorError

    from agentlightning.policy.local import LocalPolicy

    try:
        return await asyncio.to_thread(LocalPolicy.open, config)
    except SafetensorError as error:
        raise PolicyError(
            f"the weights in {config.model} cannot be read: {error}; a file is cut short or damaged: fetch it again"
        ) from error


async def open_learner(
    config: TrainConfig, algorithm: Algorithm[Any], run_dir: RunDir, state: RunState, store: LightningStoreBase
) -> Policy:
    """The policy of a run as it goes on: with the starting weights where these are still to be measured, else with
    those of its last checkpoint. Raises ConfigError, PolicyError, and ResumeError for a checkpoint that does not
    fit."""
    optimizer = algorithm.optimizer or config.algorithm.optimizer
    path = start_path(config, run_dir)
    policy = await open_policy(policy_config(config, path, optimizer, algorithm.optimizer_steps, algorithm.objective))
    if config.policy.in_flight and not policy.can_update_in_flight:
        await policy.close()
        raise ConfigError(f"policy.in_flight = true: {CANNOT_GO_ON}")
    if not measures_start(config, state):
        try:
            await load_checkpoint(policy, run_dir, state, store)
        except ResumeError:
            await policy.close()
            raise
    return policy


def measures_start(config: TrainConfig, state: RunState) -> bool:
    """Whether the starting policy is still to be measured."""
    return any(f"before-{mode}" not in state.evaluations for mode in config.evaluation.modes)


async def load_checkpoint(policy: Policy, run_dir: RunDir, state: RunState, store: LightningStoreBase) -> None:
    """Go on from the run's last checkpoint, if there is one."""
    if state.checkpoint is None:
        return
    directory = run_dir.path / state.checkpoint
    try:
        await policy.load(directory, above=await newest_version(store, state))
    except PolicyError as error:
        raise ResumeError(f"{run_dir.path} cannot go on from {directory}: {error}") from error


async def with_servers(policy: Policy, config: TrainConfig, run_dir: RunDir, progress: Progress) -> Policy:
    """The policy that is sampled from as the configuration says; owns `policy`. Raises as `ServedPolicy.open`."""
    settings = config.policy
    if settings.engine == "local":
        return policy
    from agentlightning.policy.served import ServedPolicy

    progress.phase("starting model servers", 1)
    folder = run_dir.path.absolute() / "servers"
    try:
        return await ServedPolicy.open(policy, settings.servers, folder, kind=settings.engine, dtype=settings.dtype)
    except BaseException:
        await policy.close()
        raise


async def open_frozen(name: str, path: str) -> Policy:
    """A model to serve and not to train. Raises ConfigError where there is none."""
    if not await asyncio.to_thread(Path(path).is_dir):
        raise ConfigError(f"the model {name!r}: {path} is no directory; give one that transformers loads")
    config = policy_config(TrainConfig(), path, OptimizerConfig(), 1)
    return await open_policy(config.model_copy(update={"name": name}))


async def open_models(
    models: Mapping[str, str | ServedModel], stack: AsyncExitStack, logs: Path = Path()
) -> dict[str, Engine]:
    """Models to serve and not to train, by name; the stack closes them. Servers write to files in `logs`."""
    opened: dict[str, Engine] = {}
    for name, given in models.items():
        if isinstance(given, str):
            policy = await open_frozen(name, given)
            stack.push_async_callback(policy.close)
            opened[name] = policy
        else:
            opened |= await given.open(name, stack, logs / f"servers-{name}")
    return opened
