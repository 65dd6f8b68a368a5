"""Where an algorithm's data comes from: it asks for rollouts, and gets trajectories.

`RolloutSource` is the only place that queues rollouts for training and evaluation. Every rollout it asks for has an id
made from the run, the purpose, the step and the place within the step, so that asking again after a crash finds what
is there already: a finished rollout is used as it stands, a waiting one is waited for, a failed one gets another
chance, nothing is done twice. One that finished and cannot be used is *rejected*: left out, with a reason; asking
again runs its task anew, under an id of its own. It never runs an agent and never calls a model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

from agentlightning.assemble import trajectory
from agentlightning.call_validation import NO_LIMITS, TokenLimits
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
from agentlightning.errors import NotFoundError, TrainingStopped, UnknownTokensError
from agentlightning.rollouts import Attempt, EnqueueRolloutRequest, Rollout, RolloutConfig, RolloutMode, RolloutStatus
from agentlightning.store.base import LightningStoreBase
from agentlightning.trajectory import Trajectory

T = TypeVar("T")

MIN_FAILURES = 4
"""Fewer failures than this never stop a run: one bad rollout of two is not a pattern."""
NO_REWARDS: Mapping[str, float] = MappingProxyType({})
AT_ONCE = 2000
"""Rollouts in one request to the store: a step of a million holds up neither the event loop nor a signal."""
WAIT_SECONDS = 1.0
"""How often a waiting source looks up to report progress and failures."""
RESUME_ADVICE = (
    "Mend the agent and continue the run with --resume, which runs these again; try one task alone with"
    " `agl eval --limit 1`; or raise runner.max_failed_share if this is expected."
)
EVALUATION_ADVICE = (
    "Mend the agent; try one task alone with `agl eval --limit 1`; or, from Python, pass"
    " runner=RunnerConfig(max_failed_share=1.0) to have failures counted only."
)


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """One rollout to ask for."""

    rollout_id: str
    task: Any
    group: str
    """Rollouts of the same task within a step."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What came back.

    >>> agl.Collected(trajectories=()).failed
    ()
    """

    trajectories: tuple[Trajectory, ...]
    """Of the rollouts that can be used, in the order asked for."""
    failed: tuple[Rollout, ...] = ()
    """Rollouts that ended without success."""
    rejected: tuple[Rejection, ...] = ()
    """Rollouts that succeeded and cannot be used."""
    timeouts: int = 0
    """Rollouts whose last attempt ran out of time: among `failed`, or with a `timeout_reward` among `trajectories`."""
    seconds: float = 0.0

    @property
    def left_out(self) -> dict[str, int]:
        """How many rollouts are of no use, for each reason, failed ones included."""
        return ({FAILED: len(self.failed)} if self.failed else {}) | count_reasons(self.rejected)

    @property
    def sampled_tokens(self) -> int:
        return sum(len(t.response_token_ids) for trajectory in self.trajectories for t in trajectory.transitions)


@dataclass(frozen=True, slots=True)
class _FailureLimit:
    """With how many failures a request goes on."""

    share: float
    excepts_timeouts: bool = False


@dataclass(slots=True)
class RolloutSource:
    """Asks the store for rollouts and returns their trajectories."""

    store: LightningStoreBase
    config: RolloutConfig = field(default_factory=RolloutConfig)
    queue: str | None = field(default=None, kw_only=True)
    """The queue that rollouts wait in; None: that of their mode."""
    max_failed_share: float = 0.5
    """With a larger share of failed and rejected rollouts in one request, training stops with the first reason."""
    model: str | None = None
    """The model that learns: what another one answered is left out of trajectories. None: nothing is."""
    limits: TokenLimits = NO_LIMITS
    """What tokens must fit to be learned from: calls beyond are left out and counted."""
    advice: str = RESUME_ADVICE
    """What to do when it stops."""

    async def collect(
        self,
        plans: Sequence[RolloutPlan],
        *,
        resources_id: str,
        mode: RolloutMode = "train",
        check: Check | None = None,
        timeout_reward: float | None = None,
        max_failed_share: float | None = None,
        max_rejected_share: float | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> Collected:
        """Queue what is not there yet, wait for all, read the trajectories; `check` names those it cannot use.

        A rollout that ran out of time has failed; with a `timeout_reward` it has that reward instead, whatever it was
        given before, and its calls so far are a trajectory like others. Raises TrainingStopped when more than
        `max_failed_share` (default: the source's) of the rollouts failed, or more than `max_rejected_share` (default:
        the same) failed or were rejected.
        """
        started = time.monotonic()
        share = self.max_failed_share if max_failed_share is None else max_failed_share
        asked = await self._ask(plans, resources_id, mode, check)
        limit = _FailureLimit(share, excepts_timeouts=timeout_reward is not None)
        finished = await self._finish(asked, resources_id, mode, limit, on_progress)
        failed = [rollout for rollout in finished if rollout.status != "succeeded"]
        late = await self._timed_out(failed)
        rewards = {} if timeout_reward is None else dict.fromkeys(late, timeout_reward)
        failed = tuple(rollout for rollout in failed if rollout.rollout_id not in rewards)
        of_no_use = {rollout.rollout_id for rollout in failed}
        readable = [plan for plan in asked if plan.rollout_id not in of_no_use]
        trajectories, rejected = await self._read(readable, check, rewards)
        share = share if max_rejected_share is None else max_rejected_share
        self._check_rejected(rejected, failed, len(asked), share)
        return Collected(trajectories, failed, rejected, len(late), time.monotonic() - started)

    async def _timed_out(self, failed: Sequence[Rollout]) -> set[str]:
        """Those of failed rollouts whose last attempt ran out of time."""
        found: set[str] = set()
        for rollout in failed:
            attempt = await self.store.get_latest_attempt(rollout.rollout_id)
            if attempt is not None and attempt.status == "timeout":
                found.add(rollout.rollout_id)
        return found

    async def _ask(
        self, plans: Sequence[RolloutPlan], resources_id: str, mode: RolloutMode, check: Check | None
    ) -> list[RolloutPlan]:
        """Queue each plan's rollout. One that was finished before it was asked for, and cannot be used, is replaced."""
        asked = list(plans)
        places = list(range(len(asked)))
        again = 0
        while places:
            queued: list[Rollout] = []
            for part in _parts(places):
                requests = [self._request(asked[place], resources_id, mode) for place in part]
                queued += await self.store.enqueue_many_rollouts(requests)
            for rollout in queued:
                if rollout.status in ("failed", "cancelled"):
                    await self.store.requeue_rollout(rollout.rollout_id, "asked for again")
            done = [place for place, rollout in zip(places, queued, strict=True) if rollout.status == "succeeded"]
            _, rejected = await self._read([asked[place] for place in done], check)
            unusable = {each.rollout_id for each in rejected}
            places = [place for place in done if asked[place].rollout_id in unusable]
            again += 1
            for place in places:
                asked[place] = replace(asked[place], rollout_id=f"{plans[place].rollout_id}-again{again}")
        return asked

    def _request(self, plan: RolloutPlan, resources_id: str, mode: RolloutMode) -> EnqueueRolloutRequest:
        return EnqueueRolloutRequest(
            input=plan.task,
            mode=mode,
            resources_id=resources_id,
            config=self.config,
            metadata={"group": plan.group},
            rollout_id=plan.rollout_id,
            queue=self.queue,
        )

    async def _finish(
        self,
        asked: Sequence[RolloutPlan],
        resources_id: str,
        mode: RolloutMode,
        limit: _FailureLimit,
        on_progress: Callable[[int], None] | None,
    ) -> list[Rollout]:
        """The finished rollouts. One that somebody removes meanwhile (`agl store prune`) is run again."""
        while True:
            try:
                return await self._wait([plan.rollout_id for plan in asked], limit, on_progress)
            except NotFoundError:
                for part in _parts(asked):
                    await self.store.enqueue_many_rollouts([self._request(plan, resources_id, mode) for plan in part])

    async def _wait(
        self, rollout_ids: Sequence[str], limit: _FailureLimit, on_progress: Callable[[int], None] | None
    ) -> list[Rollout]:
        ended: list[Rollout] = []
        for part in _parts(rollout_ids):
            minimum, finished = 1, list[Rollout]()
            while len(finished) < len(part):
                finished = await self.store.wait_for_rollouts(
                    rollout_ids=part, timeout=WAIT_SECONDS, minimum=min(minimum, len(part))
                )
                if on_progress is not None:
                    on_progress(len(ended) + len(finished))
                await self._check_failures([*ended, *finished], len(rollout_ids), limit)
                minimum = len(finished) + max(1, len(part) // 8)
            ended += finished
        return ended

    async def _check_failures(self, finished: Sequence[Rollout], total: int, limit: _FailureLimit) -> None:
        failed, share = [rollout for rollout in finished if rollout.status != "succeeded"], limit.share
        if _too_many(len(failed), total, share) and limit.excepts_timeouts:
            late = await self._timed_out(failed)
            failed = [rollout for rollout in failed if rollout.rollout_id not in late]
        if not _too_many(len(failed), total, share):
            return
        attempt = await self.store.get_latest_attempt(failed[0].rollout_id)
        raise TrainingStopped(
            f"{len(failed)} of {total} rollouts failed, more than max_failed_share={share:g} allows."
            f" The first one, {failed[0].rollout_id}:\n{describe_failure(attempt)}\n{self.advice}"
        )

    def _check_rejected(
        self, rejected: Sequence[Rejection], failed: Sequence[Rollout], total: int, share: float
    ) -> None:
        if not rejected or not _too_many(len(rejected) + len(failed), total, share):
            return
        counts = count_reasons(rejected)
        also = f", and {len(failed)} failed" if failed else ""
        stop = UnknownTokensError if set(counts) == {UNKNOWN_TOKENS} else TrainingStopped
        raise stop(
            f"{len(rejected)} of {total} rollouts cannot be used ({describe_reasons(counts)}){also}, more than"
            f" max_failed_share={share:g} allows. The first one, {rejected[0].rollout_id}:\n{rejected[0].message}\n"
            f"{self.advice}"
        )

    async def _read(
        self, plans: Sequence[RolloutPlan], check: Check | None, rewards: Mapping[str, float] = NO_REWARDS
    ) -> tuple[tuple[Trajectory, ...], tuple[Rejection, ...]]:
        """`rewards`: what some have instead of their own."""
        groups = {plan.rollout_id: plan.group for plan in plans}
        found: dict[str, Trajectory] = {}
        rejected: dict[str, Rejection] = {}
        async for rollout_id, spans in self.store.iter_spans(list(groups)):
            attempt_id = spans[-1].attempt_id if spans else ""
            try:
                group = groups[rollout_id]
                read = trajectory(rollout_id, attempt_id, spans, group, model=self.model, limits=self.limits)
            except (*REJECTING, *UNREADABLE) as error:
                rejected[rollout_id] = rejection(rollout_id, error)
            else:
                found[rollout_id] = replace(read, reward=rewards[rollout_id]) if rollout_id in rewards else read
        usable = tuple(found[rollout_id] for rollout_id in groups if rollout_id in found)
        if check is not None:
            refused = {each.rollout_id: each for each in check(usable)}
            usable = tuple(each for each in usable if each.rollout_id not in refused)
            rejected |= refused
        return usable, tuple(rejected[rollout_id] for rollout_id in groups if rollout_id in rejected)

    async def first_of_each_reason(self, collected: Collected) -> dict[str, Rejection]:
        """One rollout that was left out for each reason, failed ones included, to be named."""
        found: dict[str, Rejection] = {}
        if collected.failed:
            rollout_id = collected.failed[0].rollout_id
            message = describe_failure(await self.store.get_latest_attempt(rollout_id)).splitlines()[-1]
            found[FAILED] = Rejection(rollout_id, FAILED, message)
        for each in collected.rejected:
            found.setdefault(each.reason, each)
        return found

    async def recover(self, run_id: str, reason: str) -> int:
        """After a crash: queue again what a process that is gone had claimed of this run. Returns how many."""
        left = await self.store.query_rollouts(status_in=["preparing", "running"], rollout_id_contains=run_id)
        for rollout in left:
            await self.store.requeue_rollout(rollout.rollout_id, reason)
        return len(left)

    async def cancel(self, run_id: str) -> None:
        """Cancel what a run has queued and what is under way of it."""
        unfinished: list[RolloutStatus] = ["queuing", "requeuing", "preparing", "running"]
        for rollout in await self.store.query_rollouts(status_in=unfinished, rollout_id_contains=run_id):
            await self.store.cancel_rollout(rollout.rollout_id)


def _too_many(bad: int, total: int, share: float) -> bool:
    return bad >= min(MIN_FAILURES, total) and bad > share * total


def describe_failure(attempt: Attempt | None) -> str:
    """The traceback of a failed attempt, or what else is known of it."""
    if attempt is None:
        return "(no attempt was made)"
    error: dict[str, Any] = attempt.metadata.get("error") or {}
    text = error.get("traceback") or error.get("message")
    return str(text).rstrip() if text else f"(attempt {attempt.attempt_id} ended as {attempt.status})"


def _parts(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), AT_ONCE):
        yield items[start : start + AT_ONCE]
