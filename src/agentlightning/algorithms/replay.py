"""Replay of recent successes: a group in which no rollout succeeded is joined by earlier successes at its task.

Such a group has no spread of rewards and teaches nothing; with a success it does. The replayed tokens keep the
log-probabilities that they were sampled with, so a loss weighs them by pi / pi_sampled as any tokens of older weights.
The buffer holds ids only: rollouts are read from the store again, and those that are too old, removed, or of no use to
the algorithm any more are forgotten and counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import FiniteFloat, TypeAdapter, ValidationError

from agentlightning.algorithms.training import Training
from agentlightning.credit import group_trajectories
from agentlightning.credit.agent_rewards import team_score
from agentlightning.credit.base import memory_key
from agentlightning.credit.rejection import Check
from agentlightning.errors import ConfigError, ResumeError
from agentlightning.policy.losses import ADVANTAGES, SAMPLED_LOGPROBS, TokenLoss
from agentlightning.trajectory import RewardWeights, Trajectory
from agentlightning.util.settings import AtLeastOne, Section

REPLAYED: Final = "replayed_rollouts"
DROPPED: Final = "replay_dropped"
SIZE: Final = "replay_size"


class Replay(Section):
    """Which successful rollouts are kept, for how long, and how many of them join a group without success."""

    capacity: AtLeastOne = 64
    """Rollouts that are kept, of all tasks together; the oldest are forgotten first."""
    max_age: AtLeastOne = 4
    """Updates by which a replayed token may be older than the weights that learn from it."""
    success: FiniteFloat = 1.0
    """The least reward of a rollout that has succeeded."""
    rollouts: AtLeastOne = 1
    """Successful rollouts that join a group without any, the newest first; as many are kept of each task."""


def check_losses(losses: Sequence[TokenLoss]) -> None:
    """Raises ConfigError for losses that would train replayed tokens as if the present weights had sampled them."""
    if not any({ADVANTAGES, SAMPLED_LOGPROBS} <= loss.needs for loss in losses):
        names = ", ".join(f'"{loss.type}"' for loss in losses)
        raise ConfigError(
            f"replay gives the losses {names} tokens of older weights, and none has a ratio that corrects for these; "
            "leave replay out, or use ppo"
        )
    for loss in losses:
        if loss.type == "nll":
            raise ConfigError('loss "nll" imitates replayed tokens without a ratio; leave replay or the loss out')


@dataclass(slots=True)
class ReplayBuffer:
    """The ids of recent successful rollouts by task, the task that succeeded last at the end."""

    config: Replay
    weights: RewardWeights = None
    """Of the named dimensions of a reward."""
    _ids: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """By task, the oldest first."""

    @property
    def size(self) -> int:
        """The number of rollouts that it holds."""
        return sum(map(len, self._ids.values()))

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Keep those that succeeded, as far as there is room."""
        for group in group_trajectories(trajectories):
            new = [each.rollout_id for each in group if each.status == "succeeded" and self._succeeded(each)]
            if new:
                task = memory_key(group)
                kept = [each for each in self._ids.pop(task, []) if each not in new]
                self._ids[task] = [*kept, *new][-self.config.rollouts :]
        self._forget_oldest()

    async def for_groups(
        self, training: Training, trajectories: Sequence[Trajectory], check: Check, joined: Sequence[Trajectory] = ()
    ) -> tuple[tuple[Trajectory, ...], dict[str, int]]:
        """The rollouts that join the groups of `trajectories` without success, and the counts for the step's metrics.
        Each joins one group of a step: not if it is among those that have `joined` one."""
        groups = group_trajectories(trajectories)
        own = {each.rollout_id for each in (*trajectories, *joined)}
        joins: dict[str, Trajectory] = {}
        for group in groups:
            if not any(map(self._succeeded, group)):
                for rollout_id in self._ids.get(memory_key(group), []):
                    if rollout_id not in own:
                        joins.setdefault(rollout_id, group[0])
        found = await training.recall(
            {rollout_id: first.group for rollout_id, first in joins.items()},
            tasks={rollout_id: first.task for rollout_id, first in joins.items()},
            max_age=self.config.max_age,
            check=check,
        )
        usable = tuple(each for each in found if self._succeeded(each))
        dropped = joins.keys() - {each.rollout_id for each in usable}
        for rollout_id in dropped:
            self._forget(memory_key([joins[rollout_id]]), rollout_id)
        return usable, {REPLAYED: len(usable), DROPPED: len(dropped)}

    def state_dict(self) -> dict[str, list[str]]:
        """All of it, as JSON can hold it."""
        return {task: list(ids) for task, ids in self._ids.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all of it. Raises ResumeError for what `state_dict` cannot have written."""
        try:
            self._ids = TypeAdapter(dict[str, list[str]]).validate_python(state)
        except ValidationError as error:
            raise ResumeError(f"the rollouts to replay cannot be read: {error!r}; start a new run") from error
        self._forget_oldest()

    def _succeeded(self, trajectory: Trajectory) -> bool:
        reward = team_score(trajectory, self.weights)
        return reward is not None and reward >= self.config.success

    def _forget_oldest(self) -> None:
        while self.size > self.config.capacity:
            task = next(iter(self._ids))
            self._forget(task, self._ids[task][0])

    def _forget(self, task: str, rollout_id: str) -> None:
        self._ids[task].remove(rollout_id)
        if not self._ids[task]:
            del self._ids[task]
