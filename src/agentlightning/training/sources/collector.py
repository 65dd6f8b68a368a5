"""Runs rollouts through the store: queues them, waits for them, and reads their trajectories.

`RolloutCollector` is the only place that queues rollouts for training and evaluation. A rollout's id follows from the
run, the purpose, the step and the position within the step, so a request that is repeated after a crash finds the
rollouts that exist: a finished one is used, a waiting one is awaited, a failed one is tried again, and nothing runs
twice. A finished rollout that cannot be used is *rejected*: it is left out with a reason, and a repeated request runs
its task again under a new id. The collector never runs an agent and never calls a model.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar

from agentlightning.algorithms.recorded.sessions import group_of, succeeded
from agentlightning.algorithms.training import Collected, RolloutReport
from agentlightning.assemble import NO_LIMITS, TURN_LIMIT_REACHED, TokenLimits, calls, trajectory
from agentlightning.credit import unrewarded
from agentlightning.credit.rejection import (
    FAILED,
    REJECTING,
    UNKNOWN_TOKENS,
    UNREADABLE,
    Check,
    Rejection,
    count_reasons,
    describe_reasons,
    rejection,
)
from agentlightning.errors import NotFoundError, RewardError, TrainingStopped, UnknownTokensError
from agentlightning.evaluation.evaluation import WITHOUT_REWARD, Evaluation
from agentlightning.resources import ProxyLLM
from agentlightning.rollouts import (
    Attempt,
    AttemptedRollout,
    EnqueueRolloutRequest,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
)
from agentlightning.runner.agents.arguments import Invocation, RewardFunction
from agentlightning.span import AIR_RULE, Span
from agentlightning.store.base import ROLLOUTS_PER_READ, LightningStoreBase
from agentlightning.tracing.air import AutomaticRewards
from agentlightning.tracing.rewards import check_reward
from agentlightning.trajectory import Reward, RewardWeights, Trajectory

# -- trajectories -----------------------------------------------------------------------------------------------------

# Reads finished rollouts from the store as trajectories, in threads: assembly never holds up the event loop.
#
# Threads and not processes, because spans and trajectories cost more to pickle than to assemble: for 256 rollouts of
# eight calls, a thread takes a ninth of the time of a process, and delays a heartbeat by at most 24 ms instead of 380.

NO_REWARDS: Mapping[str, float] = MappingProxyType({})
Readings = tuple[tuple[Trajectory, ...], tuple[Rejection, ...]]
"""The usable trajectories and the rejected rollouts, each in the order requested."""


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """One rollout to run."""

    rollout_id: str
    task: Any
    group: str
    """The same for the rollouts of one task within a step."""
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What its rollout records beside the group. `BRANCH`: the `rollout_id` of the rollout that it branches off, and
    `span_ids` of the calls before that point, as the gateway reads them."""
    resources_id: str | None = None
    """None: it was not queued."""
    mode: RolloutMode = "train"


