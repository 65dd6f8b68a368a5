"""The trainer: builds the parts of a run, connects them, runs the loop, and reports. The only synchronous entry point.

    prepare     tasks, starting policy (warm start included)
    before      held-out reward of the starting policy
    train       the algorithm's steps, validated and checkpointed
    after       held-out reward of the best checkpoint, paired with the first

Every phase reads from the run directory what is done already, so that resuming is the same code as starting. An
algorithm that learns no weights is run without a policy, and without torch.
"""

from __future__ import annotations

import asyncio
import copy
import os
import secrets
import shutil
import socket
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agentlightning.algorithms.base import Algorithm, make_algorithm
from agentlightning.algorithms.recorded.plan import MethodSetting
from agentlightning.assemble.model_calls import NO_LIMITS, TokenLimits
from agentlightning.attempt_variables import OTLP_ENDPOINTS
from agentlightning.compat.algorithm import Baseline, with_adapter
from agentlightning.compat.runner import Hook, check_tracer, with_hooks
from agentlightning.config import DataConfig, TrainConfig
from agentlightning.dashboard.app import PATH as DASHBOARD
from agentlightning.dashboard.app import dashboard_routes
from agentlightning.dashboard.data.catalog import catalog_of_run
from agentlightning.engine.base import Engine
from agentlightning.errors import ConfigError, ResumeError
from agentlightning.policy.base import Policy, capabilities_of
from agentlightning.policy.learner import Learner
from agentlightning.policy.open import follow_trainer, open_models, require_training
from agentlightning.resources import NamedResources, Resource, as_resources, prompts_in
from agentlightning.runner import Runner
from agentlightning.runner.agents.loading import load_object
from agentlightning.runner.agents.spec import function_spec
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
from agentlightning.training.callbacks import Callback, RunAccount, make_callbacks
from agentlightning.training.curriculum import task_order
from agentlightning.training.dry_run import DryRun
from agentlightning.training.environment_providers import with_own_providers
from agentlightning.training.governance import Audit, Gate, Guard, Health
from agentlightning.training.health.examination import starting_warnings
from agentlightning.training.joined_gateways import JoinedGateways, check_free, check_gateways, joined_url
from agentlightning.training.measurements import Measurements
from agentlightning.training.persistence.checkpoints import (
    Checkpoints,
    ResourcePublisher,
    load_weights,
    read_resources,
)
from agentlightning.training.persistence.run_changes import (
    Tasks,
    changed_settings,
    changes_rewards,
    check_changes,
    check_disjoint,
    check_extensions,
    check_objects,
    describe_changes,
    extensions_of,
    load_tasks,
    overrides,
    read_tasks,
    record_of,
    resumed_settings,
    settings_of_run,
    write_tasks,
)
from agentlightning.training.persistence.run_dir import RunDir, RunState, read_state, write_atomically
from agentlightning.training.persistence.token_ratios import TokenRatios
from agentlightning.training.recorded import (
    NothingArrived,
    RecordedSource,
    check_live,
    check_recorded,
    open_recorded,
    recorded_data,
    sessions_of,
    wired_settings,
)
from agentlightning.training.report.result import TrainingResult
from agentlightning.training.report.reward_curve import Curve
from agentlightning.training.run import TrainingRun
from agentlightning.training.sources.collector import RolloutCollector, TrajectoryReader
from agentlightning.training.sources.group_rewards import GroupRewardSource
from agentlightning.training.sources.stream import InFlightLimit, RolloutStream, check_staleness
from agentlightning.training.starting_policy import has_random_weights, make_starting_policy, open_for_training
from agentlightning.training.tracking import Tracking
from agentlightning.training.trainer_settings import (
    algorithm_of_run,
    algorithm_to_record,
    check_algorithm,
    check_prices,
    split_prompts,
    trained_agents,
    with_absolute_paths,
    with_arguments,
)
from agentlightning.training.watch import watch_rollouts
from agentlightning.util.event_loop import in_background, run_sync
from agentlightning.util.plugins import calls_of, load_plugin
from agentlightning.util.progress import Progress
from agentlightning.util.settings import dump_toml, settings_from


