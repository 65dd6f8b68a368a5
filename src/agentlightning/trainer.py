"""The trainer: builds the parts of a run, wires them together, runs the loop, and reports. The only sync door.

    prepare     tasks, starting policy (warm start included)
    before      held-out reward of the starting policy
    train       the algorithm's steps, validated and checkpointed
    after       held-out reward of the best checkpoint, paired with the first

Every phase finds out from the run directory what is done already, so that resuming is the same code as starting.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from agentlightning.algorithms import class_name, make_algorithm
from agentlightning.algorithms.base import Algorithm
from agentlightning.algorithms.lightning_rl import LightningRLConfig
from agentlightning.attempt_variables import OTLP_ENDPOINTS
from agentlightning.call_validation import TokenLimits
from agentlightning.config import PolicyConfig, RunConfig, RunnerConfig, TrainConfig
from agentlightning.engine.base import Engine
from agentlightning.errors import ConfigError, ResumeError
from agentlightning.evaluation.evaluation import Evaluation, gain_of
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.recording import raw_exchange
from agentlightning.policy.base import Policy
from agentlightning.policy.requirements import require_training
from agentlightning.resources import NamedResources
from agentlightning.runner import Runner
from agentlightning.server.app import Server, is_loopback
from agentlightning.server.serve import serve
from agentlightning.store import LightningStore
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.instrumented import observed
from agentlightning.store.journal.store import take_over
from agentlightning.tracing.otlp.exporter import OtlpExporter
from agentlightning.training.agent_runner import (
    check_runners,
    credentials,
    in_background,
    load_agent,
    make_runner,
    queue_of,
    rollout_config,
    say_where_no_runner_is,
    unless_it_ends,
)
from agentlightning.training.health import closing_warnings, starting_warnings
from agentlightning.training.result import TrainingResult
from agentlightning.training.reward_curve import draw_curve
from agentlightning.training.rollout_source import RolloutSource
from agentlightning.training.run import Tasks, TrainingRun
from agentlightning.training.run_changes import (
    changed_settings,
    changes_rewards,
    check_changes,
    describe_changes,
    overrides,
    record_of,
)
from agentlightning.training.run_dir import RunDir, RunState, write_atomically
from agentlightning.training.setup import (
    TINY,
    check_model,
    keep_tasks,
    load_checkpoint,
    load_tasks,
    make_start,
    measures_start,
    open_learner,
    open_models,
    read_tasks,
    with_absolute_paths,
    with_servers,
)
from agentlightning.util.event_loop import run_sync
from agentlightning.util.progress import Progress
from agentlightning.util.settings import dump_toml, load_settings, settings_from


class Trainer:
    """Trains an agent.

    Settings come from `config`; the keyword arguments are short ways to its most used fields. `algorithm` is run as it
    is, whatever its class; without one, it is made from the settings. `run_dir` is where everything is kept (default:
    `runs/<time>` below the current directory). `store` takes the place of the run's own.

        >>> agl.Trainer(algorithm=agl.LightningRL(steps=50), model="path/to/model", run_dir="runs/first")
        Trainer(algorithm='lightning_rl', model='path/to/model', run_dir='runs/first')
    """

    def __init__(
        self,
        config: TrainConfig | None = None,
        *,
        algorithm: Algorithm[Any] | None = None,
        model: str | Path | None = None,
        reward: Any | None = None,
        store: LightningStoreBase | None = None,
        run_dir: str | Path | None = None,
        n_runners: int | None = None,
        seed: int | None = None,
        initial_resources: NamedResources | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.algorithm = None if algorithm is None else _checked(algorithm)
        self.config = _with_shortcuts(config or TrainConfig(), self.algorithm, model, n_runners, seed)
        self.reward = reward if reward is not None else self.config.reward
        self.store = store
        self.run_dir = Path(run_dir) if run_dir is not None else Path("runs") / time.strftime("%Y%m%d-%H%M%S")
        self.initial_resources = dict(initial_resources or {})
        self.progress = progress or Progress()
        self._resumed_from: TrainConfig | None = None
        """The settings of the run that is resumed, before any change."""

    def __repr__(self) -> str:
        algorithm = self.algorithm.name if self.algorithm is not None else self.config.algorithm.type
        model = self.config.policy.model
        return f"Trainer(algorithm={algorithm!r}, model={model!r}, run_dir={str(self.run_dir)!r})"

    @classmethod
    def resume(cls, run_dir: str | Path, *, changes: Mapping[str, Any] | Sequence[str] = (), **options: Any) -> Trainer:
        """A trainer that continues the run in `run_dir`; then call `fit` (with the agent, where it was a live object).

        `changes` of settings, as `{"algorithm.steps": 200}` or as the command line has them, are recorded in the run;
        a run that is finished goes on with more steps. Another agent, reward or `algorithm.reward_weights` has the
        starting policy measured again, so that both measurements mean the same; an object that replaces an object is
        taken for the same one. `options` are those of `Trainer`.

        Raises ResumeError where there is no run, and ConfigError for a change that cannot be made.
        """
        before = settings_of_run(Path(run_dir))
        settings = settings_of_run(Path(run_dir), overrides(changes))
        trainer = cls(settings, run_dir=run_dir, **options)
        trainer._changes_from(before)
        return trainer

    def _changes_from(self, before: TrainConfig) -> None:
        self._resumed_from = before
        check_changes(changed_settings(before, self.config))

    def fit(
        self,
        agent: Any | None = None,
        train_dataset: Sequence[Any] | None = None,
        val_dataset: Sequence[Any] | None = None,
        *,
        held_out_dataset: Sequence[Any] | None = None,
    ) -> TrainingResult:
        """Train `agent` on the tasks of `train_dataset`; every argument defaults to what the configuration names.

        `val_dataset` chooses the best checkpoint; `held_out_dataset` measures the gain; where not given, shares of the
        training tasks are set aside. Ctrl-C ends it with KeyboardInterrupt and leaves the run resumable.
        """
        return run_sync(self.fit_async(agent, train_dataset, val_dataset, held_out_dataset=held_out_dataset))

    async def fit_async(
        self,
        agent: Any | None = None,
        train_dataset: Sequence[Any] | None = None,
        val_dataset: Sequence[Any] | None = None,
        *,
        held_out_dataset: Sequence[Any] | None = None,
    ) -> TrainingResult:
        """`fit`, for callers with an event loop of their own."""
        require_training()
        self._name_objects(agent)
        with self.progress:
            run_dir, state, tasks = self._open(train_dataset, val_dataset, held_out_dataset, agent)
            try:
                algorithm = self._algorithm_of(state)
                changed_rewards = self._changes_rewards(agent)
                if changed_rewards:
                    state.forget_measurements()
                async with AsyncExitStack() as stack:
                    with self._set_up(run_dir, state):
                        agent = self._agent_of(agent, state)
                        wired = self._wired(agent, algorithm, run_dir, state, tasks)
                        runner, run = await stack.enter_async_context(wired)
                        if changed_rewards:
                            await self._begin_revision(run)
                    return await unless_it_ends(runner, self._fit(algorithm, run))
            finally:
                run_dir.close()

    def _name_objects(self, agent: Any) -> None:
        """An agent or a reward that is a name is a setting, wherever it was given."""
        named = {"agent": agent, "reward": self.reward}
        self.config = self.config.model_copy(update={key: name for key, name in named.items() if isinstance(name, str)})

    def _changes_rewards(self, agent: Any) -> bool:
        """Whether a resumed run is given what makes its rewards mean something else. An object that takes the place of
        an object is taken for the same one."""
        before = self._resumed_from
        if before is None:
            return False
        objects = (("agent", agent, before.agent), ("reward", self.reward, before.reward))
        replaced = [part for part, given, named in objects if named is not None and not isinstance(given, str | None)]
        return bool(replaced) or changes_rewards(changed_settings(before, self.config))

    async def _begin_revision(self, run: TrainingRun) -> None:
        """What was queued before a change of what rewards mean is of no use any more."""
        await run.source.cancel(run.state.run_id)
        run.write_state()
        self.progress.note(
            "rewards from here on cannot be compared with those so far: the starting policy is measured again, the best"
            " checkpoint is chosen anew, and rollouts of the step under way are run again"
        )

    def _agent_of(self, agent: Any, state: RunState) -> Any:
        """The agent to run. Raises ConfigError where there is none, ResumeError where a part of the run that was a live
        object was not given again."""
        if "store" in state.objects and self.store is None:
            raise ResumeError(
                f"{self.run_dir} keeps its rollouts in a store that was given to it; give it again:"
                f" Trainer.resume({str(self.run_dir)!r}, store=...), or --server URL"
            )
        if "reward" in state.objects and self.reward is None:
            raise ResumeError(
                f"{self.run_dir} was started with a reward function that is an object; give it again:"
                f" Trainer.resume({str(self.run_dir)!r}, reward=...), or --reward module:name"
            )
        agent = agent if agent is not None else self.config.agent
        check_runners(self.config, self.store, agent, self.reward)
        return agent

    @contextmanager
    def _set_up(self, run_dir: RunDir, state: RunState) -> Generator[None]:
        """An error within leaves no new run behind, unless its warm start is done; after it, changes are recorded."""
        try:
            yield
        except Exception:
            warmed_up = self.config.warm_start.dataset is not None and run_dir.start.exists()
            if self._resumed_from is None and not warmed_up:
                run_dir.discard()
            raise
        if self._resumed_from is not None and (changes := changed_settings(self._resumed_from, self.config)):
            self._write_config(run_dir)
            run_dir.append_changes(record_of(changes, state.step))
            self.progress.note(f"changed: {describe_changes(changes)}")

    def _write_config(self, run_dir: RunDir) -> None:
        # The headers a provider is sent may hold its key.
        write_atomically(run_dir.path / "config.toml", dump_toml(self.config).encode(), private=True)

    def _algorithm_of(self, state: RunState) -> Algorithm[Any]:
        """The object that was given, or the one the settings name. Raises ResumeError where a resumed run had another,
        which its directory cannot bring back."""
        if self.algorithm is None and state.algorithm is None:
            return make_algorithm(self.config.algorithm)
        given = None if self.algorithm is None else class_name(self.algorithm)
        if given != (state.algorithm or class_name(make_algorithm(self.config.algorithm))):
            raise ResumeError(
                f"{self.run_dir} is trained by {state.algorithm or 'an algorithm made from its settings'}, not by"
                f" {given or 'one made from settings'}; give it the algorithm it had:"
                f" Trainer.resume({str(self.run_dir)!r}, algorithm=...)"
            )
        assert self.algorithm is not None
        return self.algorithm

    # -- phases --------------------------------------------------------------------------------------------------------

    def _open(
        self,
        train: Sequence[Any] | None,
        validation: Sequence[Any] | None,
        held_out: Sequence[Any] | None,
        agent: Any | None,
    ) -> tuple[RunDir, RunState, Tasks]:
        if self._resumed_from is not None:
            if any(part is not None for part in (train, validation, held_out)):
                raise ConfigError(f"{self.run_dir} keeps its own tasks; resume it without datasets")
            run_dir = RunDir.open(self.run_dir)
            try:
                return run_dir, run_dir.read_state(), read_tasks(run_dir)
            except BaseException:
                run_dir.close()
                raise
        check_runners(self.config, self.store, agent or self.config.agent, self.reward)
        self.config = with_absolute_paths(self.config)
        tasks = load_tasks(self.config, train, validation, held_out)
        run_dir = RunDir.create(self.run_dir)
        keep_tasks(run_dir, tasks)
        self._write_config(run_dir)
        stock = self.algorithm is None or type(self.algorithm) is type(make_algorithm(self.config.algorithm))
        name = None if self.algorithm is None or stock else class_name(self.algorithm)
        parts = {"agent": agent, "reward": self.reward, "store": self.store}
        objects = [name for name, part in parts.items() if part is not None and not isinstance(part, str)]
        state = RunState(run_id=f"r{secrets.token_hex(4)}", algorithm=name, objects=objects)
        run_dir.write_state(state)
        return run_dir, state, tasks

    async def _fit(self, algorithm: Algorithm[Any], run: TrainingRun) -> TrainingResult:
        held_out = len(run.tasks.held_out[: self.config.evaluation.held_out_tasks])
        measurements = held_out * len(self.config.evaluation.modes)
        random = self.config.policy.model == TINY and self.config.warm_start.dataset is None
        run.warn(starting_warnings(random_weights=random and algorithm.objective == "reinforcement"))
        self.progress.phase("measuring the starting policy", measurements)
        at_start = measures_start(self.config, run.state)
        before = await run.measure("before", strict=True)
        if at_start:
            async with run.updating():
                await load_checkpoint(run.policy, run.run_dir, run.state, run.store)
        self.progress.phase("training", run.total_steps, done=run.step)
        if run.step >= run.total_steps:
            self.progress.note(f"all {run.step} steps are done; with more (algorithm.steps=N) the run goes on")
        run.run_dir.forget_metrics_after(run.state.step)
        run.records[:] = run.run_dir.read_metrics()
        await algorithm.run(run)
        if run.state.best_checkpoint is not None and run.state.best_step != run.state.step:
            await run.load(run.run_dir.path / run.state.best_checkpoint)
        self.progress.phase("measuring the trained policy", measurements)
        after = await run.measure_trained()
        return await _report(run, before, after)

    # -- wiring --------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _wired(
        self, agent: Any, algorithm: Algorithm[Any], run_dir: RunDir, state: RunState, tasks: Tasks
    ) -> AsyncGenerator[tuple[Runner | None, TrainingRun]]:
        config, since = self.config, time.monotonic()
        token, secret = credentials(self.store)
        async with AsyncExitStack() as stack:
            store = self.store
            if store is None:
                store = LightningStore(run_dir.store_path)
                stack.push_async_callback(store.close)
            store = _exported(store, stack)
            await take_over(store, raw_exchange.read)
            self.progress.phase("loading the agent and the model")
            queue, runner = queue_of(config.runner, self.store, state.run_id), None
            if config.runner.hosts:
                log = run_dir.path / "agent.log"
                runner = make_runner(config.runner, store, agent, self.reward, secret, queue=queue, log=log)
            listener = await load_agent(runner, stack, config.run.host, config.run.port, policy=True)
            await make_start(config, run_dir, tasks, self.progress)
            learner = await open_learner(config, algorithm, run_dir, state, store)
            policy = await with_servers(learner, config, run_dir, self.progress)
            stack.push_async_callback(policy.close)
            engines = {policy.model: policy} | await open_models(config.gateway.models, stack, run_dir.path)
            serving = _serve(store, engines, config, run_dir, secret=secret, token=token, listener=listener)
            server = await stack.enter_async_context(serving)
            assert server.gateway is not None
            limits = rollout_config(config.runner), config.runner.max_failed_share
            tokens = TokenLimits(policy.vocab_size, policy.context_length)
            source = RolloutSource(store, *limits, model=policy.model, limits=tokens, queue=queue)
            if runner is None:
                stack.enter_context(
                    in_background(say_where_no_runner_is(self.store or store, state.run_id, self.progress.note))
                )
            else:
                await source.recover(state.run_id, "the process that ran it ended")
                await runner.start(server.url)
                stack.push_async_callback(runner.stop)
            run = TrainingRun(
                config=config,
                run_dir=run_dir,
                state=state,
                store=store,
                policy=policy,
                source=source,
                tasks=tasks,
                server_url=config.run.public_url or server.url,
                updating=partial(_updating, server.gateway, policy, config.policy),
                progress=self.progress,
                total_steps=algorithm.total_steps,
                reward_weights=algorithm.reward_weights,
                target_agent=_trained_agents(agent),
                resources=self.initial_resources,
                since=since,
            )
            yield runner, run


def _exported(store: LightningStoreBase, stack: AsyncExitStack) -> LightningStoreBase:
    """The store; its spans also go where OpenTelemetry's environment variables say."""
    endpoint = next(filter(None, map(os.environ.get, OTLP_ENDPOINTS)), None)
    if endpoint is None:
        return store
    exporter = OtlpExporter(endpoint)
    stack.push_async_callback(asyncio.to_thread, exporter.close)
    return observed(store, [exporter])


