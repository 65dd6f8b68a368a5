"""Checks the rewards of every batch before it is learned from, as `[guard]` says.

What is measured is in the metrics of the step (`rewards_missing_share`, `reward_drift`, `reward_disagreement`); what
violates a limit is there as `guard_...`, from which the signs of `training/health/signs.py` are made.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from agentlightning.algorithms.training import Collected
from agentlightning.assemble import scalar_reward
from agentlightning.config import RewardGuard
from agentlightning.credit import group_trajectories
from agentlightning.credit.agent_rewards import team_reward, team_score
from agentlightning.credit.rejection import CALL_LIMIT, MISSING_REWARD
from agentlightning.errors import RewardError, TrainingStopped
from agentlightning.rollouts import Attempt, AttemptedRollout, Rollout
from agentlightning.runner.agents.arguments import Invocation
from agentlightning.runner.agents.loading import load_object
from agentlightning.runner.agents.reward import RewardFunction, check_reward
from agentlightning.runner.agents.spec import function_spec
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.training.health.signs import GUARDED, STEPS_BEFORE, Sign, discordance, distance
from agentlightning.training.health.step_record import VIOLATION, StepRecord
from agentlightning.training.persistence.run_dir import RunState
from agentlightning.trajectory import Reward, Trajectory

# -- second reward ---------------------------------------------------------------------------------------------------

# Scores finished rollouts by a reward function that no agent is trained on.

CONCURRENCY: Final = 8
"""Rollouts that are scored at the same time."""
logger = logging.getLogger(__name__)


def with_attempt(rollout: Rollout, attempt: Attempt) -> AttemptedRollout:
    return AttemptedRollout(**{name: getattr(rollout, name) for name in rollout.__struct_fields__}, attempt=attempt)


async def apply_reward(
    store: LightningStoreBase, function: RewardFunction, rollout: AttemptedRollout, spans: Sequence[Span]
) -> Reward:
    """What a reward function gives a stored rollout. Raises RewardError, and whatever the function raises."""
    resources = None if rollout.resources_id is None else await store.get_resources_by_id(rollout.resources_id)
    invocation = Invocation(rollout, {} if resources is None else resources.resources, task=rollout.input)
    output = rollout.attempt.metadata.get("output")
    value = await asyncio.to_thread(function.start, invocation, output, spans=spans)
    return check_reward(await value if inspect.isawaitable(value) else value, function.source)


@dataclass(frozen=True, slots=True)
class SecondReward:
    """A reward function that is applied to finished rollouts, in this process."""

    store: LightningStoreBase
    function: RewardFunction
    weights: Mapping[str, float] | None = None

    @classmethod
    def load(
        cls, store: LightningStoreBase, name: str | None, weights: Mapping[str, float] | None = None
    ) -> SecondReward | None:
        """The function of that name; None for None. Raises AgentError where it cannot be loaded."""
        if name is None:
            return None
        return cls(store, RewardFunction.of(load_object(function_spec(name, "reward"), "reward")), weights)

    async def scores(self, rollout_ids: Sequence[str]) -> dict[str, float]:
        """By rollout id. One that the function raises for, or gives no number, is left out; the first is logged."""
        limit = asyncio.Semaphore(CONCURRENCY)
        failures: list[str] = []

        async def score(rollout_id: str) -> float | None:
            async with limit:
                try:
                    return await self._score(rollout_id)
                except Exception as error:  # noqa: BLE001  The boundary of the user's function; counted as missing.
                    failures.append(f"rollout {rollout_id}: {type(error).__name__}: {error}")
                    return None

        found = await asyncio.gather(*map(score, rollout_ids))
        if failures:
            logger.warning("%s gave %d rollouts no score. %s", self.function.source, len(failures), failures[0])
        return {key: value for key, value in zip(rollout_ids, found, strict=True) if value is not None}

    async def _score(self, rollout_id: str) -> float | None:
        rollout = await self.store.get_rollout_by_id(rollout_id)
        attempt = await self.store.get_latest_attempt(rollout_id)
        if rollout is None or attempt is None:
            return None
        spans = await self.store.query_spans(rollout_id, attempt.attempt_id)
        reward = await apply_reward(self.store, self.function, with_attempt(rollout, attempt), spans)
        return scalar_reward(reward, self.weights)


WITHOUT_REWARD: Final = frozenset({MISSING_REWARD, CALL_LIMIT, RewardError.reason})
"""Reasons of rejected rollouts that have no usable reward."""
MOST_REMEMBERED: Final = 512
"""Rewards of a step that are remembered."""


@dataclass(slots=True)
class RewardWatch:
    """Watches the rewards of a run."""

    guard: RewardGuard
    state: RunState
    weights: Mapping[str, float] | None = None
    second: SecondReward | None = None
    _metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Of the batches of the present step."""
    _rewards: list[float] = field(default_factory=list[float])

    async def check(self, collected: Collected) -> None:
        """Measure a batch. Raises TrainingStopped where it violates a limit and the guard is to stop the run."""
        rewards = {each.rollout_id: _score(each, self.weights) for each in collected.trajectories}
        found = self._range_and_missing(collected, rewards) | self._drift(list(_known(rewards)))
        found |= await self._disagreement(collected.trajectories, rewards)
        self._rewards += _known(rewards)
        for name, value in found.items():  # a step may have several batches
            both = value + self._metrics.get(name, 0.0)
            self._metrics[name] = both if name.endswith("out_of_range") else max(value, self._metrics.get(name, value))
        violated = self.signs(found)
        if violated and self.guard.on_violation == "stop":
            raise TrainingStopped(
                f"step {self.state.step + 1}: {'; '.join(map(str, violated))}.\nThe run has not learned from it:"
                ' guard.on_violation = "stop". Continue it with --resume once the cause is mended'
            )

    @staticmethod
    def signs(metrics: Mapping[str, float]) -> list[Sign]:
        """What is violated, by the metrics of a batch."""
        record = StepRecord.read({"step": 1, **metrics})
        return [sign for detector in GUARDED if (sign := detector([record])) is not None]

    def finish_step(self) -> dict[str, float]:
        """The metrics of the step."""
        metrics, self._metrics = self._metrics, {}
        rewards, self._rewards = self._rewards, []
        spread = max(1, len(rewards) // MOST_REMEMBERED)
        self.state.recent_rewards = [*self.state.recent_rewards, rewards[::spread]][-STEPS_BEFORE:]
        return metrics

    def _range_and_missing(self, collected: Collected, rewards: Mapping[str, float | None]) -> dict[str, float]:
        guard, found = self.guard, dict[str, float]()
        values = [value for each in collected.trajectories for value in self._checked(each)]
        beyond = sum(
            (guard.low is not None and value < guard.low) or (guard.high is not None and value > guard.high)
            for value in values
        )
        if beyond:
            found[f"{VIOLATION}out_of_range"] = float(beyond)
        missing = sum(each.reason in WITHOUT_REWARD for each in collected.rejected)
        missing += sum(reward is None for reward in rewards.values())
        finished = len(collected.trajectories) + len(collected.rejected)
        share = missing / finished if finished else 0.0
        found["rewards_missing_share"] = share
        if share > guard.max_missing:
            found[f"{VIOLATION}missing"] = share
        return found

    def _checked(self, trajectory: Trajectory) -> Sequence[float]:
        score = _score(trajectory, self.weights)
        return () if score is None else (score,)

    def _drift(self, now: Sequence[float]) -> dict[str, float]:
        before = [reward for step in self.state.recent_rewards for reward in step]
        found = distance(now, before)
        if found is None:
            return {}
        return {"reward_drift": found} | ({f"{VIOLATION}drift": found} if found > self.guard.max_drift else {})

    async def _disagreement(
        self, trajectories: Sequence[Trajectory], rewards: Mapping[str, float | None]
    ) -> dict[str, float]:
        groups = group_trajectories(trajectories)
        shares = [self._of_dimensions(groups), *await self._of_functions(groups, rewards)]
        known = [share for share in shares if share is not None]
        if not known:
            return {}
        worst = max(known)
        violated = {f"{VIOLATION}disagreement": worst} if worst > self.guard.max_disagreement else {}
        return {"reward_disagreement": worst} | violated

    def _of_dimensions(self, groups: Sequence[Sequence[Trajectory]]) -> float | None:
        if self.guard.agree is None:
            return None
        first, second = self.guard.agree
        named = [[reward for each in group if isinstance(reward := team_reward(each), dict)] for group in groups]
        return discordance(
            [[(each[first], each[second]) for each in group if first in each and second in each] for group in named]
        )

    async def _of_functions(
        self, groups: Sequence[Sequence[Trajectory]], rewards: Mapping[str, float | None]
    ) -> list[float | None]:
        if self.second is None:
            return []
        chosen: list[Sequence[Trajectory]] = []
        for group in groups:
            if sum(map(len, chosen)) + len(group) <= self.guard.sample:
                chosen.append(group)
        scores = await self.second.scores([each.rollout_id for group in chosen for each in group])
        pairs = [
            [
                (reward, scores[each.rollout_id])
                for each in group
                if (reward := rewards[each.rollout_id]) is not None and each.rollout_id in scores
            ]
            for group in chosen
        ]
        return [discordance(pairs)]


def _known(rewards: Mapping[str, float | None]) -> list[float]:
    return [reward for reward in rewards.values() if reward is not None]


def _score(trajectory: Trajectory, weights: Mapping[str, float] | None) -> float | None:
    try:
        return team_score(trajectory, weights)
    except RewardError:
        return None
