"""Learns from recorded data: makes the plan, runs the algorithm, writes checkpoints, and measures the gain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import orjson

from agentlightning.algorithms.base import Algorithm, class_name
from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.preference import DPO
from agentlightning.algorithms.recorded.preference_records import conversations, load_preferences
from agentlightning.algorithms.recorded.sessions import Session, Sessions, read_sessions
from agentlightning.algorithms.sequential import Sequential
from agentlightning.algorithms.sft import SFTAlgorithm, learn
from agentlightning.algorithms.training import Collected
from agentlightning.config import RunnerConfig, TrainConfig
from agentlightning.credit.rejection import Rejection
from agentlightning.errors import ConfigError, PolicyError, ResumeError, TrainingStopped
from agentlightning.evaluation.evaluation import Evaluation
from agentlightning.evaluation.intervals import Gain, paired_gain
from agentlightning.models.resolve import TINY
from agentlightning.policy import open as opening
from agentlightning.policy.base import Policy
from agentlightning.resources import LLM
from agentlightning.server.serve import serve
from agentlightning.store import InMemoryLightningStore
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.trajectory_query import TrajectoryQuery
from agentlightning.task import load_dataset
from agentlightning.training.agent_runner import credentials, load_agent, make_runner, rollout_config
from agentlightning.training.measurements import TEMPERATURES, evaluate_tasks
from agentlightning.training.persistence.run_dir import OFFLINE_FILE, RunDir, write_atomically
from agentlightning.training.recorded.plan import OfflineOptions, Plan, Planner, ids, query_of
from agentlightning.training.recorded.position import (
    CHECKPOINT_EVERY,
    HELD_OUT_FILE,
    OfflinePosition,
    described,
    store_file,
)
from agentlightning.training.recorded.result import OfflineResult
from agentlightning.training.recorded.run import RecordedLoop, RecordedTraining, learner_of
from agentlightning.training.recorded.source import POLL_SECONDS, ArrivingSource, SessionSource, describe
from agentlightning.training.sources.collector import EVALUATION_ADVICE, RolloutCollector, RolloutPlan
from agentlightning.training.sources.reader import TrajectoryReader
from agentlightning.util.json_values import dumps
from agentlightning.util.progress import Progress
from agentlightning.util.settings import dump_toml

# -- agent runs ------------------------------------------------------------------------------------------------------

# Runs an agent on tasks while a policy of this process answers its calls: to measure it, or to record sessions.

Mode = Literal["greedy", "sampled"]


@dataclass(slots=True)
class AgentRuns:
    """An agent whose runners wait for tasks."""

    collector: RolloutCollector
    url: str
    policy: Policy
    max_calls: int | None = None
    """Answers of the policy that a rollout may be given."""
    _measured: int = field(default=0, init=False)

    async def _resources(self, temperature: float) -> str:
        sampling = {"temperature": temperature}
        llm = LLM(endpoint=self.url, model=self.policy.model, sampling_parameters=sampling, max_calls=self.max_calls)
        return (await self.collector.store.add_resources({"llm": llm})).resources_id

    async def measure(self, tasks: Sequence[Any], mode: Mode) -> Evaluation:
        """The reward of each task under the present weights, one rollout each."""
        self._measured += 1
        resources_id = await self._resources(TEMPERATURES[mode])
        name = f"measurement-{self._measured}"
        return await evaluate_tasks(self.collector, tasks, name=name, resources_id=resources_id, require_reward=True)

    async def record(self, tasks: Sequence[Any], sessions: int) -> Collected:
        """`sessions` rollouts of each task at temperature 1, kept in the store."""
        plans = [
            RolloutPlan(f"session-{index:05d}-{number}", task, f"task-{index:05d}")
            for index, task in enumerate(tasks)
            for number in range(sessions)
        ]
        return await self.collector.collect(plans, resources_id=await self._resources(1.0), max_rejected_share=1.0)


@asynccontextmanager
async def agent_runs(
    policy: Policy, store: LightningStoreBase, agent: Any, reward: Any | None, config: RunnerConfig
) -> AsyncGenerator[AgentRuns]:
    """Starts the agent's runners and a server of the policy, and stops them."""
    token, secret = credentials()
    async with AsyncExitStack() as stack:
        runner = make_runner(config, store, agent, reward, secret)
        listener = await load_agent(runner, stack, policy=True)
        serving = serve(store, {policy.model: policy}, secret=secret, token=token, listener=listener)
        server = await stack.enter_async_context(serving)
        await runner.start(server.url)
        stack.push_async_callback(runner.stop)
        reader = TrajectoryReader(store, policy.model)
        collector = RolloutCollector(
            reader,
            rollout_config(config),
            max_failed_share=config.max_failed_share,
            advice=EVALUATION_ADVICE,
        )
        yield AgentRuns(collector, server.url, policy, config.max_calls)