def _serve(
    store: LightningStoreBase,
    engines: Mapping[str, Engine],
    config: TrainConfig,
    run_dir: RunDir,
    *,
    secret: str,
    token: str,
    listener: socket.socket | None = None,
) -> AbstractAsyncContextManager[Server]:
    """The policy, the first of the engines, serves all calls that no route sends elsewhere."""
    return serve(
        store,
        engines,
        secret=secret,
        token=token,
        routing=config.gateway,
        accept_any_model=True,
        require_key=not is_loopback(config.run.host),
        budget_file=run_dir.path / "spent",
        host=config.run.host,
        listener=listener,
    )


def _trained_agents(agent: Any) -> str | None:
    """Which agents are to be trained, where the agent is an object that says so."""
    target = getattr(agent, "trained_agents", None)
    return settings_from(LightningRLConfig, {"target_agent": target}, source="trained_agents of the agent").target_agent


def settings_of_run(run_dir: Path, changes: Sequence[str] = ()) -> TrainConfig:
    """The configuration of a run, with `changes` as the command line has them. Raises ResumeError where there is no
    run."""
    path = run_dir / "config.toml"
    if not path.exists():
        raise ResumeError(f"{run_dir} holds no run: {path} does not exist")
    return load_settings(TrainConfig, toml=path, overrides=changes)


