"""Streaming rollouts with bounded staleness: while a step trains, the rollouts of the next steps already run.

With `max_staleness=k`, a request for step s first queues the batches of steps s to s+k, each with the weights that are
the newest when it is queued, and then waits for the batch of step s. Weights change once a step, so a trajectory is at
most k updates old when it is learned from. Batches have the names and tasks that `LiveSource` gives them, so a resumed
run finds them again. Versions also grow at a resume: what is older than the bound by then is rejected, and run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from agentlightning.algorithms.training import Collected, RolloutRequest
from agentlightning.credit.rejection import Check, Rejection
from agentlightning.training.sources.collector import QueuedBatch
from agentlightning.training.sources.live import LiveSource
from agentlightning.trajectory import Trajectory

STALE: Final = "stale"


@dataclass(slots=True)
class StreamingSource:
    """Keeps the rollouts of `max_staleness` further steps running."""

    live: LiveSource
    policy_version: Callable[[], int]
    """The version of the present weights."""
    max_staleness: int
    total_steps: int
    _queued: dict[int, tuple[RolloutRequest, QueuedBatch]] = field(
        default_factory=dict[int, tuple[RolloutRequest, QueuedBatch]]
    )
    """By step: the batches that this process has queued."""

    async def next(self, request: RolloutRequest) -> Collected:
        step, part = self.live.next_part()
        if part:
            return await self.live.run(request, step, part)
        request = replace(request, check=self._with_staleness(request.check))
        last = min(step + self.max_staleness, self.total_steps - 1)
        for ahead in range(step, max(step, last) + 1):
            if ahead not in self._queued or _differs(self._queued[ahead][0], request):
                self._queued[ahead] = request, await self._enqueue(request, ahead)
        _, batch = self._queued.pop(step)
        return await self.live.collector.gather(
            batch,
            check=request.check,
            timeout_reward=request.timeout_reward,
            on_progress=lambda done: self.live.on_progress(done, len(batch.plans)),
        )

    async def _enqueue(self, request: RolloutRequest, step: int) -> QueuedBatch:
        resources_id = await self.live.publish(self.live.name(step, 0), request.temperature)
        plans = self.live.plans(request, step, 0)
        return await self.live.collector.enqueue(plans, resources_id=resources_id, check=request.check)

    def _with_staleness(self, check: Check | None) -> Check:
        def checked(trajectories: Sequence[Trajectory]) -> list[Rejection]:
            oldest = self.policy_version() - self.max_staleness
            stale = [self._stale(each) for each in trajectories if _version(each, oldest) < oldest]
            return [*stale, *(check(trajectories) if check is not None else ())]

        return checked

    def _stale(self, trajectory: Trajectory) -> Rejection:
        message = (
            f"it was sampled with weights of version {_version(trajectory, 0)}; the present version is"
            f" {self.policy_version()} and max_staleness is {self.max_staleness}"
        )
        return Rejection(trajectory.rollout_id, STALE, message)


def _differs(queued: RolloutRequest, request: RolloutRequest) -> bool:
    return replace(queued, check=None, timeout_reward=None) != replace(request, check=None, timeout_reward=None)


def _version(trajectory: Trajectory, unknown: int) -> int:
    """The oldest version of the weights that sampled a token of the trajectory."""
    versions = [
        version
        for call in trajectory.transitions
        for version in ([each for each, _ in call.versions] or [call.policy_version])
        if version is not None
    ]
    return min(versions, default=unknown)
