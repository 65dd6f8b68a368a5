"""Recorded rollouts: the finished rollouts of a store, in groups of one task."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.algorithms.training import RolloutRequest
from agentlightning.credit.rejection import Rejection
from agentlightning.errors import DatasetError
from agentlightning.store import InMemoryLightningStore
from agentlightning.training.persistence.run_dir import RunState
from agentlightning.training.sources import recorded
from agentlightning.training.sources.reader import TrajectoryReader
from agentlightning.training.sources.recorded import RecordedQuery, RecordedSource


async def record(store: InMemoryLightningStore, finish: Any, *words: str, **options: Any) -> None:
    for index, word in enumerate(words):
        await finish(await store.start_rollout({"word": word}, **options), reward=float(index))


def source(store: InMemoryLightningStore, **query: Any) -> RecordedSource:
    return RecordedSource(TrajectoryReader(store), RunState(run_id="r"), RecordedQuery(**query))


async def test_rollouts_of_one_task_are_a_group_and_each_step_has_the_next_groups(
    store: InMemoryLightningStore, finish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded, "PAGE", 2)
    await record(store, finish, "red", "blue", "red", "green", "red")
    await store.start_rollout({"word": "unfinished"})
    found = source(store)
    request = RolloutRequest(tasks=2, group_size=2)
    first = await found.next(request)
    assert [each.reward for each in first.trajectories] == [0.0, 2.0, 1.0], "two of red, one of blue"
    assert len({each.group for each in first.trajectories}) == 2
    found.state.step = 1
    assert [each.reward for each in (await found.next(request)).trajectories] == [3.0, 0.0, 2.0], "and from the start"


async def test_a_query_chooses_the_rollouts(store: InMemoryLightningStore, finish: Any) -> None:
    await record(store, finish, "red", mode="train")
    await record(store, finish, "blue", mode="val")
    request = RolloutRequest(tasks=9, group_size=9)
    assert len((await source(store, modes=["val"]).next(request)).trajectories) == 1
    assert len((await source(store).next(request)).trajectories) == 2
    with pytest.raises(DatasetError, match="no finished rollout"):
        await source(store, finished_before=1.0).next(request)


async def test_rollouts_that_an_algorithm_cannot_use_are_rejected(store: InMemoryLightningStore, finish: Any) -> None:
    await record(store, finish, "red", "blue")
    reject = RolloutRequest(2, 1, check=lambda found: [Rejection(found[0].rollout_id, "unloved", "nobody likes it")])
    collected = await source(store).next(reject)
    assert [each.reason for each in collected.rejected] == ["unloved"]
    assert [each.reward for each in collected.trajectories] == [1.0]
