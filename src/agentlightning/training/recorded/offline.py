"""Learns from the sessions of a store: chooses how, runs the algorithm, and measures the gain where it can."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import orjson

from agentlightning.algorithms.base import Algorithm
from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.preference import DPO
from agentlightning.algorithms.recorded.method import (
    NAMES,
    DataCounts,
    Method,
    MethodSetting,
    choose,
    for_recorded,
)
from agentlightning.algorithms.recorded.sessions import (
    NO_LOGPROBS,
    Session,
    Sessions,
    TokenizedSession,
    Tokenizer,
    missing_rewards,
    read_sessions,
    without_probabilities,
)
from agentlightning.algorithms.sft import SFTAlgorithm
from agentlightning.config import TrainConfig
from agentlightning.credit import is_target
from agentlightning.credit.agent_rewards import team_score
from agentlightning.credit.rejection import Rejection
from agentlightning.errors import ConfigError, DatasetError, TrainingStopped
from agentlightning.evaluation.evaluation import Evaluation
from agentlightning.evaluation.intervals import Gain, paired_gain
from agentlightning.policy import open as opening
from agentlightning.policy.base import Policy
from agentlightning.policy.optimizer_config import Objective
from agentlightning.store import InMemoryLightningStore
from agentlightning.store.base import LightningStoreBase
from agentlightning.task import load_dataset
from agentlightning.training.recorded.agent_runs import AgentRuns, agent_runs
from agentlightning.training.recorded.result import OfflineResult
from agentlightning.training.recorded.run import RecordedTraining, learner_of
from agentlightning.training.recorded.source import POLL_SECONDS, ArrivingSource, SessionSource, describe, tokenized
from agentlightning.training.starting_policy import TINY
from agentlightning.trajectory import Trajectory
from agentlightning.util.progress import Progress
from agentlightning.util.settings import settings_from


@dataclass(frozen=True, slots=True)
class OfflineOptions:
    """How recorded sessions are learned from."""

    num_iterations: int | None = None
    """Updates. None: as many as the algorithm says."""
    target_agent: str | None = None
    """Only calls of agents whose whole name matches this regular expression are learned from. None: as the algorithm
    says."""
    method: MethodSetting = "auto"
    """How LightningRL learns from sessions of another policy: importance, awr, rejection; auto: as the data allows."""
    success_threshold: float = 0.5
    """The reward from which on a session is a success, for method "rejection"."""
    follow: bool = False
    """Learn from each session once, as they arrive, and wait for those to come."""
    follow_timeout: float | None = None
    """Seconds without a new session after which following ends. None: it waits on."""
    eval_agent: Any = None
    """The agent whose reward on the held-out tasks is measured before and after. None: nothing is measured."""
    held_out_dataset: Any = None
    """The tasks to measure on: a list, or a file."""


@dataclass(frozen=True, slots=True)
class _Learning:
    """One call of `train` on recorded sessions."""

    config: TrainConfig
    store: LightningStoreBase
    options: OfflineOptions
    run_dir: Path
    progress: Progress
    reward: Any

    # -- before ----------------------------------------------------------------------------------------------------

    def check(self, algorithm: Algorithm[Any]) -> None:
        options = self.options
        if not algorithm.learns_weights:
            raise ConfigError(
                f"{type(algorithm).__name__} trains no weights, so recorded sessions teach it nothing; give an agent"
                " and tasks: train(agent=..., train_dataset=...)"
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

    async def sessions(self) -> Sessions:
        """What the store holds; with `follow`, once it holds something."""
        found = await read_sessions(self.store)
        since = time.monotonic()
        timeout = self.options.follow_timeout
        while self.options.follow and not found.usable and (timeout is None or time.monotonic() - since < timeout):
            await asyncio.sleep(POLL_SECONDS)
            found = await read_sessions(self.store)
        found.check()
        return found

    async def model(self, given: Path | None, sessions: Sequence[Session]) -> str:
        """The directory of the model to train."""
        if given is not None:
            return str(given)
        if self.config.policy.model != TINY:
            return self.config.policy.model
        if not sessions:
            raise ConfigError("no model: give model=DIRECTORY to the trainer")
        from agentlightning.models.tiny import make_tiny

        records = [
            {"messages": [*call.messages, call.answer], "tools": list(call.tools)}
            for session in sessions
            for call in session.calls
            if call.messages and call.answer is not None
        ] or [session.rollout.input for session in sessions]
        self.progress.note("warning: no model was given, so a tiny one with random weights is trained; set model=...")
        return str(await asyncio.to_thread(make_tiny, self.run_dir / TINY, records, seed=self.config.run.seed))

    async def open(self, model: str, algorithm: Algorithm[Any], objective: Objective) -> Policy:
        return await opening.open_policy(
            opening.policy_config(
                self.config.policy,
                model,
                optimizer=algorithm.optimizer or getattr(self.config.algorithm, "optimizer", None),
                steps=algorithm.optimizer_steps,
                objective=objective,
                seed=self.config.run.seed,
                agents=algorithm.agents,
            )
        )

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


async def learn_offline(
    config: TrainConfig,
    algorithm: Algorithm[Any],
    store: LightningStoreBase,
    run_dir: Path,
    options: OfflineOptions,
    *,
    model: Path | None,
    reward: Any,
    progress: Progress,
) -> OfflineResult:
    """Train on the sessions of a store; the model is in `run_dir/checkpoint` afterwards.

    Raises DatasetError where the store holds nothing that the algorithm can learn from, saying what is missing."""
    started = time.monotonic()
    learning = _Learning(config, store, options, run_dir, progress, reward)
    learning.check(algorithm)
    tasks = [] if options.held_out_dataset is None else load_dataset(options.held_out_dataset)
    await asyncio.to_thread(run_dir.mkdir, parents=True, exist_ok=True)
    progress.phase("reading sessions")
    sessions = await learning.sessions() if _reads_store(algorithm) else Sessions(())
    target = options.target_agent or getattr(getattr(algorithm, "config", None), "target_agent", None)
    if sessions.usable:
        sessions.check_target(target)
    path = await learning.model(model, sessions.usable)
    plan = await _plan(learning, algorithm, sessions, target, path)
    async with AsyncExitStack() as stack:
        policy = await learning.open(path, plan.algorithm, plan.objective)
        stack.push_async_callback(policy.close)
        learner = learner_of(policy, config.policy.token_budget)
        start = Path(path) if await asyncio.to_thread(Path(path).is_dir) else None
        pools = not isinstance(plan.algorithm, DPO)
        source = SessionSource(plan.trajectories, config.run.seed, pools_singles=pools)
        run = RecordedTraining(source, learner, run_dir, plan.algorithm.total_steps, start, progress)
        run.reject([*sessions.rejected, *plan.rejected])
        for note in plan.notes:
            run.say(note)
        if options.follow:
            run.rollouts = _arriving(learning, plan, sessions, run)
        runs = await stack.enter_async_context(learning.measuring(policy))
        before = await learning.measure(runs, tasks, "measuring before")
        progress.phase("training", run.total_steps)
        try:
            await _run(plan.algorithm, run, policy)
        except TrainingStopped as stopped:
            if not options.follow:
                raise
            run.say(f"training ended: {stopped}")
        after = await learning.measure(runs, tasks, "measuring after")
        await policy.save(run_dir / "checkpoint")
    gains: dict[str, Gain] = {mode: paired_gain(before[mode].rewards, after[mode].rewards) for mode in before}
    left_out = describe(Rejection(rollout_id, reason, "") for rollout_id, reason in run.rejected.items())
    left_out |= run.left_out
    if sessions.measured:
        left_out["modes_val_and_test"] = sessions.measured
    result = OfflineResult(
        algorithm=plan.algorithm.name,
        method=plan.method,
        steps=run.step,
        sessions=run.sessions or len(plan.trajectories),
        left_out=left_out,
        rendered_calls=plan.rendered,
        foreign_calls=plan.foreign,
        metrics=run.metrics,
        counts=run.counts,
        held_out=gains,
        checkpoint=run_dir / "checkpoint",
        run_dir=run_dir,
        seconds=time.monotonic() - started,
        notes=tuple(run.notes),
    )
    (run_dir / "result.json").write_bytes(orjson.dumps(result.as_json(), option=orjson.OPT_INDENT_2))
    return result


def _reads_store(algorithm: Algorithm[Any]) -> bool:
    """Whether it learns from the store's sessions, and not from a dataset of its own."""
    return not (isinstance(algorithm, SFTAlgorithm) and algorithm.has_dataset)