@dataclass(frozen=True, slots=True)
class TrajectoryReader:
    """Reads trajectories and rejects those that cannot be used."""

    store: LightningStoreBase
    model: str | None = None
    """The model that learns: answers of other models are left out of trajectories. None: all models count."""
    limits: TokenLimits = NO_LIMITS
    """What tokens must fit to be learned from: calls beyond are left out and counted."""
    air: AutomaticRewards | None = None
    """Rules whose rewards are added to the attempts that are read, and recorded in the store. None: no rules."""
    turn_limit_reward: float | None = None
    """The reward of rollouts that ended at their limit of turns without one of their own."""
    weights: RewardWeights = None
    """Of the named dimensions of rewards."""

    async def read(
        self, plans: Sequence[RolloutPlan], check: Check | None = None, rewards: Mapping[str, float] = NO_REWARDS
    ) -> Readings:
        """The finished rollouts of these plans. `rewards`, by id, replace those of rollouts that timed out."""
        found: list[Trajectory | Rejection] = []
        for chunk in _chunks(plans, ROLLOUTS_PER_READ):
            spans = [own async for _, own in self.store.iter_spans([plan.rollout_id for plan in chunk])]
            assembled, rewards_found = await asyncio.to_thread(self._assemble, chunk, spans, rewards)
            if rewards_found:
                await self.store.add_many_spans(rewards_found)
            found += assembled
        return await checked(found, check)

    def _assemble(
        self, plans: Sequence[RolloutPlan], recorded: Sequence[list[Span]], rewards: Mapping[str, float]
    ) -> tuple[list[Trajectory | Rejection], list[Span]]:
        """What was read of each rollout, and the automatic rewards that the store does not have yet."""
        assembled: list[Trajectory | Rejection] = []
        found: list[Span] = []
        for plan, spans in zip(plans, recorded, strict=True):
            key, attempt_id = plan.rollout_id, spans[-1].attempt_id if spans else ""
            try:
                if self.air is not None:  # The rewards of today's rules take the place of recorded ones.
                    own = [span for span in spans if span.attempt_id == attempt_id and AIR_RULE not in span.attributes]
                    given, known = self.air.reward_spans(own, calls(own)), {span.span_id for span in spans}
                    found += [reward for reward in given if reward.span_id not in known]
                    spans = [*own, *given]
                read = trajectory(key, attempt_id, spans, plan.group, model=self.model, limits=self.limits)
            except (*REJECTING, *UNREADABLE) as error:
                assembled.append(rejection(key, error))
                continue
            ended_early = read.reward is None and TURN_LIMIT_REACHED in read.metadata
            reward = rewards.get(key, self.turn_limit_reward if ended_early else read.reward)
            assembled.append(replace(read, reward=reward, task=plan.task, weights=self.weights))
        return assembled, found


async def checked(found: Sequence[Trajectory | Rejection], check: Check | None) -> Readings:
    """Those that can be used, and those that are rejected already or that `check` names."""
    usable, refused = [each for each in found if isinstance(each, Trajectory)], dict[str, Rejection]()
    if check is not None and usable:
        refused = {each.rollout_id: each for each in await asyncio.to_thread(lambda: list(check(usable)))}
    rejected = [refused.get(each.rollout_id, each) for each in found]
    return (
        tuple(each for each in usable if each.rollout_id not in refused),
        tuple(each for each in rejected if isinstance(each, Rejection)),
    )


# -- recordings ------------------------------------------------------------------------------------------------------


async def read_recordings(store: LightningStoreBase, rollout_ids: Sequence[str]) -> dict[str, RolloutReport]:
    """What the last attempts of rollouts have left in the store: by rollout id, in the order given. Raises
    NotFoundError for a rollout that is no longer there."""
    if not rollout_ids:
        return {}
    attempts = {each.rollout_id: each for each in await store.get_latest_attempts(rollout_ids)}
    spans = {rollout_id: tuple(found) async for rollout_id, found in store.iter_spans(rollout_ids)}
    outputs = {key: attempt.metadata.get("output") for key, attempt in attempts.items()}
    return {
        key: RolloutReport(key, output=outputs.get(key), spans=spans.get(key, ()), attempt=attempts.get(key))
        for key in rollout_ids
    }


async def apply_reward(
    store: LightningStoreBase, function: RewardFunction, rollout: Rollout, attempt: Attempt, spans: Sequence[Span]
) -> Reward:
    """What a reward function gives a stored rollout. Raises RewardError, and whatever the function raises."""
    resources = None if rollout.resources_id is None else await store.get_resources_by_id(rollout.resources_id)
    fields = {name: getattr(rollout, name) for name in rollout.__struct_fields__}
    attempted = AttemptedRollout(**fields, attempt=attempt)
    invocation = Invocation(attempted, {} if resources is None else resources.resources, task=rollout.input)
    value = await asyncio.to_thread(function.start, invocation, attempt.metadata.get("output"), spans=spans)
    return check_reward(await value if inspect.isawaitable(value) else value, function.source)


# -- recorded --------------------------------------------------------------------------------------------------------

# Recorded rollouts: those that finished earlier, from the agent's own use for example. Those of the same task form a
# group, in the order of their first rollout.


