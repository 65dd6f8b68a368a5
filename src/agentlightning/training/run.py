"""The training run: what has been done so far, what an algorithm and callbacks act on, and the steps from start to end.

`agentlightning/run.py` makes its parts: a source of rollouts, live or recorded, and checkpoints. After every step the
run directory holds all that is needed to continue from there.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
from msgspec import Struct, field

from agentlightning.algorithms.base import Algorithm, without_calls
from agentlightning.algorithms.training import Collected, RolloutReport, RolloutRequest, Stage, Training
from agentlightning.config import TrainConfig
from agentlightning.credit.rejection import NO_POLICY_CALLS, Check, count_reasons
from agentlightning.errors import ConfigError, ResumeError, TrainingStopped
from agentlightning.evaluation.evaluation import Evaluation, comparable_scores, gain_of
from agentlightning.policy.base import UPDATE, Metrics, UpdateOptions
from agentlightning.policy.learner import Learner
from agentlightning.resources import NamedResources, named_resources, prompts_in
from agentlightning.training.callbacks import Callback, FinishedStep, restore, saved
from agentlightning.training.health.step_record import VALIDATION, StepRecord, step_line
from agentlightning.training.joined_gateways import JoinedGateways
from agentlightning.training.persistence.checkpoints import Checkpoints, load_weights, read_resources
from agentlightning.training.persistence.run_dir import (
    RunDir,
    RunState,
    Tasks,
    append_lines,
    forget_after,
    write_atomically,
)
from agentlightning.training.recorded import NothingArrived, RecordedSource
from agentlightning.training.report.result import (
    CLOSING,
    TrainingResult,
    closing_warnings,
    cost_of_steps,
    stage_results,
    with_providers,
)
from agentlightning.training.sources.collector import TEMPERATURES, RolloutCollector, Scores, evaluate_tasks, run_trials
from agentlightning.training.sources.stream import RolloutStream
from agentlightning.trajectory import TrainingSample, Trajectory
from agentlightning.util.plugins import calls_of
from agentlightning.util.progress import Progress


class TrainingRun(Struct):
    """Implements `algorithms.training.Training`."""

    config: TrainConfig
    algorithm: Algorithm[Any]
    run_dir: RunDir
    state: RunState
    tasks: Tasks
    collector: RolloutCollector
    source: RolloutStream | RecordedSource
    """What it learns from: rollouts that are under way, or recorded data."""
    checkpoints: Checkpoints
    progress: Progress
    total_steps: int
    """The last step; in a run of several stages, that of the present one."""
    since: float = field(default_factory=time.monotonic)
    """When this process began to work on the run, or last recorded the time spent."""
    target_agent: str | None = None
    joined: JoinedGateways | None = None
    """The gateways that answer calls; None: its own process does."""
    prepared: Mapping[str, str] = {}
    """What the algorithm found in order before it began."""
    validates: bool = True
    """False: the algorithm chooses its result on the validation tasks itself."""
    callbacks: list[Callback[Any]] = []
    """In the order in which they are called (training/callbacks.py)."""
    records: list[StepRecord] = []
    """Of all steps so far."""
    _named: set[str] = set()
    """Reasons of left-out rollouts that were shown."""
    _lr_factor: float = 1.0
    """Of the present stage."""
    _evaluations: int = 0
    """Evaluations that the algorithm requested within the step."""

    def __repr__(self) -> str:  # Settings may hold the key of a provider.
        return f"TrainingRun({str(self.directory)!r}, step={self.state.step})"

    @property
    def step(self) -> int:
        return self.state.stage_step

    @property
    def learner(self) -> Learner | None:
        return self.checkpoints.learner

    def _learner(self) -> Learner:
        if self.learner is None:
            raise ConfigError("this run trains no model: the algorithm's class says learns_weights = False")
        return self.learner

    @property
    def seed(self) -> int:
        return self.config.run.seed

    @property
    def resources(self) -> NamedResources:
        return self.checkpoints.publisher.resources

    @property
    def train_tasks(self) -> Sequence[Any]:
        return self.tasks.train

    @property
    def validation_tasks(self) -> Sequence[Any]:
        return self.tasks.validation[: self.config.evaluation.tasks]

    @property
    def held_out(self) -> Sequence[Any]:
        """The tasks that the gain is measured on."""
        return self.tasks.held_out[: self.config.evaluation.held_out_tasks]

    @property
    def held_out_tasks(self) -> int:
        return len(self.held_out)

    @property
    def directory(self) -> Path:
        return self.run_dir.path

    # -- account -------------------------------------------------------------------------------------------------------

    def add(self, callback: Callback[Any]) -> None:
        """Call it after those that there are, with the state that it had. Raises ConfigError where one has its name."""
        if callback.name in (each.name for each in self.callbacks):
            raise ConfigError(f"two callbacks of the run are called {callback.name!r}; give one of them another name")
        callback.run = self
        restore(callback, self.state.of(callback.name))
        self.callbacks.append(callback)

    async def each(self, point: str, *args: object) -> list[Any]:
        """What the method of each callback for this point returns. Raises ExtensionError for one of others that fails,
        with its file."""
        found: list[Any] = []
        for callback in self.callbacks:
            with calls_of(type(callback), "callback"):
                found.append(await getattr(callback, point)(*args))
        return found

    async def close(self) -> None:
        """The process leaves the run."""
        await self.each("close")

    def write_state(self) -> None:
        now = time.monotonic()
        self.state.seconds += now - self.since
        self.since = now
        for callback in self.callbacks:
            with calls_of(type(callback), "callback"):
                self.state.callbacks[callback.name] = saved(callback)
        self.run_dir.write_state(self.state)

    async def save(self) -> None:
        """Write a checkpoint, then name it in state.json: only then does the step count."""
        await self.checkpoints.save()
        await self.each("on_checkpoint")
        self.write_state()
        self.run_dir.prune_checkpoints(self.state, self.config.run.keep_checkpoints)

    def note(self, text: str) -> None:
        self.progress.note(text)

    def warn(self, name: str, text: str) -> None:
        state = self.state
        state.warning_counts[name] = state.warning_counts.get(name, 0) + 1
        if name not in state.warnings:
            state.warnings[name] = f"step {state.step}: {text}" if state.step else text
            self.note(f"warning: {state.warnings[name]}")

    def warn_of(self, found: Mapping[str, str]) -> None:
        """Warnings by kind."""
        for name, text in found.items():
            self.warn(name, text)

    async def count(self, collected: Collected) -> None:
        """Count the training rollouts, and name the first of each kind that is of no use."""
        self.state.rollouts += collected.rollouts
        self.state.failed_rollouts += len(collected.failed)
        self.state.rejected = Counter(self.state.rejected) + Counter(count_reasons(collected.rejected))
        await self.name_left_out(collected)

    async def name_left_out(self, collected: Collected) -> None:
        if collected.left_out.keys() <= self._named:
            return
        for reason, first in (await self.collector.first_of_each_reason(collected)).items():
            if reason not in self._named:
                self.note(
                    f"rollout {first.rollout_id} is left out ({reason.replace('_', ' ')}): {first.message}\n"
                    "  further ones are counted: metrics.jsonl, report.json"
                )
        self._named |= collected.left_out.keys()

    async def name_evaluated(self, collected: Collected) -> None:
        """The same for an evaluation of a policy. Where no rollout asked any model, warn: nothing can be learned from
        such rollouts."""
        await self.name_left_out(collected)
        if not self.state.learns_weights or any(each.transitions for each in collected.trajectories):
            return
        found = without_calls(collected.trajectories)
        if found and found[0].reason == NO_POLICY_CALLS:
            self.warn(NO_POLICY_CALLS, f"evaluation: {found[0].message}")

    async def begin_revision(self) -> None:
        """Cancel the rollouts that were queued before a change of what rewards mean."""
        await self.each("on_revision")
        await self.collector.cancel(self.state.run_id)
        self.write_state()
        self.note(
            "rewards from here on cannot be compared with those so far: the starting policy is measured again, the best"
            " checkpoint is chosen again, and rollouts of the current step run again"
        )

    def conclude(self, step: FinishedStep) -> None:
        """Show what is to be said of a step that is written. Raises TrainingStopped where it ends the run."""
        for text in step.notes:
            self.note(text)
        if step.stop is not None:
            raise TrainingStopped(step.stop)

    def add_step(self, line: Mapping[str, Any]) -> StepRecord:
        """Record a finished step."""
        record = StepRecord.read(line)
        self.state.skipped_groups += record.skipped_groups
        append_lines(self.directory / "metrics.jsonl", line)
        self.records.append(record)
        self.progress.step(line)
        return record

    # -- what an algorithm does ----------------------------------------------------------------------------------------

    collect = Training.collect

    async def next(self, request: RolloutRequest) -> Collected:
        collected = await self.source.next(request)
        if self.state.recorded is None:
            await self.count(collected)
        await self.each("on_batch", collected)
        return collected

    async def recall(
        self, groups: Mapping[str, str], *, tasks: Mapping[str, Any], max_age: int, check: Check | None = None
    ) -> tuple[Trajectory, ...]:
        self._learner()
        return await self.source.recall(groups, check, tasks, max_age)

    async def update(self, samples: Sequence[TrainingSample], options: UpdateOptions = UPDATE) -> Metrics:
        options = replace(options, lr_factor=options.lr_factor * self._lr_factor)
        for callback in self.callbacks:
            with calls_of(type(callback), "callback"):
                options = callback.before_update(options)
        metrics = dict(await self._learner().update(samples, options))
        for further in await self.each("on_update", samples):
            metrics |= further or {}
        return metrics

    async def starting_weights(self) -> Path | None:
        """The policy after its warm start, or a copy that is written when it is first asked for; None with adapters
        that began with no effect."""
        run_dir = self.run_dir
        if self._learner().starts_at_base:
            return None
        if run_dir.start.exists():
            return run_dir.start
        if not run_dir.reference.exists():
            if self.state.may_have_learned:
                raise ConfigError(
                    f"the weights that the run started from were not kept: no setting needed them in its first "
                    f"{self.state.step} steps. Set algorithm.reference to the directory of a model"
                )
            await self._learner().save(run_dir.reference)
        return run_dir.reference

    def _check_agent(self) -> None:
        if not self.config.evaluation.modes:
            raise ConfigError("recorded sessions come with no agent to run; give eval_agent and held_out_dataset")

    async def try_resources(
        self, resources: NamedResources, tasks: Mapping[str, Any], metadata: Mapping[str, Any] | None = None
    ) -> list[RolloutReport]:
        self._check_agent()
        label = f"{self.state.run_id}-trial-{self.state.step + 1:06d}{self.state.suffix}"
        sampling = {"temperature": TEMPERATURES[self.config.evaluation.modes[0]]}
        # The same resources have the same id, wherever the policy is served.
        given = {**self.resources, **resources}
        digest = hashlib.blake2b(named_resources.dump_json(given), digest_size=8).hexdigest()
        resources_id = await self.checkpoints.publisher.write(f"{label}-{digest}", sampling, resources=given)
        collected, reports = await run_trials(self.collector, label, tasks, resources_id, metadata)
        await self.count(collected)
        return reports

    async def publish(self, resources: NamedResources) -> None:
        self.checkpoints.publisher.publish(resources)

    async def evaluate(self, tasks: Sequence[Any] | None = None) -> Evaluation:
        self._check_agent()
        label = f"evaluation-{self.state.step + 1:06d}" + (f"-part{self._evaluations}" if self._evaluations else "")
        self._evaluations += 1
        chosen = self.validation_tasks if tasks is None else tasks
        return await self.measure(self.evaluation_name(label, "greedy"), "greedy", chosen)

    async def finish_step(self, collected: Collected, metrics: Metrics) -> None:
        state, self._evaluations = self.state, 0
        state.step += 1
        line: dict[str, Any] = {"step": state.step, **metrics}
        if state.recorded is None:
            line = await asyncio.to_thread(step_line, state, collected, metrics)
        if self.validation_is_due():
            results = await self.validate()
            if self.is_best(results):
                await self._keep_best()
            await self.each("on_validation", results)
            for mode, result in results.items():
                line[f"{VALIDATION}{mode}"] = result.mean if result.known else math.nan
                if result.missing:
                    line[f"missing_{VALIDATION}{mode}"] = result.missing
        step = FinishedStep(collected, line, is_last=state.step == self.total_steps)
        for callback in self.callbacks:
            with calls_of(type(callback), "callback"):
                step.line |= {name: float(value) for name, value in (await callback.on_step(step) or {}).items()}
        record = self.add_step(step.line)
        if step.saves or self.checkpoints.is_due(is_last=step.is_last):
            await self.save()
        await self.each("on_step_end", step)
        self.progress.update(self.step, **record.progress())
        self.conclude(step)

    # -- measuring -----------------------------------------------------------------------------------------------------

    def validation_is_due(self) -> bool:
        every, step = self.config.evaluation.every, self.state.step
        is_due = every > 0 and (step % every == 0 or step == self.total_steps)
        return self.validates and is_due and bool(self.tasks.validation)

    async def validate(self) -> dict[str, Evaluation]:
        """The reward of the validation tasks, by mode."""
        modes = self.config.evaluation.modes
        return {mode: await self.measure(self.validation_name(mode), mode, self.validation_tasks) for mode in modes}

    def validation_name(self, mode: str) -> str:
        """The beginning of the ids of the rollouts of the step's validation."""
        return self.evaluation_name(f"validation-{self.state.step:06d}", mode)

    def is_best(self, results: Mapping[str, Evaluation]) -> bool:
        """Whether these are as good as the best validation so far, and if so record them. Tasks without a reward count
        as the lowest reward of both."""
        best = [self.state.evaluations.get(f"best-{mode}", []) for mode in results]
        scores = comparable_scores([*results.values(), *(Evaluation(tuple(rewards)) for rewards in best)])
        score = statistics.fmean(scores[: len(results)])
        best_score = statistics.fmean(scores[len(results) :]) if all(best) else self.state.best_score
        better = not math.isinf(score) and (best_score is None or score >= best_score)
        if better:
            self.state.best_score = score
            self.state.evaluations |= {f"best-{mode}": list(result.rewards) for mode, result in results.items()}
        return better

    async def keep_best(self, score: float) -> None:
        state = self.state
        if not self.tasks.validation and (state.best_score is None or score > state.best_score):
            state.best_score = score
            await self._keep_best()

    async def _keep_best(self) -> None:
        self.state.best_step = self.state.step
        self.state.best_checkpoint = await self.checkpoints.write(self.state.step)
        self.state.best_version = self.checkpoints.version

    async def measure_trained(self) -> dict[str, Evaluation]:
        """Held-out reward of the present weights, the best or the last ones; again where a run that was finished has
        continued to others."""
        state = self.state
        step = state.step if state.best_step is None else state.best_step
        if state.measured_step != step:
            state.measured_step = step
            for mode in self.config.evaluation.modes:
                state.evaluations.pop(f"after-{mode}", None)
                state.reasons.pop(f"after-{mode}", None)
        return await self.measure_held_out("measuring the trained policy", "after", f"after-{step:06d}")

    async def measure_held_out(self, phase: str, label: str, purpose: str) -> dict[str, Evaluation]:
        """Held-out reward by mode, measured once for each label in the life of a run. `purpose` names its rollouts. For
        that of the starting policy, raises TrainingStopped if more rollouts fail than the run allows, and RewardError
        if there is no reward at all."""
        state, count = self.state, self.held_out_tasks
        modes, results = self.config.evaluation.modes, dict[str, Evaluation]()
        if rollouts := count * len(modes):
            self.progress.phase(phase, rollouts)
        for index, mode in enumerate(modes):
            name = f"{label}-{mode}"
            if name not in state.evaluations:
                named, done = self.evaluation_name(purpose, mode), index * count

                def show(ended: int, done: int = done) -> None:
                    self.progress.update(done + ended)

                strict = label == "before"
                result = await self.measure(named, mode, self.held_out, show, held_out=True, strict=strict)
                state.evaluations[name] = list(result.rewards)
                state.reasons[name] = dict(result.reasons)
                self.write_state()
            results[mode] = Evaluation(tuple(state.evaluations[name]), reasons=state.reasons.get(name, {}))
        return results

    def evaluation_name(self, purpose: str, mode: str) -> str:
        """The beginning of the ids of the rollouts of an evaluation, and its resources."""
        return f"{self.state.run_id}-{purpose}-{mode}{self.state.suffix}"

    async def measure(
        self,
        name: str,
        mode: str,
        tasks: Sequence[Any],
        on_progress: Callable[[int], None] | None = None,
        *,
        held_out: bool = False,
        strict: bool = False,
        scores: Scores | None = None,
    ) -> Evaluation:
        """The reward of tasks under the present weights and resources. Failures are part of the result, unless it is
        `strict`."""
        return await evaluate_tasks(
            self.collector,
            tasks,
            name=name,
            resources_id=await self.checkpoints.publisher.write(name, {"temperature": TEMPERATURES[mode]}),
            mode="test" if held_out else "val",
            strict=strict,
            scores=scores,
            on_progress=on_progress,
            on_collected=self.name_evaluated,
        )

    # -- phases --------------------------------------------------------------------------------------------------------

    async def fit(self) -> TrainingResult:
        """Measure the starting policy, unless that is done, train, and measure the result."""
        state, algorithm, progress = self.state, self.algorithm, self.progress
        state.warnings = {kind: text for kind, text in state.warnings.items() if not kind.startswith(CLOSING)}
        at_start = state.measures_start(self.config.evaluation.modes)
        before = await self.measure_held_out("measuring the starting policy", "before", "before")
        if at_start:  # Continue from the last checkpoint.
            await self.publish(read_resources(self.directory, state.checkpoint))
            if self.learner is not None:
                async with self.learner.updating():
                    await load_weights(self.learner.policy, self.run_dir, state, self.collector.store)
        # How many steps a search takes is not known: its budget ends it.
        progress.phase("training", None if algorithm.selects_result else self.total_steps, done=state.step)
        if state.step >= self.total_steps:
            self.note(f"all {state.step} steps are done; with more (algorithm.steps=N) the run continues")
        # Lines of steps that will be repeated are dropped.
        forget_after(self.directory / "metrics.jsonl", state.step)
        self.records = [StepRecord.read(line) for line in self.run_dir.read_metrics()]
        if self.learner is not None:
            await self.learner.publish()
        await self.each("on_start")
        with calls_of(type(algorithm), "algorithm"):
            try:
                outcome: object = await algorithm.run(self)
            except NothingArrived as ended:
                outcome = ended
                await self.save()
        if isinstance(self.source, RecordedSource):
            self.source.finish(outcome)
        await self.finish()
        return await self.report(before, await self.measure_trained())

    async def finish(self) -> None:
        """After the last step of the run, or of a stage: its result is the promoted version, or the best one by
        validation."""
        await self.each("on_trained")
        state = self.state
        if state.best_checkpoint is not None and state.best_step != state.step:
            await self.checkpoints.rollback(state.best_checkpoint, state.best_version)

    async def report(self, before: Mapping[str, Evaluation], after: Mapping[str, Evaluation]) -> TrainingResult:
        """Write what the finished run leaves: its checkpoint and `report.json`. `before`, `after`: held-out reward."""
        state = self.state
        gains = {mode: gain_of(before[mode], after[mode]) for mode in before if before[mode].rewards}
        directory = self.directory / "checkpoint"
        await self.checkpoints.export(directory)
        state.warnings |= closing_warnings(self.records, gains)
        self.write_state()
        lines = self.run_dir.read_metrics()
        cost = cost_of_steps(lines)
        if self.config.gateway.providers:
            cost = await with_providers(cost, self.collector.store, state.run_id)
        result = TrainingResult(
            held_out=gains,
            missing=dict(state.reasons),
            rollouts=state.rollouts,
            failed_rollouts=state.failed_rollouts,
            rejected_rollouts=dict(state.rejected),
            skipped_groups=state.skipped_groups,
            warnings=tuple(state.warnings.values()),
            warning_counts=dict(state.warning_counts),
            rollbacks=state.rollbacks,
            gate_rejections=state.of("gate").get("gate_rejections", 0),
            steps=state.step,
            best_step=state.best_step,
            seconds=state.seconds,
            checkpoint=directory,
            curve=None,
            run_dir=self.directory,
            start_prompts=self.config.prompts,
            prompts=prompts_in(self.resources),
            stages=stage_results(state, lines, list(gains)),
            cost=cost,
            recorded=self.source.result(lines) if isinstance(self.source, RecordedSource) else None,
            gateways=self.joined and await self.joined.report(),
        )
        for callback in self.callbacks:
            with calls_of(type(callback), "callback"):
                result = await callback.on_end(result)
        write_atomically(self.directory / "report.json", orjson.dumps(result.as_json(), option=orjson.OPT_INDENT_2))
        return result

    # -- stages --------------------------------------------------------------------------------------------------------

    async def begin_stage(self, stage: Stage) -> bool:
        state = self.state
        self._check_order(stage)
        if stage.number < len(state.stages):
            return False
        if stage.number > len(state.stages):
            if state.stages:  # The next stage begins with the result of the one before it, which is measured.
                await self.finish()
                place = stage.place - 1
                await self.measure_held_out(
                    f"measuring after stage {stage.place}", f"stage-{place}", f"stage-{place:02d}"
                )
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
                await self.save()
            await self.each("on_stage")
            self.write_state()
        self.total_steps, self._lr_factor = state.first_step + stage.steps, stage.lr_factor
        self.validates = not stage.selects_result
        if isinstance(self.source, RolloutStream):
            self.source.total_steps = self.total_steps
        steps = None if stage.selects_result else stage.steps
        self.progress.phase(f"stage {stage.number} of {stage.of}: {stage.name}", steps, done=self.step)
        return True

    def _check_order(self, stage: Stage) -> None:
        """Raises ResumeError where the run had another algorithm at the place of a stage. Warns of changed settings of
        one that is over."""
        records = self.state.stages
        if stage.number > len(records):
            return
        record = records[stage.place]
        if record["name"] != stage.name:
            raise ResumeError(
                f"stage {stage.number} of the run was {record['name']}, not {stage.name}; resume it with the stages it"
                " had"
            )
        if stage.number < len(records) and record["settings"] != stage.settings:
            self.warn(
                f"stage_{stage.number}_changed",
                f"the settings of stage {stage.number} ({stage.name}) were changed after it had ended, which changes"
                " nothing; start a new run for them",
            )
