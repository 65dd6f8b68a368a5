"""Where an algorithm's data comes from: it asks for rollouts, and gets trajectories.

`RolloutSource` is the only place that queues rollouts for training and evaluation. Every rollout it asks for has an id
made from the run, the purpose, the step and the place within the step, so that asking again after a crash finds what
is there already: a finished rollout is used as it stands, a waiting one is waited for, a failed one gets another
chance, nothing is done twice. It never runs an agent and never calls a model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning.assemble import trajectory
from agentlightning.errors import TrainingStopped
from agentlightning.rollouts import Attempt, EnqueueRolloutRequest, Rollout, RolloutConfig, RolloutMode
from agentlightning.store.base import LightningStoreBase
from agentlightning.trajectory import Trajectory

MIN_FAILURES = 4
"""Fewer failures than this never stop a run: one bad rollout of two is not a pattern."""
WAIT_SECONDS = 1.0
"""How often a waiting source looks up to report progress and failures."""


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """One rollout to ask for."""

    rollout_id: str
    task: Any
    group: str
    """Rollouts of the same task within a step."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What came back."""

    trajectories: tuple[Trajectory, ...]
    """Of the rollouts that succeeded, in the order asked for."""
    failed: tuple[Rollout, ...] = ()
    seconds: float = 0.0

    @property
    def sampled_tokens(self) -> int:
        return sum(len(t.response_token_ids) for trajectory in self.trajectories for t in trajectory.transitions)


@dataclass(slots=True)
class RolloutSource:
    """Asks the store for rollouts and returns their trajectories."""

    store: LightningStoreBase
    config: RolloutConfig = field(default_factory=RolloutConfig)
    max_failed_share: float = 0.5
    """With a larger share of failed rollouts in one request, training stops with the first traceback."""
    model: str | None = None
    """The model that learns: what another one answered is left out of trajectories. None: nothing is."""

    async def collect(
        self,
        plans: Sequence[RolloutPlan],
        *,
        resources_id: str,
        mode: RolloutMode = "train",
        on_progress: Callable[[int], None] | None = None,
    ) -> Collected:
        """Queue what is not there yet, wait for all, read the trajectories.

        Raises TrainingStopped when more than `max_failed_share` of the rollouts failed.
        """
        started = time.monotonic()
        queued = await self.store.enqueue_many_rollouts([self._request(plan, resources_id, mode) for plan in plans])
        for rollout in queued:
            if rollout.status in ("failed", "cancelled"):
                await self.store.requeue_rollout(rollout.rollout_id, "asked for again")
        finished = await self._wait([plan.rollout_id for plan in plans], on_progress)
        failed = tuple(rollout for rollout in finished if rollout.status != "succeeded")
        trajectories = await self._read(plans, {rollout.rollout_id for rollout in failed})
        return Collected(trajectories, failed, time.monotonic() - started)

    def _request(self, plan: RolloutPlan, resources_id: str, mode: RolloutMode) -> EnqueueRolloutRequest:
        return EnqueueRolloutRequest(
            input=plan.task,
            mode=mode,
            resources_id=resources_id,
            config=self.config,
            metadata={"group": plan.group},
            rollout_id=plan.rollout_id,
        )

    async def _wait(self, rollout_ids: Sequence[str], on_progress: Callable[[int], None] | None) -> list[Rollout]:
        minimum = 1
        while True:
            finished = await self.store.wait_for_rollouts(
                rollout_ids=rollout_ids, timeout=WAIT_SECONDS, minimum=min(minimum, len(rollout_ids))
            )
            if on_progress is not None:
                on_progress(len(finished))
            await self._check_failures(finished, len(rollout_ids))
            if len(finished) == len(rollout_ids):
                return finished
            minimum = len(finished) + max(1, len(rollout_ids) // 8)

    async def _check_failures(self, finished: Sequence[Rollout], total: int) -> None:
        failed = [rollout for rollout in finished if rollout.status != "succeeded"]
        if len(failed) < min(MIN_FAILURES, total) or len(failed) <= self.max_failed_share * total:
            return
        attempt = await self.store.get_latest_attempt(failed[0].rollout_id)
        raise TrainingStopped(
            f"{len(failed)} of {total} rollouts failed, more than max_failed_share={self.max_failed_share:g} allows."
            f" The first one, {failed[0].rollout_id}:\n{describe_failure(attempt)}\n"
            "Mend the agent and continue the run with --resume; try one task alone with `agl eval --limit 1`;"
            " or raise runner.max_failed_share if these failures are expected."
        )

    async def _read(self, plans: Sequence[RolloutPlan], failed: set[str]) -> tuple[Trajectory, ...]:
        groups = {plan.rollout_id: plan.group for plan in plans if plan.rollout_id not in failed}
        found: dict[str, Trajectory] = {}
        async for rollout_id, spans in self.store.iter_spans(list(groups)):
            attempt_id = spans[-1].attempt_id if spans else ""
            found[rollout_id] = trajectory(rollout_id, attempt_id, spans, group=groups[rollout_id], model=self.model)
        return tuple(found[rollout_id] for rollout_id in groups if rollout_id in found)

    async def recover(self, run_id: str, reason: str) -> int:
        """After a crash: queue again what a process that is gone had claimed of this run. Returns how many."""
        left = await self.store.query_rollouts(status_in=["preparing", "running"], rollout_id_contains=run_id)
        for rollout in left:
            await self.store.requeue_rollout(rollout.rollout_id, reason)
        return len(left)


def describe_failure(attempt: Attempt | None) -> str:
    """The traceback of a failed attempt, or what else is known of it."""
    if attempt is None:
        return "(no attempt was made)"
    error: dict[str, Any] = attempt.metadata.get("error") or {}
    text = error.get("traceback") or error.get("message")
    return str(text).rstrip() if text else f"(attempt {attempt.attempt_id} ended as {attempt.status})"
