"""Callbacks: what a run does beside collecting, learning and measuring, at the points of each step; and the account of
a run, which calls them and keeps its state file, its metrics, its warnings and its time.

A run calls its callbacks in one order at every point: curve, tracking, reward guard, token ratios, audit log, health,
promotion gate, and then those of others as they were named. Each has a state of its own, which `state.json` holds under
its name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import msgspec
from msgspec import Struct, field

from agentlightning.algorithms.agents import without_calls
from agentlightning.algorithms.training import Collected, Training
from agentlightning.config import CALLBACKS
from agentlightning.credit.rejection import NO_POLICY_CALLS, count_reasons
from agentlightning.errors import ConfigError, ResumeError, TrainingStopped
from agentlightning.policy.base import Metrics, UpdateOptions
from agentlightning.training.health.step_record import StepRecord
from agentlightning.training.persistence.run_dir import RunDir, RunState, forget_after
from agentlightning.trajectory import TrainingSample
from agentlightning.util.plugins import calls_of, described
from agentlightning.util.progress import Progress

if TYPE_CHECKING:
    from agentlightning.evaluation.evaluation import Evaluation
    from agentlightning.training.report.result import TrainingResult
    from agentlightning.training.sources.collector import RolloutCollector

R = TypeVar("R")
S = TypeVar("S")


class NoState(Struct):
    """The state of a callback that remembers nothing."""


class FinishedStep(Struct):
    """A step whose algorithm is done with it.

    >>> from agentlightning.algorithms.training import Collected
    >>> from agentlightning.training.callbacks import FinishedStep
    >>> FinishedStep(Collected(()), {"step": 3, "reward": 0.5}).line["reward"]
    0.5
    """

    collected: Collected
    """The batch that it learned from."""
    line: dict[str, Any]
    """Its metrics so far, as `metrics.jsonl` gets them."""
    is_last: bool = False
    """Whether it is the last one of the run, or of its stage."""
    saves: bool = False
    """Set it to have a checkpoint written after the step, whether one is due or not."""
    notes: list[str] = []
    """What is shown once the step is written."""
    stop: str | None = None
    """Set it to end the run, which can be resumed, once the step is written: the message of its TrainingStopped."""

    @property
    def returned(self) -> bool:
        """Whether the run has returned to earlier weights in this step."""
        return bool(self.line.get("rolled_back") or self.line.get("stopped"))


class Callback(Generic[S]):
    """Code of one's own at the points of a training run, in the trainer's process. Override what is needed.

    `run` is the training run, as an algorithm sees it. What is to survive a resume is in `state`, an object of
    `state_class` (a dataclass whose fields have defaults, of what JSON holds): it is saved with each checkpoint, so
    that a step which a crash has undone is undone here, too. What a method raises ends the run, which can be resumed;
    `agl.errors.TrainingStopped` does so without blame.

        >>> from dataclasses import make_dataclass
        >>> Best = make_dataclass("Best", [("reward", float, 0.0)])
        >>> class Record(agl.Callback[Best]):
        ...     state_class = Best
        ...     async def on_step(self, step):
        ...         self.state.reward = max(self.state.reward, step.line["reward"])
        ...         return {"best_reward": self.state.reward}
        >>> Record.name
        'Record'
    """

    name: ClassVar[str] = ""
    """Names its state; by default that of the class."""
    state_class: ClassVar[type[Any]] = NoState
    state: S
    run: Training

    def __init_subclass__(cls) -> None:
        cls.name = cls.__dict__.get("name", cls.__name__)

    async def on_start(self) -> None:
        """A process is about to begin, or continue, the steps."""

    async def on_batch(self, collected: Collected) -> None:
        """A batch was collected; nothing has learned from it."""

    def before_update(self, options: UpdateOptions) -> UpdateOptions:
        """The options of an update, changed or not."""
        return options

    async def on_update(self, samples: Sequence[TrainingSample]) -> Metrics | None:
        """The weights were updated. Returns further metrics of the update."""

    async def on_validation(self, results: Mapping[str, Evaluation]) -> None:
        """The validation tasks were measured in a step, by sampling mode."""

    async def on_step(self, step: FinishedStep) -> Metrics | None:
        """A step is finished, and not written. Returns what its line gains."""

    async def on_step_end(self, step: FinishedStep) -> None:
        """Its line is written, and a checkpoint where one was due."""

    async def on_checkpoint(self) -> None:
        """A checkpoint was written, which `state.json` is about to name."""

    async def on_stage(self) -> None:
        """A stage of a run of several algorithms has begun."""

    async def on_revision(self) -> None:
        """Rewards mean something else from here on."""

    async def on_trained(self) -> None:
        """Training, or a stage of it, is over. Its result is measured next."""

    async def on_end(self, result: TrainingResult) -> TrainingResult:
        """The run is finished. Returns the result, changed or not."""
        return result

    async def close(self) -> None:
        """The process leaves the run, finished or not."""


def restore(callback: Callback[Any], table: Mapping[str, Any]) -> None:
    """Give a callback its saved state. Raises ResumeError where it does not fit."""
    try:
        callback.state = msgspec.convert(table, callback.state_class)
    except msgspec.ValidationError as error:
        raise ResumeError(
            f"the state of callback {described(type(callback))} cannot be read: {error}; mend it, or leave the callback"
            " out (run.callbacks)"
        ) from error


def saved(callback: Callback[Any]) -> dict[str, Any]:
    """Its state as JSON values. Raises TypeError and ValueError for what JSON has not."""
    state: Any = callback.state
    # msgspec leaves out fields of a dataclass that have the default of their class.
    table = msgspec.to_builtins(asdict(state) if hasattr(state, "__dataclass_fields__") else state)
    json.dumps(table, allow_nan=False)
    return table


def make_callbacks(named: Sequence[str], given: Sequence[Callback[Any]]) -> list[Callback[Any]]:
    """The callbacks that settings name, and those that are objects. Raises ConfigError and ExtensionError."""
    made: list[Callback[Any]] = []
    for each in map(CALLBACKS.find, named):
        with calls_of(each, "callback"):
            made.append(each())
    return [*made, *given]


# -- account ---------------------------------------------------------------------------------------------------------


class RunAccount(Struct):
    """What a run has done so far, and who adds to it."""

    run_dir: RunDir
    state: RunState
    collector: RolloutCollector
    progress: Progress
    callbacks: list[Callback[Any]] = []
    """In the order in which they are called (training/callbacks.py)."""
    records: list[StepRecord] = []
    """Of all steps so far."""
    since: float = field(default_factory=time.monotonic)
    """When this process began to work on the run, or last recorded the time spent."""
    _named: set[str] = set()
    """Reasons of left-out rollouts that were shown."""

    def add(self, callback: Callback[Any]) -> None:
        """Call it after those that there are, with the state that it had. Raises ConfigError where one has its name."""
        if callback.name in (each.name for each in self.callbacks):
            raise ConfigError(f"two callbacks of the run are called {callback.name!r}; give one of them another name")
        restore(callback, self.state.of(callback.name))
        self.callbacks.append(callback)

    async def each(self, call: Callable[[Callback[Any]], Awaitable[R]]) -> list[R]:
        """What a call of each callback returns. Raises ExtensionError for one of others that fails, with its file."""
        found: list[R] = []
        for callback in self.callbacks:
            with calls_of(type(callback), "callback"):
                found.append(await call(callback))
        return found

    async def close(self) -> None:
        """The process leaves the run."""
        await self.each(lambda callback: callback.close())

    def write_state(self) -> None:
        now = time.monotonic()
        self.state.seconds += now - self.since
        self.since = now
        for callback in self.callbacks:
            with calls_of(type(callback), "callback"):
                self.state.callbacks[callback.name] = saved(callback)
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
        if not self.state.learns_weights or any(each.transitions for each in collected.trajectories):
            return
        found = without_calls(collected.trajectories)
        if found and found[0].reason == NO_POLICY_CALLS:
            self.warn({NO_POLICY_CALLS: f"evaluation: {found[0].message}"})

    async def begin_revision(self) -> None:
        """Cancel the rollouts that were queued before a change of what rewards mean."""
        await self.each(lambda callback: callback.on_revision())
        await self.collector.cancel(self.state.run_id)
        self.write_state()
        self.progress.note(
            "rewards from here on cannot be compared with those so far: the starting policy is measured again, the best"
            " checkpoint is chosen again, and rollouts of the current step run again"
        )

    def read_records(self) -> None:
        """Continue from the metrics of earlier steps. Those of steps that will be repeated are dropped."""
        forget_after(self.run_dir.path / "metrics.jsonl", self.state.step)
        self.records = [StepRecord.read(line) for line in self.run_dir.read_metrics()]

    def conclude(self, step: FinishedStep) -> None:
        """Show what is to be said of a step that is written. Raises TrainingStopped where it ends the run."""
        for text in step.notes:
            self.progress.note(text)
        if step.stop is not None:
            raise TrainingStopped(step.stop)

    def add_step(self, line: Mapping[str, Any]) -> StepRecord:
        """Record a finished step."""
        record = StepRecord.read(line)
        self.state.skipped_groups += record.skipped_groups
        self.run_dir.append_metrics(line)
        self.records.append(record)
        self.progress.step(line)
        return record
