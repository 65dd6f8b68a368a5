"""Trajectories are assembled and checked in threads, while the event loop goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from agentlightning.credit.rejection import Rejection
from agentlightning.store import InMemoryLightningStore
from agentlightning.training.sources import reader
from agentlightning.training.sources.reader import TrajectoryReader
from agentlightning.trajectory import Trajectory


async def test_the_event_loop_runs_while_trajectories_are_assembled_and_checked(
    store: InMemoryLightningStore, finish: Any, monkeypatch: Any
) -> None:
    """Assembly and the check each wait until the event loop has ticked: on the loop they would wait for ever."""
    rollout = await store.start_rollout({"n": 0})
    await finish(rollout)
    ticked = threading.Event()
    assemble = reader.trajectory

    def wait_for_tick() -> None:
        ticked.clear()
        assert ticked.wait(30)

    def slow_trajectory(*args: Any, **options: Any) -> Trajectory:
        wait_for_tick()
        return assemble(*args, **options)

    def check(found: Sequence[Trajectory]) -> list[Rejection]:
        wait_for_tick()
        return []

    async def tick() -> None:
        while True:
            ticked.set()
            await asyncio.sleep(0)

    monkeypatch.setattr(reader, "trajectory", slow_trajectory)
    heartbeat = asyncio.create_task(tick())
    trajectories, _ = await TrajectoryReader(store).read({rollout.rollout_id: "g"}, check)
    heartbeat.cancel()
    assert [each.reward for each in trajectories] == [1.0]