def _with_shortcuts(
    config: TrainConfig,
    algorithm: Algorithm[Any] | None,
    model: str | Path | None,
    n_runners: int | None,
    seed: int | None,
) -> TrainConfig:
    changes: dict[str, Any] = {}
    settings = getattr(algorithm, "config", None)
    if isinstance(settings, LightningRLConfig):
        changes["algorithm"] = settings
    model = _model_of(model, algorithm)
    if model is not None:
        changes["policy"] = settings_from(PolicyConfig, {"model": str(model)}, base=config.policy)
    if n_runners is not None:
        values = {"hosts": n_runners}
        changes["runner"] = settings_from(RunnerConfig, values, base=config.runner, source="given as n_runners")
    if seed is not None:
        changes["run"] = settings_from(RunConfig, {"seed": seed}, base=config.run, source="given to Trainer")
    return config.model_copy(update=changes)


def _checked(algorithm: object) -> Algorithm[Any]:
    if isinstance(algorithm, Algorithm):
        return algorithm  # pyright: ignore[reportUnknownVariableType]
    shown = algorithm.__name__ if isinstance(algorithm, type) else repr(algorithm)
    way_out = f"give an object: {shown}(...)" if isinstance(algorithm, type) else "give agl.LightningRL(steps=100)"
    raise ConfigError(f"algorithm={shown} is no algorithm; {way_out}, or an object of your own subclass of Algorithm")


