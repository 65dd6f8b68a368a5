"""The policy that a run starts or resumes with: the configured model, a tiny one, or one after its warm start."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from agentlightning.algorithms.base import Algorithm
from agentlightning.algorithms.sft import SFTAlgorithm, SFTConfig
from agentlightning.config import TrainConfig
from agentlightning.errors import ConfigError
from agentlightning.models.resolve import TINY
from agentlightning.policy import open as opening
from agentlightning.policy.base import Metrics, Policy, capabilities_of
from agentlightning.store.base import LightningStoreBase
from agentlightning.task import load_dataset
from agentlightning.training.persistence.checkpoints import load_weights
from agentlightning.training.persistence.run_changes import Tasks
from agentlightning.training.persistence.run_dir import RunDir, RunState
from agentlightning.util.progress import Progress


def has_random_weights(config: TrainConfig) -> bool:
    """Whether the run starts from random weights."""
    return config.policy.model == TINY and config.warm_start.dataset is None


async def make_starting_policy(config: TrainConfig, run_dir: RunDir, tasks: Tasks, progress: Progress) -> None:
    """Write the starting policy to the run directory, unless it is there or the configured model is used as it is."""
    warm_start, model = config.warm_start, config.policy.model
    if run_dir.start.exists() or (model != TINY and warm_start.dataset is None):
        return
    conversations = load_dataset(warm_start.dataset) if warm_start.dataset else []
    if model == TINY:
        from agentlightning.models.tiny import make_tiny

        progress.phase("making a tiny policy", 1)
        records = [*tasks.train, *conversations]
        model = str(await asyncio.to_thread(make_tiny, run_dir.path / TINY, records, seed=config.run.seed))
    settings: Any = SFTConfig(**dict(warm_start), seed=config.run.seed, token_budget=config.policy.token_budget)
    learning = SFTAlgorithm(None, conversations, config=settings)
    steps = learning.total_steps if conversations else 0
    policy = await opening.open_policy(
        opening.policy_config(
            # A warm start trains all weights; without one they are only written.
            config.policy.model_copy(update={"lora": None} | ({} if conversations else {"kind": "local"})),
            model,
            optimizer=warm_start.optimizer,
            steps=max(1, steps),
            objective=learning.objective,
            seed=config.run.seed,
        )
    )

    def report(step: int, metrics: Metrics) -> None:
        progress.update(step, loss=metrics["loss"])

    try:
        if conversations:
            progress.phase("warm start", steps)
            learning.model, learning.on_step = policy, report
            await learning.run()
        await policy.save(run_dir.start)
    finally:
        await policy.close()


async def open_for_training(
    config: TrainConfig,
    algorithm: Algorithm[Any],
    run_dir: RunDir,
    state: RunState,
    store: LightningStoreBase,
    progress: Progress,
    check: Callable[[Policy], Awaitable[None]] | None,
) -> Policy:
    """The policy of a run and its servers: with the starting weights if these are still to be measured, else with those
    of its last checkpoint. `check` sees the policy before any server gets its weights. Raises ConfigError, PolicyError,
    and ResumeError for a checkpoint that does not fit."""
    settings = opening.policy_config(
        config.policy,
        str(run_dir.start) if run_dir.start.exists() else config.policy.model,
        optimizer=algorithm.optimizer or getattr(config.algorithm, "optimizer", None),
        steps=algorithm.optimizer_steps,
        objective=algorithm.objective,
        seed=config.run.seed,
        agents=algorithm.agents,
    )
    policy = await opening.open_trained(config.policy, settings)
    try:
        if config.policy.in_flight and not capabilities_of(policy).in_flight:
            raise ConfigError(
                "policy.in_flight = true: this policy cannot change its weights while answers are drawn; leave"
                " in_flight false, and they finish first"
            )
        if check is not None:
            await check(policy)
        if not state.measures_start(config.evaluation.modes):
            await load_weights(policy, run_dir, state, store)
    except BaseException:
        await policy.close()
        raise
    if config.policy.engine != "local":
        progress.phase("starting model servers", 1)
    return await opening.with_servers(policy, config.policy, run_dir.path.absolute() / "servers", settings.dtype)
