"""Reads finished rollouts from the store as trajectories, in threads: assembly never holds up the event loop.

Threads and not processes, because spans and trajectories cost more to pickle than to assemble: for 256 rollouts of
eight calls, a thread takes a ninth of the time of a process, and delays a heartbeat by at most 24 ms instead of 380.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from agentlightning.algorithms.recorded.sessions import group_of, succeeded
from agentlightning.assemble import TURN_LIMIT_REACHED, calls, trajectory
from agentlightning.assemble.model_calls import NO_LIMITS, TokenLimits
from agentlightning.credit.rejection import REJECTING, UNREADABLE, Check, Rejection, rejection
from agentlightning.errors import NotFoundError
from agentlightning.rollouts import RolloutMode
from agentlightning.span import AIR_RULE, Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.tracing.air import AutomaticRewards
from agentlightning.trajectory import Reward, Trajectory

NO_REWARDS: Mapping[str, float] = MappingProxyType({})
NO_TASKS: Mapping[str, Any] = MappingProxyType({})
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
    air: AutomaticRewards | None = None
    """Rules whose rewards are added to the attempts that are read, and recorded in the store. None: no rules."""
    turn_limit_reward: float | None = None
    """The reward of rollouts that ended at their limit of turns without one of their own."""

    async def read(
        self,
        groups: Mapping[str, str],
        check: Check | None = None,
        rewards: Mapping[str, float] = NO_REWARDS,
        tasks: Mapping[str, Any] = NO_TASKS,
    ) -> Readings:
        """`groups`: rollout id -> group; `tasks`: rollout id -> its input. `rewards` replace the rewards of those that
        timed out."""
        if not groups:
            return (), ()
        found: dict[str, Trajectory] = {}
        rejected: dict[str, Rejection] = {}
        async for chunk in _chunks(self.store.iter_spans(list(groups))):
            assembled, rewards_found = await asyncio.to_thread(self._assemble, chunk, groups)
            if rewards_found:
                await self.store.add_many_spans(rewards_found)
            for read in assembled:
                if isinstance(read, Rejection):
                    rejected[read.rollout_id] = read
                else:
                    reward = rewards.get(read.rollout_id, self._reward(read))
                    found[read.rollout_id] = replace(read, reward=reward, task=tasks.get(read.rollout_id))
        usable, refused = await checked([found[each] for each in groups if each in found], check)
        rejected |= {each.rollout_id: each for each in refused}
        return usable, tuple(rejected[rollout_id] for rollout_id in groups if rollout_id in rejected)

    async def read_remaining(
        self, groups: Mapping[str, str], check: Check | None = None, tasks: Mapping[str, Any] = NO_TASKS
    ) -> tuple[Trajectory, ...]:
        """The usable ones of rollouts that the store may have removed, each read and checked by itself."""
        found: list[Trajectory] = []
        for rollout_id, group in groups.items():
            try:
                usable, _ = await self.read({rollout_id: group}, check, tasks=tasks)
            except NotFoundError:
                continue
            found += usable
        return tuple(found)

    def _reward(self, read: Trajectory) -> Reward | None:
        return self.turn_limit_reward if read.reward is None and TURN_LIMIT_REACHED in read.metadata else read.reward

    def _assemble(
        self, chunk: Sequence[tuple[str, list[Span]]], groups: Mapping[str, str]
    ) -> tuple[list[Trajectory | Rejection], list[Span]]:
        """What was read of each rollout, and the automatic rewards that the store does not have yet."""
        assembled: list[Trajectory | Rejection] = []
        found: list[Span] = []
        for rollout_id, spans in chunk:
            attempt_id, group = spans[-1].attempt_id if spans else "", groups[rollout_id]
            try:
                spans, new = self._with_rewards(spans, attempt_id)
                found += new
                read = trajectory(rollout_id, attempt_id, spans, group, model=self.model, limits=self.limits)
            except (*REJECTING, *UNREADABLE) as error:
                assembled.append(rejection(rollout_id, error))
            else:
                assembled.append(read)
        return assembled, found

    def _with_rewards(self, spans: list[Span], attempt_id: str) -> tuple[list[Span], list[Span]]:
        """The spans with the rewards of today's rules in place of recorded ones, and those that are not recorded."""
        if self.air is None:
            return spans, []
        attempt = [span for span in spans if span.attempt_id == attempt_id and AIR_RULE not in span.attributes]
        known = {span.span_id for span in spans}
        rewards = self.air.reward_spans(attempt, calls(attempt))
        return [*attempt, *rewards], [reward for reward in rewards if reward.span_id not in known]


async def checked(trajectories: Sequence[Trajectory], check: Check | None) -> Readings:
    """Those that can be used, and those that `check` names."""
    rejected = () if check is None else tuple(await asyncio.to_thread(lambda: list(check(trajectories))))
    refused = {each.rollout_id for each in rejected}
    return tuple(each for each in trajectories if each.rollout_id not in refused), rejected


async def _chunks(rollouts: AsyncIterator[tuple[str, list[Span]]]) -> AsyncIterator[list[tuple[str, list[Span]]]]:
    chunk: list[tuple[str, list[Span]]] = []
    async for each in rollouts:
        chunk.append(each)
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


# -- recorded --------------------------------------------------------------------------------------------------------

# Recorded rollouts: those that finished earlier, from the agent's own use for example. Those of the same task form a
# group, in the order of their first rollout.


async def find_groups(
    store: LightningStoreBase, modes: Sequence[RolloutMode] | None = None
) -> list[tuple[str, list[str]]]:
    """(group, rollout ids) of the succeeded rollouts of some modes: by the `group` in their metadata, else by task."""
    groups: dict[str, list[str]] = {}
    async for rollout in succeeded(store, modes):
        groups.setdefault(group_of(rollout), []).append(rollout.rollout_id)
    return list(groups.items())