@dataclass(frozen=True, slots=True)
class OfflineJob:
    """One call of `train` on recorded data."""

    config: TrainConfig
    algorithm: Algorithm[Any]
    store: LightningStoreBase
    options: OfflineOptions
    run_dir: Path
    progress: Progress
    model: Path | None = None
    """What an earlier call in the same directory has made of the model."""
    reward: Any = None
    position: OfflinePosition | None = None
    """Of the run that is resumed."""

    @property
    def target(self) -> str | None:
        own = getattr(getattr(self.algorithm, "config", None), "target_agent", None)
        return self.options.target_agent or own

    @property
    def reads_store(self) -> bool:
        return reads_store(self.algorithm)

    # -- before ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        options, algorithm = self.options, self.algorithm
        if not algorithm.learns_weights:
            raise ConfigError(
                f"{type(algorithm).__name__} trains no weights, so recorded sessions teach it nothing; give an agent"
                " and tasks: train(agent=..., train_dataset=...)"
            )
        if isinstance(algorithm, Sequential):
            raise ConfigError(
                "Sequential runs an agent in each of its stages; give train(agent=..., train_dataset=...), or one"
                " algorithm to learn from recorded sessions"
            )
        if options.num_iterations is not None and options.num_iterations < 1:
            raise ConfigError(f"num_iterations={options.num_iterations} trains nothing; use at least 1")
        if (options.eval_agent is None) != (options.held_out_dataset is None):
            raise ConfigError("eval_agent and held_out_dataset go together: give both, or neither")
        if options.method != "auto" and not isinstance(algorithm, LightningRL):
            raise ConfigError(f"method={options.method!r} is a setting of LightningRL, not of {algorithm.name!r}")
        if options.follow_timeout is not None and not options.follow:
            raise ConfigError(f"follow_timeout={options.follow_timeout:g} has a meaning with follow=True only")
        if options.follow and not isinstance(algorithm, LightningRL):
            raise ConfigError(f"follow=True is for LightningRL; {algorithm.name!r} learns from what is there")
        if options.follow and options.method == "rejection":
            raise ConfigError(
                'follow=True learns by "importance" or "awr"; method="rejection" learns from what is there'
            )

    async def sessions(self) -> Sessions:
        """What the store holds, or held when the run began; with `follow`, once it holds something."""
        if not self.reads_store:
            return Sessions(())
        query = query_of(self.algorithm, self.store, self.options)
        store = self.store if query is None else query.store
        wanted = None if self.position is None else self.position.rollouts
        found = await read_sessions(store, ids=wanted)
        if wanted is not None and (lost := len(wanted) - len(found.usable) - len(found.rejected)):
            self.progress.note(f"warning: {lost} sessions of this run are no longer in the store")
        since = time.monotonic()
        timeout = self.options.follow_timeout
        while self.options.follow and not found.usable and (timeout is None or time.monotonic() - since < timeout):
            await asyncio.sleep(POLL_SECONDS)
            found = await read_sessions(store)
        found.check()
        found.check_target(self.target)
        return found

    async def starting_model(self, sessions: Sequence[Session]) -> str:
        """The directory of the model to train."""
        if self.position is not None:
            return self.position.model
        if self.model is not None:
            return str(await asyncio.to_thread(self.model.resolve))
        named = self.config.policy.model
        if named != TINY:
            return await asyncio.to_thread(lambda: str(Path(named).resolve()) if Path(named).exists() else named)
        records = self._own_conversations() or _texts(sessions)
        if not records:
            raise ConfigError("no model: give model=NAME to the trainer, such as smollm2-135m or a directory")
        from agentlightning.models.tiny import make_tiny

        self.progress.note(
            "warning: a tiny model with random weights is trained; for another set model=, such as smollm2-135m"
        )
        directory = (self.run_dir / TINY).resolve()
        return str(await asyncio.to_thread(make_tiny, directory, records, seed=self.config.run.seed))

    def _own_conversations(self) -> list[Any]:
        """Those that the algorithm was given as a file or as a list of them."""
        if isinstance(self.algorithm, DPO) and self.algorithm.has_dataset:
            return conversations(load_preferences(self.algorithm.data))
        found = self.algorithm.dataset if isinstance(self.algorithm, SFTAlgorithm) else ()
        if isinstance(found, str | Path):
            return load_dataset(found)
        return [] if isinstance(found, TrajectoryQuery) else [each for each in found if isinstance(each, Mapping)]

    async def open(self, model: str, plan: Plan) -> Policy:
        """The policy, at the position of the run."""
        algorithm, settings = plan.algorithm, self.config.policy
        lora = algorithm.config.lora if isinstance(algorithm, SFTAlgorithm) else None
        if lora is not None and settings.lora not in (None, lora):
            raise ConfigError("lora was given to the algorithm and, another one, as policy.lora; give one of them")
        if lora is not None:
            settings = settings.model_copy(update={"lora": lora})
        policy = await opening.open_policy(
            opening.policy_config(
                settings,
                model,
                optimizer=algorithm.optimizer or getattr(self.config.algorithm, "optimizer", None),
                steps=algorithm.optimizer_steps,
                objective=plan.objective,
                seed=self.config.run.seed,
                agents=algorithm.agents,
            )
        )
        if self.position is None or self.position.checkpoint is None:
            return policy
        directory = self.run_dir / self.position.checkpoint
        try:
            await policy.load(directory)
        except PolicyError as error:
            await policy.close()
            raise ResumeError(f"{self.run_dir} cannot continue from {directory}: {error}") from error
        plan.algorithm.load_state_dict(self.position.algorithm_state)
        return policy

    def new_position(self, plan: Plan, sessions: Sessions, model: str, first_line: int) -> OfflinePosition:
        settings, sources, objects = described(self.algorithm)
        query = query_of(self.algorithm, self.store, self.options)
        store = (self.store if query is None else query.store) if self.reads_store else None
        file = store_file(store)
        if store is not None and file is None:
            objects.append("store")
        objects += ["eval_agent"] if not isinstance(self.options.eval_agent, str | None) else []
        objects += ["reward"] if not isinstance(self.reward, str | None) else []
        held = [each.rollout.rollout_id for each in sessions.usable] + list(ids(sessions.rejected))
        return OfflinePosition(
            algorithm=class_name(self.algorithm),
            settings=settings,
            given=sorted(getattr(getattr(self.algorithm, "config", None), "model_fields_set", ())),
            sources=sources,
            options=self.options.as_json(),
            model=model,
            checkpoint_every=self.config.run.checkpoint_every or CHECKPOINT_EVERY,
            store=file,
            objects=objects,
            rollouts=None if self.options.follow or not self.reads_store else held,
            method=plan.method,
            first_line=first_line,
            left_out={"modes_val_and_test": sessions.measured} if sessions.measured else {},
        )

    # -- measuring -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def measuring(self, policy: Policy) -> AsyncGenerator[AgentRuns | None]:
        if self.options.eval_agent is None:
            yield None
            return
        store = InMemoryLightningStore()
        try:
            agent, config = self.options.eval_agent, self.config.runner
            async with agent_runs(policy, store, agent, self.reward, config) as runs:
                yield runs
        finally:
            await store.close()

    async def measure(self, runs: AgentRuns | None, tasks: Sequence[Any], phase: str) -> Mapping[str, Evaluation]:
        if runs is None:
            return {}
        self.progress.phase(phase, len(tasks) * len(self.config.evaluation.modes))
        return {mode: await runs.measure(tasks, mode) for mode in self.config.evaluation.modes}

    async def measure_start(
        self, runs: AgentRuns | None, tasks: Sequence[Any], position: OfflinePosition
    ) -> Mapping[str, Evaluation]:
        """Of the starting weights, unless that was done before the run was resumed."""
        if position.before or runs is None:
            return {mode: Evaluation(tuple(rewards)) for mode, rewards in position.before.items()}
        if position.step:
            self.progress.note(
                "warning: this run was not measured when it began, so its gain is not known; it is measured at its end"
            )
            return {}
        before = await self.measure(runs, tasks, "measuring before")
        position.before = {mode: list(each.rewards) for mode, each in before.items()}
        return before


