"""What an algorithm is: it asks for rollouts, turns what comes back into an update, and publishes the result.

The three steps are methods of `Training`, which the trainer hands it; the algorithm decides what to ask for, how
credit is assigned and which loss is taken. It never calls a model, runs an agent or opens a file, so the same file
works on a laptop and on a cluster, and a crashed run continues without its help: it starts at `training.step`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from pydantic import BaseModel

from agentlightning.rejection import Check
from agentlightning.source import Collected
from agentlightning.trajectory import TrainingSample


class Training(Protocol):
    """A training run, as an algorithm sees it."""

    @property
    def step(self) -> int:
        """Steps done so far: 0 in a new run, more in a resumed one."""
        ...

    async def collect(
        self, *, tasks: int, group_size: int, temperature: float, check: Check | None = None
    ) -> Collected:
        """The rollouts of the step under way: `group_size` for each of `tasks` tasks, by the newest weights.
        Trajectories of one task carry the same `group`.

        `check` names the rollouts the algorithm cannot learn from. They are left out and counted, a resumed run runs
        them again, and too many of them stop training."""
        ...

    async def update(self, samples: Sequence[TrainingSample], **options: Any) -> Mapping[str, float]:
        """One update of the policy: model calls that come wait for it, those under way finish first or go on across it.
        `options` are those of the policy's `train`."""
        ...

    async def finish_step(self, collected: Collected, figures: Mapping[str, float]) -> None:
        """Publish the new weights, keep a checkpoint and the figures, validate when it is time, go to the next step."""
        ...


C = TypeVar("C", bound=BaseModel)


class Algorithm(ABC, Generic[C]):
    """The base of all algorithms."""

    config: C
    """Its settings; frozen, unknown keys refused."""
    name: ClassVar[str]

    @property
    @abstractmethod
    def total_steps(self) -> int:
        """How many steps a whole run has."""

    @abstractmethod
    async def run(self, training: Training) -> None:
        """Do the steps from `training.step` to `total_steps`."""