class Trainer:
    """Trains an agent.

    Settings come from `config`; the keyword arguments are shortcuts for its most used fields. `algorithm` is run as it
    is, whatever its class; without one, it is made from the settings. `run_dir` is the directory of the run (default:
    `runs/<time>` below the current directory). `store` replaces the run's own store.

        >>> agl.Trainer(algorithm=agl.LightningRL(steps=50), model="path/to/model", run_dir="runs/first")
        Trainer(algorithm='lightning_rl', model='path/to/model', run_dir='runs/first')
    """

    def __init__(
        self,
        config: TrainConfig | None = None,
        *,
        algorithm: Algorithm[Any] | type[Algorithm[Any]] | str | None = None,
        model: str | Path | None = None,
        reward: Any | None = None,
        store: LightningStoreBase | None = None,
        run_dir: str | Path | None = None,
        n_runners: int | None = None,
        n_workers: int | None = None,
        seed: int | None = None,
        initial_resources: Mapping[str, Resource | str] | None = None,
        progress: Progress | None = None,
        hooks: Hook | Sequence[Hook] | None = None,
        callbacks: Sequence[Callback[Any] | type[Callback[Any]] | str] = (),
        tracer: Any | None = None,
        adapter: Any | None = None,
    ) -> None:
        check_tracer(tracer)
        self.hooks = hooks
        self.callbacks = [each for each in callbacks if isinstance(each, Callback)]
        """Those that are objects; the settings name the others."""
        self.algorithm = with_adapter(None if algorithm is None else check_algorithm(algorithm), adapter)
        runners = n_workers if n_runners is None else n_runners
        named = [each for each in callbacks if not isinstance(each, Callback)]
        self.config = with_arguments(config or TrainConfig(), self.algorithm, model, runners, seed, named)
        prompts, others = split_prompts(as_resources(initial_resources or {}))
        self.config = self.config.model_copy(update={"prompts": {**self.config.prompts, **prompts}})
        self.reward = reward if reward is not None else self.config.reward
        self.store = store
        self.run_dir = Path(run_dir) if run_dir is not None else Path("runs") / time.strftime("%Y%m%d-%H%M%S")
        self.initial_resources: NamedResources = {**self.config.prompts, **others}
        self.progress = progress or Progress()
        self._trained: Path | None = None
        """What `train` has made of the model."""
        self._resumed_from: TrainConfig | None = None
        """The settings of the run that is resumed, before any change."""
        self._named: list[str] = []
        """The changes."""

    def __repr__(self) -> str:
        algorithm = self.config.algorithm.type if self.algorithm is None else self.algorithm.name
        model = self.config.policy.model
        return f"Trainer(algorithm={algorithm!r}, model={model!r}, run_dir={str(self.run_dir)!r})"

    @classmethod
    def resume(cls, run_dir: str | Path, *, changes: Mapping[str, Any] | Sequence[str] = (), **options: Any) -> Trainer:
        """A trainer that continues the run in `run_dir`; then call `fit`, with the agent where it was a live object, or
        `train` for a run on recorded data.

        `changes` of settings, as `{"algorithm.steps": 200}` or as on the command line, are recorded in the run; a
        finished run continues with more steps. After a change of the agent, the reward or `algorithm.reward_weights`
        the starting policy is measured again, so that both measurements mean the same; an object that replaces an
        object is assumed to be the same one. `options` are those of `Trainer`.

        Raises ResumeError where there is no run, and ConfigError for a change that cannot be made.
        """
        trainer = cls(resumed_settings(Path(run_dir), changes), run_dir=run_dir, **options)
        trainer._resumed_from = settings_of_run(Path(run_dir))
        trainer._named = overrides(changes)
        check_changes(changed_settings(trainer._resumed_from, trainer.config))
        return trainer

    def fit(
        self,
        agent: Any | None = None,
        train_dataset: Sequence[Any] | None = None,
        val_dataset: Sequence[Any] | None = None,
        *,
        held_out_dataset: Sequence[Any] | None = None,
    ) -> TrainingResult:
        """Train `agent` on the tasks of `train_dataset`. Every argument defaults to the one in the configuration.

        `val_dataset` chooses the best checkpoint and `held_out_dataset` measures the gain; without them, shares of the
        training tasks are split off. Ctrl-C ends it with KeyboardInterrupt and leaves the run resumable.
        """
        return run_sync(self.fit_async(agent, train_dataset, val_dataset, held_out_dataset=held_out_dataset))

    def dev(
        self,
        agent: Any | None = None,
        train_dataset: Sequence[Any] | None = None,
        val_dataset: Sequence[Any] | None = None,
    ) -> TrainingResult:
        """Run the agent once on each task, without training, to see that agent, reward and hooks work. The algorithm is
        used if it trains no model. The tasks of `val_dataset` (default: the same) are measured before and after."""
        if self.algorithm is not None and self.algorithm.learns_weights:
            raise ConfigError(
                f"dev() runs the agent without training, and {type(self.algorithm).__name__} trains a model; call"
                " fit(), or make the trainer without an algorithm"
            )
        tasks = load_dataset(train_dataset if train_dataset is not None else self.config.data.train or ())
        evaluation = self.config.evaluation.model_copy(update={"every": 0, "modes": ("greedy",)})
        data = self.config.data.model_copy(update={"validation_share": 0.0})
        trainer = copy.copy(self)
        trainer.config = self.config.model_copy(update={"evaluation": evaluation, "data": data})
        trainer.algorithm = self.algorithm or Baseline(len(tasks))
        return trainer.fit(agent, tasks, held_out_dataset=load_dataset(val_dataset) if val_dataset else tasks)

    def dry_run(
        self,
        agent: Any | None = None,
        train_dataset: Sequence[Any] | None = None,
        val_dataset: Sequence[Any] | None = None,
        *,
        held_out_dataset: Sequence[Any] | None = None,
    ) -> DryRun:
        """Check everything short of training: imports, tasks, the model, and a few rollouts with their calls, tokens
        and rewards. The arguments are those of `fit`. Leaves nothing behind; raises ConfigError and DatasetError."""
        follow_trainer(self.config.policy)
        datasets: dry_run.Datasets = train_dataset, val_dataset, held_out_dataset
        if self._resumed_from is not None:
            datasets = dry_run.tasks_of_run(self.run_dir)
        with TemporaryDirectory(prefix="agl-dry-run-") as directory, self.progress:
            settings = dry_run.settings_of(self.config, self.run_dir if self._resumed_from is not None else None)
            other = copy.copy(self)
            other.config, other.run_dir, other.store = settings, Path(directory) / "run", None
            other.callbacks, other._resumed_from = [], None
            return run_sync(other._rehearse(agent, datasets, self.config))

    async def _rehearse(self, agent: Any, datasets: dry_run.Datasets, config: TrainConfig) -> DryRun:
        agent = self._named_or_given(agent)
        run_dir, state, tasks = self._open(agent, *datasets, recorded=False)
        try:
            wired = partial(self._wired, self._agent_of(agent, state), self._chosen, run_dir, state, tasks)
            return await dry_run.dry_run(config, self._chosen, tasks, wired)
        finally:
            run_dir.close()

    async def fit_async(
        self,
        agent: Any | None = None,
        train_dataset: Sequence[Any] | None = None,
        val_dataset: Sequence[Any] | None = None,
        *,
        held_out_dataset: Sequence[Any] | None = None,
    ) -> TrainingResult:
        """`fit`, for callers that have an event loop."""
        return await self._run(agent, train_dataset, val_dataset, held_out_dataset, recorded=False)

    async def _run(self, agent: Any, *datasets: Any, recorded: bool) -> TrainingResult:
        """A run, new or resumed: of an agent, or on `recorded` data, where an agent only measures."""
        if not recorded:
            check_live(self._chosen, self.config)
        if self._chosen.learns_weights:
            require_training()
            follow_trainer(self.config.policy)
        agent = self._named_or_given(agent)
        with self.progress:
            run_dir, state, tasks = self._open(agent, *datasets, recorded=recorded)
            try:
                async with AsyncExitStack() as stack:
                    with self._set_up(run_dir, state):
                        algorithm = algorithm_of_run(self.algorithm, self.config, state.algorithm, self.run_dir)
                        changed_rewards = self._changes_rewards(agent)
                        if changed_rewards:
                            state.forget_measurements()
                        source = None
                        if recorded:
                            check_recorded(algorithm, self.config, agent, tasks.held_out)
                            store, parts = sessions_of(algorithm, self.store), (run_dir, state, self.progress, stack)
                            self.config, source = await open_recorded(self.config, algorithm, store, *parts)
                            write_tasks(run_dir, tasks)
                            self._write_config(run_dir)
                            algorithm = source.plan.algorithm
                        agent = self._agent_of(agent, state, recorded=recorded)
                        wired = self._wired(agent, algorithm, run_dir, state, tasks, source)
                        runner, run = await stack.enter_async_context(wired)
                        run_dir.write_state(state)
                        if changed_rewards:
                            await run.account.begin_revision()
                    return await run_beside(runner, self._fit(algorithm, run))
            except Exception as error:
                run_dir.write_error(error)
                raise
            finally:
                run_dir.close()

    def train(
        self,
        num_iterations: int | None = None,
        *,
        target_agent: str | None = None,
        target: str | None = None,
        agent: Any | None = None,
        train_dataset: Sequence[Any] | None = None,
        val_dataset: Sequence[Any] | None = None,
        held_out_dataset: Any | None = None,
        method: MethodSetting | None = None,
        success_threshold: float | None = None,
        follow: bool | None = None,
        follow_timeout: float | None = None,
        eval_agent: Any | None = None,
    ) -> TrainingResult:
        """Learn from the sessions recorded in the store; with an `agent`, from new rollouts, as `fit` does.

        num_iterations: updates (default: the algorithm's steps). target_agent (alias: target): a regular expression for
        the whole name of the agents to train; the calls of others are read and carry no loss. method: how LightningRL
        learns from sessions of another policy, by default as the data allows: "importance" where log-probabilities were
        recorded, else "awr", or "rejection", which imitates sessions with a reward of `success_threshold` or more.
        follow: learn from each session once, as they arrive, until nothing came for `follow_timeout` seconds. None: as
        the settings (`DataConfig`) say. With an `eval_agent`, its reward on the tasks of `held_out_dataset` is measured
        before and after.

        A second call goes on with the weights of the first, `Trainer.resume(run_dir).train()` with a run that was
        killed. Raises DatasetError where the store holds nothing that the algorithm can learn from, saying what is
        missing, and ConfigError for arguments that do not go together.
        """
        if target is not None and target_agent not in (None, target):
            raise ConfigError(f"target_agent={target_agent!r} and target={target!r} are two names of one setting")
        learning = given(steps=num_iterations, target_agent=target_agent if target_agent is not None else target)
        waiting = {"follow": follow, "follow_timeout": follow_timeout}
        data = given(method=method, success_threshold=success_threshold, **waiting)
        recorded = self.is_recorded or (self._resumed_from is None and agent is None and self.config.agent is None)
        if recorded and agent is not None:
            raise ConfigError("the run learns from recorded data, without an agent; leave it out, or data.sessions")
        if recorded and (train_dataset is not None or val_dataset is not None):
            raise ConfigError("tasks are for an agent to run: give agent=..., or leave the datasets out")
        if not recorded and (extra := [*data, *([] if eval_agent is None else ["eval_agent"])]):
            raise ConfigError(f"{', '.join(extra)}: for recorded sessions only; leave out the agent, or these")
        trainer = copy.copy(self)
        if learning:
            made = self._chosen.with_settings(learning, "given to train")
            trainer.algorithm = None if self.algorithm is None else made
            trainer.config = with_arguments(trainer.config, made)
        own = settings_from(DataConfig, data, base=trainer.config.data, source="given to train")
        trainer.config = trainer.config.model_copy(update={"data": own})
        if self._resumed_from is not None:
            check_changes(changed_settings(self._resumed_from, trainer.config))
        if not recorded:
            return trainer.fit(agent, train_dataset, val_dataset, held_out_dataset=held_out_dataset)
        result = run_sync(trainer._run(eval_agent, None, None, held_out_dataset, recorded=True))
        self._trained = result.checkpoint
        return result

    @property
    def is_recorded(self) -> bool:
        """Whether the settings, or the run that is resumed, learn from recorded data by `train`."""
        if self._resumed_from is not None:
            return read_state(self.run_dir).recorded is not None
        return self.config.is_recorded

    @property
    def _chosen(self) -> Algorithm[Any]:
        """The algorithm object, else the one that the settings name."""
        return self.algorithm or make_algorithm(self.config.algorithm)

    def _named_or_given(self, agent: Any) -> Any:
        """The agent, by default that of the settings. An agent or a reward that is given as a name becomes one."""
        named = {"agent": agent, "reward": self.reward}
        self.config = self.config.model_copy(update={key: name for key, name in named.items() if isinstance(name, str)})
        return agent if agent is not None else self.config.agent

    def _changes_rewards(self, agent: Any) -> bool:
        """Whether a resumed run has a changed agent, reward or reward weights. An object that replaces an object is
        assumed to be the same one."""
        before = self._resumed_from
        if before is None:
            return False
        objects = (("agent", agent, before.agent), ("reward", self.reward, before.reward))
        replaced = [part for part, given, named in objects if named is not None and not isinstance(given, str | None)]
        return bool(replaced) or changes_rewards(changed_settings(before, self.config))

    def _agent_of(self, agent: Any, state: RunState, *, recorded: bool = False) -> Any:
        """The agent to run. Raises ConfigError for none, ResumeError for an object that was not given again."""
        check_objects(self.run_dir, state, store=self.store, reward=self.reward, callbacks=self.callbacks)
        if agent is not None or not recorded:
            check_runners(self.config, None if recorded else self.store, agent, self.reward)
        return with_hooks(agent, self.hooks, self.config.runner.hooks)

    @contextmanager
    def _set_up(self, run_dir: RunDir, state: RunState) -> Generator[None]:
        """Discard a new run if its set-up fails, unless its warm start is done; record the changes of a resumed one."""
        try:
            yield
        except Exception:
            warmed_up = self.config.warm_start.dataset is not None and run_dir.start.exists()
            if self._resumed_from is None and self._trained is None and not warmed_up:
                run_dir.discard()
            raise
        if self._resumed_from is not None and (changes := changed_settings(self._resumed_from, self.config)):
            self._write_config(run_dir)
            with (run_dir.path / "changes.jsonl").open("ab") as file:
                file.write(record_of(changes, state.step))
            self.progress.note(f"changed: {describe_changes(changes)}")

    def _write_config(self, run_dir: RunDir) -> None:
        # Headers for a provider may hold its key.
        write_atomically(run_dir.path / "config.toml", dump_toml(self.config).encode(), private=True)

    # -- phases --------------------------------------------------------------------------------------------------------

    def _open(
        self, agent: Any, train: Any, validation: Any, held_out: Any, *, recorded: bool
    ) -> tuple[RunDir, RunState, Tasks]:
        """The run directory: new, resumed, or one whose result a further run on recorded data begins with. Raises
        ConfigError, DatasetError and ResumeError."""
        if not recorded:
            check_gateways(self.config, self.store, self._chosen)
        if self._resumed_from is not None and self._trained is None:
            if any(part is not None for part in (train, validation, held_out)):
                raise ConfigError(f"{self.run_dir} keeps its own tasks; resume it without datasets")
            run_dir = RunDir.open(self.run_dir)
            try:
                state = run_dir.read_state()
                if state.recorded is not None and not recorded:
                    raise ResumeError(
                        f"{self.run_dir} learns from recorded data, without an agent; continue it with Trainer.resume("
                        f"{str(self.run_dir)!r}).train(), or `agl train --resume {self.run_dir}`"
                    )
                check_extensions(self.run_dir, state, self.config, self._named)
                return run_dir, state, read_tasks(run_dir)
            except BaseException:
                run_dir.close()
                raise
        self.config = with_absolute_paths(self.config)
        if recorded:
            own = held_out if held_out is not None else self.config.data.held_out
            tasks = Tasks([], held_out=[] if own is None else load_dataset(own))
            data, store = recorded_data(self._chosen, is_object=self.algorithm is not None), None
        else:
            tasks, data, store = load_tasks(self.config, train, validation, held_out), None, self.store
        parts = {"agent": agent, "reward": self.reward, "store": store, "callbacks": self.callbacks or None}
        state = RunState(
            f"r{secrets.token_hex(4)}",
            None if data is not None and data.sources else algorithm_to_record(self.algorithm),
            [name for name, part in parts.items() if part is not None and not isinstance(part, str)],
            extensions_of(self.config),
            recorded=data,
        )
        if data is None or self._trained is None:
            run_dir = RunDir.create(self.run_dir)
            write_tasks(run_dir, tasks)
            self._write_config(run_dir)
            run_dir.write_state(state)
            return run_dir, state, tasks
        run_dir = RunDir.open(self.run_dir)
        for earlier in (run_dir.start, run_dir.reference):
            shutil.rmtree(earlier, ignore_errors=True)
        policy = self.config.policy.model_copy(update={"model": str(self._trained)})
        self.config = self.config.model_copy(update={"policy": policy})
        state.step = data.first_step = len(run_dir.read_metrics())
        return run_dir, state, tasks

    async def _fit(self, algorithm: Algorithm[Any], run: TrainingRun) -> TrainingResult:
        state, measurements = run.state, run.measurements
        random = run.learner is not None and has_random_weights(self.config)
        random = random and algorithm.objective == "reinforcement"
        run.account.warn(starting_warnings(random_weights=random, shared=measurements.tasks.shared()))
        if measurements.rollouts:
            self.progress.phase("measuring the starting policy", measurements.rollouts)
        at_start = state.measures_start(measurements.config.modes)
        before = await measurements.measure_start()
        if at_start:
            await self._load_checkpoint(run)
        # How many steps a search takes is not known: its budget ends it.
        self.progress.phase("training", None if algorithm.selects_result else run.total_steps, done=state.step)
        if state.step >= run.total_steps:
            self.progress.note(f"all {state.step} steps are done; with more (algorithm.steps=N) the run continues")
        await run.begin()
        with calls_of(type(algorithm), "algorithm"):
            await self._learn(algorithm, run)
        await run.finish()
        if measurements.rollouts:
            self.progress.phase("measuring the trained policy", measurements.rollouts)
        after = await measurements.measure_trained()
        return await run.report(before, after)

    async def _learn(self, algorithm: Algorithm[Any], run: TrainingRun) -> None:
        try:
            outcome = await algorithm.run(run)
        except NothingArrived as ended:
            outcome = ended
            await run.checkpoints.save()
        if run.recorded is not None:
            run.recorded.finish(outcome)

    async def _load_checkpoint(self, run: TrainingRun) -> None:
        """Continue from the last checkpoint once the starting policy is measured."""
        run_dir, state = run.account.run_dir, run.state
        run.checkpoints.publisher.publish(read_resources(run_dir.path, state.checkpoint))
        if run.learner is not None:
            async with run.learner.updating():
                await load_weights(run.learner.policy, run_dir, state, run.account.collector.store)

    @asynccontextmanager
    async def _wired(
        self,
        agent: Any,
        algorithm: Algorithm[Any],
        run_dir: RunDir,
        state: RunState,
        tasks: Tasks,
        recorded: RecordedSource | None = None,
    ) -> AsyncGenerator[tuple[Runner | None, TrainingRun]]:
        """The run and its runner: of `agent`, which in a run on `recorded` data only measures, and may be missing. Such
        a run keeps rollouts in a store of its own."""
        since, config = time.monotonic(), self.config if recorded is None else wired_settings(self.config, agent)
        given_store, state.learns_weights = self.store if recorded is None else None, algorithm.learns_weights
        if not algorithm.learns_weights:
            config = with_own_providers(config, self.progress.note)
        if algorithm.selects_result:
            check_disjoint(tasks)
        check_prices(algorithm, config)
        token, secret = credentials(given_store)
        async with AsyncExitStack() as stack:
            store = await open_store(given_store, run_dir, stack)
            self.progress.phase("loading the agent and the model")
            queue = queue_of(config.runner, given_store, state.run_id)
            runs_agent, runner = recorded is None or agent is not None, None
            if runs_agent and config.runner.hosts:
                redirect, log = algorithm.learns_weights or routes_models(config), run_dir.path / "agent.log"
                runner = make_runner(
                    config.runner, store, agent, self.reward, secret, redirect=redirect, queue=queue, log=log
                )
            host, port, url = config.run.host, config.run.port, joined_url(config)
            listener = await load_agent(runner, stack, host, port, policy=algorithm.learns_weights, url=url)
            policy = joined = None
            if algorithm.learns_weights:
                await make_starting_policy(config, run_dir, tasks, self.progress)
                check = partial(check_free, config, given_store, state.run_id)
                policy = await open_for_training(config, algorithm, run_dir, state, store, self.progress, check)
                stack.push_async_callback(policy.close)
            if config.run.gateways:
                opening = JoinedGateways.open(config, given_store, policy, state.run_id, self.progress.note)
                joined = await stack.enter_async_context(opening)
            own = None if joined else policy
            server = await serve_run(config, store, own, run_dir, stack, secret, token, listener)
            self.progress.note(f"dashboard: {server.url}{DASHBOARD}#token={token}")
            collector = make_collector(config, store, policy, queue)
            account = RunAccount(run_dir, state, collector, self.progress, since=since)
            stack.push_async_callback(account.close)
            if self.progress.enabled:
                timeout, own_store = config.runner.timeout_seconds, run_dir.store_path.exists()
                watching = watch_rollouts(store, state.run_id, self.progress, timeout, own_store=own_store)
                await stack.enter_async_context(in_background(watching))
            url = url or config.run.public_url or server.url
            await collector.move(state.run_id, url)
            if runner is None and runs_agent:
                waiting = report_missing_runners(given_store or store, state.run_id, self.progress.note)
                await stack.enter_async_context(in_background(waiting))
            elif runner is not None:
                await account.collector.recover(state.run_id, "the process that ran it ended")
                await runner.start(joined_url(config) or server.url)
                stack.push_async_callback(runner.stop)
            parts = tasks, policy, server, self.initial_resources
            others = make_callbacks(config.run.callbacks, self.callbacks)
            run = await make_training_run(config, algorithm, account, *parts, url, joined, recorded, others)
            run.target_agent = trained_agents(agent)
            with calls_of(type(algorithm), "algorithm"):
                run.prepared = await algorithm.prepare(run)
            yield runner, run


def given(**arguments: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: each for name, each in arguments.items() if each is not None}


# -- parts of a run ----------------------------------------------------------------------------------------------------


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
    stream = None if recorded else make_source(config, account, tasks, publisher, learner, algorithm)
    source: Any = recorded or stream
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
        stream=stream,
        uses_providers=bool(config.gateway.providers),
        joined=joined,
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
) -> Learner:
    if joined is not None:
        updating = joined.updating
    else:
        assert server.gateway is not None
        updating = partial(
            server.gateway.gates.of(policy).update,
            in_flight=config.policy.in_flight,
            drain_seconds=config.policy.drain_seconds if capabilities_of(policy).in_flight else None,
        )
    published, folder, publish = config.policy.weights, account.run_dir.path / "weights", None
    if published.url is not None:
        publish = load_plugin("publishers", "weights")(policy, published, folder).publish
    return Learner(
        policy,
        updating,
        config.policy.token_budget,
        resumes=account.state.resumes,
        publish_weights=publish,
    )


def make_source(
    config: TrainConfig,
    account: RunAccount,
    tasks: Tasks,
    publisher: ResourcePublisher,
    learner: Learner | None,
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