def reads_store(algorithm: Algorithm[Any]) -> bool:
    """Whether it learns from sessions of a store, and not from data of its own."""
    if isinstance(algorithm, SFTAlgorithm):
        return isinstance(algorithm.dataset, TrajectoryQuery) or not algorithm.has_dataset
    return not (isinstance(algorithm, DPO) and algorithm.has_dataset)


def _texts(sessions: Sequence[Session]) -> list[Any]:
    """What the model calls of sessions say, or the tasks of sessions without any."""
    return [
        {"messages": [*call.messages, call.answer], "tools": list(call.tools)}
        for session in sessions
        for call in session.calls
        if call.messages and call.answer is not None
    ] or [session.rollout.input for session in sessions]


async def learn_offline(job: OfflineJob) -> OfflineResult:
    """Train on recorded data; the model is in `run_dir/checkpoint` afterwards.

    Raises DatasetError where there is nothing that the algorithm can learn from, saying what is missing."""
    started = time.monotonic()
    job.check()
    run_dir, lines = await asyncio.to_thread(_open, job)
    begun = job.position is not None or job.model is not None
    try:
        job.progress.phase("reading sessions" if job.reads_store else "reading the data")
        tasks = [] if job.options.held_out_dataset is None else load_dataset(job.options.held_out_dataset)
        sessions = await job.sessions()
        model = await job.starting_model(sessions.usable)
        planner = Planner(job.config, job.store, _options(job), job.target, model)
        plan = await planner.plan(job.algorithm, sessions)
        plan = replace(plan, rejected=[*sessions.rejected, *plan.rejected])
        position = job.position or job.new_position(plan, sessions, model, lines)
        async with AsyncExitStack() as stack:
            policy = await job.open(model, plan)
            stack.push_async_callback(policy.close)
            await asyncio.to_thread(_write_start, job, tasks, position)
            begun = True
            started -= position.seconds
            return await _learn(job, plan, position, policy, tasks, model, started)
    except Exception:
        if not begun:
            await asyncio.to_thread(run_dir.discard)
        raise
    finally:
        run_dir.close()


