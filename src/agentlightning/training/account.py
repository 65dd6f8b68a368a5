"""The account of a run: its state file, its metrics, warnings and time, and the callbacks that add to them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from msgspec import Struct, field

from agentlightning.algorithms.agents import without_calls
from agentlightning.algorithms.training import Collected
from agentlightning.credit.rejection import NO_POLICY_CALLS, count_reasons
from agentlightning.errors import ConfigError, TrainingStopped
from agentlightning.training.callbacks import Callback, FinishedStep, restore, saved
from agentlightning.training.health.step_record import StepRecord
from agentlightning.training.persistence.run_dir import RunDir, RunState, forget_after
from agentlightning.training.sources.collector import RolloutCollector
from agentlightning.util.plugins import calls_of
from agentlightning.util.progress import Progress

R = TypeVar("R")


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
