"""Pages of rollouts cost what is on them, whatever else there is."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from agentlightning.rollouts import EnqueueRolloutRequest
from agentlightning.store import LightningStore
from agentlightning.store.sql.store import SqlStore
from agentlightning.store.sql.tx import Tx


@pytest.fixture
async def database(tmp_path: Path) -> Path:
    store = LightningStore(tmp_path / "store.db")
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(n, rollout_id=f"r{n}") for n in range(20)])
    await store.cancel_rollout("r7")
    await store.close()
    return tmp_path / "store.db"


async def instructions(store, call):
    """How many instructions SQLite executes for the reads of a call, in hundreds."""
    ran, raw = [], store.reader._connection.raw
    raw.set_progress_handler(lambda: ran.append(1), 100)
    await call()
    raw.set_progress_handler(None, 100)
    return len(ran)


@pytest.mark.parametrize("states", [None, ["queuing"], ["failed"], ["queuing", "failed"], ["running"]])
@pytest.mark.parametrize("newest_first", [False, True])
async def test_a_page_of_rollouts_costs_the_same_however_many_there_are(states, newest_first):
    store = SqlStore(":memory:")
    asked = []
    for count in (200, 1800):
        requests = [EnqueueRolloutRequest(number) for number in range(count)]
        made = [each.rollout_id for each in await store.enqueue_many_rollouts(requests)]
        await asyncio.gather(*(store.update_rollout(each, status="failed") for each in made[: count // 2]))
        page = partial(store.query_rollouts, status_in=states, newest_first=newest_first, limit=10)
        asked += [await instructions(store, partial(page, after=each)) for each in (None, made[count // 4], made[-20])]
    assert max(asked[3:]) <= max(asked[:3]) + 3
    await store.close()


async def test_rollouts_of_several_states_are_paged_in_order_of_creation(database):
    store = LightningStore(database)
    every = [each.rollout_id for each in await store.query_rollouts()]
    for newest_first in (False, True):
        after, seen = None, []
        states = ["queuing", "running", "cancelled", "queuing"]
        while page := await store.query_rollouts(status_in=states, newest_first=newest_first, after=after, limit=2):
            after = page[-1].rollout_id
            seen += page
        wanted = [each for each in (every[::-1] if newest_first else every) if each in {r.rollout_id for r in seen}]
        assert [each.rollout_id for each in seen] == wanted
        assert len(seen) == await store.count_rollouts(status_in=states)
        page = await store.query_rollouts(status_in=states, newest_first=newest_first, limit=3, offset=2)
        assert [each.rollout_id for each in page] == wanted[2:5]
    assert await store.query_rollouts(status_in=[]) == []
    await store.close()


@pytest.mark.parametrize("filters", [{"status_in": ["idle"]}, {"worker_id_contains": "worker"}])
async def test_a_page_of_some_workers_costs_the_same_however_many_there_are(filters):
    store = SqlStore(":memory:")
    asked = []
    for count in (100, 900):
        await asyncio.gather(*(store.update_worker(f"worker-{number}-of-{count}") for number in range(count)))
        asked.append(await instructions(store, partial(store.query_workers, **filters, limit=5)))
    await store.close()
    assert asked[1] < 2 * asked[0] + 20


@pytest.mark.parametrize(("queues", "bytes_each", "most"), [(1, 400_000, 8), (100, 100, 64)])
async def test_what_is_read_ahead_for_claims_is_not_read_again_for_each(queues, bytes_each, most, monkeypatch):
    """Large rollouts, or those of many queues, would otherwise fill the memory of rows before one is claimed."""
    store = SqlStore(":memory:")
    for _ in range(60):
        await store.enqueue_many_rollouts(
            [EnqueueRolloutRequest("a" * bytes_each, queue=f"q{number}") for number in range(queues)]
        )
    loaded, load = [], Tx.load_rows
    monkeypatch.setattr(Tx, "load_rows", lambda *args: loaded.extend(found := load(*args)) or found)
    for _ in range(40):
        assert await store.dequeue_rollout() is not None
    assert len(loaded) <= 40 * most + queues
    await store.close()
