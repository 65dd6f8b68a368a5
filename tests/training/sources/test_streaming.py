"""Streaming: the next steps' rollouts run while a step trains, and none is older than the bound."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentlightning.algorithms.training import Collected, RolloutRequest
from agentlightning.rollouts import AttemptedRollout
from agentlightning.store import InMemoryLightningStore
from agentlightning.training.persistence.run_dir import RunState
from agentlightning.training.sources.collector import RolloutCollector
from agentlightning.training.sources.live import LiveSource
from agentlightning.training.sources.reader import TrajectoryReader
from agentlightning.training.sources.streaming import StreamingSource

TASKS = [{"n": n} for n in range(8)]
REQUEST = RolloutRequest(tasks=2, group_size=2)


class Loop:
    """A training loop around a source: each step raises the version of the weights by one."""

    def __init__(self, store: InMemoryLightningStore, finish: Any, max_staleness: int, total_steps: int = 4) -> None:
        self.store, self.finish = store, finish
        self.state = RunState(run_id="r")
        self.version = 0
        self.published: list[tuple[str, int]] = []
        collector = RolloutCollector(TrajectoryReader(store))
        live = LiveSource(collector, TASKS, self.state, self.publish)
        self.source = StreamingSource(live, lambda: self.version, max_staleness, total_steps)

    async def publish(self, resources_id: str, temperature: float) -> str:
        self.published.append((resources_id, self.version))
        if await self.store.get_resources_by_id(resources_id) is None:
            await self.store.add_resources({}, resources_id)
        return resources_id

    async def claim(self, count: int) -> list[AttemptedRollout]:
        claimed = [await self.store.dequeue_rollout(timeout=5) for _ in range(count)]
        return [rollout for rollout in claimed if rollout is not None]

    def train(self) -> None:
        self.state.step += 1
        self.version += 1


def steps_of(rollouts: list[AttemptedRollout]) -> list[str]:
    return [rollout.rollout_id[:14] for rollout in rollouts]


async def test_rollouts_of_the_next_steps_wait_for_nobody(store: InMemoryLightningStore, finish: Any) -> None:
    loop = Loop(store, finish, max_staleness=1)
    first = asyncio.create_task(loop.source.next(REQUEST))
    claimed = await loop.claim(8)
    assert steps_of(claimed) == ["r-train-000000"] * 4 + ["r-train-000001"] * 4
    assert loop.published == [("r-train-000000", 0), ("r-train-000001", 0)]
    for rollout in claimed:
        await finish(rollout, version=0)
    assert len((await first).trajectories) == 4
    loop.train()
    second = await loop.source.next(REQUEST)
    assert {each.rollout_id[:14] for each in second.trajectories} == {"r-train-000001"}, "nobody had to run them again"
    assert loop.published[2:] == [("r-train-000002", 1)]


async def test_nothing_runs_beyond_the_last_step(store: InMemoryLightningStore, finish: Any) -> None:
    loop = Loop(store, finish, max_staleness=3, total_steps=2)
    collecting = asyncio.create_task(loop.source.next(REQUEST))
    for rollout in await loop.claim(8):
        await finish(rollout)
    await collecting
    assert [name for name, _ in loop.published] == ["r-train-000000", "r-train-000001"]
    assert await store.dequeue_rollout() is None


@pytest.mark.parametrize(("version", "rejected"), [(2, []), (1, ["stale"] * 4)])
async def test_what_is_older_than_the_bound_is_rejected(
    store: InMemoryLightningStore, finish: Any, version: int, rejected: list[str]
) -> None:
    loop = Loop(store, finish, max_staleness=1, total_steps=1)
    loop.version = 3
    loop.source.live.collector.max_failed_share = 1.0
    collecting = asyncio.create_task(loop.source.next(REQUEST))
    for rollout in await loop.claim(4):
        await finish(rollout, version=version)
    collected: Collected = await collecting
    assert [each.reason for each in collected.rejected] == rejected
    assert len(collected.trajectories) == 4 - len(rejected)


async def test_a_resumed_run_uses_what_it_had_queued_and_runs_again_what_is_too_old(
    store: InMemoryLightningStore, finish: Any
) -> None:
    before = Loop(store, finish, max_staleness=1)
    collecting = asyncio.create_task(before.source.next(REQUEST))
    for rollout in await before.claim(8):
        await finish(rollout, version=5 if rollout.rollout_id.endswith("000") else 9)
    await collecting
    after = Loop(store, finish, max_staleness=1)
    after.state.step, after.version = 1, 10
    collecting = asyncio.create_task(after.source.next(REQUEST))
    again = [rollout for rollout in await after.claim(6) if "train-000001" in rollout.rollout_id]
    assert {rollout.rollout_id[-10:] for rollout in again} == {"000-again1"}
    for rollout in again:
        await finish(rollout, version=10)
    collected = await collecting
    assert len(again) == 2
    assert len(collected.trajectories) == 4
