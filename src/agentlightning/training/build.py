"""Builds the parts of a training run from its configuration; `trainer.py` decides when, and closes them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from starlette.routing import BaseRoute

from agentlightning.algorithms.base import Algorithm
from agentlightning.algorithms.training import RolloutSource
from agentlightning.assemble.model_calls import NO_LIMITS, TokenLimits
from agentlightning.attempt_variables import OTLP_ENDPOINTS
from agentlightning.config import TrainConfig
from agentlightning.engine.base import Engine
from agentlightning.errors import ConfigError
from agentlightning.policy.base import Policy, capabilities_of
from agentlightning.policy.open import open_models
from agentlightning.resources import NamedResources, prompts_in
from agentlightning.runner.agents.loading import load_object
from agentlightning.runner.agents.spec import function_spec
from agentlightning.server.app import Server, is_loopback
from agentlightning.server.serve import serve
from agentlightning.store import LightningStore
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.instrumented import instrument
from agentlightning.tracing.air import weighted_rules
from agentlightning.tracing.otlp.exporter import OtlpExporter
from agentlightning.training.account import RunAccount
from agentlightning.training.agent_runner import rollout_config, routes_models
from agentlightning.training.callbacks import Callback
from agentlightning.training.curriculum import task_order
from agentlightning.training.governance import Audit, Gate, Guard, Health
from agentlightning.training.joined_gateways import JoinedGateways
from agentlightning.training.learner import PolicyLearner
from agentlightning.training.measurements import Measurements
from agentlightning.training.persistence.checkpoints import Checkpoints, ResourcePublisher, read_resources
from agentlightning.training.persistence.run_changes import Tasks
from agentlightning.training.persistence.run_dir import RunDir
from agentlightning.training.persistence.token_ratios import TokenRatios
from agentlightning.training.recorded import RecordedSource
from agentlightning.training.report.reward_curve import Curve
from agentlightning.training.run import TrainingRun
from agentlightning.training.sources.collector import RolloutCollector
from agentlightning.training.sources.group_rewards import GroupRewardSource
from agentlightning.training.sources.in_flight_limit import InFlightLimit
from agentlightning.training.sources.reader import TrajectoryReader
from agentlightning.training.sources.stream import RolloutStream, check_staleness
from agentlightning.training.tracking import Tracking
from agentlightning.util.plugins import load_plugin


async def open_store(given: LightningStoreBase | None, run_dir: RunDir, stack: AsyncExitStack) -> LightningStoreBase:
    """The given store, or the run's own. Its spans also go where OpenTelemetry's environment variables say."""
    store = given
    if store is None:
        store = LightningStore(run_dir.store_path)
        stack.push_async_callback(store.close)
    endpoint = next(filter(None, map(os.environ.get, OTLP_ENDPOINTS)), None)
    if endpoint is not None:
        exporter = OtlpExporter(endpoint)
        stack.push_async_callback(asyncio.to_thread, exporter.close)
        store = instrument(store, [exporter])
    return store


async def serve_run(
    config: TrainConfig,
    store: LightningStoreBase,
    policy: Engine | None,
    run_dir: RunDir,
    stack: AsyncExitStack,
    secret: str,
    token: str,
    listener: socket.socket | None = None,
    pages: Sequence[BaseRoute] = (),
) -> Server:
    """The server of a run, until the stack is closed. The policy answers all calls that no route sends elsewhere.
    `pages`: the dashboard's."""
    engines: dict[str, Engine] = {} if policy is None else {policy.model: policy}
    engines |= await open_models(config.gateway.models, stack, run_dir.path)
    serving = serve(
        store,
        engines if policy is not None or routes_models(config) else None,
        secret=secret,
        token=token,
        routing=config.gateway,
        accept_any_model=policy is not None,
        require_key=not is_loopback(config.run.host),
        budget_file=run_dir.path / "spent",
        host=config.run.host,
        listener=listener,
        pages=pages,
    )
    return await stack.enter_async_context(serving)


def make_collector(
    config: TrainConfig, store: LightningStoreBase, policy: Policy | None, queue: str | None
) -> RolloutCollector:
    limits, model = NO_LIMITS, None
    if policy is not None:
        limits = TokenLimits(policy.vocab_size, policy.context_length)
        model = policy.model
    return RolloutCollector(
        TrajectoryReader(
            store,
            model,
            limits,
            weighted_rules(config.air, load_rule),
            turn_limit_reward=config.curriculum.turns and config.curriculum.turns.reward,
        ),
        rollout_config(config.runner),
        queue=queue,
        max_failed_share=config.runner.max_failed_share,
    )


def load_rule(name: str) -> Any:
    """The function of an AIR rule that is given by name. Raises AgentError."""
    return load_object(function_spec(name, "AIR rule"), "AIR rule")


