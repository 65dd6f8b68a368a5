"""Reads finished rollouts from the store as trajectories, in threads: assembly never holds up the event loop.

A worker thread, and not a process, because the spans and trajectories would cost more to pickle than to assemble.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from agentlightning.assemble import trajectory
from agentlightning.assemble.call_validation import NO_LIMITS, TokenLimits
from agentlightning.credit.rejection import REJECTING, UNREADABLE, Check, Rejection, rejection
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.trajectory import Trajectory

NO_REWARDS: Mapping[str, float] = MappingProxyType({})
CHUNK: Final = 16
"""Rollouts assembled in one call of a worker thread: few enough to bound memory, enough to make the hand-over cheap."""

Readings = tuple[tuple[Trajectory, ...], tuple[Rejection, ...]]
"""The usable trajectories and the rejected rollouts, each in the order requested."""


@dataclass(frozen=True, slots=True)
class TrajectoryReader:
    """Reads trajectories and rejects those that cannot be used."""

    store: LightningStoreBase
    model: str | None = None
    """The model that learns: answers of other models are left out of trajectories. None: all models count."""
    limits: TokenLimits = NO_LIMITS
    """What tokens must fit to be learned from: calls beyond are left out and counted."""

    async def read(
        self, groups: Mapping[str, str], check: Check | None = None, rewards: Mapping[str, float] = NO_REWARDS
    ) -> Readings:
        """`groups`: rollout id -> group. `rewards` replace the rewards of those that timed out."""
        found: dict[str, Trajectory] = {}
        rejected: dict[str, Rejection] = {}
        chunk: list[tuple[str, list[Span]]] = []

        def assemble() -> None:
            for rollout_id, spans in chunk:
                read = self._assemble(rollout_id, spans, groups[rollout_id])
                if isinstance(read, Rejection):
                    rejected[rollout_id] = read
                elif rollout_id in rewards:
                    found[rollout_id] = replace(read, reward=rewards[rollout_id], status="timeout")
                else:
                    found[rollout_id] = read
            chunk.clear()

        async for rollout_id, spans in self.store.iter_spans(list(groups)):
            chunk.append((rollout_id, spans))
            if len(chunk) == CHUNK:
                await asyncio.to_thread(assemble)
        await asyncio.to_thread(assemble)
        usable = tuple(found[rollout_id] for rollout_id in groups if rollout_id in found)
        if check is not None:
            refused = {each.rollout_id: each for each in await asyncio.to_thread(lambda: list(check(usable)))}
            usable = tuple(each for each in usable if each.rollout_id not in refused)
            rejected |= refused
        return usable, tuple(rejected[rollout_id] for rollout_id in groups if rollout_id in rejected)

    def _assemble(self, rollout_id: str, spans: Sequence[Span], group: str) -> Trajectory | Rejection:
        attempt_id = spans[-1].attempt_id if spans else ""
        try:
            return trajectory(rollout_id, attempt_id, spans, group, model=self.model, limits=self.limits)
        except (*REJECTING, *UNREADABLE) as error:
            return rejection(rollout_id, error)
