"""The training run: the `Training` that an algorithm is given.

It combines the run's source of rollouts, learner, measurements and checkpoints, and keeps the account of its steps;
`trainer.py` makes these parts. After every step the run directory holds all that is needed to continue from there.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from agentlightning.algorithms.agents import without_calls
from agentlightning.algorithms.training import Collected, RolloutReport, RolloutRequest, RolloutSource, Stage, Want
from agentlightning.assemble import AUTOMATIC_REWARDS
from agentlightning.chat.base import ChatFormat
from agentlightning.config import RunConfig
from agentlightning.credit.rejection import NO_POLICY_CALLS, Check, count_reasons
from agentlightning.errors import ConfigError, ResumeError, StoreError
from agentlightning.evaluation.evaluation import Evaluation
from agentlightning.policy.base import UPDATE, UpdateOptions
from agentlightning.resources import NamedResources, PromptTemplate, named_resources
from agentlightning.training.governance.audit import AuditLog
from agentlightning.training.governance.gate import Decision, PromotionGate
from agentlightning.training.governance.reward_watch import RewardWatch
from agentlightning.training.health.batch import batch_metrics
from agentlightning.training.health.recovery import Reaction, Recovery
from agentlightning.training.health.signs import Sign, signs_of
from agentlightning.training.health.step_record import StepRecord
from agentlightning.training.learner import PolicyLearner, age
from agentlightning.training.measurements import TEMPERATURES, Measurements
from agentlightning.training.persistence.checkpoints import Checkpoints
from agentlightning.training.persistence.run_dir import RunDir, RunState, StageRecord
from agentlightning.training.persistence.token_ratios import record_ratios
from agentlightning.training.recorded import Recorded
from agentlightning.training.report.reward_curve import LiveCurve
from agentlightning.training.sources.collector import RolloutCollector
from agentlightning.training.sources.trials import run_trials
from agentlightning.training.tracking.tracking import Tracking, validation_transcripts
from agentlightning.trajectory import TrainingSample, Trajectory
from agentlightning.util.progress import Progress

SLOW_CHECKPOINT: Final = 1.0
"""Seconds. One that takes less is written after each step ..."""
CHECKPOINT_SHARE: Final = 9
"""... and of others so few that training takes nine times as long."""

# -- stages ----------------------------------------------------------------------------------------------------------

# The stages of a run of several algorithms, as its state records them.


def record_of(stage: Stage, state: RunState) -> StageRecord:
    """The record of a stage that begins now."""
    return {
        "name": stage.name,
        "first_step": state.step,
        "rollouts": state.rollouts,
        "learns_weights": stage.learns_weights,
        "settings": stage.settings,
    }


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


@dataclass(slots=True)
class RunAccount:
    """What a run has done so far: its state file, metrics, warnings and time."""

    run_dir: RunDir
    state: RunState
    collector: RolloutCollector
    progress: Progress
    records: list[StepRecord] = field(default_factory=list[StepRecord])
    """Of all steps so far."""
    since: float = field(default_factory=time.monotonic)
    """When this process began to work on the run, or last recorded the time spent."""
    curve: LiveCurve = field(init=False)
    """Drawn again as the run goes on."""
    tracking: Tracking | None = None
    """The trackers that it reports to."""
    _named: set[str] = field(default_factory=set[str])
    """Reasons of left-out rollouts that were shown."""

    def __post_init__(self) -> None:
        self.curve = LiveCurve(self.run_dir.path / "curve.png")

    def write_state(self) -> None:
        now = time.monotonic()
        self.state.seconds += now - self.since
        self.since = now
        self.run_dir.write_state(self.state)

    def warn(self, found: Mapping[str, str]) -> None:
        """Show each kind of warning once in the life of the run, count it, and keep it for the result."""
        for kind, text in found.items():
            self.state.warning_counts[kind] = self.state.warning_counts.get(kind, 0) + 1
            if kind not in self.state.warnings:
                self.state.warnings[kind] = f"step {self.state.step}: {text}" if self.state.step else text
                self.progress.note(f"warning: {self.state.warnings[kind]}")

    async def count(self, collected: Collected) -> None:
        """Count the training rollouts, and name the first of each kind that is of no use."""
        self.state.rollouts += collected.rollouts
        self.state.failed_rollouts += len(collected.failed)
        for reason, count in count_reasons(collected.rejected).items():
            self.state.rejected[reason] = self.state.rejected.get(reason, 0) + count
        await self.name_left_out(collected)

    async def name_left_out(self, collected: Collected) -> None:
        if not collected.left_out.keys() - self._named:
            return
        for reason, first in (await self.collector.first_of_each_reason(collected)).items():
            if reason not in self._named:
                self._named.add(reason)
                self.progress.note(
                    f"rollout {first.rollout_id} is left out ({reason.replace('_', ' ')}): {first.message}\n"
                    "  further ones are counted: metrics.jsonl, report.json"
                )

    async def name_evaluated(self, collected: Collected) -> None:
        """The same for an evaluation of a policy. Where no rollout asked any model, warn: nothing can be learned from
        such rollouts."""
        await self.name_left_out(collected)
        if any(each.transitions for each in collected.trajectories):
            return
        found = without_calls(collected.trajectories)
        if found and found[0].reason == NO_POLICY_CALLS:
            self.warn({NO_POLICY_CALLS: f"evaluation: {found[0].message}"})

    async def begin_revision(self) -> None:
        """Cancel the rollouts that were queued before a change of what rewards mean."""
        await self.collector.cancel(self.state.run_id)
        self.write_state()
        self.progress.note(
            "rewards from here on cannot be compared with those so far: the starting policy is measured again, the best"
            " checkpoint is chosen again, and rollouts of the current step run again"
        )

    def read_records(self) -> None:
        """Continue from the metrics of earlier steps. Those of steps that will be repeated are dropped."""
        self.run_dir.forget_metrics_after(self.state.step)
        self.records = [StepRecord.read(line) for line in self.run_dir.read_metrics()]

    def judge(self, line: Mapping[str, Any]) -> list[Sign]:
        """Warn of what the metrics of a step show, together with those before it."""
        found = signs_of([*self.records, StepRecord.read(line)])
        self.warn({sign.name: str(sign) for sign in found})
        return found

    def add_step(self, line: Mapping[str, Any]) -> StepRecord:
        """Record a finished step."""
        record = StepRecord.read(line)
        self.state.skipped_groups += record.skipped_groups
        self.run_dir.append_metrics(line)
        self.records.append(record)
        self.progress.step(line)
        self.curve.draw(self.run_dir.read_metrics)
        if self.tracking is not None:
            self.tracking.log(self.state.step, line)
            self.warn_of_trackers()
        return record

    def warn_of_trackers(self) -> None:
        """Name those that fail; each failure is counted by the tracker's channel."""
        if self.tracking is not None:
            new = self.tracking.warnings()
            self.warn({kind: text for kind, text in new.items() if kind not in self.state.warnings})