def _open(job: OfflineJob) -> tuple[RunDir, int]:
    """The run directory, and the lines of metrics of earlier calls of `train` in it."""
    if job.position is not None:
        run_dir = RunDir.open(job.run_dir, OFFLINE_FILE)
        run_dir.forget_metrics_after(job.position.first_line + job.position.step)
        return run_dir, job.position.first_line
    if job.model is not None and (job.run_dir / OFFLINE_FILE).exists():
        run_dir = RunDir.open(job.run_dir, OFFLINE_FILE)
        return run_dir, len(run_dir.read_metrics())
    return RunDir.create(job.run_dir), 0


def _options(job: OfflineJob) -> OfflineOptions:
    """A resumed run learns by the method it began with, whatever the store holds now."""
    method = None if job.position is None else job.position.method
    if method is None or not isinstance(job.algorithm, LightningRL):
        return job.options
    return replace(job.options, method=method)  # pyright: ignore[reportArgumentType]


def _write_start(job: OfflineJob, tasks: Sequence[Any], position: OfflinePosition) -> None:
    if job.position is not None:
        return
    write_atomically(job.run_dir / "config.toml", dump_toml(job.config).encode(), private=True)
    if tasks:
        lines = b"".join(dumps(task) + b"\n" for task in tasks)
        write_atomically(job.run_dir / HELD_OUT_FILE, lines)
    position.write(job.run_dir)


async def _learn(
    job: OfflineJob,
    plan: Plan,
    position: OfflinePosition,
    policy: Policy,
    tasks: Sequence[Any],
    model: str,
    started: float,
) -> OfflineResult:
    run = await _make_run(job, plan, position, policy, model)

    async def write(training: RecordedTraining) -> None:
        directory = Path("checkpoints") / f"step-{training.step:06d}"
        await policy.save(job.run_dir / directory, training_state=True)
        position.checkpoint = str(directory)
        _note(position, training, plan, time.monotonic() - started)
        await asyncio.to_thread(position.write, job.run_dir)

    run.checkpoint = write
    async with job.measuring(policy) as runs:
        before = await job.measure_start(runs, tasks, position)
        _note(position, run, plan, time.monotonic() - started)
        await asyncio.to_thread(position.write, job.run_dir)
        job.progress.phase("training", run.total_steps, done=run.step)
        if run.step >= run.total_steps:
            job.progress.note(f"all {run.step} steps are done; with more (num_iterations=N) the run continues")
        await _run(plan.algorithm, run, policy)
        after = await job.measure(runs, tasks, "measuring after")
    await policy.save(job.run_dir / "checkpoint")
    result = _result(job, plan, run, before, after, time.monotonic() - started)
    content = dumps(result.as_json(), option=orjson.OPT_INDENT_2)
    await asyncio.to_thread(write_atomically, job.run_dir / "result.json", content)
    return result


