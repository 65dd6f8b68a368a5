"""The promotion gate: a version of weights or prompts is promoted only if it does not lose on a guard set of tasks.

Every `gate.every` steps the present version runs the guard set. It is compared, task by task, with the promoted version
and with the one that the run started from, so that many small losses do not add up unseen. It loses where a sign-flip
test rejects a mean difference of -margin or more, which is where the interval of the difference lies below; a task
without a reward counts as the lowest reward. A version that loses is replaced by the promoted one. The result of the
run is the promoted version.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentlightning.config import GateConfig
from agentlightning.credit.agent_rewards import team_score
from agentlightning.errors import ConfigError, RewardError, TrainingStopped
from agentlightning.evaluation.intervals import Gain, paired_gain
from agentlightning.task import load_dataset, task_key
from agentlightning.training.governance.audit import Action, AuditLog, AuditRecord
from agentlightning.training.governance.reward_watch import SecondReward
from agentlightning.training.measurements import TEMPERATURES
from agentlightning.training.persistence.checkpoints import Checkpoints
from agentlightning.training.persistence.run_changes import Tasks
from agentlightning.training.persistence.run_dir import KeptCheckpoint, RunState
from agentlightning.training.sources.collector import RolloutCollector, RolloutPlan

Scores = Sequence[float | None]


def guard_tasks(config: GateConfig, tasks: Tasks) -> list[Any]:
    """The guard set of a run. Raises ConfigError where there is none, or it has tasks that are trained on."""
    found = list(tasks.validation if config.tasks is None else load_dataset(config.tasks))
    if not found:
        raise ConfigError("the gate has no tasks: set gate.tasks to a file, or give validation tasks (data.validation)")
    trained = {task_key(task) for task in tasks.train}
    shared = [row for row, task in enumerate(found, 1) if task_key(task) in trained]
    if shared:
        shown = ", ".join(map(str, shared[:5])) + (" ..." if len(shared) > 5 else "")
        raise ConfigError(
            f"{len(shared)} tasks of the guard set ({config.tasks or 'the validation tasks'}) are training tasks, too:"
            f" rows {shown}. A version that has memorised them would pass; remove them from one of the two"
        )
    return found[: config.limit]


@dataclass(frozen=True, slots=True)
class GuardSet:
    """Measures the present version on the guard set."""

    collector: RolloutCollector
    tasks: Sequence[Any]
    mode: str
    publish: Callable[[str, Mapping[str, float]], Awaitable[str]]
    weights: Mapping[str, float] | None = None
    second: SecondReward | None = None

    async def measure(self, name: str) -> list[float | None]:
        """The reward of each task. Rollout ids begin with `name`: a repeated call continues an interrupted one."""
        plans = [RolloutPlan(f"{name}-{index:05d}", task, f"{name}-{index}") for index, task in enumerate(self.tasks)]
        resources_id = await self.publish(name, {"temperature": TEMPERATURES[self.mode]})
        collected = await self.collector.collect(
            plans, resources_id=resources_id, mode="val", max_failed_share=1.0, max_rejected_share=1.0
        )
        ids = {each.group: each.rollout_id for each in collected.trajectories}
        if self.second is not None:
            found: Mapping[str, float | None] = await self.second.scores(list(ids.values()))
        else:
            found = {each.rollout_id: team_score(each, self.weights) for each in collected.trajectories}
        return [found.get(ids.get(plan.group, "")) for plan in plans]


def difference(before: Scores, after: Scores, confidence: float, margin: float = 0.0) -> Gain:
    """The paired difference where a task without a reward counts as the lowest. Raises RewardError if none has one."""
    known = [score for score in (*before, *after) if score is not None]
    if not known:
        raise RewardError("no task of the guard set has a reward; check the reward of the gate (gate.reward)")
    low = min(0.0, *known) if max(known) <= 1 else min(known)
    filled = [[low if score is None else score for score in scores] for scores in (before, after)]
    return paired_gain(*filled, confidence=confidence, null=-margin)


@dataclass(frozen=True, slots=True)
class Decision:
    """What the gate decided about a version."""

    step: int
    promoted: bool
    reason: str
    gain: float
    """Mean paired difference to the promoted version."""
    returned_to: int
    """The step of the version that the run has now."""

    def metrics(self) -> dict[str, float]:
        found = {"gate_gain": self.gain, "gate_promoted": float(self.promoted)}
        return found if self.promoted else {**found, "rolled_back": 1.0, "returned_to_step": float(self.returned_to)}


@dataclass(slots=True)
class PromotionGate:
    """Promotes versions, and returns to the promoted one."""

    config: GateConfig
    state: RunState
    checkpoints: Checkpoints
    guard_set: GuardSet
    audit: AuditLog

    async def begin(self) -> None:
        """Before the first step of a process: the version that the run starts from is the promoted one."""
        state = self.state
        if state.promoted is not None:
            return
        scores = await self._measure()
        known = [score for score in scores if score is not None]
        if not known:
            raise RewardError(
                f"none of {len(scores)} tasks of the guard set has a reward under the starting version; check"
                " gate.reward, or the reward of the run"
            )
        state.guard_scores = {"start": scores, "promoted": scores}
        state.promoted, state.judged_step = await self._checkpoint(), state.step
        await self._record("promoted", "the run starts from it", {"guard": sum(known) / len(known)})

    def is_due(self, total_steps: int) -> bool:
        return self.state.step % self.config.every == 0 or self.state.step == total_steps

    @property
    def has_judged(self) -> bool:
        """Whether it has decided about the present step."""
        return self.state.judged_step == self.state.step

    async def decide(self) -> Decision:
        """Promote the present version, or return to the promoted one."""
        state = self.state
        assert state.promoted is not None
        scores = await self._measure()
        state.judged_step = state.step
        gains = {
            name: difference(state.guard_scores[name], scores, self.config.confidence, self.config.margin)
            for name in ("promoted", "start")
        }
        lost = [name for name, gain in gains.items() if gain.interval[1] < -self.config.margin]
        gain = gains["promoted"]
        reason = _describe(gains[lost[0]] if lost else gain, lost[0] if lost else "promoted", state.promoted["step"])
        numbers = {"guard": gain.after, "gain": gain.gain, "low": gain.interval[0], "high": gain.interval[1]}
        if not lost:
            state.promoted, state.guard_scores["promoted"] = await self._checkpoint(), scores
            await self._record("promoted", reason, numbers)
            return Decision(state.step, True, reason, gain.gain, state.step)
        version = self._version
        state.gate_rejections += 1
        await self.restore()
        await self._record("rejected", reason, numbers, version=version, returned_to=state.promoted["step"])
        return Decision(state.step, False, reason, gain.gain, state.promoted["step"])

    async def restore(self) -> None:
        """Return to the promoted version."""
        promoted = self.state.promoted
        assert promoted is not None
        await self.checkpoints.rollback(promoted["directory"], promoted["version"])
        if self.state.healthy is not None:
            self.state.healthy = self.state.candidate = promoted

    def describe(self, decision: Decision) -> str:
        if decision.promoted:
            return f"step {decision.step}: promoted, {decision.reason}"
        return f"step {decision.step}: not promoted, and back to step {decision.returned_to}: {decision.reason}"

    def stopped(self, decision: Decision) -> TrainingStopped:
        """The error that ends the run."""
        return TrainingStopped(
            f'{self.describe(decision)}. gate.on_loss = "stop". The promoted version is kept; continue from it with'
            " --resume, another reward or a lower learning rate"
        )

    @property
    def _version(self) -> int | None:
        learner = self.checkpoints.learner
        return None if learner is None else learner.policy_version

    @property
    def _name(self) -> str:
        return f"{self.state.run_id}-guard-{self.state.step:06d}{self.state.suffix}"

    async def _measure(self) -> list[float | None]:
        return await self.guard_set.measure(self._name)

    async def _checkpoint(self) -> KeptCheckpoint:
        directory = await self.checkpoints.write(self.state.step)
        return {"directory": directory, "step": self.state.step, "version": self._version}

    async def _record(
        self,
        action: Action,
        reason: str,
        scores: Mapping[str, float],
        *,
        version: int | None = None,
        returned_to: int | None = None,
    ) -> None:
        record = AuditRecord(
            action,
            self.state.step,
            self._version if version is None else version,
            self.audit.algorithm,
            time.time(),
            scores=scores,
            reason=reason,
            resources_id=self._name,
            returned_to=returned_to,
        )
        await self.audit.decided(record)


def _describe(gain: Gain, name: str, step: int) -> str:
    than = f"the promoted version of step {step}" if name == "promoted" else "the version that the run started from"
    low, high = gain.interval
    verb = "loses to" if high < 0 else "does not lose to"
    return (
        f"it {verb} {than} on {gain.tasks} guard tasks: {gain.before:.3g} -> {gain.after:.3g}, difference"
        f" {gain.gain:+.3g} (interval {low:.3g} to {high:.3g})"
    )