async def _run(algorithm: Algorithm[Any], run: RecordedTraining, policy: Policy) -> None:
    if not isinstance(algorithm, SFTAlgorithm):
        await algorithm.run(run)
        return

    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        run.finished(metrics)
        if algorithm.on_step is not None:
            algorithm.on_step(step, metrics)

    outcome = await algorithm.on(model=policy, on_step=on_step).run()
    run.sessions = outcome.conversations
    run.left_out.update(outcome.left_out)
    if outcome.best_step is not None:
        run.say(f"the model is that of step {outcome.best_step}, with the lowest validation loss")


# -- what is learned, and how ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plan:
    algorithm: Algorithm[Any]
    objective: Objective
    trajectories: Sequence[Trajectory]
    tokenizer: Tokenizer
    method: Method | None = None
    rejected: Sequence[Rejection] = ()
    rendered: int = 0
    foreign: int = 0
    notes: tuple[str, ...] = ()


async def _plan(
    learning: _Learning, algorithm: Algorithm[Any], sessions: Sessions, target: str | None, path: str
) -> _Plan:
    from agentlightning.chat.hf import load_chat_format
    from agentlightning.models.limits import model_limits

    chat = await load_chat_format(path, learning.config.policy.tool_calls)
    vocabulary, context = await asyncio.to_thread(model_limits, path)
    tokenizer = Tokenizer(chat, min(context, learning.config.policy.max_context or context), vocabulary, target)
    if isinstance(algorithm, SFTAlgorithm):
        return _plan_sft(algorithm, learning, sessions, target, tokenizer)
    found, rejected = await asyncio.to_thread(tokenized, sessions.usable, tokenizer)
    weights = algorithm.reward_weights
    unscored = missing_rewards([s for s in sessions.usable if s.rollout.rollout_id not in _ids(rejected)], weights)
    found = [each for each in found if each.trajectory.rollout_id not in _ids(unscored)]
    rejected = [*rejected, *unscored]
    if isinstance(algorithm, LightningRL):
        return await asyncio.to_thread(_plan_rl, algorithm, learning, found, rejected, target, tokenizer)
    prepared = with_options(algorithm, learning.options)
    trajectories = [without_probabilities(each.trajectory) for each in found]
    if isinstance(prepared, DPO):
        await asyncio.to_thread(prepared.check_data, trajectories, target)
    rendered, foreign = sum(e.rendered for e in found), sum(e.foreign for e in found)
    note = f"{algorithm.name}: {len(found)} sessions"
    return _Plan(prepared, prepared.objective, trajectories, tokenizer, None, rejected, rendered, foreign, (note,))


