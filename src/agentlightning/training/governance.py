"""Governance of a run: its health, the check of its rewards, the audit log of its versions, and the promotion gate.

Health warns of each sign of trouble, and when the policy collapses it may stop the run, or return to a healthy
checkpoint with a lower learning rate. A checkpoint is *healthy* once a number of further steps have shown no collapse,
because its signs come some steps after its cause. Two are kept: the healthy one, and the next candidate. A run that
stops has returned to the healthy one, too, so that it can be resumed; both are bounded in number by
`run.max_rollbacks`.

The guard checks the rewards of every batch before it is learned from, as `[guard]` says. What it measures is in the
metrics of the step (`rewards_missing_share`, `reward_drift`, `reward_disagreement`); what violates a limit is there as
`guard_...`, from which the signs of `training/health/signs.py` are made.

The audit log says for every version of weights and prompts what it was learned from, by what, and how it scored:
`audit.jsonl` in the run directory has a line for each. What the gate decided is in the store as well, as a finished
rollout `RUN-audit-STEP` whose input is the line and whose `resources_id` names the version it is about.

The gate promotes a version only if it does not lose on a guard set of tasks. Every `gate.every` steps the present
version runs the guard set. It is compared, task by task, with the promoted version and with the one that the run
started from, so that many small losses do not add up unseen. It loses where a sign-flip test rejects a mean difference
of -margin or more, which is where the interval of the difference lies below; a task without a reward counts as the
lowest reward. A version that loses is replaced by the promoted one. The result of the run is the promoted version.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from agentlightning.algorithms.training import Collected
from agentlightning.config import GateConfig, RewardGuard
from agentlightning.credit import group_trajectories
from agentlightning.credit.rejection import CALL_LIMIT, MISSING_REWARD
from agentlightning.errors import ConfigError, ConflictError, RewardError, TrainingStopped
from agentlightning.evaluation.intervals import Gain, paired_gain
from agentlightning.policy.base import Metrics, UpdateOptions
from agentlightning.resources import named_resources
from agentlightning.rollouts import Rollout
from agentlightning.runner.agents.agent import function_spec, load_object
from agentlightning.runner.agents.arguments import RewardFunction
from agentlightning.task import load_dataset, task_key
from agentlightning.training.callbacks import Callback, FinishedStep, NoState
from agentlightning.training.health.signs import beyond_limits, signs_of
from agentlightning.training.health.step_record import (
    DIMENSION,
    STEPS_BEFORE,
    VALIDATION,
    StepRecord,
    discordance,
    distance,
    score_of,
)
from agentlightning.training.persistence.run_dir import KeptCheckpoint, append_lines, check_run, whole_lines
from agentlightning.training.sources.collector import Scores, apply_reward, read_recordings
from agentlightning.trajectory import Trajectory, scalar_reward

if TYPE_CHECKING:
    from agentlightning.training.run import TrainingRun

S = TypeVar("S")


class RunCallback(Callback[S]):
    """A callback of ours, which acts on all of a run."""

    def __init__(self, run: TrainingRun) -> None:
        self.run: TrainingRun = run  # pyright: ignore[reportIncompatibleVariableOverride]


# -- health ----------------------------------------------------------------------------------------------------------

HEALTHY_STEPS = 5
"""Steps without a sign of collapse after which a checkpoint is healthy: `signs.LAST` and one."""


class HealthState(Struct):
    healthy: KeptCheckpoint | None = None
    """The newest checkpoint known to be from before any collapse."""
    candidate: KeptCheckpoint | None = None
    """The one that is to follow it."""
    rollbacks: int = 0
    """The number of returns to a healthy checkpoint."""
    lr_factor: float = 1.0
    """The factor of the learning rate after these."""


class Health(RunCallback[HealthState]):
    """Judges each step together with those before it, and acts on a collapse as `run.on_collapse` says."""

    name = "health"
    state_class = HealthState

    async def on_start(self) -> None:
        """There is always a checkpoint to return to."""
        if self.run.config.run.on_collapse != "warn" and self.state.healthy is None:
            self.state.healthy = self.state.candidate = await self.run.checkpoints.keep()

    def before_update(self, options: UpdateOptions) -> UpdateOptions:
        return replace(options, lr_factor=options.lr_factor * self.state.lr_factor)

    async def on_step(self, step: FinishedStep) -> Metrics | None:
        run, state, config = self.run, self.state, self.run.config.run
        if run.state.recorded is not None:  # Signs are for rollouts of the present weights.
            return None
        signs = signs_of([*run.records, StepRecord.read(step.line)])
        run.warn_of({sign.name: str(sign) for sign in signs})
        sign, healthy = next((sign for sign in signs if sign.is_collapse), None), state.healthy
        if sign is None or healthy is None or config.on_collapse == "warn":
            return None
        await run.checkpoints.rollback(healthy["directory"], healthy["version"])
        state.candidate, step.saves = healthy, True
        back = f"returned to the weights of step {healthy['step']}"
        stops = config.on_collapse == "stop" or state.rollbacks >= config.max_rollbacks
        if stops:
            why = f'run.on_collapse = "{config.on_collapse}"'
            if config.on_collapse == "rollback":
                why += f", after {state.rollbacks} rollbacks (run.max_rollbacks)"
            step.stop = (
                f"step {run.state.step}: {sign}.\nThe run has {back} and stopped: {why}. Continue with a lower learning"
                f" rate: agl train --resume {run.directory} algorithm.optimizer.lr=..."
            )
        else:
            state.rollbacks += 1
            state.lr_factor *= config.rollback_lr_factor
            step.notes.append(
                f"step {run.state.step}: {back}, with {state.lr_factor:.3g} of the learning rate (rollback"
                f" {state.rollbacks} of {config.max_rollbacks}), because {sign.what}"
            )
        did = "stopped" if stops else "rolled_back"
        return {did: 1.0, "returned_to_step": float(healthy["step"]), "lr_factor": state.lr_factor}

    async def on_checkpoint(self) -> None:
        """That of a step without collapse is the next candidate when due."""
        state, written = self.state, self.run.checkpoints.written
        if written is None or state.candidate is None:
            return
        if written["step"] - state.candidate["step"] >= HEALTHY_STEPS:
            state.healthy, state.candidate = state.candidate, written

    async def on_stage(self) -> None:
        """Return to no checkpoint before the one with which a stage begins."""
        if (written := self.run.checkpoints.written) is not None:
            self.return_to(written)

    def return_to(self, kept: KeptCheckpoint) -> None:
        """Return to no other checkpoint than this from now on, where one is kept at all."""
        if self.state.healthy is not None:
            self.state.healthy = self.state.candidate = kept


# -- second reward ---------------------------------------------------------------------------------------------------

# Scores finished rollouts by a reward function that no agent is trained on.

CONCURRENCY = 8
"""Rollouts that are scored at the same time."""
logger = logging.getLogger(__name__)


def second_reward(run: TrainingRun, name: str | None) -> Scores | None:
    """Gives finished rollouts of a run the rewards of the function of that name, in this process. One that the function
    raises for, or gives no number, is left out; the first is logged. Raises AgentError where it cannot be loaded."""
    if not name:
        return None
    function = RewardFunction.of(load_object(function_spec(name, "reward"), "reward"))
    store, limit = run.collector.store, asyncio.Semaphore(CONCURRENCY)

    async def scores(rollout_ids: Sequence[str]) -> dict[str, float]:
        recorded = await read_recordings(store, rollout_ids)

        async def score(rollout: Rollout) -> float | None:
            own = recorded[rollout.rollout_id]
            if own.attempt is None:
                return None
            async with limit:
                reward = await apply_reward(store, function, rollout, own.attempt, own.spans)
            return scalar_reward(reward, run.algorithm.reward_weights)

        rollouts = await store.query_rollouts(rollout_id_in=rollout_ids)
        # The boundary of the user's function: what it raises is counted as missing.
        results = await asyncio.gather(*map(score, rollouts), return_exceptions=True)
        found = {rollout.rollout_id: each for rollout, each in zip(rollouts, results, strict=True)}
        failures = [
            f"{key}: {type(each).__name__}: {each}" for key, each in found.items() if isinstance(each, BaseException)
        ]
        if failures:
            logger.warning("%s gave %d rollouts no score. rollout %s", function.source, len(failures), failures[0])
        return {key: value for key, value in found.items() if isinstance(value, int | float)}

    return scores


# -- guard -----------------------------------------------------------------------------------------------------------

WITHOUT_REWARD = frozenset({MISSING_REWARD, CALL_LIMIT, RewardError.reason})
"""Reasons of rejected rollouts that have no usable reward."""
MOST_REMEMBERED = 512
"""Rewards of a step that are remembered."""
Pairs: TypeAlias = Sequence[Sequence[tuple[float, float]]]
"""Two scores of each rollout of each group."""


class GuardState(Struct):
    recent_rewards: list[list[float]] = []
    """Those of the last steps."""


class Guard(RunCallback[GuardState]):
    """Checks the rewards of a run."""

    name = "guard"
    state_class = GuardState

    def __init__(self, run: TrainingRun, guard: RewardGuard) -> None:
        """Raises AgentError where the second reward cannot be loaded."""
        super().__init__(run)
        self.guard, self.second = guard, second_reward(run, guard.reward)
        self._metrics = dict[str, float]()
        """Of the batches of the present step."""
        self._rewards: list[float] = []

    async def on_batch(self, collected: Collected) -> None:
        """Measure a batch. Raises TrainingStopped where it violates a limit and the guard is to stop the run."""
        rewards = {each.rollout_id: score_of(each) for each in collected.trajectories}
        known = [reward for reward in rewards.values() if reward is not None]
        guard = self.guard
        low, high = -math.inf if guard.low is None else guard.low, math.inf if guard.high is None else guard.high
        finished = len(collected.trajectories) + len(collected.rejected)
        rejected = sum(each.reason in WITHOUT_REWARD for each in collected.rejected)
        outside = sum(not low <= reward <= high for reward in known)
        missing = (rejected + len(rewards) - len(known)) / max(1, finished)
        drift = distance(known, [reward for step in self.state.recent_rewards for reward in step])
        shares = map(discordance, await self._pairs(collected.trajectories, rewards))
        disagreement = max((share for share in shares if share is not None), default=None)
        self._rewards += filter(math.isfinite, known)
        found: dict[str, float] = {"guard_out_of_range": outside} if outside else {}
        for name, metric, value, limit in (
            ("guard_missing", "rewards_missing_share", missing, guard.max_missing),
            ("guard_drift", "reward_drift", drift, guard.max_drift),
            ("guard_disagreement", "reward_disagreement", disagreement, guard.max_disagreement),
        ):
            if value is not None:
                found |= {metric: value} | ({name: value} if value > limit else {})
        for name, value in found.items():  # a step may have several batches
            earlier = self._metrics.get(name, 0.0)
            self._metrics[name] = value + earlier if name == "guard_out_of_range" else max(value, earlier)
        violated = list(beyond_limits([StepRecord.read(found)]))
        if violated and guard.on_violation == "stop":
            raise TrainingStopped(
                f"step {self.run.state.step + 1}: {'; '.join(map(str, violated))}.\nThe run has not learned from"
                ' it: guard.on_violation = "stop". Continue it with --resume once the cause is mended'
            )

    async def on_step(self, step: FinishedStep) -> Metrics:
        metrics, self._metrics = self._metrics, {}
        rewards, self._rewards = self._rewards, []
        spread = max(1, len(rewards) // MOST_REMEMBERED)
        self.state.recent_rewards = [*self.state.recent_rewards, rewards[::spread]][-STEPS_BEFORE:]
        return metrics

    async def on_stage(self) -> None:
        self.state.recent_rewards.clear()

    on_revision = on_stage

    async def _pairs(self, trajectories: Sequence[Trajectory], rewards: Mapping[str, float | None]) -> list[Pairs]:
        """What is compared: two dimensions of the reward, and the reward with that of another function."""
        groups, compared = group_trajectories(trajectories), list[Mapping[str, tuple[float, float]]]()
        if self.guard.agree is not None:
            first, second = self.guard.agree
            given = {each.rollout_id: reward for each in trajectories if (reward := each.team_reward) is not None}
            named = {key: reward for key, reward in given.items() if isinstance(reward, dict)}
            both = {key: (each[first], each[second]) for key, each in named.items() if {first, second} <= each.keys()}
            if given and not both:
                dimensions = sorted({name for each in named.values() for name in each})
                self.run.warn(
                    "guard_agree",
                    f"guard.agree compares the dimensions {first!r} and {second!r}, and no reward of the batch has both"
                    f" ({', '.join(dimensions) or 'they are plain numbers'}), so that nothing is compared; give others,"
                    " or leave it out",
                )
            compared.append(both)
        if self.second:
            chosen: list[str] = []
            for group in groups:
                if len(chosen) + len(group) <= self.guard.sample:
                    chosen += [each.rollout_id for each in group]
            scores = await self.second(chosen)
            compared.append({key: (own, score) for key, score in scores.items() if (own := rewards[key]) is not None})
        ids = [[each.rollout_id for each in group] for group in groups]
        return [[[pairs[key] for key in own if key in pairs] for own in ids] for pairs in compared]


# -- audit log -------------------------------------------------------------------------------------------------------

AUDIT_FILE = "audit.jsonl"
Action = Literal["learned", "promoted", "rejected"]


class AuditRecord(Struct, frozen=True):
    """One event in the life of a version.

    >>> from agentlightning.training.governance import AuditRecord
    >>> AuditRecord("learned", step=3, version=3, algorithm="lightning_rl", time=0.0).rollouts
    ()
    """

    action: Action
    """learned: it was made by a step; promoted, rejected: what the promotion gate decided."""
    step: int
    """The step after which it was present."""
    version: int | None
    """Its policy_version. None: the run trains no weights."""
    algorithm: str
    time: float
    """Seconds since 1970."""
    rollouts: tuple[str, ...] = ()
    """The rollouts that the step was given to learn from."""
    scores: Mapping[str, float] = {}
    """Rewards of the step, of its validation, or of the guard set."""
    reason: str = ""
    """Why it was promoted or rejected."""
    resources: Mapping[str, Any] | None = None
    """The prompts and models beside the policy, where the algorithm has published some."""
    resources_id: str | None = None
    """Under which the store has the version."""
    returned_to: int | None = None
    """The step of the version that a rejected one was replaced by."""


class Audit(RunCallback[NoState]):
    """Writes the audit log of a run."""

    name = "audit"

    async def on_step(self, step: FinishedStep) -> None:
        publisher = self.run.checkpoints.publisher
        self._write(
            "learned",
            rollouts=tuple(each.rollout_id for each in step.collected.trajectories),
            scores={
                name: float(value)
                for name, value in step.line.items()
                if name == "reward" or name.startswith((VALIDATION, DIMENSION))
                if isinstance(value, int | float)
            },
            resources=named_resources.dump_python(publisher.resources, mode="json") if publisher.published else None,
        )

    def _write(self, action: Action, **fields: Any) -> AuditRecord:
        run = self.run
        given: Any = {"version": run.checkpoints.version, "algorithm": run.algorithm.name, "time": time.time()} | fields
        record = AuditRecord(action, run.state.step, **given)
        append_lines(run.directory / AUDIT_FILE, msgspec.to_builtins(record))
        return record

    async def decided(self, action: Action, **fields: Any) -> None:
        """The promotion gate has decided. `fields`: those of the record."""
        state, store = self.run.state, self.run.collector.store
        record = self._write(action, **fields)
        name = f"{state.run_id}-audit-{record.step:06d}{state.suffix}"
        try:
            rollout = await store.start_rollout(
                msgspec.to_builtins(record),
                resources_id=record.resources_id,
                metadata={"audit": record.action},
                rollout_id=name,
                queue="audit",
            )
        except ConflictError:
            return  # the step was repeated after a crash
        await store.update_attempt(name, rollout.attempt.attempt_id, status="succeeded")


def read_audit(run_dir: str | Path) -> list[AuditRecord]:
    """The audit log of a run, in order. Of a step that was repeated after a crash, the last time counts.

    Raises ConfigError where there is no run, or its log cannot be read.

        >>> from agentlightning.training.governance import read_audit
        >>> read_audit("runs/first")[-1].action  # doctest: +SKIP
        'promoted'
    """
    check_run(Path(run_dir))
    path = Path(run_dir) / AUDIT_FILE
    return last_times(audit_record(path, number, line) for number, line in enumerate(whole_lines(path), 1))


def audit_record(path: Path, number: int, line: bytes) -> AuditRecord:
    """The record in a line of an audit log. Raises ConfigError."""
    try:
        return msgspec.json.decode(line, type=AuditRecord)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"line {number} of {path} cannot be read: {error}; remove that line") from error


def last_times(records: Iterable[AuditRecord]) -> list[AuditRecord]:
    """The records without those of steps that were repeated later."""
    found: dict[tuple[int, str], AuditRecord] = {}
    for record in records:
        key = (record.step, "learned" if record.action == "learned" else "decided")
        found.pop(key, None)
        found[key] = record
    return list(found.values())


# -- promotion gate --------------------------------------------------------------------------------------------------


def difference(
    before: Sequence[float | None], after: Sequence[float | None], confidence: float, margin: float = 0.0
) -> Gain:
    """The paired difference where a task without a reward counts as the lowest. Raises RewardError if none has one."""
    known = [score for score in (*before, *after) if score is not None]
    if not known:
        raise RewardError("no task of the guard set has a reward; check the reward of the gate (gate.reward)")
    low = min(0.0, *known) if max(known) <= 1 else min(known)
    filled = [[low if score is None else score for score in scores] for scores in (before, after)]
    return paired_gain(*filled, confidence=confidence, null=-margin)


class GateState(Struct):
    promoted: KeptCheckpoint | None = None
    """The version that has passed last."""
    guard_scores: dict[str, list[float | None]] = {}
    """The rewards of the guard set: of the version the run started from (`start`) and of the promoted one."""
    judged_step: int | None = None
    """The step whose version was judged last."""
    gate_rejections: int = 0
    """The number of versions that were refused."""


class Gate(RunCallback[GateState]):
    """Promotes versions, and returns to the promoted one."""

    name = "gate"
    state_class = GateState

    def __init__(self, run: TrainingRun, config: GateConfig, audit: Audit, health: Health) -> None:
        """Raises AgentError where the reward of the gate cannot be loaded, and ConfigError where the guard set has no
        tasks, or some that are trained on."""
        super().__init__(run)
        self.config, self.audit, self.health = config, audit, health
        self.second = second_reward(run, config.reward)
        found = list(run.tasks.validation if config.tasks is None else load_dataset(config.tasks))
        if not found:
            raise ConfigError(
                "the gate has no tasks: set gate.tasks to a file, or give validation tasks (data.validation)"
            )
        trained = {task_key(task) for task in run.tasks.train}
        shared = [row for row, task in enumerate(found, 1) if task_key(task) in trained]
        if shared:
            shown = ", ".join(map(str, shared[:5])) + (" ..." if len(shared) > 5 else "")
            raise ConfigError(
                f"{len(shared)} tasks of the guard set ({config.tasks or 'the validation tasks'}) are training tasks,"
                f" too: rows {shown}. A version that has memorised them would pass; remove them from one of the two"
            )
        self.tasks = found[: config.limit]

    async def on_start(self) -> None:
        """The version that the run starts from is the promoted one."""
        if self.state.promoted is not None:
            return
        scores = await self.measure()
        known = [score for score in scores if score is not None]
        if not known:
            raise RewardError(
                f"none of {len(scores)} tasks of the guard set has a reward under the starting version; check"
                " gate.reward, or the reward of the run"
            )
        self.state.guard_scores = {"start": scores, "promoted": scores}
        self.state.promoted, self.state.judged_step = await self.run.checkpoints.keep(), self.run.state.step
        numbers = {"guard": sum(known) / len(known)}
        why = "the run starts from it"
        await self.audit.decided("promoted", resources_id=self._name, reason=why, scores=numbers)
        self.run.write_state()

    async def on_step(self, step: FinishedStep) -> Metrics | None:
        if step.returned or not (step.is_last or self.run.state.step % self.config.every == 0):
            return None
        step.saves = True
        return await self.decide(step)

    async def on_trained(self) -> None:
        """Judge the present version, unless that is done. The result of the run, or of its stage, is the promoted
        one."""
        run = self.run.state
        if self.state.judged_step != run.step:
            step = FinishedStep(Collected(()), {}, is_last=True)
            await self.decide(step)
            await self.run.save()
            self.run.conclude(step)
        if (promoted := self.state.promoted) is not None:
            run.best_step, run.best_checkpoint = promoted["step"], promoted["directory"]
            run.best_version = promoted["version"]

    async def on_revision(self) -> None:
        self.state.promoted = self.state.judged_step = None
        self.state.guard_scores.clear()

    async def decide(self, step: FinishedStep) -> dict[str, float]:
        """Promote the present version, or return to the promoted one. Returns the metrics of that."""
        state, checkpoints, number = self.state, self.run.checkpoints, self.run.state.step
        assert state.promoted is not None
        scores = await self.measure()
        state.judged_step = number
        gains = {
            name: difference(state.guard_scores[name], scores, self.config.confidence, self.config.margin)
            for name in ("promoted", "start")
        }
        lost = [name for name, gain in gains.items() if gain.interval[1] < -self.config.margin]
        gain, against = gains["promoted"], lost[0] if lost else "promoted"
        reason = _describe(gains[against], against, state.promoted["step"])
        numbers = {"guard": gain.after, "gain": gain.gain, "low": gain.interval[0], "high": gain.interval[1]}
        decided = partial(self.audit.decided, resources_id=self._name, reason=reason, scores=numbers)
        found = {"gate_gain": gain.gain, "gate_promoted": float(not lost)}
        if not lost:
            state.promoted, state.guard_scores["promoted"] = await checkpoints.keep(), scores
            await decided("promoted")
            step.notes.append(f"step {number}: promoted, {reason}")
            return found
        version, back = checkpoints.version, state.promoted["step"]
        state.gate_rejections += 1
        await checkpoints.rollback(state.promoted["directory"], state.promoted["version"])
        self.health.return_to(state.promoted)
        await decided("rejected", version=version, returned_to=back)
        said = f"step {number}: not promoted, and back to step {back}: {reason}"
        if self.config.on_loss == "stop":
            step.stop = (
                f'{said}. gate.on_loss = "stop". The promoted version is kept; continue from it with --resume, another'
                " reward or a lower learning rate"
            )
        else:
            step.notes.append(said)
        return {**found, "rolled_back": 1.0, "returned_to_step": float(back)}

    @property
    def _name(self) -> str:
        """Of the present version, and the beginning of the ids of its rollouts."""
        run = self.run.state
        return f"{run.run_id}-guard-{run.step:06d}{run.suffix}"

    async def measure(self) -> list[float | None]:
        """The reward of each task of the guard set. A repeated call continues an interrupted one."""
        found = await self.run.measure(self._name, self.config.mode, self.tasks, scores=self.second)
        return list(found.rewards)


def _describe(gain: Gain, name: str, step: int) -> str:
    than = f"the promoted version of step {step}" if name == "promoted" else "the version that the run started from"
    low, high = gain.interval
    verb = "loses to" if high < 0 else "does not lose to"
    return (
        f"it {verb} {than} on {gain.tasks} guard tasks: {gain.before:.3g} -> {gain.after:.3g}, difference"
        f" {gain.gain:+.3g} (interval {low:.3g} to {high:.3g})"
    )
