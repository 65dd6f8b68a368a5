"""The trainer: builds the parts of a run, connects them, runs the loop, and reports. The only synchronous entry point.

    prepare     tasks, starting policy (warm start included)
    before      held-out reward of the starting policy
    train       the algorithm's steps, validated and checkpointed
    after       held-out reward of the best checkpoint, paired with the first

Every phase reads from the run directory what is done already, so that resuming is the same code as starting. An
algorithm that learns no weights is run without a policy, and without torch.
"""

from __future__ import annotations

import copy
import secrets
import shutil
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agentlightning.algorithms.base import Algorithm, make_algorithm
from agentlightning.algorithms.recorded.plan import MethodSetting
from agentlightning.compat.algorithm import Baseline, with_adapter
from agentlightning.compat.runner import Hook, check_tracer, with_hooks
from agentlightning.config import DataConfig, TrainConfig
from agentlightning.dashboard.app import PATH as DASHBOARD
from agentlightning.dashboard.app import dashboard_routes
from agentlightning.dashboard.data.run_data import dashboard_of_run
from agentlightning.errors import ConfigError, ResumeError
from agentlightning.policy.open import follow_trainer, require_training
from agentlightning.resources import NamedResources, Resource, as_resources
from agentlightning.runner import Runner
from agentlightning.store.base import LightningStoreBase
from agentlightning.task import load_dataset
from agentlightning.training import dry_run
from agentlightning.training.account import RunAccount
from agentlightning.training.agent_runner import (
    check_runners,
    credentials,
    load_agent,
    make_runner,
    queue_of,
    report_missing_runners,
    routes_models,
    run_beside,
)
from agentlightning.training.build import make_collector, make_training_run, open_store, serve_run
from agentlightning.training.callbacks import Callback, make_callbacks
from agentlightning.training.dry_run import DryRun
from agentlightning.training.environment_providers import with_own_providers
from agentlightning.training.health.examination import starting_warnings
from agentlightning.training.joined_gateways import JoinedGateways, check_free, check_gateways, joined_url
from agentlightning.training.persistence.checkpoints import load_weights, read_resources
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
from agentlightning.training.run import TrainingRun
from agentlightning.training.starting_policy import has_random_weights, make_starting_policy, open_for_training
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
from agentlightning.util.plugins import calls_of
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
        algorithm = self.algorithm.name if self.algorithm is not None else self.config.algorithm.type
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
        self._name_objects(agent)
        agent = agent if agent is not None else self.config.agent
        run_dir, state, tasks = self._open(agent, *datasets, recorded=False)
        try:
            algorithm = self.algorithm or make_algorithm(self.config.algorithm)
            agent = self._agent_of(agent, state)
            wired = partial(self._wired, agent, algorithm, run_dir, state, tasks)
            return await dry_run.dry_run(config, algorithm, tasks, wired)
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
        chosen = self.algorithm or make_algorithm(self.config.algorithm)
        if not recorded:
            check_live(chosen, self.config)
        if chosen.learns_weights:
            require_training()
            follow_trainer(self.config.policy)
        self._name_objects(agent)
        agent = agent if agent is not None else self.config.agent
        with self.progress:
            run_dir, state, tasks = self._open(agent, *datasets, recorded=recorded)
            try:
                async with AsyncExitStack() as stack:
                    with self._set_up(run_dir, state):
                        algorithm = algorithm_of_run(self.algorithm, self.config, state.algorithm, self.run_dir)
                        changed_rewards = self._changes_rewards(agent)
                        if changed_rewards:
                            state.forget_measurements()
                        config, source = self.config, None
                        if recorded:
                            check_recorded(algorithm, config, agent, tasks.held_out)
                            store = sessions_of(algorithm, self.store)
                            opening = open_recorded(config, algorithm, store, run_dir, state, self.progress, stack)
                            self.config, source = await opening
                            write_tasks(run_dir, tasks)
                            self._write_config(run_dir)
                            algorithm, config = source.plan.algorithm, wired_settings(self.config, agent)
                        agent = self._agent_of(agent, state, recorded=recorded)
                        wired = self._wired(agent, algorithm, run_dir, state, tasks, config, source)
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
            made = (self.algorithm or make_algorithm(self.config.algorithm)).with_settings(learning, "given to train")
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

    def _name_objects(self, agent: Any) -> None:
        """Treat an agent or a reward that is given as a name as a setting."""
        named = {"agent": agent, "reward": self.reward}
        self.config = self.config.model_copy(update={key: name for key, name in named.items() if isinstance(name, str)})

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
            run_dir.append_changes(record_of(changes, state.step))
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
        algorithm = self.algorithm or make_algorithm(self.config.algorithm)
        if not recorded:
            check_gateways(self.config, self.store, algorithm)
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
            data, store = recorded_data(algorithm, is_object=self.algorithm is not None), None
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
        config: TrainConfig | None = None,
        recorded: RecordedSource | None = None,
    ) -> AsyncGenerator[tuple[Runner | None, TrainingRun]]:
        """The run and its runner: of `agent`, which in a run on `recorded` data only measures, and may be missing. Such
        a run keeps rollouts in a store of its own."""
        config, since = config or self.config, time.monotonic()
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
            place: Any = {"host": config.run.host, "port": config.run.port, "url": joined_url(config)}
            listener, policy = await load_agent(runner, stack, policy=algorithm.learns_weights, **place), None
            if algorithm.learns_weights:
                await make_starting_policy(config, run_dir, tasks, self.progress)
                check = partial(check_free, config, given_store, state.run_id)
                policy = await open_for_training(config, algorithm, run_dir, state, store, self.progress, check)
                stack.push_async_callback(policy.close)
            data = dashboard_of_run(run_dir.path, store)
            stack.push_async_callback(data.close)
            pages = dashboard_routes(data, token)
            joined = None
            if config.run.gateways:
                opening = JoinedGateways.open(config, given_store, policy, state.run_id, self.progress.note)
                joined = await stack.enter_async_context(opening)
            own = None if joined else policy
            server = await serve_run(config, store, own, run_dir, stack, secret, token, listener, pages)
            self.progress.note(f"dashboard: {server.url}{DASHBOARD}#token={token}")
            collector = make_collector(config, store, policy, queue)
            account = RunAccount(run_dir, state, collector, self.progress, since=since)
            stack.push_async_callback(account.close)
            if self.progress.enabled:
                timeout, own_store = config.runner.timeout_seconds, run_dir.store_path.exists()
                watching = watch_rollouts(store, state.run_id, self.progress, timeout, own_store=own_store)
                await stack.enter_async_context(in_background(watching))
            url = joined_url(config) or config.run.public_url or server.url
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