def _plan_sft(
    algorithm: SFTAlgorithm, learning: _Learning, sessions: Sessions, target: str | None, tokenizer: Tokenizer
) -> _Plan:
    found = algorithm
    if not algorithm.has_dataset:
        found = algorithm.on(
            dataset=learning.store.get_successful_trajectories(threshold=learning.options.success_threshold)
        )
    prepared = with_options(found, learning.options)
    return _Plan(prepared, "supervised", (), tokenizer)


def _plan_rl(
    algorithm: LightningRL,
    learning: _Learning,
    found: Sequence[TokenizedSession],
    rejected: Sequence[Rejection],
    target: str | None,
    tokenizer: Tokenizer,
) -> _Plan:
    options, weights = learning.options, algorithm.config.reward_weights
    sampled = [each.trajectory for each in found if each.logprobs]
    refused = {each.rollout_id: each for each in algorithm.rejections(sampled, target)} if sampled else {}
    groups: dict[str, list[float]] = {}
    for each in found:
        groups.setdefault(each.trajectory.group, []).append(_score(each.trajectory, weights))
    pooled = [group for group in groups.values() if len(group) > 1]
    singles = [group[0] for group in groups.values() if len(group) == 1]
    pooled += [singles] if singles else []
    known = len(sampled) - len(refused)
    counts = DataCounts.of(pooled, known, options.success_threshold)
    if options.follow and options.method == "auto" and counts.sessions:
        method: Method = "importance" if known * 2 >= counts.sessions else "awr"
    else:
        method = choose(options.method, counts, options.success_threshold)
    notes = [
        f"LightningRL learns by {NAMES[method]}: {counts.sessions} sessions of {len(groups)} tasks, {known} of them"
        f" with log-probabilities, {counts.successful} with a reward of {options.success_threshold:g} or more"
    ]
    if singles:
        notes.append(f"{len(singles)} tasks have one session each; their baseline is the mean of such sessions")
    usable, further = _usable(found, method, refused)
    rendered, foreign = sum(each.rendered for each in usable), sum(each.foreign for each in usable)
    if foreign:
        notes.append(f"{foreign} calls have tokens of another tokenizer; their text is rendered anew")
    trajectories = [_trajectory(each, method) for each in usable]
    rejected = [*rejected, *further]
    if method == "rejection":
        wins = [each for each in trajectories if _score(each, weights) >= options.success_threshold]
        sft = _rejection_sampling(algorithm, learning, wins, target)
        return _Plan(sft, "supervised", wins, tokenizer, method, rejected, rendered, foreign, tuple(notes))
    prepared = for_recorded(algorithm, method, options.target_agent, options.num_iterations)
    objective: Objective = "reinforcement" if method == "importance" else "supervised"
    return _Plan(prepared, objective, trajectories, tokenizer, method, rejected, rendered, foreign, tuple(notes))