@dataclass(frozen=True, slots=True)
class CountedSource:
    """A rollout source whose batches enter the run's account, after a check of their rewards."""

    source: RolloutSource
    account: RunAccount
    watch: RewardWatch | None = None

    async def next(self, request: RolloutRequest) -> Collected:
        collected = await self.source.next(request)
        await self.account.count(collected)
        if self.watch is not None:
            await self.watch.check(collected)
        return collected


@dataclass(slots=True)
class TrainingRun:
    """Implements `algorithms.training.Training`."""

    config: RunConfig
    account: RunAccount
    rollouts: RolloutSource
    learner: PolicyLearner | None
    measurements: Measurements
    checkpoints: Checkpoints
    recovery: Recovery
    total_steps: int
    """The last step; in a run of several stages, that of the present one."""
    audit: AuditLog
    watch: RewardWatch | None = None
    gate: PromotionGate | None = None
    target_agent: str | None = None
    start_prompts: Mapping[str, PromptTemplate] = field(default_factory=dict[str, PromptTemplate])
    """The prompt templates that the run began with."""
    stop_rollouts_at: Callable[[int], None] = lambda step: None
    """No rollouts are started for this step or later ones."""
    uses_providers: bool = False
    """Whether agents may call models of others, at their prices."""
    recorded: Recorded | None = None
    """What it learns from in place of rollouts."""
    gateways: Callable[[], Awaitable[Mapping[str, Any]]] | None = None
    """What the gateways that the run has joined did for it; None: its own process answers calls."""
    _lr_factor: float = 1.0
    """Of the present stage."""
    _evaluations: int = 0
    """Evaluations that the algorithm requested within the step."""
    _writing: float = 0.0
    """The most seconds that a checkpoint took."""
    _written: float = 0.0
    """When the last one was finished."""

    @property
    def state(self) -> RunState:
        return self.account.state

    @property
    def step(self) -> int:
        return self.state.stage_step

    @property
    def chat(self) -> ChatFormat:
        return self._learner().chat

    @property
    def context_length(self) -> int:
        return self._learner().context_length

    def _learner(self) -> PolicyLearner:
        if self.learner is None:
            raise ConfigError("this run trains no model: the algorithm's class says learns_weights = False")
        return self.learner

    # -- what an algorithm does ----------------------------------------------------------------------------------------

    async def collect(
        self,
        wants: Sequence[Want] = (),
        *,
        tasks: int = 0,
        group_size: int = 1,
        temperature: float = 1.0,
        check: Check | None = None,
        timeout_reward: float | None = None,
        top_p: float = 1.0,
        top_k: int = 0,
    ) -> Collected:
        request = RolloutRequest(
            [*wants, *[Want(n=group_size)] * tasks], temperature, check, timeout_reward, top_p, top_k
        )
        return await self.rollouts.next(request)

    async def recall(
        self, groups: Mapping[str, str], *, tasks: Mapping[str, Any], max_age: int, check: Check | None = None
    ) -> tuple[Trajectory, ...]:
        if self.recorded is not None:  # Every session comes again by itself.
            return ()
        found = await self.account.collector.reader.read_remaining(groups, check, tasks)
        learner, resumes = self._learner(), self.state.resumes
        ages = (age(each, learner.policy_version, resumes, learner.versions) for each in found)
        return tuple(each for each, updates in zip(found, ages, strict=True) if updates <= max_age)

    async def update(self, samples: Sequence[TrainingSample], options: UpdateOptions = UPDATE) -> Mapping[str, float]:
        options = replace(options, lr_factor=options.lr_factor * self._lr_factor)
        metrics = await self._learner().update(samples, options)
        if not self.config.token_ratios:
            return metrics
        run_dir, step = self.account.run_dir.path, self.state.step + 1
        return {**metrics, **await record_ratios(run_dir, step, self._learner(), samples)}

    async def save(self, directory: Path) -> None:
        await self._learner().save(directory)

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

    async def try_resources(self, resources: NamedResources, tasks: Mapping[str, Any]) -> list[RolloutReport]:
        self._check_agent()
        label = f"{self.state.run_id}-trial-{self.state.step + 1:06d}{self.state.suffix}"
        sampling = {"temperature": TEMPERATURES[self.measurements.config.modes[0]]}
        resources_id = await self.checkpoints.publisher.write_trial(label, resources, sampling)
        weights = self.measurements.reward_weights
        collected, reports = await run_trials(self.account.collector, label, tasks, resources_id, weights)
        await self.account.count(collected)
        return reports

    async def publish(self, resources: NamedResources) -> None:
        self.checkpoints.publisher.publish(resources)

    async def evaluate(self, tasks: Sequence[Any] | None = None) -> Evaluation:
        self._check_agent()
        label = f"evaluation-{self.state.step + 1:06d}" + (f"-part{self._evaluations}" if self._evaluations else "")
        self._evaluations += 1
        chosen = self.measurements.validation if tasks is None else tasks
        return await self.measurements.evaluate(label, "greedy", chosen)

    async def finish_step(self, collected: Collected, metrics: Mapping[str, float]) -> None:
        state = self.state
        state.step += 1
        self._evaluations = 0
        line: dict[str, Any] = {"step": state.step, **metrics}
        if self.recorded is None:
            line = step_line(state, collected, await self._batch_metrics(collected) | dict(metrics))
        if self.watch is not None:
            line |= self.watch.finish_step()
        if self.measurements.validation_is_due(self.total_steps):
            line |= await self._validate()
        self._write_audit(collected, line)
        # What signs mean assumes rollouts of the present weights.
        reaction = await self.recovery.react(self.account.judge(line) if self.recorded is None else [])
        decision = None
        if reaction is not None:
            line |= reaction.metrics(state)
        elif self.gate is not None and self.gate.is_due(self.total_steps):
            decision = await self.gate.decide()
            line |= decision.metrics()
        record = self.account.add_step(line)
        if reaction is not None:
            await self._finish_reaction(reaction)
        elif decision is not None:
            await self._finish_decision(decision)
        elif self._checkpoint_is_due():
            await self.checkpoint()
        self.account.progress.update(self.step, **record.progress())

    async def _finish_reaction(self, reaction: Reaction) -> None:
        await self.checkpoint()
        if reaction.stops:
            raise self.recovery.stopped(reaction, self.account.run_dir.path)
        self.account.progress.note(self.recovery.describe(reaction))

    async def begin(self) -> None:
        """Before the first step of a process: there are checkpoints to return to."""
        await self.recovery.begin()
        if self.gate is not None:
            await self.gate.begin()
            self.account.write_state()

    async def _finish_decision(self, decision: Decision) -> None:
        assert self.gate is not None
        await self.checkpoint()
        if not decision.promoted and self.gate.config.on_loss == "stop":
            raise self.gate.stopped(decision)
        self.account.progress.note(self.gate.describe(decision))

    async def judge(self) -> None:
        """Have the gate decide about the present version, unless it has."""
        if self.gate is not None and not self.gate.has_judged:
            await self._finish_decision(await self.gate.decide())

    # -- stages --------------------------------------------------------------------------------------------------------

    async def begin_stage(self, stage: Stage) -> bool:
        state = self.state
        check_order(stage, state.stages, self.warn)
        if stage.number < len(state.stages):
            return False
        if stage.number > len(state.stages):
            if state.stages:
                await self._finish_stage(stage)
            state.begin_stage(record_of(stage, state))
            await self._keep_start()
        self.total_steps, self._lr_factor = state.first_step + stage.steps, stage.lr_factor
        self.stop_rollouts_at(self.total_steps)
        self.measurements.validates = not stage.selects_result
        steps = None if stage.selects_result else stage.steps
        self.account.progress.phase(f"stage {stage.number} of {stage.of}: {stage.name}", steps, done=self.step)
        return True

    async def _keep_start(self) -> None:
        """Record that a stage has begun, with a checkpoint of what it begins with."""
        if self.state.first_step:
            await self.checkpoint()
            self.recovery.keep_only(str(self.state.checkpoint))
        self.account.write_state()

    async def _finish_stage(self, following: Stage) -> None:
        """Leave the next stage the promoted version, or the best one by validation, and measure it."""
        await self.judge()
        await self.load_best()
        self.account.progress.phase(f"measuring after stage {following.place}", self.measurements.rollouts)
        await self.measurements.measure_stage(following.place - 1)

    def _write_audit(self, collected: Collected, line: Mapping[str, Any]) -> None:
        publisher = self.checkpoints.publisher
        resources = named_resources.dump_python(publisher.resources, mode="json") if publisher.published else None
        version = None if self.learner is None else self.learner.policy_version
        self.audit.learned(version, [each.rollout_id for each in collected.trajectories], line, resources)

    async def _batch_metrics(self, collected: Collected) -> dict[str, float]:
        weights = self.measurements.reward_weights
        return await asyncio.to_thread(batch_metrics, collected.trajectories, weights)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    async def checkpoint(self) -> None:
        """Write a checkpoint, then name it in state.json: only then does the step count."""
        started = time.monotonic()
        self.state.checkpoint = await self.checkpoints.write(self.state.step)
        self._written = time.monotonic()
        if self._writing < SLOW_CHECKPOINT <= self._written - started and self.config.checkpoint_every is None:
            self.note(
                f"a checkpoint takes {self._written - started:.1f} s to write, so that one is written about every"
                f" {CHECKPOINT_SHARE * (self._written - started):.0f} s (run.checkpoint_every)"
            )
        self._writing = max(self._writing, self._written - started)
        self.state.checkpoint_version = None if self.learner is None else self.learner.policy_version
        self.recovery.keep()
        self.account.write_state()
        self.account.run_dir.prune_checkpoints(self.state, self.config.keep_checkpoints)

    def _checkpoint_is_due(self) -> bool:
        every, step = self.config.checkpoint_every, self.state.step
        if every is not None or step == self.total_steps:
            return step == self.total_steps or step % (every or 1) == 0
        return self._writing < SLOW_CHECKPOINT or time.monotonic() - self._written >= CHECKPOINT_SHARE * self._writing

    async def load_best(self) -> None:
        """Return to the best checkpoint by validation, if that is not the present one. With a gate, that is the
        promoted one."""
        promoted = self.state.promoted
        if self.gate is not None and promoted is not None:
            self.state.best_step, self.state.best_checkpoint = promoted["step"], promoted["directory"]
            self.state.best_version = promoted["version"]
        if self.state.best_checkpoint is not None and self.state.best_step != self.state.step:
            await self.checkpoints.rollback(self.state.best_checkpoint, self.state.best_version)

    async def keep_best(self, score: float) -> None:
        state = self.state
        if not self.measurements.tasks.validation and (state.best_score is None or score > state.best_score):
            state.best_score = score
            await self._keep_best()

    async def _keep_best(self) -> None:
        self.state.best_step = self.state.step
        self.state.best_checkpoint = await self.checkpoints.write(self.state.step)
        self.state.best_version = None if self.learner is None else self.learner.policy_version

    async def _validate(self) -> dict[str, float]:
        results = await self.measurements.validate()
        if self.measurements.is_best(results):
            await self._keep_best()
        await self._track_validation(results)
        return {
            **{f"validation_{mode}": result.mean if result.known else math.nan for mode, result in results.items()},
            **{f"missing_validation_{mode}": result.missing for mode, result in results.items() if result.missing},
        }

    async def _track_validation(self, results: Mapping[str, Evaluation]) -> None:
        """Send transcripts of the first tasks to the trackers."""
        tracking = self.account.tracking
        if tracking is None or not tracking.config.transcripts:
            return
        tasks = list(self.measurements.validation[: tracking.config.transcripts])
        names = {mode: self.measurements.validation_name(mode) for mode in results}
        try:
            rows = await validation_transcripts(self.account.collector.store, names, results, tasks)
        except StoreError as error:  # somebody has pruned them meanwhile
            self.account.warn({"transcripts": f"the transcripts of a validation were not kept: {error}"})
        else:
            tracking.transcripts(self.state.step, rows)


def step_line(state: RunState, collected: Collected, metrics: Mapping[str, float]) -> dict[str, Any]:
    """A line of `metrics.jsonl`: the algorithm's metrics, and what the run knows of the step's rollouts."""
    reasons = count_reasons(collected.rejected)
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
        "sampled_tokens": collected.sampled_tokens,
        "tokens_per_second": (collected.sampled_tokens - collected.sampled_before) / max(collected.seconds, 1e-9),
        "collect_seconds": collected.seconds,
    }


def _automatic_rewards(collected: Collected) -> dict[str, float]:
    """`air_RULE` for each rule that gave rewards, and `air_reward` for all: the mean sum of a rollout."""
    sums: dict[str, float] = {}
    for trajectory in collected.trajectories:
        for rule, value in trajectory.metadata.get(AUTOMATIC_REWARDS, {}).items():
            for name in (f"air_{rule}", "air_reward"):
                sums[name] = sums.get(name, 0.0) + value
    return {name: value / len(collected.trajectories) for name, value in sums.items()}