def _model_of(model: object, algorithm: Algorithm[Any] | None) -> str | Path | None:
    """The model to train, named by the trainer's argument or by the algorithm."""
    own = None if algorithm is None else algorithm.model
    for given in (model, own):
        if given is not None:
            check_model(given)
    if model is not None and own is not None and str(model) != str(own):
        raise ConfigError(f"model={str(model)!r} was given to the trainer and {str(own)!r} to the algorithm; give one")
    found = model if model is not None else own
    return found if isinstance(found, str | Path) else None


def _updating(gateway: Gateway, policy: Policy, settings: PolicyConfig) -> AbstractAsyncContextManager[bool]:
    return gateway.gates.of(policy).update(
        in_flight=settings.in_flight,
        drain_seconds=settings.drain_seconds,
        can_go_on=policy.can_update_in_flight,
    )


async def _report(
    run: TrainingRun, before: Mapping[str, Evaluation], after: Mapping[str, Evaluation]
) -> TrainingResult:
    gains = {mode: gain_of(before[mode], after[mode]) for mode in before if before[mode].rewards}
    checkpoint, curve = run.run_dir.path / "checkpoint", run.run_dir.path / "curve.png"
    await run.policy.save(checkpoint)
    draw_curve(run.run_dir.read_metrics(), {mode: gain for mode, gain in gains.items() if gain.tasks}, curve)
    run.write_state()
    result = TrainingResult(
        held_out=gains,
        missing=dict(run.state.reasons),
        rollouts=run.state.rollouts,
        failed_rollouts=run.state.failed_rollouts,
        rejected_rollouts=dict(run.state.rejected),
        skipped_groups=run.state.skipped_groups,
        warnings=(*run.state.warnings.values(), *closing_warnings(run.records, gains).values()),
        steps=run.state.step,
        best_step=run.state.best_step,
        seconds=run.state.seconds,
        checkpoint=checkpoint,
        curve=curve,
        run_dir=run.run_dir.path,
    )
    write_atomically(run.run_dir.path / "report.json", orjson.dumps(result.as_json(), option=orjson.OPT_INDENT_2))
    return result