def _usable(
    found: Sequence[TokenizedSession], method: Method, refused: Mapping[str, Rejection]
) -> tuple[list[TokenizedSession], list[Rejection]]:
    """The sessions that a method can learn from, and the others."""
    if method != "importance":
        return list(found), []
    usable = [each for each in found if each.logprobs and each.trajectory.rollout_id not in refused]
    message = 'of its calls no log-probabilities in tokens of this model are known; method="awr" learns from it'
    without = [Rejection(each.trajectory.rollout_id, NO_LOGPROBS, message) for each in found if not each.logprobs]
    return usable, [*without, *refused.values()]


def _trajectory(session: TokenizedSession, method: Method) -> Trajectory:
    return session.trajectory if method == "importance" else without_probabilities(session.trajectory)


def _rejection_sampling(
    algorithm: LightningRL, learning: _Learning, wins: Sequence[Trajectory], target: str | None
) -> SFTAlgorithm:
    """Supervised learning on the successful sessions, as many at a time as a step of the algorithm has."""
    config = algorithm.config
    own = [_of_target(each, target) for each in wins]
    return SFTAlgorithm(
        dataset=[each for each in own if each.transitions],
        steps=learning.options.num_iterations or config.steps,
        batch_size=config.tasks_per_step,
        seed=learning.config.run.seed,
        optimizer=config.optimizer,
    )


def _of_target(trajectory: Trajectory, target: str | None) -> Trajectory:
    return replace(trajectory, transitions=tuple(t for t in trajectory.transitions if is_target(t.agent, target)))


def _score(trajectory: Trajectory, weights: Mapping[str, float] | None) -> float:
    found = team_score(trajectory, weights)
    assert found is not None  # Sessions without a reward were left out.
    return found


def _ids(rejected: Sequence[Rejection]) -> set[str]:
    return {each.rollout_id for each in rejected}


CHANGED: Final = {"num_iterations": "steps", "target_agent": "target_agent"}
"""Options -> the fields of an algorithm's settings that they replace."""


def with_options(algorithm: Any, options: OfflineOptions) -> Any:
    """The algorithm with the options in its settings. Raises ConfigError where it has no such setting."""
    given = {field: getattr(options, name) for name, field in CHANGED.items() if getattr(options, name) is not None}
    if not given:
        return algorithm
    config: Any = getattr(algorithm, "config", None)
    known: Mapping[str, Any] = getattr(type(config), "model_fields", {})
    for name, field in CHANGED.items():
        if field in given and field not in known:
            raise ConfigError(f"{name}={given[field]!r}: {type(algorithm).__name__} has no setting {field}")
    settings = settings_from(type(config), given, base=config, source="given to train")
    found = copy.copy(algorithm)
    if isinstance(algorithm, LightningRL):
        LightningRL.__init__(found, settings, store=algorithm.store)
    else:
        found.config = settings
    return found


def _arriving(learning: _Learning, plan: _Plan, sessions: Sessions, run: RecordedTraining) -> ArrivingSource:
    if plan.method == "rejection":
        raise DatasetError('follow=True learns by "importance" or "awr"; method="rejection" learns from what is there')
    method: Method = plan.method or "awr"

    def prepare(arrived: Sequence[Session]) -> tuple[list[Trajectory], list[Rejection]]:
        found, rejected = tokenized(arrived, plan.tokenizer)
        unscored = missing_rewards(arrived, plan.algorithm.reward_weights)
        found = [each for each in found if each.trajectory.rollout_id not in _ids(unscored)]
        usable, further = _usable(found, method, {})
        return [_trajectory(each, method) for each in usable], [*rejected, *unscored, *further]

    known = {session.rollout.rollout_id for session in sessions.usable} | _ids(sessions.rejected)
    return ArrivingSource(
        learning.store,
        prepare,
        plan.trajectories,
        known,
        run.reject,
        learning.options.follow_timeout,
        learning.config.run.seed,
    )