async def find_groups(
    store: LightningStoreBase, modes: Sequence[RolloutMode] | None = None
) -> list[tuple[str, list[str]]]:
    """(group, rollout ids) of the succeeded rollouts of some modes: by the `group` in their metadata, else by task."""
    groups: dict[str, list[str]] = {}
    async for rollout in succeeded(store, modes):
        groups.setdefault(group_of(rollout), []).append(rollout.rollout_id)
    return list(groups.items())


# -- collector --------------------------------------------------------------------------------------------------------

T = TypeVar("T")

MIN_FAILURES = 4
"""Fewer failures never stop a run: one bad rollout of two is not a pattern."""
UNFINISHED: Final[Sequence[RolloutStatus]] = ("queuing", "requeuing", "preparing", "running")
CHUNK = 2000
"""Rollouts in one request to the store, so that a step of a million blocks neither the event loop nor a signal."""
WAIT_SECONDS = 1.0
"""How often a waiting collector reports progress and counts failures."""
RESUME_ADVICE = (
    "Fix the agent or its reward and continue the run with --resume, which runs these again; try one task alone with"
    " `agl eval --limit 1`; or raise runner.max_failed_share if this is expected."
)
EVALUATION_ADVICE = (
    "Fix the agent or its reward; try one task alone with `agl eval --limit 1`; or have failures counted only:"
    " runner.max_failed_share=1.0 (from Python runner=RunnerConfig(max_failed_share=1.0))."
)


