"""What an algorithm is: it asks for rollouts, turns what comes back into an update, and publishes the result.

The three steps are methods of `Training`, which the trainer hands it; the algorithm decides what to ask for, how
credit is assigned and which loss is taken. It never calls a model, runs an agent or opens a file, so the same file
works on a laptop and on a cluster, and a crashed run continues without its help: it starts at `training.step`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from pydantic import BaseModel

from agentlightning.credit.rejection import Check
from agentlightning.training.rollout_source import Collected
from agentlightning.trajectory import TrainingSample

if TYPE_CHECKING:
    from agentlightning.chat.base import ChatFormat
    from agentlightning.policy.optimizer_config import Objective, OptimizerConfig


class Training(Protocol):
    """A training run, as an algorithm sees it."""

    @property
    def step(self) -> int:
        """Steps done so far: 0 in a new run, more in a resumed one."""
        ...

    @property
    def target_agent(self) -> str | None:
        """Which agents are to be trained, as the agent itself says (`LitAgent.trained_agents`): a regular expression
        for the whole name; None: every one."""
        ...

    @property
    def chat(self) -> ChatFormat:
        """How the policy writes conversations: for algorithms that learn from text."""
        ...

    @property
    def context_length(self) -> int:
        """Tokens the policy holds, prompt and answer together."""
        ...

    async def collect(
        self,
        *,
        tasks: int,
        group_size: int,
        temperature: float,
        check: Check | None = None,
        timeout_reward: float | None = None,
    ) -> Collected:
        """The rollouts of the step under way: `group_size` for each of `tasks` tasks, by the newest weights.
        Trajectories of one task carry the same `group`.

        `check` names the rollouts the algorithm cannot learn from. They are left out and counted, a resumed run runs
        them again, and too many of them stop training. With a `timeout_reward`, rollouts that ran out of time have that
        reward and are learned from; without, they have failed."""
        ...

    async def update(self, samples: Sequence[TrainingSample], **options: Any) -> Mapping[str, float]:
        """One update of the policy: model calls that come wait for it, those under way finish first or go on across it.
        `options` are those of the policy's `train`."""
        ...

    async def finish_step(self, collected: Collected, figures: Mapping[str, float]) -> None:
        """Publish the new weights, keep a checkpoint and the figures, validate when it is time, go to the next step.
        `figures` may be any; `reward` and `loss` are shown."""
        ...

    async def save(self, directory: Path) -> None:
        """Write the present weights to a directory that transformers loads."""
        ...


C = TypeVar("C", bound=BaseModel)


class Algorithm(ABC, Generic[C]):
    """The base of all algorithms. A trainer runs the very object it is given.

    A subclass defines `total_steps` and `run`; settings of its own go into `config`, and what its optimiser and its
    rewards need is read from there (`optimizer`, `reward_weights`) or defined by overriding the properties.

        >>> class Measure(agl.Algorithm):
        ...     total_steps = 1
        ...     async def run(self, training):
        ...         collected = await training.collect(tasks=4, group_size=1, temperature=1.0)
        ...         await training.finish_step(collected, {})
        >>> Measure().total_steps
        1
    """

    config: C
    """Its settings, where it has any; frozen, unknown keys refused."""
    name: ClassVar[str] = "algorithm"
    objective: ClassVar[Objective] = "reinforcement"
    """What the default learning rate suits."""

    @property
    @abstractmethod
    def total_steps(self) -> int:
        """How many steps a whole run has."""

    @abstractmethod
    async def run(self, training: Training) -> object:
        """Do the steps from `training.step` to `total_steps`. What it returns is not looked at."""

    @property
    def optimizer(self) -> OptimizerConfig | None:
        """How the policy's weights are updated; None: as the trainer's own settings say."""
        return getattr(self._settings, "optimizer", None)

    @property
    def optimizer_steps(self) -> int:
        """Optimiser steps of a whole run, for a learning-rate schedule."""
        return self.total_steps * int(getattr(self._settings, "minibatches", 1))

    @property
    def reward_weights(self) -> Mapping[str, float] | None:
        """Weights of the named dimensions of a reward, for evaluations too."""
        return getattr(self._settings, "reward_weights", None)

    @property
    def model(self) -> object:
        """The model it was given to train: a directory or hub name; None: the trainer's."""
        return None

    @property
    def _settings(self) -> object:
        return getattr(self, "config", None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self, 'config', '')!s})"
