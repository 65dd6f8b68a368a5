"""Live rollouts: each step runs its own, sampled with the newest weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning.algorithms.training import Collected, RolloutRequest
from agentlightning.task import TaskSampler
from agentlightning.training.persistence.run_dir import RunState
from agentlightning.training.sources.collector import RolloutCollector, RolloutPlan

Publish = Callable[[str, float], Awaitable[str]]
"""(resources id, sampling temperature) -> the id under which the present weights and resources were published."""
OnProgress = Callable[[int, int], None]
"""(finished rollouts, all rollouts) of the current batch."""


@dataclass(slots=True)
class LiveSource:
    """Runs a batch of rollouts at each request and waits for all of them."""

    collector: RolloutCollector
    tasks: Sequence[Any]
    state: RunState
    publish: Publish
    seed: int = 0
    on_progress: OnProgress = field(default=lambda done, total: None)
    _part: tuple[int, int] = (-1, 0)
    """(step, requests within it)."""

    async def next(self, request: RolloutRequest) -> Collected:
        return await self.run(request, *self.next_part())

    async def run(self, request: RolloutRequest, step: int, part: int) -> Collected:
        """Run a batch and wait for it."""
        plans = self.plans(request, step, part)
        return await self.collector.collect(
            plans,
            resources_id=await self.publish(self.name(step, part), request.temperature),
            check=request.check,
            timeout_reward=request.timeout_reward,
            on_progress=lambda done: self.on_progress(done, len(plans)),
        )

    def next_part(self) -> tuple[int, int]:
        """The current step, and the number of earlier requests within it."""
        step, count = self._part
        part = count if step == self.state.step else 0
        self._part = self.state.step, part + 1
        return self.state.step, part

    def name(self, step: int, part: int) -> str:
        """The name of a batch: that of its resources, and the beginning of its rollouts' ids."""
        return step_name(self.state, step) + (f"-part{part}" if part else "")

    def plans(self, request: RolloutRequest, step: int, part: int) -> list[RolloutPlan]:
        """The rollouts of a batch: the same in a resumed run."""
        name = self.name(step, part) + self.state.suffix
        tasks = TaskSampler(self.tasks, request.tasks, self.seed).draw(step)
        return [
            RolloutPlan(f"{name}-{index:04d}-{member:03d}", task, f"{name}-{index:04d}")
            for index, task in enumerate(tasks)
            for member in range(request.group_size)
        ]


def step_name(state: RunState, step: int) -> str:
    """The name of a training step's resources, and the beginning of its rollouts' ids."""
    return f"{state.run_id}-train-{step:06d}"