async def _make_run(
    job: OfflineJob, plan: Plan, position: OfflinePosition, policy: Policy, model: str
) -> RecordedTraining:
    kept = job.run_dir / "start"
    named = Path(model) if await asyncio.to_thread(Path(model).is_dir) else None
    start = kept if named is None and position.step and await asyncio.to_thread(kept.is_dir) else named
    pools, seed = not isinstance(plan.algorithm, DPO), job.config.run.seed
    source = SessionSource(plan.trajectories, seed, pools_singles=pools, resumed=position.source)
    run = RecordedTraining(
        source,
        learner_of(policy, job.config.policy.token_budget),
        job.run_dir,
        plan.algorithm.total_steps,
        start,
        job.progress,
        step=position.step,
        metrics=dict(position.metrics),
        rejected=dict(position.rejected),
        left_out={**plan.left_out, **position.left_out},
        notes=list(position.notes),
        validation_losses={int(step): loss for step, loss in position.validation_losses.items()},
        checkpoint_every=position.checkpoint_every,
        first_line=position.first_line,
    )
    run.counts.update(position.counts)
    run.reject(plan.rejected)
    for note in plan.notes:
        run.say(note)
    if job.options.follow:
        run.rollouts = _arriving(job, plan, position, run)
    return run


def _note(position: OfflinePosition, run: RecordedTraining, plan: Plan, seconds: float) -> None:
    """Bring the position up to date."""
    position.step, position.seconds = run.step, seconds
    position.algorithm_state = dict(plan.algorithm.state_dict())
    position.source = dict(getattr(run.rollouts, "position", {}))
    position.validation_losses = {str(step): loss for step, loss in run.validation_losses.items()}
    position.metrics = {name: value for name, value in run.metrics.items() if value == value}
    position.counts, position.rejected = dict(run.counts), dict(run.rejected)
    position.left_out, position.notes = dict(run.left_out), list(run.notes)


async def _run(algorithm: Algorithm[Any], run: RecordedTraining, policy: Policy) -> None:
    if not isinstance(algorithm, SFTAlgorithm):
        try:
            await algorithm.run(run)
        except TrainingStopped as stopped:
            if not isinstance(run.rollouts, ArrivingSource):
                raise
            run.say(f"training ended: {stopped}")
            if run.checkpoint is not None:
                await run.checkpoint(run)
        return
    outcome = await learn(algorithm, RecordedLoop(run, policy))
    run.sessions = outcome.conversations
    run.left_out.update(outcome.left_out)
    if outcome.best_step is not None:
        run.say(f"the model is that of step {outcome.best_step}, with the lowest validation loss")


def _result(
    job: OfflineJob,
    plan: Plan,
    run: RecordedTraining,
    before: Mapping[str, Evaluation],
    after: Mapping[str, Evaluation],
    seconds: float,
) -> OfflineResult:
    gains: dict[str, Gain] = {mode: paired_gain(before[mode].rewards, after[mode].rewards) for mode in before}
    left_out = describe(Rejection(rollout_id, reason, "") for rollout_id, reason in run.rejected.items())
    return OfflineResult(
        algorithm=plan.algorithm.name,
        method=plan.method,
        steps=run.step,
        sessions=run.sessions or plan.sessions,
        left_out=left_out | run.left_out,
        rendered_calls=plan.rendered,
        foreign_calls=plan.foreign,
        metrics=run.metrics,
        counts=run.counts,
        held_out=gains,
        checkpoint=job.run_dir / "checkpoint",
        run_dir=job.run_dir,
        seconds=seconds,
        notes=tuple(run.notes),
    )


def _arriving(job: OfflineJob, plan: Plan, position: OfflinePosition, run: RecordedTraining) -> ArrivingSource:
    assert plan.prepare is not None
    learned = [str(each) for each in position.source.get("learned", ())]
    known = {each.rollout_id for each in plan.trajectories} | set(run.rejected) | set(learned)
    first = [each for each in plan.trajectories if each.rollout_id not in set(learned)]
    return ArrivingSource(
        job.store,
        plan.prepare,
        first,
        known,
        run.reject,
        job.options.follow_timeout,
        job.config.run.seed,
        learned,
    )
