"""A training run, from its settings to its result: opens its directory, makes its parts, and connects them.

It is imported when a run begins: a trainer and its settings need none of these parts.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from msgspec import Struct, structs
from pydantic import BaseModel

from agentlightning.algorithms.apo.config import APOConfig
from agentlightning.algorithms.base import Algorithm, class_name, make_algorithm
from agentlightning.algorithms.lightning_rl import LightningRLConfig
from agentlightning.algorithms.sequential import SequentialConfig
from agentlightning.assemble import NO_LIMITS, TokenLimits
from agentlightning.attempt_variables import OTLP_ENDPOINTS
from agentlightning.compat.runner import Hook, with_hooks
from agentlightning.config import CALLBACKS, TrainConfig
from agentlightning.dashboard.app import PATH as DASHBOARD
from agentlightning.dashboard.app import dashboard_routes
from agentlightning.dashboard.data.run_data import catalog_of_run
from agentlightning.engine.base import Engine
from agentlightning.errors import ConfigError, DatasetError, ResumeError
from agentlightning.policy.base import Policy, capabilities_of
from agentlightning.policy.learner import Learner
from agentlightning.policy.open import follow_trainer, open_models, require_training
from agentlightning.resources import NamedResources
from agentlightning.runner import Runner
from agentlightning.runner.agents.agent import function_spec, load_object
from agentlightning.server.app import Server, is_loopback
from agentlightning.server.serve import serve
from agentlightning.store import LightningStore
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.instrumented import instrument
from agentlightning.task import load_dataset
from agentlightning.tracing.air import weighted_rules
from agentlightning.tracing.otlp.exporter import OtlpExporter
from agentlightning.training import dry_run
from agentlightning.training.agent_runner import (
    check_runners,
    credentials,
    load_agent,
    make_runner,
    queue_of,
    report_missing_runners,
    rollout_config,
    routes_models,
    run_beside,
)
from agentlightning.training.callbacks import Callback
from agentlightning.training.dry_run import DryRun
from agentlightning.training.environment_providers import with_own_providers
from agentlightning.training.governance import Audit, Gate, Guard, Health
from agentlightning.training.joined_gateways import JoinedGateways, check_gateways, joined_url
from agentlightning.training.persistence.checkpoints import (
    Checkpoints,
    ResourcePublisher,
    has_random_weights,
    make_starting_policy,
    open_for_training,
    read_resources,
)
from agentlightning.training.persistence.run_dir import (
    OBJECTS,
    RunDir,
    RunState,
    Tasks,
    append_lines,
    changed_settings,
    changes_rewards,
    check_extensions,
    describe_changes,
    extensions_of,
    load_tasks,
    read_state,
    read_tasks,
    shown,
    write_atomically,
    write_tasks,
)
from agentlightning.training.recorded import (
    CHECKPOINT_EVERY,
    RecordedSource,
    check_live,
    check_recorded,
    open_recorded,
    recorded_data,
)
from agentlightning.training.report.result import TrainingResult, starting_warnings
from agentlightning.training.run import TrainingRun
from agentlightning.training.sources.collector import RolloutCollector, TrajectoryReader
from agentlightning.training.sources.stream import InFlightLimit, RolloutStream
from agentlightning.training.tracking import Curve, TokenRatios, Tracking
from agentlightning.training.watch import watch_rollouts
from agentlightning.util.event_loop import in_background
from agentlightning.util.plugins import calls_of, load_plugin
from agentlightning.util.progress import Progress
from agentlightning.util.settings import dump_toml, settings_from


class Run(Struct):
    """A run as a trainer is asked for it: `fit` opens its directory, makes its parts, and carries it out."""

    config: TrainConfig
    algorithm: Algorithm[Any] | None
    """The object that was given. None: the settings name it."""
    agent: Any
    reward: Any
    store: LightningStoreBase | None
    """The one that was given. None: it has one of its own."""
    resources: NamedResources
    """What rollouts are given beside the policy."""
    callbacks: Sequence[Callback[Any]]
    """Those of others that are objects; the settings name more."""
    hooks: Hook | Sequence[Hook] | None
    progress: Progress
    path: Path
    """Of its directory."""
    before: TrainConfig | None
    """The settings of the run that is resumed, before any change. None: it begins."""
    changes: Sequence[str]
    """As on the command line."""
    trained: Path | None
    """What an earlier call of `train` has made of the model."""

    async def fit(
        self, train: Any = None, validation: Any = None, held_out: Any = None, *, recorded: bool = False
    ) -> TrainingResult:
        """A run of the agent, or on `recorded` data, where the agent only measures."""
        if not recorded:
            check_live(self._chosen, self.config)
        if self._chosen.learns_weights:
            require_training()
            follow_trainer(self.config.policy)
        with self.progress:
            run_dir, state, tasks = self._open(train, validation, held_out, recorded=recorded)
            is_new = self.before is None and self.trained is None
            try:
                async with AsyncExitStack() as stack:
                    algorithm = self._algorithm_of(state.algorithm)
                    if changed_rewards := self._changes_rewards():
                        state.forget_measurements()
                    source = None
                    if recorded:
                        check_recorded(algorithm, self.config, self.agent, tasks.held_out)
                        given = self.config, algorithm, self.store, run_dir, state, self.progress, stack
                        self.config, source = await open_recorded(*given)
                        write_tasks(run_dir, tasks)
                        self._write_config(run_dir)
                        algorithm = source.algorithm
                    wiring = self._wiring(algorithm, run_dir, state, tasks, source)
                    runner, run = await stack.enter_async_context(wiring.open())
                    run_dir.write_state(state)
                    if changed_rewards:
                        await run.begin_revision()
                    is_new = False
                    self._record_changes(run_dir, state)
                    random = algorithm.learns_weights and algorithm.objective == "reinforcement"
                    random = random and has_random_weights(self.config)
                    run.warn_of(starting_warnings(random_weights=random, shared=tasks.shared()))
                    return await run_beside(runner, run.fit())
            except Exception as error:
                warmed_up = self.config.warm_start.dataset is not None and run_dir.start.exists()
                if is_new and not warmed_up:
                    run_dir.discard()
                run_dir.write_error(error)
                raise
            finally:
                run_dir.close()

    async def dry_run(self, *datasets: Any) -> DryRun:
        """Everything short of training, in a directory that is removed. `datasets`: as `fit` takes them."""
        follow_trainer(self.config.policy)
        if self.before is not None:
            raise ConfigError(
                f"a dry run checks a run that is to begin, and {self.path} has begun; give its settings in place of it:"
                f" agl train --config {self.path}/config.toml --dry-run"
            )
        with TemporaryDirectory(prefix="agl-dry-run-") as directory, self.progress:
            settings, path = dry_run.settings_of(self.config), Path(directory) / "run"
            other = structs.replace(self, config=settings, path=path, store=None, callbacks=())
            run_dir, state, tasks = other._open(*datasets, recorded=False)
            try:
                wiring = other._wiring(other._chosen, run_dir, state, tasks, None)
                return await dry_run.dry_run(self.config, wiring.algorithm, tasks, wiring.open)
            finally:
                run_dir.close()

    @property
    def _chosen(self) -> Algorithm[Any]:
        return self.algorithm or make_algorithm(self.config.algorithm)

    def _algorithm_of(self, recorded: str | None) -> Algorithm[Any]:
        """The given object, or the algorithm that the settings name. Raises ResumeError where a resumed run had another
        one, which its directory cannot bring back."""
        given = self.algorithm
        if given is None and recorded is None:
            return self._chosen
        name = given and class_name(given)
        if given is None or name != (recorded or class_name(make_algorithm(self.config.algorithm))):
            raise ResumeError(
                f"{self.path} is trained by {recorded or 'an algorithm made from its settings'}, not by"
                f" {name or 'one made from settings'}; give it the algorithm it had:"
                f" Trainer.resume({str(self.path)!r}, algorithm=...)"
            )
        return given

    def _changes_rewards(self) -> bool:
        """Whether a resumed run has a changed agent, reward or reward weights. An object that replaces an object is
        assumed to be the same one."""
        if (before := self.before) is None:
            return False
        replaced = ((self.agent, before.agent), (self.reward, before.reward))
        if any(named is not None and not isinstance(given, str | None) for given, named in replaced):
            return True
        return changes_rewards(changed_settings(before, self.config))

    def _open(self, train: Any, validation: Any, held_out: Any, *, recorded: bool) -> tuple[RunDir, RunState, Tasks]:
        """The run directory: new, resumed, or one whose result a further run on recorded data begins with. Raises
        ConfigError, DatasetError and ResumeError."""
        if not recorded:
            check_gateways(self.config, self.store, self._chosen)
        if self.before is not None and self.trained is None:
            if any(part is not None for part in (train, validation, held_out)):
                raise ConfigError(f"{self.path} keeps its own tasks; resume it without datasets")
            return self._reopen(recorded=recorded)
        self.config = with_absolute_paths(self.config)
        if recorded:
            own = held_out if held_out is not None else self.config.data.held_out
            tasks = Tasks([], held_out=[] if own is None else load_dataset(own))
            data, store = recorded_data(self._chosen, is_object=self.algorithm is not None), None
        else:
            tasks, data, store = load_tasks(self.config, train, validation, held_out), None, self.store
        parts = {"agent": self.agent, "reward": self.reward, "store": store, "callbacks": self.callbacks or None}
        given = self.algorithm
        state = RunState(
            f"r{secrets.token_hex(4)}",
            None if given is None or given.restorable or (data is not None and data.sources) else class_name(given),
            [name for name, part in parts.items() if part is not None and not isinstance(part, str)],
            extensions_of(self.config),
            recorded=data,
        )
        if data is None or self.trained is None:
            run_dir = RunDir.create(self.path)
            write_tasks(run_dir, tasks)
            self._write_config(run_dir)
            run_dir.write_state(state)
            return run_dir, state, tasks
        run_dir = RunDir.open(self.path)
        for earlier in (run_dir.start, run_dir.reference):
            shutil.rmtree(earlier, ignore_errors=True)
        self.config = self.config.with_section("policy", model=str(self.trained))
        state.step = data.first_step = len(run_dir.read_metrics())
        return run_dir, state, tasks

    def _reopen(self, *, recorded: bool) -> tuple[RunDir, RunState, Tasks]:
        run_dir = RunDir.open(self.path)
        try:
            state = read_state(self.path)
            if state.recorded is not None and not recorded:
                raise ResumeError(
                    f"{self.path} learns from recorded data, without an agent; continue it with Trainer.resume("
                    f"{str(self.path)!r}).train(), or `agl train --resume {self.path}`"
                )
            check_extensions(self.path, state, self.config, self.changes)
            return run_dir, state, read_tasks(run_dir)
        except BaseException:
            run_dir.close()
            raise

    def _record_changes(self, run_dir: RunDir, state: RunState) -> None:
        """Those of a resumed run."""
        if self.before is not None and (changes := shown(changed_settings(self.before, self.config))):
            self._write_config(run_dir)
            record = {"time": time.time(), "step": state.step, "changes": changes}
            append_lines(run_dir.path / "changes.jsonl", record)
            self.progress.note(f"changed: {describe_changes(changes)}")

    def _write_config(self, run_dir: RunDir) -> None:
        # Headers for a provider may hold its key.
        write_atomically(run_dir.path / "config.toml", dump_toml(self.config).encode(), private=True)

    def _wiring(
        self, algorithm: Algorithm[Any], run_dir: RunDir, state: RunState, tasks: Tasks, recorded: RecordedSource | None
    ) -> Wiring:
        """Of an agent, which in a run on `recorded` data only measures, and may be missing; such a run keeps rollouts
        in a store of its own. Raises ConfigError for none, ResumeError for an object that was not given again."""
        for name, (what, how) in OBJECTS.items():
            if name in state.objects and not getattr(self, name):
                raise ResumeError(f"{self.path} {what}: Trainer.resume({str(self.path)!r}, {name}={how}")
        config, store, agent = self.config, self.store, self.agent
        if recorded is not None:  # Checkpoints are rare, and without an agent nothing is measured.
            every, store = config.run.checkpoint_every or CHECKPOINT_EVERY, None
            config = config.with_section("run", checkpoint_every=every)
            config = config if agent is not None else config.with_section("evaluation", modes=())
        if agent is not None or recorded is None:
            check_runners(config, store, agent, self.reward)
        agent = with_hooks(agent, self.hooks, config.runner.hooks)
        asked = structs.replace(self, config=config, store=store, agent=agent)
        return Wiring(asked, algorithm, run_dir, state, tasks, recorded)


class Wiring(Struct):
    """What a run is made of; `open` makes the run."""

    asked: Run
    """Without an agent, runners elsewhere have it, or a run on recorded data measures nothing."""
    algorithm: Algorithm[Any]
    run_dir: RunDir
    state: RunState
    tasks: Tasks
    recorded: RecordedSource | None
    """What it learns from. None: from rollouts of the agent, which else only measures."""

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[tuple[Runner | None, TrainingRun]]:
        """The run and its runner; None: it has none here."""
        since, asked, algorithm, state = time.monotonic(), self.asked, self.algorithm, self.state
        progress, note = asked.progress, asked.progress.note
        learns = state.learns_weights = algorithm.learns_weights
        if not learns:
            asked.config = with_own_providers(asked.config, note)
        config, given, run_id = asked.config, asked.store, state.run_id
        if algorithm.selects_result and (shared := self.tasks.shared()):
            raise DatasetError(
                f"{'; '.join(map(str, shared))}: a result could be chosen on what it is tested with; give each task to"
                " one split"
            )
        check_prices(algorithm, config)
        if self.recorded is None:
            Algorithm.check_staleness(algorithm, config.run.max_staleness)  # That of a class need not call it.
            algorithm.check_staleness(config.run.max_staleness)
        token, secret = credentials(given)
        async with AsyncExitStack() as stack:
            store = await open_store(given, self.run_dir, stack)
            progress.phase("loading the agent and the model")
            queue, runner = queue_of(config.runner, given, run_id), None
            runs_agent = self.recorded is None or asked.agent is not None
            if runs_agent and config.runner.hosts:
                routing: dict[str, Any] = {"redirect": learns or routes_models(config), "queue": queue}
                log = self.run_dir.path / "agent.log"
                runner = make_runner(config.runner, store, asked.agent, asked.reward, secret, log=log, **routing)
            url = joined_url(config)
            listener = await load_agent(runner, stack, config.run.host, config.run.port, policy=learns, url=url)
            policy, joined = None, JoinedGateways(config, given, run_id, note) if config.run.gateways else None
            if joined:
                stack.push_async_callback(joined.close)
            if learns:
                await make_starting_policy(config, self.run_dir, self.tasks, progress)
                check = joined and joined.check_free
                policy = await open_for_training(config, algorithm, self.run_dir, state, store, progress, check)
                stack.push_async_callback(policy.close)
            if joined:
                await stack.enter_async_context(joined.join(policy))
            own = None if joined else policy
            server = await serve_run(config, store, own, self.run_dir, stack, secret, token, listener)
            note(f"dashboard: {server.url}{DASHBOARD}#token={token}")
            called = url or config.run.public_url or server.url
            run = self._run(store, queue, policy, server, called, joined, since)
            stack.push_async_callback(run.close)
            if progress.enabled:
                timeout, own_store = config.runner.timeout_seconds, (self.run_dir.path / "store.db").exists()
                watching = watch_rollouts(store, run_id, progress, timeout, own_store=own_store)
                await stack.enter_async_context(in_background(watching))
            await run.collector.move(run_id, called)
            if runner is not None:
                await run.collector.recover(run_id, "the process that ran it ended")
                await runner.start(url or server.url)
                stack.push_async_callback(runner.stop)
            elif runs_agent:
                await stack.enter_async_context(in_background(report_missing_runners(given or store, run_id, note)))
            await self._add_callbacks(run)
            with calls_of(type(algorithm), "algorithm"):
                run.prepared = await algorithm.prepare(run)
            yield runner, run

    def _run(
        self,
        store: LightningStoreBase,
        queue: str | None,
        policy: Policy | None,
        server: Server,
        url: str,
        joined: JoinedGateways | None,
        since: float,
    ) -> TrainingRun:
        """The run, with the resources of its last checkpoint unless the starting policy is still to be measured. Its
        calls go to `url`: the gateway of `server`, or one that was joined."""
        asked, algorithm, run_dir, state = self.asked, self.algorithm, self.run_dir, self.state
        config, progress = asked.config, asked.progress
        limits, model, learner, publish = NO_LIMITS, None, None, None
        if policy is not None:
            limits, model = TokenLimits(policy.vocab_size, policy.context_length), policy.model
            updating = joined and joined.updating
            if updating is None:
                assert server.gateway is not None
                updating = partial(
                    server.gateway.gates.of(policy).update,
                    in_flight=config.policy.in_flight,
                    drain_seconds=config.policy.drain_seconds if capabilities_of(policy).in_flight else None,
                )
            if config.policy.weights.url is not None:
                weights = load_plugin("publishers", "weights")
                publish = weights(policy, config.policy.weights, run_dir.path / "weights").publish
            learner = Learner(policy, updating, config.policy.token_budget, state.resumes, publish)
        reward = config.curriculum.turns and config.curriculum.turns.reward
        reader = TrajectoryReader(store, model, limits, weighted_rules(config.air), reward, algorithm.reward_weights)
        share = config.runner.max_failed_share
        collector = RolloutCollector(reader, rollout_config(config.runner), queue=queue, max_failed_share=share)
        publisher = ResourcePublisher(store, url, policy, asked.resources, config.runner.max_calls)
        if not state.measures_start(config.evaluation.modes):
            publisher.publish(read_resources(run_dir.path, state.checkpoint))
        target = {"target_agent": getattr(asked.agent, "trained_agents", None)}  # Those that the agent itself declares.
        checkpoints = Checkpoints(run_dir, state, config.run, learner, publisher, algorithm, progress.note)
        checkpoints.restore_algorithm(state.checkpoint)
        return TrainingRun(
            config,
            algorithm,
            run_dir,
            state,
            self.tasks,
            collector,
            self.recorded or self._stream(collector, publisher, learner),
            checkpoints,
            progress,
            algorithm.total_steps + (state.first_step if self.recorded else 0),
            since,
            settings_from(LightningRLConfig, target, source="trained_agents of the agent").target_agent,
            joined,
            validates=not algorithm.selects_result,
        )

    async def _add_callbacks(self, run: TrainingRun) -> None:
        config = self.asked.config
        named: list[Callback[Any]] = []
        for each in map(CALLBACKS.find, config.run.callbacks):  # Before a tracker begins a run.
            with calls_of(each, "callback"):
                named.append(each())
        run.add(Curve(run))
        run.add(await asyncio.to_thread(Tracking, run))
        if config.guard is not None:
            run.add(Guard(run, config.guard))
        if config.run.token_ratios and run.learner is not None:
            run.add(TokenRatios(run))
        run.add(audit := Audit(run))
        run.add(health := Health(run))
        if config.gate is not None:
            run.add(Gate(run, config.gate, audit, health))
        for callback in (*named, *self.asked.callbacks):
            run.add(callback)

    def _stream(
        self, collector: RolloutCollector, publisher: ResourcePublisher, learner: Learner | None
    ) -> RolloutStream:
        """The stream of rollouts; with `max_staleness` 0, each step waits for its own. Raises ConfigError for a
        curriculum that cannot be."""
        config, algorithm = self.asked.config, self.algorithm
        judge = config.group_reward
        if learner is None:
            check_calls_of_policy(config)
        limit = InFlightLimit()
        if learner is not None and config.runner.limit_by_load:
            limit.usage = learner.policy.kv_cache_usage
        return RolloutStream(
            collector,
            self.tasks.train,
            self.state,
            publisher.write,
            self.asked.progress,
            learner,
            config.curriculum,
            config.run.seed,
            config.run.max_staleness,
            algorithm.total_steps,
            None if judge is None else load_object(function_spec(judge, "group reward"), "group reward"),
            limit,
        )


async def open_store(given: LightningStoreBase | None, run_dir: RunDir, stack: AsyncExitStack) -> LightningStoreBase:
    """The given store, or the run's own. Its spans also go where OpenTelemetry's environment variables say."""
    store = given
    if store is None:
        store = LightningStore(run_dir.path / "store.db")
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
) -> Server:
    """The server of a run and its dashboard, until the stack is closed. The policy answers all calls that no route
    sends elsewhere."""
    data = catalog_of_run(run_dir.path, store)
    stack.push_async_callback(data.close)
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
        pages=dashboard_routes(data, token),
    )
    return await stack.enter_async_context(serving)


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


# -- settings --------------------------------------------------------------------------------------------------------


C = TypeVar("C", bound=BaseModel)


def check_prices(algorithm: Algorithm[Any], config: TrainConfig) -> None:
    """Raises ConfigError for a prompt search with a budget in money, of whose calls none has a price."""
    gateway = config.gateway
    if any(each.price for each in (*gateway.providers, *gateway.routes)):
        return
    for stage in getattr(algorithm, "stages", (algorithm,)):
        settings = getattr(stage, "config", None)
        if isinstance(settings, APOConfig) and settings.budget.money and not settings.has_prices:
            raise ConfigError(
                f"budget.money={settings.budget.money:g} limits nothing, as no call has a price: set input_price and"
                " output_price of the critic (and the editor), and agent_input_price and agent_output_price of the"
                " budget, or the price of a provider ([[gateway.providers]])"
            )


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """The same configuration, so that a run can be resumed from any directory. Raises ConfigError where its model
    servers cannot be had."""
    servers = config.policy.servers.with_absolute_paths()
    if config.policy.engine != "local":
        servers.check(config.policy.engine)
    changes: dict[str, Any] = {
        "runner": config.runner.model_copy(update={"cwd": str(Path(config.runner.cwd or ".").resolve())}),
        "policy": _absolute(config.policy, "model").model_copy(update={"servers": servers}),
        "algorithm": _with_absolute_models(config.algorithm),
        "data": _absolute(config.data, "sessions"),
        "gate": config.gate and _absolute(config.gate, "tasks"),
        "warm_start": _absolute(config.warm_start, "dataset"),
    }
    return config.model_copy(update=changes)


def _with_absolute_models(settings: C) -> C:
    """The settings of an algorithm, and of its stages."""
    if isinstance(settings, SequentialConfig):
        return settings.model_copy(update={"stages": tuple(map(_with_absolute_models, settings.stages))})
    found = _absolute(settings, "reference", "teacher", "dataset", "validation", "data")
    output = getattr(settings, "output", None)
    return found.model_copy(update={"output": str(Path(output).resolve())} if output else {})


def _absolute(section: C, *names: str) -> C:
    """A section of settings whose paths, where there is something, are absolute."""
    given = {name: path for name in names if (path := getattr(section, name, None)) and Path(path).exists()}
    return section.model_copy(update={name: str(Path(path).resolve()) for name, path in given.items()})