async def make_training_run(
    config: TrainConfig,
    algorithm: Algorithm[Any],
    account: RunAccount,
    tasks: Tasks,
    policy: Policy | None,
    server: Server,
    resources: NamedResources,
    url: str,
    joined: JoinedGateways | None = None,
    recorded: RecordedSource | None = None,
    callbacks: Sequence[Callback[Any]] = (),
) -> TrainingRun:
    """The run, with the resources of its last checkpoint unless the starting policy is still to be measured. Its calls
    go to `url`: the gateway of `server`, or one that was joined. It learns from what was `recorded`, else from
    rollouts. `callbacks`: those of others."""
    state, collector, weights = account.state, account.collector, algorithm.reward_weights
    publisher = ResourcePublisher(collector.store, url, policy, resources, config.runner.max_calls)
    if not state.measures_start(config.evaluation.modes):
        publisher.publish(read_resources(account.run_dir.path, state.checkpoint))
    learner = None if policy is None else make_learner(server, policy, config, account, joined)
    checkpoints = Checkpoints(account, config.run, learner, publisher, algorithm)
    checkpoints.restore_algorithm(state.checkpoint)
    measurements = Measurements(
        account, publisher, tasks, config.evaluation, weights, validates=not algorithm.selects_result
    )
    source: RolloutSource
    if recorded is not None:
        source, stop_at = recorded, None
    else:
        stream = make_source(config, account, tasks, publisher, learner, algorithm)
        source, stop_at = stream, stream.stop_at
        if config.group_reward is not None:
            judge = load_object(function_spec(config.group_reward, "group reward"), "group reward")
            source = GroupRewardSource(source, judge, collector.store)
    run = TrainingRun(
        account,
        source,
        learner,
        measurements,
        checkpoints,
        total_steps=state.first_step + algorithm.total_steps if recorded else algorithm.total_steps,
        seed=config.run.seed,
        recorded=recorded,
        start_prompts=prompts_in(resources),
        stop_rollouts_at=stop_at or (lambda step: None),
        uses_providers=bool(config.gateway.providers),
        gateways=None if joined is None else joined.report,
    )
    account.add(Curve(account.run_dir, required=learner is not None))
    account.add(await asyncio.to_thread(Tracking, config, account, measurements))
    if config.guard is not None:
        account.add(Guard(config.guard, account, weights))
    if config.run.token_ratios and learner is not None:
        account.add(TokenRatios(account, learner))
    account.add(audit := Audit(account, checkpoints, algorithm.name))
    account.add(health := Health(config.run, account, checkpoints, judges=recorded is None))
    if config.gate is not None:
        account.add(Gate(config.gate, account, checkpoints, audit, health, measurements))
    for callback in callbacks:
        callback.run = run
        account.add(callback)
    return run


def make_learner(
    server: Server,
    policy: Policy,
    config: TrainConfig,
    account: RunAccount,
    joined: JoinedGateways | None,
) -> PolicyLearner:
    if joined is not None:
        updating = joined.updating
    else:
        assert server.gateway is not None
        updating = partial(
            server.gateway.gates.of(policy).update,
            in_flight=config.policy.in_flight,
            drain_seconds=config.policy.drain_seconds,
            can_go_on=capabilities_of(policy).in_flight,
        )
    published, folder = config.policy.weights, account.run_dir.path / "weights"
    return PolicyLearner(
        policy,
        updating,
        config.policy.token_budget,
        resumes=account.state.resumes,
        weights=None if published.url is None else load_plugin("publishers", "weights")(policy, published, folder),
    )


def make_source(
    config: TrainConfig,
    account: RunAccount,
    tasks: Tasks,
    publisher: ResourcePublisher,
    learner: PolicyLearner | None,
    algorithm: Algorithm[Any],
) -> RolloutStream:
    """The stream of rollouts; with `max_staleness` 0, each step waits for its own. Raises ConfigError for a
    `max_staleness` or a curriculum that cannot be."""
    check_staleness(config.run.max_staleness, algorithm.total_steps)
    algorithm.check_staleness(config.run.max_staleness)
    if learner is None:
        check_calls_of_policy(config)
    return RolloutStream(
        account.collector,
        tasks.train,
        account.state,
        publisher.write,
        seed=config.run.seed,
        policy_version=lambda: 0 if learner is None else learner.policy_version,
        versions=lambda: {} if learner is None else learner.versions,
        max_staleness=config.run.max_staleness,
        total_steps=algorithm.total_steps,
        order=task_order(config.curriculum, len(tasks.train), config.run.seed, account.state.curriculum),
        reward_weights=algorithm.reward_weights,
        turn_limit=config.curriculum.turns,
        branching=config.curriculum.branching,
        limit=InFlightLimit()
        if learner is None or not config.runner.limit_by_load
        else InFlightLimit(learner.policy.kv_cache_usage),
        on_progress=lambda done, total: account.progress.update(account.state.stage_step, rollouts=f"{done}/{total}"),
        note=account.progress.note,
    )


def check_calls_of_policy(config: TrainConfig) -> None:
    """Raises ConfigError for settings on the calls of a policy, for a run without one."""
    settings = {
        "curriculum.turns": config.curriculum.turns,
        "curriculum.branching": config.curriculum.branching,
        "runner.max_calls": config.runner.max_calls,
        "run.token_ratios": config.run.token_ratios or None,
    }
    for name, setting in settings.items():
        if setting is not None:
            raise ConfigError(
                f"{name} needs a policy, whose answers are counted and have log-probabilities; this run trains no"
                " model: leave it out"
            )