@dataclass(slots=True)
class RolloutCollector:
    """Queues rollouts and collects their trajectories."""

    reader: TrajectoryReader
    config: RolloutConfig = field(default_factory=RolloutConfig)
    queue: str | None = field(default=None, kw_only=True)
    """The queue that rollouts wait in. None: that of their mode."""
    max_failed_share: float = 0.5
    """Training stops, with the first reason, when a larger share of a batch failed or was rejected."""
    advice: str = RESUME_ADVICE
    """The advice in the error that stops it."""

    @property
    def store(self) -> LightningStoreBase:
        return self.reader.store

    async def collect(
        self,
        plans: Sequence[RolloutPlan],
        *,
        resources_id: str | None,
        mode: RolloutMode = "train",
        check: Check | None = None,
        timeout_reward: float | None = None,
        max_failed_share: float | None = None,
        max_rejected_share: float | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> Collected:
        """`enqueue` the rollouts, unless they are queued (`resources_id` is None), wait for all of them, and read their
        trajectories; `check` names those that cannot be used.

        A rollout that timed out has failed. With a `timeout_reward` it has that reward instead of any other, and its
        calls so far are its trajectory. Raises TrainingStopped when more than `max_failed_share` (default: the
        collector's) of the rollouts failed, or more than `max_rejected_share` (default: the same) failed or were
        rejected.
        """
        started = time.monotonic()
        if resources_id is not None:
            plans = await self.enqueue(plans, resources_id, mode, check)
        share = self.max_failed_share if max_failed_share is None else max_failed_share
        max_rejected_share = share if max_rejected_share is None else max_rejected_share
        finished: list[Rollout] = []
        for chunk in _chunks(plans):
            minimum, done = 1, list[Rollout]()
            while len(done) < len(chunk):
                done = await self.wait_for_some(chunk, minimum)
                if on_progress is not None:
                    on_progress(len(finished) + len(done))
                await self.check_failures([*finished, *done], len(plans), timeout_reward=timeout_reward, share=share)
                minimum = len(done) + max(1, len(chunk) // 8)
            finished += done
        failed = [rollout for rollout in finished if rollout.status != "succeeded"]
        timed_out = await self._timed_out(failed)
        rewards = {} if timeout_reward is None else dict.fromkeys(timed_out, timeout_reward)
        failed = tuple(rollout for rollout in failed if rollout.rollout_id not in rewards)
        failed_ids = {rollout.rollout_id for rollout in failed}
        ended = [plan for plan in plans if plan.rollout_id not in failed_ids]
        trajectories, rejected = await self.reader.read(ended, check, rewards)
        if rejected and _too_many(len(rejected) + len(failed), len(plans), max_rejected_share):
            counts = count_reasons(rejected)
            also = f", and {len(failed)} failed" if failed else ""
            stop = UnknownTokensError if set(counts) == {UNKNOWN_TOKENS} else TrainingStopped
            raise stop(
                f"{len(rejected)} of {len(plans)} rollouts cannot be used ({describe_reasons(counts)}){also}, more than"
                f" max_failed_share={max_rejected_share:g} allows. The first one, {rejected[0].rollout_id}:\n"
                f"{rejected[0].message}\n{self.advice}"
            )
        return Collected(trajectories, failed, rejected, len(timed_out), time.monotonic() - started)

    async def enqueue(
        self, plans: Sequence[RolloutPlan], resources_id: str, mode: RolloutMode = "train", check: Check | None = None
    ) -> list[RolloutPlan]:
        """Queue the rollouts that do not exist yet. A rollout that failed earlier is queued again; one that finished
        earlier and cannot be used is replaced by a new one of the same task."""
        found = {plan.rollout_id: replace(plan, resources_id=resources_id, mode=mode) for plan in plans}
        asked, repetition = list(found), 0
        while asked:
            done: dict[str, str] = {}
            for key, rollout in zip(asked, await self._queue([found[key] for key in asked]), strict=True):
                if rollout.status in ("failed", "cancelled"):
                    await self.store.requeue_rollout(rollout.rollout_id, "asked for again")
                elif rollout.status == "succeeded":
                    done[rollout.rollout_id] = key
            _, rejected = await self.reader.read([found[key] for key in done.values()], check)
            asked = [done[each.rollout_id] for each in rejected]
            repetition += 1
            for key in asked:
                found[key] = replace(found[key], rollout_id=f"{key}-again{repetition}")
        return list(found.values())

    async def _timed_out(self, failed: Sequence[Rollout]) -> set[str]:
        """The ids of those whose last attempt timed out."""
        found: set[str] = set()
        for chunk in _chunks(failed):
            attempts = await self.store.get_latest_attempts([rollout.rollout_id for rollout in chunk])
            found |= {attempt.rollout_id for attempt in attempts if attempt.status == "timeout"}
        return found

    async def _queue(self, plans: Sequence[RolloutPlan]) -> list[Rollout]:
        """Those that exist are not queued again."""
        queued: list[Rollout] = []
        for chunk in _chunks(plans):
            requests = [
                EnqueueRolloutRequest(
                    input=plan.task,
                    mode=plan.mode,
                    resources_id=plan.resources_id,
                    config=self.config,
                    metadata={"group": plan.group, **plan.metadata},
                    rollout_id=plan.rollout_id,
                    queue=self.queue,
                )
                for plan in chunk
            ]
            queued += await self.store.enqueue_many_rollouts(requests)
        return queued

    async def wait_for_some(self, plans: Sequence[RolloutPlan], minimum: int) -> list[Rollout]:
        """Those of the rollouts that have finished: once they are `minimum`, or after `WAIT_SECONDS`. One that is
        removed meanwhile (`agl store prune`) is run again."""
        chunks, finished = list(_chunks([plan.rollout_id for plan in plans])), list[Rollout]()
        try:
            for chunk in chunks:
                seconds = WAIT_SECONDS / len(chunks)
                finished += await self.store.wait_for_rollouts(
                    rollout_ids=chunk, timeout=seconds, minimum=min(minimum, len(chunk))
                )
        except NotFoundError:
            await self._queue(plans)
        return finished

    async def check_failures(
        self, finished: Sequence[Rollout], total: int, *, timeout_reward: float | None, share: float | None = None
    ) -> None:
        """Raises TrainingStopped when more than a share (default: the collector's) of `total` rollouts have failed;
        those that timed out count as failed unless there is a `timeout_reward`."""
        share = self.max_failed_share if share is None else share
        failed = [rollout for rollout in finished if rollout.status != "succeeded"]
        if _too_many(len(failed), total, share) and timeout_reward is not None:
            timed_out = await self._timed_out(failed)
            failed = [rollout for rollout in failed if rollout.rollout_id not in timed_out]
        if not _too_many(len(failed), total, share):
            return
        attempt = await self.store.get_latest_attempt(failed[0].rollout_id)
        raise TrainingStopped(
            f"{len(failed)} of {total} rollouts failed, more than max_failed_share={share:g} allows."
            f" The first one, {failed[0].rollout_id}:\n{describe_failure(attempt)}\n{self.advice}"
        )

    async def first_of_each_reason(self, collected: Collected) -> dict[str, Rejection]:
        """For each reason, one rollout that was left out, failures included."""
        found: dict[str, Rejection] = {}
        if collected.failed:
            rollout_id = collected.failed[0].rollout_id
            message = cause_of_failure(await self.store.get_latest_attempt(rollout_id))
            found[FAILED] = Rejection(rollout_id, FAILED, message)
        for each in collected.rejected:
            found.setdefault(each.reason, each)
        return found

    async def recover(self, run_id: str, reason: str) -> int:
        """After a crash: queue again what a dead process had claimed of this run. Returns the number of rollouts."""
        claimed = await self.store.query_rollouts(status_in=["preparing", "running"], rollout_id_contains=run_id)
        for rollout in claimed:
            await self.store.requeue_rollout(rollout.rollout_id, reason)
        return len(claimed)

    async def move(self, run_id: str, endpoint: str) -> None:
        """Let the unfinished rollouts of a run call the policy at `endpoint`. A resumed run may have another address,
        and runners claim what is queued before any step publishes it again."""
        unfinished = await self.store.query_rollouts(status_in=UNFINISHED, rollout_id_contains=run_id)
        for resources_id in sorted({each.resources_id for each in unfinished if each.resources_id is not None}):
            if (update := await self.store.get_resources_by_id(resources_id)) is None:
                continue
            moved = {
                name: each.model_copy(update={"endpoint": endpoint})
                for name, each in update.resources.items()
                if name.partition(":")[0] == "llm" and isinstance(each, ProxyLLM)  # Others may be anywhere.
            }
            await self.store.update_resources(resources_id, {**update.resources, **moved})

    async def cancel(self, run_id: str) -> None:
        """Cancel the unfinished rollouts of a run."""
        for rollout in await self.store.query_rollouts(status_in=UNFINISHED, rollout_id_contains=run_id):
            await self.store.cancel_rollout(rollout.rollout_id)


def _too_many(bad: int, total: int, share: float) -> bool:
    return bad >= min(MIN_FAILURES, total) and bad > share * total


def describe_failure(attempt: Attempt | None) -> str:
    """The traceback of a failed attempt, or what else is known of it."""
    if attempt is None:
        return "(no attempt was made)"
    error: Mapping[str, Any] = attempt.metadata.get("error") or {}
    text = error.get("traceback") or error.get("message")
    return str(text).rstrip() if text else f"(attempt {attempt.attempt_id} ended as {attempt.status})"


def cause_of_failure(attempt: Attempt | None) -> str:
    """The line of a failure that names it: of an exception of the agent the first of its own, since a framework may add
    notes below it; of a program, the last that it wrote."""
    lines = describe_failure(attempt).splitlines()
    error: Mapping[str, Any] = {} if attempt is None else attempt.metadata.get("error") or {}
    raised = re.compile(rf"(?!agentlightning\.)[\w.<>]*{re.escape(str(error.get('type')))}(:|$)")
    return next((line for line in reversed(lines) if raised.match(line)), lines[-1])


def _chunks(items: Sequence[T], size: int | None = None) -> Iterator[Sequence[T]]:
    size = size or CHUNK
    for start in range(0, len(items), size):
        yield items[start : start + size]


# -- evaluations -----------------------------------------------------------------------------------------------------

# Evaluates an agent on tasks: one rollout or several for each, collected through the store.

TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}
"""Sampling temperature of each evaluation mode."""
Scores: TypeAlias = Callable[[Sequence[str]], Awaitable[Mapping[str, float]]]
"""Gives rollouts their rewards, by id."""


async def evaluate_tasks(
    collector: RolloutCollector,
    tasks: Sequence[Any],
    *,
    name: str,
    resources_id: str,
    mode: RolloutMode = "val",
    repeats: int = 1,
    rollout_ids: Sequence[str] | None = None,
    strict: bool = True,
    scores: Scores | None = None,
    on_progress: Callable[[int], None] | None,
    on_collected: Callable[[Collected], Awaitable[None]],
) -> Evaluation:
    """The rewards of each task's rollouts, `repeats` of them. Rollout ids begin with `name`, unless they are given,
    task by task: a repeated call continues an interrupted evaluation. `scores`: rewards by rollout id, in place of
    those that the rollouts have.

    Failures are part of the result, unless it is `strict`: that raises TrainingStopped as `RolloutCollector.collect`
    does where too many rollouts fail, and RewardError where rollouts succeed and none has a usable reward.
    """
    ends = [""] if repeats == 1 else [f"-{repeat}" for repeat in range(repeats)]
    plans = [
        RolloutPlan(f"{name}-{index:05d}{end}", task, f"{name}-{index}{end}")
        for index, task in enumerate(tasks)
        for end in ends
    ]
    if rollout_ids is not None:
        plans = [replace(plan, rollout_id=each) for plan, each in zip(plans, rollout_ids, strict=True)]
    collected = await collector.collect(
        plans,
        resources_id=resources_id,
        mode=mode,
        check=None if scores is not None else without_any_reward,
        max_failed_share=None if strict else 1.0,
        max_rejected_share=1.0,
        on_progress=on_progress,
    )
    if strict and collected.rejected and not collected.trajectories:
        first = collected.rejected[0]
        raise RewardError(
            f"none of {len(tasks)} tasks has a reward ({describe_reasons(collected.left_out)}). The first rollout,"
            f" {first.rollout_id}: {first.message}"
        )
    await on_collected(collected)
    if scores is not None:
        known = await scores([each.rollout_id for each in collected.trajectories])
    else:
        known = {each.rollout_id: each.score for each in collected.trajectories}
    rewards = {each.group: known.get(each.rollout_id) for each in collected.trajectories}
    found = [rewards.get(plan.group) for plan in plans]
    return Evaluation.of_rollouts(
        [found[start : start + repeats] for start in range(0, len(found), repeats)],
        seconds=collected.seconds,
        reasons=collected.left_out,
    )


def without_any_reward(trajectories: Sequence[Trajectory]) -> list[Rejection]:
    """Rejects what cannot be measured."""
    return unrewarded(trajectories, f"it has no reward: {WITHOUT_REWARD}")


# -- trials ----------------------------------------------------------------------------------------------------------

# Trials: single rollouts with resources that are being tried, reported with what the agent said and did.


async def run_trials(
    collector: RolloutCollector,
    label: str,
    tasks: Mapping[str, Any],
    resources_id: str,
    metadata: Mapping[str, Any] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> tuple[Collected, list[RolloutReport]]:
    """One rollout of each task; ids begin with `label` and the key of the task. However many fail, the rest counts."""
    plans = [RolloutPlan(f"{label}-{name}", task, name, metadata or {}) for name, task in tasks.items()]
    collected = await collector.collect(
        plans, resources_id=resources_id, check=without_any_reward, max_failed_share=1.0, on_progress=on_progress
    )
    outcomes: dict[str, dict[str, Any]] = {each.rollout_id: {"failure": each.message} for each in collected.rejected}
    for each in collected.trajectories:
        outcomes[each.rollout_id] = {"score": each.score, "reward": each.team_reward}
    ids = [*outcomes, *(each.rollout_id for each in collected.failed)]
    reports: dict[str, RolloutReport] = {}
    for rollout_id, found in (await read_recordings(collector.store, ids)).items():
        name = rollout_id.removeprefix(f"{label}-").partition("-again")[0]
        outcome = outcomes.get(rollout_id) or {"failure": describe_failure(found.attempt)}
        reports[name] = replace(found, **outcome)
    return collected, [reports[name] for name in tasks]
