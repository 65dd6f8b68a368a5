"""Queues, priorities, claims that can be repeated, and workers with leases, whatever the store is made of."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.rollouts import EnqueueRolloutRequest, RolloutConfig
from agentlightning.store import LightningStoreBase
from agentlightning.store.ids import claimed_id, new_id
from agentlightning.store.types import Queue

pytestmark = pytest.mark.integration

Store = LightningStoreBase


async def claim(store: Store, **values: Any) -> str | None:
    """The task of the next rollout that is claimed."""
    attempted = await store.dequeue_rollout(**values)
    return None if attempted is None else attempted.input


# -- the order of claiming -------------------------------------------------------------------------------------------


async def test_a_higher_priority_is_claimed_first_and_equal_ones_in_order_of_creation(store: Store) -> None:
    for task, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 5)):
        made = await store.enqueue_rollout(task, priority=priority)
        assert made.priority == priority
    assert [await claim(store) for _ in range(5)] == ["b", "d", "a", "c", None]


async def test_what_is_queued_again_keeps_its_place(store: Store) -> None:
    first = await store.enqueue_rollout("first")
    await store.enqueue_rollout("second")
    assert await claim(store) == "first"
    await store.requeue_rollout(first.rollout_id, "once more")
    assert [await claim(store) for _ in range(2)] == ["first", "second"]


async def test_a_rollout_waits_in_its_queue_else_that_of_its_mode(store: Store) -> None:
    made = [
        await store.enqueue_rollout("a", queue="urgent", mode="train"),
        await store.enqueue_rollout("b", mode="val"),
        await store.enqueue_rollout("c"),
    ]
    assert [rollout.queue for rollout in made] == ["urgent", "val", "default"]
    assert await claim(store, queues=["val"]) == "b"
    assert await claim(store, queues=["val", "unheard-of"]) is None
    assert await claim(store, queues=["default", "urgent"]) == "a"
    assert await claim(store) == "c"


async def test_a_queue_whose_name_begins_with_an_underscore_is_left_alone_by_those_who_do_not_name_it(
    store: Store,
) -> None:
    await store.enqueue_rollout("mine", queue="_run-1", priority=9)
    waiting = asyncio.create_task(store.dequeue_rollout(timeout=20))
    assert await claim(store) is None
    assert await claim(store, queues=["default"]) is None
    assert await claim(store, queues=["_run-1"]) == "mine"
    await store.enqueue_rollout("yours")
    assert (claimed := await waiting) is not None
    assert claimed.input == "yours"
    assert {queue.name for queue in await store.query_queues()} == {"_run-1", "default"}


async def test_a_queue_of_thousands_is_claimed_in_order_whatever_comes_meanwhile(store: Store) -> None:
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(index) for index in range(2500)])
    first = await store.dequeue_many_rollouts(limit=1300)
    await store.enqueue_rollout("urgent", priority=1)
    rest = await store.dequeue_many_rollouts(limit=5000)
    assert [each.input for each in first] == list(range(1300))
    assert [each.input for each in rest] == ["urgent", *range(1300, 2500)]
    assert await claim(store) is None


# -- limits ----------------------------------------------------------------------------------------------------------


async def test_a_limit_holds_its_queue_back_and_no_other(store: Store) -> None:
    queue = await store.update_queue("train", 2)
    assert queue == Queue("train", limit=2)
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(f"train {n}", mode="train") for n in range(4)])
    await store.enqueue_rollout("val", mode="val")
    claimed = await store.dequeue_many_rollouts(limit=10)
    assert [each.input for each in claimed] == ["train 0", "train 1", "val"]
    assert await store.query_queues() == [Queue("train", 2, waiting=2, open=2), Queue("val", None, 0, 1)]
    await store.update_attempt(claimed[0].rollout_id, "latest", status="succeeded")
    assert [await claim(store), await claim(store)] == ["train 2", None]


async def test_a_claim_that_waits_for_a_full_queue_is_woken_when_a_rollout_of_it_ends(store: Store) -> None:
    await store.update_queue("train", 1)
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(n, mode="train") for n in range(2)])
    first = await store.dequeue_rollout()
    assert first is not None
    waiting = asyncio.create_task(claim(store, timeout=30))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await store.update_attempt(first.rollout_id, first.attempt.attempt_id, status="succeeded")
    assert await waiting == 1


@pytest.mark.parametrize("limit", [None, 3])
async def test_a_paused_queue_goes_on_when_its_limit_is_lifted(store: Store, limit: int | None) -> None:
    await store.update_queue("default", 0)
    await store.enqueue_rollout("task")
    assert await claim(store) is None
    waiting = asyncio.create_task(claim(store, timeout=30))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await store.update_queue("default", limit)
    assert await waiting == "task"


async def test_a_started_rollout_counts_as_open_and_is_not_held_back(store: Store) -> None:
    await store.update_queue("mine", 1)
    await store.start_rollout("first", queue="mine")
    await store.start_rollout("second", queue="mine")
    await store.enqueue_rollout("third", queue="mine")
    assert await claim(store) is None
    assert await store.query_queues() == [Queue("mine", 1, waiting=1, open=2)]


@pytest.mark.parametrize(("name", "limit"), [("train", -1), ("a/b", 1), ("", 1)])
async def test_a_queue_that_cannot_be_is_refused(store: Store, name: str, limit: int) -> None:
    with pytest.raises(ConfigError):
        await store.update_queue(name, limit)


# -- claims that are repeated ----------------------------------------------------------------------------------------


async def test_a_claim_repeated_returns_what_it_claimed_and_takes_nothing_more(store: Store) -> None:
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(n) for n in range(5)])
    claim_id = new_id("cl")
    first = await store.dequeue_many_rollouts(limit=3, claim_id=claim_id)
    again = await store.dequeue_many_rollouts(limit=3, claim_id=claim_id)
    assert again == first
    assert [each.attempt.attempt_id for each in first] == [claimed_id(claim_id, n) for n in range(3)]
    assert len(await store.dequeue_many_rollouts(limit=10, claim_id=new_id("cl"))) == 2
    assert await store.dequeue_many_rollouts(limit=3, claim_id=new_id("cl")) == []


async def test_a_claim_that_found_nothing_may_find_something_when_repeated(store: Store) -> None:
    claim_id = new_id("cl")
    assert await store.dequeue_rollout(claim_id=claim_id) is None
    await store.enqueue_rollout("task")
    attempted = await store.dequeue_rollout(claim_id=claim_id)
    assert attempted is not None
    assert attempted.attempt.attempt_id == claimed_id(claim_id, 0)


async def test_the_same_claim_made_twice_at_once_claims_once(store: Store) -> None:
    claim_id = new_id("cl")
    both = [asyncio.create_task(store.dequeue_rollout(timeout=30, claim_id=claim_id)) for _ in range(2)]
    await asyncio.sleep(0.05)
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(n) for n in range(2)])
    one, other = await asyncio.gather(*both)
    assert one is not None
    assert other is not None
    assert one.attempt.attempt_id == other.attempt.attempt_id
    assert await claim(store) == 1


async def test_starting_can_be_repeated_too(store: Store) -> None:
    claim_id = new_id("cl")
    first = await store.start_rollout("task", rollout_id="mine", claim_id=claim_id)
    assert await store.start_rollout("task", rollout_id="mine", claim_id=claim_id) == first
    await store.update_attempt("mine", "latest", status="failed")
    second_id = new_id("cl")
    second = await store.start_attempt("mine", claim_id=second_id)
    assert second.attempt.sequence_id == 2
    assert (await store.start_attempt("mine", claim_id=second_id)).attempt == second.attempt
    assert len(await store.query_attempts("mine")) == 2


# -- workers ---------------------------------------------------------------------------------------------------------


async def test_a_lost_worker_frees_its_work_for_another(store: Store) -> None:
    worker = await store.update_worker("w1", lease_seconds=0.2)
    assert (worker.status, worker.lease_seconds) == ("idle", 0.2)
    await store.enqueue_rollout("task", config=RolloutConfig(max_attempts=2))
    first = await store.dequeue_rollout("w1")
    assert first is not None
    again = await store.dequeue_rollout("w2", timeout=30)
    assert again is not None
    assert (again.rollout_id, again.attempt.sequence_id) == (first.rollout_id, 2)
    lost = await store.get_attempt(first.attempt.attempt_id)
    assert lost is not None
    assert lost.status == "unresponsive"
    assert "'w1'" in lost.metadata["error"]["message"]
    worker = await store.get_worker("w1")
    assert worker is not None
    assert (worker.status, worker.current_rollout_id) == ("lost", None)
    assert worker.last_error is not None
    assert worker.last_error["attempt_id"] == first.attempt.attempt_id
    assert (await store.update_worker("w1")).status in ("idle", "lost")  # a short lease may be over again
    assert (await store.update_worker("w1", lease_seconds=600)).status == "idle"


async def test_a_worker_is_busy_with_what_it_claimed_until_that_has_ended(store: Store) -> None:
    await store.update_worker("w1", {"cpu": 1}, lease_seconds=600)
    await store.enqueue_rollout("task")
    attempted = await store.dequeue_rollout("w1")
    assert attempted is not None
    worker = await store.get_worker("w1")
    assert worker is not None
    assert (worker.status, worker.current_attempt_id) == ("busy", attempted.attempt.attempt_id)
    assert (worker.stats, worker.lease_seconds) == ({"cpu": 1}, 600)
    await store.update_attempt(attempted.rollout_id, "latest", status="succeeded")
    worker = await store.get_worker("w1")
    assert worker is not None
    assert (worker.status, worker.last_error) == ("idle", None)
    assert await store.get_worker("nobody") is None


async def test_a_worker_tells_how_its_last_failed_attempt_ended(store: Store) -> None:
    await store.enqueue_rollout("task")
    attempted = await store.dequeue_rollout("w1")
    assert attempted is not None
    error = {"type": "ValueError", "message": "no such city", "traceback": "..."}
    await store.update_attempt(attempted.rollout_id, "latest", status="failed", metadata={"error": error})
    worker = await store.get_worker("w1")
    assert worker is not None
    assert worker.last_error is not None
    assert (worker.last_error["type"], worker.last_error["message"]) == ("ValueError", "no such city")
    assert worker.last_error["rollout_id"] == attempted.rollout_id


async def test_work_that_is_handed_over_belongs_to_the_other_worker(store: Store) -> None:
    attempted = await store.start_rollout("task", worker_id="w1")
    await store.update_attempt(attempted.rollout_id, "latest", worker_id="w2")
    workers = {worker.worker_id: worker for worker in await store.query_workers()}
    assert workers["w1"].status == "idle"
    assert workers["w2"].current_rollout_id == attempted.rollout_id


async def test_workers_are_read_in_pages_in_order_of_appearance(store: Store) -> None:
    for number in (3, 1, 2):
        await store.update_worker(f"w{number}")
    first = await store.query_workers(limit=2)
    rest = await store.query_workers(after=first[-1].worker_id)
    assert [worker.worker_id for worker in [*first, *rest]] == ["w3", "w1", "w2"]
    with pytest.raises(NotFoundError, match="nobody"):
        await store.query_workers(after="nobody")


@pytest.mark.parametrize("lease", [0, -1, float("nan")])
async def test_a_lease_that_is_none_is_refused(store: Store, lease: float) -> None:
    with pytest.raises(ConfigError, match="lease_seconds"):
        await store.update_worker("w1", lease_seconds=lease)


# -- whose turn it is ------------------------------------------------------------------------------------------------


async def test_who_waits_is_served_before_who_comes(store: Store) -> None:
    waiting = asyncio.create_task(store.dequeue_rollout("first", timeout=20))
    await asyncio.sleep(0.1)
    made, later = await asyncio.gather(store.enqueue_rollout("task"), store.dequeue_rollout("second"))
    assert (await waiting).rollout_id == made.rollout_id
    assert later is None


async def test_those_who_wait_for_one_queue_and_for_any_are_served_in_turn(store: Store) -> None:
    one = asyncio.create_task(store.dequeue_rollout("one", timeout=20, queues=["b"]))
    await asyncio.sleep(0.1)
    every = asyncio.create_task(store.dequeue_rollout("any", timeout=20))
    await asyncio.sleep(0.1)
    first = await store.enqueue_rollout("task", queue="b")
    assert (await one).rollout_id == first.rollout_id
    second = await store.enqueue_rollout("task", queue="b")
    assert (await every).rollout_id == second.rollout_id


async def test_who_comes_for_what_nobody_waits_for_need_not_wait(store: Store) -> None:
    waiting = asyncio.create_task(store.dequeue_rollout("first", timeout=20, queues=["a"]))
    made = await store.enqueue_rollout("task", queue="b")
    assert (await store.dequeue_rollout("second", queues=["b"])).rollout_id == made.rollout_id
    await store.enqueue_rollout("task", queue="a")
    assert await waiting is not None
