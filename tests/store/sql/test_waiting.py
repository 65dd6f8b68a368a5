"""Who waits for which rollouts to finish, and who is woken up."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterable

import pytest

from agentlightning.errors import StoreClosedError
from agentlightning.store import InMemoryLightningStore
from agentlightning.store.sql.queries import _FINISHED_AMONG
from agentlightning.store.sql.schema import migrate
from agentlightning.store.sql.sqlite import SqliteSchema, _translated
from agentlightning.store.sql.waiting import Wait, Waits


async def woken(waits: Waits, wait: Wait, finished: Iterable[str] | None) -> bool:
    waits.notify(finished)
    try:
        await asyncio.wait_for(wait.enough(None), 0.02)
    except TimeoutError:
        return False
    return True


async def test_a_wait_is_over_once_enough_of_its_rollouts_have_finished() -> None:
    waits, both, either = Waits(), Wait(["a", "b"], 2), Wait(["b", "c"], 1)
    with waits.add(either):
        either.begin()
        with waits.add(both):
            both.begin()
            assert not await woken(waits, both, ["a"])
            assert not await woken(waits, either, ["a"])
            assert await woken(waits, both, ["b", "unknown"])
            assert await woken(waits, either, [])
        both.begin()
        either.begin()
        assert not await woken(waits, both, ["a", "b"])
        assert await woken(waits, either, [])
    assert waits._by_rollout == {}


async def test_a_wait_counts_what_finished_before_it_and_looks_again_where_any_may_have() -> None:
    waits, wait = Waits(), Wait(["a", "b", "c"], 2)
    with waits.add(wait):
        wait.begin()
        wait.note(["a"])
        assert await woken(waits, wait, ["c"])
        wait.begin()
        assert not await woken(waits, wait, ["c"])
        assert await woken(waits, wait, None)


async def test_a_wait_ends_when_the_store_is_closed() -> None:
    store = InMemoryLightningStore()
    made = await store.enqueue_rollout("waits")
    waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=[made.rollout_id]))
    await asyncio.sleep(0.02)
    await store.close()
    with pytest.raises(StoreClosedError, match="open it again"):
        await asyncio.wait_for(waiting, 20)


async def test_a_rollout_that_was_queued_again_has_not_finished_for_a_wait() -> None:
    store = InMemoryLightningStore()
    first, second = await store.start_rollout("first"), await store.start_rollout("second")
    ids = [first.rollout_id, second.rollout_id]
    waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=ids, timeout=20))
    await asyncio.sleep(0.02)
    await store.cancel_rollout(ids[0])
    await asyncio.sleep(0.02)
    await store.requeue_rollout(ids[0], "again")
    await store.cancel_rollout(ids[1])
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await store.cancel_rollout(ids[0])
    assert [each.rollout_id for each in await waiting] == ids
    await store.close()


def test_finished_rollouts_are_found_by_their_ids_and_not_among_all_that_have_finished() -> None:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    migrate(SqliteSchema(connection, "store.db"))
    plan = connection.execute("EXPLAIN QUERY PLAN " + _translated(_FINISHED_AMONG), ['["ro-1"]']).fetchall()
    assert "(rollout_id=?)" in plan[0][3]
    connection.close()
