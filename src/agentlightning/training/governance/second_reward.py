"""Scores finished rollouts by a reward function that no agent is trained on."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from agentlightning.assemble import scalar_reward
from agentlightning.rollouts import Attempt, AttemptedRollout, Rollout
from agentlightning.runner.agents.arguments import Invocation
from agentlightning.runner.agents.loading import load_object
from agentlightning.runner.agents.reward import RewardFunction, check_reward
from agentlightning.runner.agents.spec import function_spec
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.trajectory import Reward

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
