"""The training run: the `Training` that an algorithm is given.

It combines the run's source of rollouts, learner, measurements and checkpoints, and keeps the account of its steps;
`agentlightning/run.py` makes these parts. After every step the run directory holds all that is needed to continue from
there.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
from msgspec import Struct

from agentlightning.algorithms.training import Collected, RolloutReport, RolloutRequest, RolloutSource, Stage, Training
from agentlightning.assemble import AUTOMATIC_REWARDS
from agentlightning.credit.rejection import Check, count_reasons
from agentlightning.errors import ConfigError, ResumeError
from agentlightning.evaluation.evaluation import Evaluation, gain_of
from agentlightning.policy.base import UPDATE, Metrics, UpdateOptions
from agentlightning.policy.learner import Learner, age
from agentlightning.resources import NamedResources, PromptTemplate, prompts_in
from agentlightning.training.callbacks import Callback, FinishedStep, RunAccount
from agentlightning.training.health.examination import closing_warnings
from agentlightning.training.health.step_record import VALIDATION, batch_metrics
from agentlightning.training.joined_gateways import JoinedGateways
from agentlightning.training.measurements import TEMPERATURES, Measurements, run_trials
from agentlightning.training.persistence.checkpoints import Checkpoints, load_weights, read_resources
from agentlightning.training.persistence.run_dir import RunState, StageRecord, write_atomically
from agentlightning.training.recorded import NothingArrived, RecordedSource
from agentlightning.training.report.result import TrainingResult, cost_of_steps, stage_results, with_providers
from agentlightning.training.sources.stream import RolloutStream
from agentlightning.trajectory import TrainingSample, Trajectory
from agentlightning.util.plugins import calls_of

# -- stages ----------------------------------------------------------------------------------------------------------

# The stages of a run of several algorithms, as its state records them.


def check_order(stage: Stage, records: Sequence[StageRecord], warn: Callable[[str, str], None]) -> None:
    """Raises ResumeError where the run had another algorithm at the place of a stage. Warns of changed settings of one
    that is over."""
    if stage.number > len(records):
        return
    record = records[stage.place]
    if record["name"] != stage.name:
        raise ResumeError(
            f"stage {stage.number} of the run was {record['name']}, not {stage.name}; resume it with the stages it had"
        )
    if stage.number < len(records) and record["settings"] != stage.settings:
        warn(
            f"stage_{stage.number}_changed",
            f"the settings of stage {stage.number} ({stage.name}) were changed after it had ended, which changes"
            " nothing; start a new run for them",
        )


def updated_before(state: RunState) -> bool:
    """Whether the weights may have been updated: a step was done by something that learns them."""
    if not state.stages:
        return state.stage_step > 0
    learning = next((each for each in state.stages if each["learns_weights"]), None)
    return learning is not None and state.step > learning["first_step"]


class TrainingRun(Struct):
    """Implements `algorithms.training.Training`."""

    account: RunAccount
    rollouts: RolloutSource
    learner: Learner | None
    measurements: Measurements
    checkpoints: Checkpoints
    total_steps: int
    """The last step; in a run of several stages, that of the present one."""
    target_agent: str | None = None
    prepared: Mapping[str, str] = {}
    """What the algorithm found in order before it began."""
    seed: int = 0
    start_prompts: Mapping[str, PromptTemplate] = {}
    """The prompt templates that the run began with."""
    stream: RolloutStream | None = None
    """The rollouts that are under way. None: it learns from recorded data."""
    uses_providers: bool = False
    """Whether agents may call models of others, at their prices."""
    recorded: RecordedSource | None = None
    """What it learns from in place of rollouts."""
    joined: JoinedGateways | None = None
    """The gateways that answer calls; None: its own process does."""
    _lr_factor: float = 1.0
    """Of the present stage."""
    _evaluations: int = 0
    """Evaluations that the algorithm requested within the step."""

    @property
    def state(self) -> RunState:
        return self.account.state

    @property
    def step(self) -> int:
        return self.state.stage_step

    def _learner(self) -> Learner:
        if self.learner is None:
            raise ConfigError("this run trains no model: the algorithm's class says learns_weights = False")
        return self.learner

    # -- what an algorithm does ----------------------------------------------------------------------------------------

    collect = Training.collect

    async def next(self, request: RolloutRequest) -> Collected:
        collected = await self.rollouts.next(request)
        if self.recorded is None:
            await self.account.count(collected)
        await self.account.each(lambda callback: callback.on_batch(collected))
        return collected

    async def recall(
        self, groups: Mapping[str, str], *, tasks: Mapping[str, Any], max_age: int, check: Check | None = None
    ) -> tuple[Trajectory, ...]:
        if self.recorded is not None:  # Every session comes again by itself.
            return ()
        found = await self.account.collector.reader.read_remaining(groups, check, tasks)
        learner, resumes = self._learner(), self.state.resumes
        ages = (age(each, learner.policy_version, resumes, learner.versions) for each in found)
        return tuple(each for each, updates in zip(found, ages, strict=True) if updates <= max_age)

    async def update(self, samples: Sequence[TrainingSample], options: UpdateOptions = UPDATE) -> Metrics:
        options = replace(options, lr_factor=options.lr_factor * self._lr_factor)
        for callback in self.account.callbacks:
            with calls_of(type(callback), "callback"):
                options = callback.before_update(options)
        metrics = dict(await self._learner().update(samples, options))
        for further in await self.account.each(lambda callback: callback.on_update(samples)):
            metrics |= further or {}
        return metrics

    async def starting_weights(self) -> Path | None:
        """The policy after its warm start, or a copy that is written when it is first asked for; None with adapters
        that began with no effect."""
        run_dir = self.account.run_dir
        if self._learner().starts_at_base:
            return None
        if run_dir.start.exists():
            return run_dir.start
        if not run_dir.reference.exists():
            if updated_before(self.state):
                raise ConfigError(
                    f"the weights that the run started from were not kept: no setting needed them in its first "
                    f"{self.state.step} steps. Set algorithm.reference to the directory of a model"
                )
            await self._learner().save(run_dir.reference)
        return run_dir.reference

    @property
    def resources(self) -> NamedResources:
        return self.checkpoints.publisher.resources

    @property
    def train_tasks(self) -> Sequence[Any]:
        return self.measurements.tasks.train

    @property
    def validation_tasks(self) -> Sequence[Any]:
        return self.measurements.validation

    @property
    def held_out_tasks(self) -> int:
        return len(self.measurements.held_out)

    @property
    def directory(self) -> Path:
        return self.account.run_dir.path

    def note(self, text: str) -> None:
        self.account.progress.note(text)

    def warn(self, name: str, text: str) -> None:
        self.account.warn({name: text})

    def _check_agent(self) -> None:
        if self.recorded is not None and not self.measurements.config.modes:
            raise ConfigError("recorded sessions come with no agent to run; give eval_agent and held_out_dataset")

    async def try_resources(
        self, resources: NamedResources, tasks: Mapping[str, Any], metadata: Mapping[str, Any] | None = None
    ) -> list[RolloutReport]:
        self._check_agent()
        label = f"{self.state.run_id}-trial-{self.state.step + 1:06d}{self.state.suffix}"
        sampling = {"temperature": TEMPERATURES[self.measurements.config.modes[0]]}
        resources_id = await self.checkpoints.publisher.write_trial(label, resources, sampling)
        weights = self.measurements.reward_weights
        collected, reports = await run_trials(self.account.collector, label, tasks, resources_id, weights, metadata)
        await self.account.count(collected)
        return reports

    async def publish(self, resources: NamedResources) -> None:
        self.checkpoints.publisher.publish(resources)

    async def evaluate(self, tasks: Sequence[Any] | None = None) -> Evaluation:
        self._check_agent()
        label = f"evaluation-{self.state.step + 1:06d}" + (f"-part{self._evaluations}" if self._evaluations else "")
        self._evaluations += 1
        chosen = self.measurements.validation if tasks is None else tasks
        return await self.measurements.evaluate(self.measurements.name(label, "greedy"), "greedy", chosen)

    async def finish_step(self, collected: Collected, metrics: Metrics) -> None:
        state, self._evaluations = self.state, 0
        state.step += 1
        line: dict[str, Any] = {"step": state.step, **metrics}
        if self.recorded is None:
            weights = self.measurements.reward_weights
            found = await asyncio.to_thread(batch_metrics, collected.trajectories, weights)
            line = step_line(state, collected, found | dict(metrics))
        if self.measurements.validation_is_due(self.total_steps):
            results = await self.measurements.validate()
            if self.measurements.is_best(results):
                await self._keep_best()
            await self.account.each(lambda callback: callback.on_validation(results))
            for mode, result in results.items():
                line[f"{VALIDATION}{mode}"] = result.mean if result.known else math.nan
                if result.missing:
                    line[f"missing_{VALIDATION}{mode}"] = result.missing
        step = FinishedStep(collected, line, is_last=state.step == self.total_steps)

        async def add(callback: Callback[Any]) -> None:
            found = await callback.on_step(step) or {}
            step.line |= {name: float(value) for name, value in found.items()}

        await self.account.each(add)
        record = self.account.add_step(step.line)
        if step.saves or self.checkpoints.is_due(is_last=step.is_last):
            await self.checkpoints.save()
        await self.account.each(lambda callback: callback.on_step_end(step))
        self.account.progress.update(self.step, **record.progress())
        self.account.conclude(step)

    # -- phases --------------------------------------------------------------------------------------------------------

    async def fit(self) -> TrainingResult:
        """Measure the starting policy, unless that is done, train, and measure the result."""
        account, state, measurements, algorithm = (
            self.account,
            self.state,
            self.measurements,
            self.checkpoints.algorithm,
        )
        progress = account.progress
        if measurements.rollouts:
            progress.phase("measuring the starting policy", measurements.rollouts)
        at_start = state.measures_start(measurements.config.modes)
        before = await measurements.measure_start()
        if at_start:
            await self._load_checkpoint()
        # How many steps a search takes is not known: its budget ends it.
        progress.phase("training", None if algorithm.selects_result else self.total_steps, done=state.step)
        if state.step >= self.total_steps:
            progress.note(f"all {state.step} steps are done; with more (algorithm.steps=N) the run continues")
        account.read_records()
        if self.learner is not None:
            await self.learner.publish()
        await account.each(lambda callback: callback.on_start())
        with calls_of(type(algorithm), "algorithm"):
            try:
                outcome: object = await algorithm.run(self)
            except NothingArrived as ended:
                outcome = ended
                await self.checkpoints.save()
        if self.recorded is not None:
            self.recorded.finish(outcome)
        await self.finish()
        if measurements.rollouts:
            progress.phase("measuring the trained policy", measurements.rollouts)
        return await self.report(before, await measurements.measure_trained())

    async def _load_checkpoint(self) -> None:
        """Continue from the last checkpoint once the starting policy is measured."""
        run_dir, state = self.account.run_dir, self.state
        self.checkpoints.publisher.publish(read_resources(run_dir.path, state.checkpoint))
        if self.learner is not None:
            async with self.learner.updating():
                await load_weights(self.learner.policy, run_dir, state, self.account.collector.store)

    async def finish(self) -> None:
        """After the last step of the run, or of a stage: its result is the promoted version, or the best one by
        validation."""
        await self.account.each(lambda callback: callback.on_trained())
        state = self.state
        if state.best_checkpoint is not None and state.best_step != state.step:
            await self.checkpoints.rollback(state.best_checkpoint, state.best_version)

    async def report(self, before: Mapping[str, Evaluation], after: Mapping[str, Evaluation]) -> TrainingResult:
        """Write what the finished run leaves: its checkpoint and `report.json`. `before`, `after`: held-out reward."""
        account, state = self.account, self.state
        gains = {mode: gain_of(before[mode], after[mode]) for mode in before if before[mode].rewards}
        directory = self.directory / "checkpoint"
        await self.checkpoints.export(directory)
        account.write_state()
        lines = account.run_dir.read_metrics()
        cost = cost_of_steps(lines)
        if self.uses_providers:
            cost = await with_providers(cost, account.collector.store, state.run_id)
        result = TrainingResult(
            held_out=gains,
            missing=dict(state.reasons),
            rollouts=state.rollouts,
            failed_rollouts=state.failed_rollouts,
            rejected_rollouts=dict(state.rejected),
            skipped_groups=state.skipped_groups,
            warnings=(*state.warnings.values(), *closing_warnings(account.records, gains).values()),
            warning_counts=dict(state.warning_counts),
            rollbacks=state.rollbacks,
            gate_rejections=state.of("gate").get("gate_rejections", 0),
            steps=state.step,
            best_step=state.best_step,
            seconds=state.seconds,
            checkpoint=directory,
            curve=None,
            run_dir=self.directory,
            start_prompts=self.start_prompts,
            prompts=prompts_in(self.resources),
            stages=stage_results(state, lines, list(gains)),
            cost=cost,
            recorded=None if self.recorded is None else self.recorded.result(lines),
            gateways=None if self.joined is None else await self.joined.report(),
        )
        for callback in account.callbacks:
            with calls_of(type(callback), "callback"):
                result = await callback.on_end(result)
        write_atomically(self.directory / "report.json", orjson.dumps(result.as_json(), option=orjson.OPT_INDENT_2))
        return result

    # -- stages --------------------------------------------------------------------------------------------------------

    async def begin_stage(self, stage: Stage) -> bool:
        state, account = self.state, self.account
        check_order(stage, state.stages, self.warn)
        if stage.number < len(state.stages):
            return False
        if stage.number > len(state.stages):
            if state.stages:  # The next stage begins with the result of the one before it, which is measured.
                await self.finish()
                account.progress.phase(f"measuring after stage {stage.place}", self.measurements.rollouts)
                await self.measurements.measure_stage(stage.place - 1)
            state.begin_stage(
                {
                    "name": stage.name,
                    "first_step": state.step,
                    "rollouts": state.rollouts,
                    "learns_weights": stage.learns_weights,
                    "settings": stage.settings,
                }
            )
            if state.first_step:
                await self.checkpoints.save()
            await account.each(lambda callback: callback.on_stage())
            account.write_state()
        self.total_steps, self._lr_factor = state.first_step + stage.steps, stage.lr_factor
        if self.stream is not None:
            self.stream.total_steps = self.total_steps
        self.measurements.validates = not stage.selects_result
        steps = None if stage.selects_result else stage.steps
        account.progress.phase(f"stage {stage.number} of {stage.of}: {stage.name}", steps, done=self.step)
        return True

    async def keep_best(self, score: float) -> None:
        state = self.state
        if not self.measurements.tasks.validation and (state.best_score is None or score > state.best_score):
            state.best_score = score
            await self._keep_best()

    async def _keep_best(self) -> None:
        self.state.best_step = self.state.step
        self.state.best_checkpoint = await self.checkpoints.write(self.state.step)
        self.state.best_version = self.checkpoints.version


def step_line(state: RunState, collected: Collected, metrics: Metrics) -> dict[str, Any]:
    """A line of `metrics.jsonl`: the algorithm's metrics, and what the run knows of the step's rollouts."""
    reasons, tokens = count_reasons(collected.rejected), collected.sampled_tokens
    return {
        "step": state.step,
        **({"revision": state.revision} if state.revision else {}),
        **({"stage": len(state.stages)} if state.stages else {}),
        **metrics,
        "rollouts": state.rollouts,
        "failed": len(collected.failed),
        "timeouts": collected.timeouts,
        "rejected": len(collected.rejected),
        **{f"rejected_{reason}": count for reason, count in reasons.items()},
        **collected.metrics,
        **_automatic_rewards(collected),
        "sampled_tokens": tokens,
        "tokens_per_second": (tokens - collected.sampled_before) / max(collected.seconds, 1e-9),
        "collect_seconds": collected.seconds,
    }


def _automatic_rewards(collected: Collected) -> dict[str, float]:
    """`air_RULE` for each rule that gave rewards, and `air_reward` for all: the mean sum of a rollout."""
    sums = defaultdict[str, float](float)
    for trajectory in collected.trajectories:
        for rule, value in trajectory.metadata.get(AUTOMATIC_REWARDS, {}).items():
            sums[f"air_{rule}"] += value
            sums["air_reward"] += value
    return {name: value / len(collected.trajectories) for name, value in sums.items()}
