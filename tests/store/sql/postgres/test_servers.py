"""Several servers on one PostgreSQL: each is one `LightningStore` here, in this process or in another."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import psycopg
import pytest

from agentlightning.errors import StoreError
from agentlightning.rollouts import AttemptedRollout, EnqueueRolloutRequest, RolloutConfig
from agentlightning.span import PROMPT_TOKEN_IDS, Span
from agentlightning.store import LightningStore, LightningStoreBase
from agentlightning.store.sql import committer
from agentlightning.store.sql import postgres as server
from agentlightning.store.sql.postgres import SUSPENDED_SECONDS
from agentlightning.store.sql.store import SqlStore

pytestmark = pytest.mark.integration

Store = LightningStoreBase


@pytest.fixture
async def servers(postgres_store_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Store, Store]]:
    """Two, that learn of one another by NOTIFY only: they would look for themselves after an hour."""
    monkeypatch.setattr(committer, "POLL_SECONDS", 3_600.0)
    pair = LightningStore(postgres_store_url), LightningStore(postgres_store_url)
    yield pair
    for store in pair:
        await store.close()


async def finish(store: Store, attempted: AttemptedRollout, status: Any = "succeeded") -> None:
    await store.update_attempt(attempted.rollout_id, attempted.attempt.attempt_id, status=status)


async def test_no_rollout_is_claimed_twice(servers: tuple[Store, Store]) -> None:
    made = await servers[0].enqueue_many_rollouts([EnqueueRolloutRequest(number) for number in range(60)])
    claims = [store.dequeue_many_rollouts(3) for _ in range(10) for store in servers]
    claimed = [each.rollout_id for some in await asyncio.gather(*claims) for each in some]
    assert sorted(claimed) == sorted(rollout.rollout_id for rollout in made)


async def test_prompts_that_servers_store_in_turn_are_read_alone_and_together(servers: tuple[Store, Store]) -> None:
    attempted = await servers[0].start_rollout("task")
    ids, prompt = (attempted.rollout_id, attempted.attempt.attempt_id), list(range(300))
    for number in range(8):
        prompt = [*prompt, *range(60)]
        span = Span(*ids, "call", 1.0, span_id=f"s{number}", attributes={PROMPT_TOKEN_IDS: prompt})
        await servers[number % 2].add_span(span)
    together = await servers[0].query_spans(ids[0])
    assert [len(span.attributes[PROMPT_TOKEN_IDS]) for span in together] == [360 + 60 * number for number in range(8)]
    for span in together:
        assert await servers[0].add_span(span) == span  # sent again, each is read alone


async def test_what_one_enqueues_wakes_a_runner_that_waits_at_the_other(servers: tuple[Store, Store]) -> None:
    here, there = servers
    waiting = asyncio.create_task(there.dequeue_rollout(timeout=60))
    await asyncio.sleep(0.05)
    made = await here.enqueue_rollout("task")
    attempted = await waiting
    assert attempted is not None
    assert attempted.rollout_id == made.rollout_id


async def test_what_ends_at_one_wakes_who_waits_at_the_other(servers: tuple[Store, Store]) -> None:
    here, there = servers
    first, second = await here.start_rollout("one"), await here.start_rollout("two")
    waiting = asyncio.create_task(
        there.wait_for_rollouts(rollout_ids=[first.rollout_id, second.rollout_id], timeout=60)
    )
    await asyncio.sleep(0.05)
    await finish(here, first)
    await finish(here, second, "failed")
    assert [rollout.status for rollout in await waiting] == ["succeeded", "failed"]


async def test_what_one_heard_it_does_not_tell_again(servers: tuple[Store, Store]) -> None:
    """Two that repeated one another's news would never be quiet again."""
    here, there = servers
    assert isinstance(here, SqlStore)
    assert isinstance(there, SqlStore)
    attempted = await here.start_rollout("task")
    waiting = asyncio.create_task(there.wait_for_rollouts(rollout_ids=[attempted.rollout_id], timeout=60))
    await asyncio.sleep(0.05)
    await finish(here, attempted)
    assert len(await waiting) == 1
    await there.enqueue_rollout("another")
    await asyncio.sleep(0.2)
    before = here.writer.commits, there.writer.commits
    await asyncio.sleep(0.2)
    assert (here.writer.commits, there.writer.commits) == before


async def test_each_sees_at_once_what_the_other_was_told(servers: tuple[Store, Store]) -> None:
    here, there = servers
    attempted = await here.start_rollout("task", config=RolloutConfig(max_attempts=3))
    ids = attempted.rollout_id, attempted.attempt.attempt_id
    for number, store in enumerate([there, here, there, here], start=1):
        span = await store.add_span(Span(*ids, f"span {number}", 1.0))
        assert span.sequence_id == number
        assert len(await servers[number % 2].query_spans(ids[0])) == number
    assert (await there.requeue_rollout(ids[0], "moved")).status == "requeuing"
    late = await here.add_span(Span(*ids, "late", 1.0))
    assert late.attributes["agentlightning.superseded"] is True
    again = await here.dequeue_rollout()
    assert again is not None
    assert again.attempt.sequence_id == 2
    assert (await there.cancel_rollout(ids[0])).status == "cancelled"
    await finish(here, again)
    rollout = await here.get_rollout_by_id(ids[0])
    assert rollout is not None
    assert rollout.status == "cancelled"


async def test_a_time_limit_is_applied_once_whoever_is_first(servers: tuple[Store, Store]) -> None:
    here, there = servers
    config = RolloutConfig(unresponsive_seconds=0.3, max_attempts=3)
    first = await here.start_rollout("task", config=config)
    again = await there.dequeue_rollout(timeout=60)
    assert again is not None
    await finish(there, again)
    statuses = [attempt.status for attempt in await here.query_attempts(first.rollout_id)]
    assert statuses == ["unresponsive", "succeeded"]


def run_sql(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement.encode())


@pytest.mark.slow
async def test_only_an_outage_of_every_server_moves_deadlines(postgres_store_url: str) -> None:
    config = RolloutConfig(unresponsive_seconds=1.5)
    here, there = LightningStore(postgres_store_url), LightningStore(postgres_store_url)
    left, kept = await here.start_rollout("left", config=config), await here.start_rollout("kept", config=config)
    await here.close()
    await there.update_attempt(kept.rollout_id, kept.attempt.attempt_id, last_heartbeat_time=1.0)
    (ended,) = await there.wait_for_rollouts(rollout_ids=[left.rollout_id], timeout=30)
    assert ended.status == "failed"
    kept = await there.start_rollout("kept", config=config)
    await there.close()
    run_sql(postgres_store_url, "UPDATE clocks SET reading = reading - 3600")  # as if an hour ago
    there = LightningStore(postgres_store_url)
    await there.update_worker("somebody else")
    assert [each.status for each in await there.query_attempts(kept.rollout_id)] == ["preparing"]
    (ended,) = await there.wait_for_rollouts(rollout_ids=[kept.rollout_id], timeout=30)
    assert ended.status == "failed"
    await there.close()


@pytest.fixture
async def busy(postgres_store_url: str) -> AsyncIterator[Store]:
    """A server that is never without a call."""
    store = LightningStore(postgres_store_url)
    busy = True

    async def work(name: str) -> None:
        while busy:
            await store.update_worker(name)

    working = [asyncio.create_task(work(f"worker {number}")) for number in range(8)]
    await asyncio.sleep(0.4)  # its first look at the deadlines is over
    yield store
    busy = False
    await asyncio.gather(*working)
    await store.close()


async def test_a_busy_server_sees_to_the_deadlines_of_one_that_is_gone(busy: Store, postgres_store_url: str) -> None:
    gone = LightningStore(postgres_store_url)
    await busy.enqueue_rollout("task", config=RolloutConfig(unresponsive_seconds=0.3))
    attempted = await gone.dequeue_rollout()  # of which nobody is told
    assert attempted is not None
    await gone.close()
    (ended,) = await busy.wait_for_rollouts(rollout_ids=[attempted.rollout_id], timeout=20)
    assert ended.status == "failed"


async def test_a_busy_server_finds_what_was_locked_when_it_was_told_of_it(busy: Store, postgres_store_url: str) -> None:
    made = await busy.enqueue_rollout("task")
    with psycopg.connect(postgres_store_url) as connection:
        connection.execute("SELECT * FROM rollouts FOR UPDATE")
        waiting = asyncio.create_task(busy.dequeue_rollout(timeout=20))
        await asyncio.sleep(0.2)
        assert not waiting.done()
    attempted = await waiting
    assert attempted is not None
    assert attempted.rollout_id == made.rollout_id


async def test_the_lease_of_a_worker_is_that_of_its_last_heartbeat_at_either(servers: tuple[Store, Store]) -> None:
    here, there = servers
    await here.update_worker("w", lease_seconds=0.6)
    attempted = await here.start_rollout("task", worker_id="w", config=RolloutConfig(max_attempts=2))
    for _ in range(4):
        await asyncio.sleep(0.3)
        await there.update_worker("w")
    assert [attempt.status for attempt in await here.query_attempts(attempted.rollout_id)] == ["preparing"]
    again = await here.dequeue_rollout("v", timeout=60)
    assert again is not None
    first, second = await there.query_attempts(attempted.rollout_id)
    assert (first.status, second.worker_id) == ("unresponsive", "v")
    lost = await there.get_worker("w")
    assert lost is not None
    assert lost.status == "lost"


@contextlib.contextmanager
def held_commits(store: Store) -> Iterator[None]:
    """Transactions of a server that are written and not committed before this ends."""
    go, connection = threading.Event(), store.writer._connection  # type: ignore[attr-defined]
    commit = connection.commit

    def held() -> None:
        assert go.wait(30)
        commit()

    connection.commit = held
    try:
        yield
    finally:
        connection.commit = commit
        go.set()


async def test_pages_skip_no_rollout_that_another_server_commits_late(servers: tuple[Store, Store]) -> None:
    """And do not wait for it: it comes after what pages have shown meanwhile."""
    here, there = servers
    known = await here.enqueue_rollout("known")  # with its queue
    with held_commits(here):
        late = asyncio.create_task(here.enqueue_many_rollouts([EnqueueRolloutRequest(n) for n in ("late 1", "late 2")]))
        await asyncio.sleep(0.2)
        on_time = await there.enqueue_rollout("on time")
        assert [each.input for each in await there.query_rollouts()] == ["known", "on time"]
        assert [each.input for each in await there.query_rollouts(limit=10)] == ["known", "on time"]
        assert not late.done()
    ids = [each.rollout_id for each in await late]
    for store in servers:
        page = await store.query_rollouts(limit=10, after=on_time.rollout_id)
        assert [each.input for each in page] == ["late 1", "late 2"]
        assert [each.input for each in await store.query_rollouts(limit=1, after=ids[0])] == ["late 2"]
        newest = await store.query_rollouts(newest_first=True, status_in=["queuing"])
        assert [each.input for each in newest] == ["late 2", "late 1", "on time", "known"]
    first = await here.dequeue_rollout()
    assert first is not None
    assert first.rollout_id == known.rollout_id
    after, seen = None, list[Any]()
    adding = [asyncio.create_task(store.enqueue_rollout(number)) for number in range(40) for store in servers]
    while page_now := await here.query_rollouts(limit=7, after=after):
        after = page_now[-1].rollout_id
        seen += [each.rollout_id for each in page_now]
    added = {each.rollout_id for each in await asyncio.gather(*adding)}
    while page_now := await here.query_rollouts(limit=7, after=after):
        after = page_now[-1].rollout_id
        seen += [each.rollout_id for each in page_now]
    assert len(seen) == 84
    assert set(seen) == {known.rollout_id, on_time.rollout_id, *ids} | added


HOLDS = """
import asyncio, sys, threading
from agentlightning.store import LightningStore
async def main():
    store = LightningStore(sys.argv[1])
    await store.enqueue_rollout("known", rollout_id="ro-held", queue="held")
    def hold():
        print("held", flush=True)
        threading.Event().wait()
    store.writer._connection.commit = hold
    await asyncio.gather(
        store.enqueue_rollout("new", queue="new"), store.update_worker("w"), store.add_resources({}, "rs-new"),
        store.cancel_rollout("ro-held"), store.update_queue("held", 3))
asyncio.run(main())
"""


async def test_no_read_waits_for_a_server_that_is_suspended_within_a_transaction(
    postgres_store_url: str, start_process: Any
) -> None:
    """Each read has a fifth of the time after which PostgreSQL ends such a transaction."""
    store = LightningStore(postgres_store_url)
    suspended = start_process(HOLDS, postgres_store_url)
    assert suspended.stdout.readline() == "held\n"
    os.kill(suspended.pid, signal.SIGSTOP)
    mine = await store.start_rollout("mine", queue="mine")
    await store.add_span(Span(mine.rollout_id, mine.attempt.attempt_id, "work", 1.0))
    reads: list[Callable[[], Awaitable[Any]]] = [
        lambda: store.query_rollouts(limit=10),
        lambda: store.query_rollouts(limit=10, after="ro-held"),
        lambda: store.query_rollouts(status_in=["preparing"], limit=1),
        lambda: store.get_rollout_by_id("ro-held"),
        lambda: store.query_attempts(mine.rollout_id),
        lambda: store.query_spans(mine.rollout_id, limit=1),
        lambda: store.query_resources(limit=10),
        lambda: store.query_workers(limit=10),
        lambda: store.query_queues(),
        lambda: store.wait_for_rollouts(rollout_ids=["ro-held"], timeout=0),
        lambda: store.read_records([mine.rollout_id]),
        lambda: store.count_rollouts(),
        lambda: store.statistics(),
        lambda: store.check_health(),
    ]
    stuck = asyncio.create_task(store.cancel_rollout("ro-held"))  # a write may wait, and no read behind it
    await asyncio.sleep(0.1)
    async with asyncio.timeout(SUSPENDED_SECONDS / 5):
        found = await asyncio.gather(*(read() for read in reads))
    assert not stuck.done()
    assert [each.input for each in found[0]] == ["known", "mine"]
    assert [each.input for each in found[1]] == ["mine"]
    suspended.kill()
    assert (await stuck).status == "cancelled"
    await store.close()


async def test_pages_skip_no_worker_that_another_server_commits_late(servers: tuple[Store, Store]) -> None:
    here, there = servers
    await there.update_worker("known")
    with held_commits(here):
        first = asyncio.create_task(here.update_worker("first"))
        await asyncio.sleep(0.2)
        await there.update_worker("known")
        second = asyncio.create_task(there.update_worker("second"))
        await asyncio.sleep(0.1)
        assert [each.worker_id for each in await there.query_workers(limit=10)] == ["known"]
    await asyncio.gather(first, second)
    assert [each.worker_id for each in await there.query_workers(after="known")] == ["first", "second"]


async def test_pages_skip_no_resources_that_another_server_commits_late(servers: tuple[Store, Store]) -> None:
    here, there = servers
    with held_commits(here):
        first = asyncio.create_task(here.add_resources({}, "rs-first"))
        await asyncio.sleep(0.2)
        second = asyncio.create_task(there.add_resources({}, "rs-second"))
        await asyncio.sleep(0.2)
        assert await there.query_resources(limit=10) == []
    await asyncio.gather(first, second)
    assert [each.resources_id for each in await there.query_resources(limit=10)] == ["rs-first", "rs-second"]


async def test_the_limit_of_a_queue_holds_for_both_together(servers: tuple[Store, Store]) -> None:
    here, there = servers
    await here.update_queue("train", 3)
    await here.enqueue_many_rollouts([EnqueueRolloutRequest(number, mode="train") for number in range(10)])
    claims = await asyncio.gather(*(store.dequeue_rollout(queues=["train"]) for _ in range(4) for store in servers))
    claimed = [each for each in claims if each is not None]
    assert len(claimed) == 3
    parked = asyncio.create_task(there.dequeue_rollout(timeout=60, queues=["train"]))
    await asyncio.sleep(0.05)
    await finish(here, claimed[0])
    assert await parked is not None
    assert await here.dequeue_rollout(queues=["train"]) is None
    parked = asyncio.create_task(there.dequeue_rollout(timeout=60, queues=["train"]))
    await asyncio.sleep(0.05)
    await here.update_queue("train", 4)
    assert await parked is not None


async def test_the_same_call_at_both_does_its_work_once(servers: tuple[Store, Store]) -> None:
    """What a client repeats at another server after it lost the answer of the first."""
    for number in range(10):
        names = {"rollout_id": f"ro-{number}"}
        made = await asyncio.gather(*(store.enqueue_rollout(number, **names) for store in servers * 2))
        assert len({each.start_time for each in made}) == 1
        claims = await asyncio.gather(*(store.dequeue_rollout(claim_id=f"cl-{number}") for store in servers * 2))
        assert len({each.attempt.attempt_id for each in claims if each is not None}) == 1
        (attempt,) = await servers[0].query_attempts(f"ro-{number}")
        span = Span(f"ro-{number}", attempt.attempt_id, "work", 1.0, span_id=f"{number:016x}")
        await asyncio.gather(*(store.add_span(span) for store in servers * 2))
        assert len(await servers[1].query_spans(f"ro-{number}")) == 1
    assert (await servers[0].statistics())["attempts"] == 10


async def test_a_span_repeated_at_the_other_server_is_kept_once(servers: tuple[Store, Store]) -> None:
    here, there = servers
    attempted = await here.start_rollout("task")
    spans = [
        Span(attempted.rollout_id, attempted.attempt.attempt_id, "work", 1.0, span_id=f"{number:016x}")
        for number in range(4)
    ]
    for store in (here, there, here, there):
        for span in spans[:2] if store is here else spans:
            await store.add_span(span)
    await here.add_many_spans(spans)
    assert [span.sequence_id for span in await there.query_spans(attempted.rollout_id)] == [1, 2, 3, 4]


WORKER = """
import asyncio, sys
from agentlightning.store import LightningStore

async def main():
    store = LightningStore(sys.argv[1])
    while (attempted := await store.dequeue_rollout(sys.argv[2], timeout=2)) is not None:
        await store.update_attempt(attempted.rollout_id, attempted.attempt.attempt_id, status="succeeded")
        print(attempted.rollout_id)
    await store.close()

asyncio.run(main())
"""


@pytest.mark.slow
async def test_processes_that_start_at_once_share_an_empty_database(postgres_url: str, start_process: Any) -> None:
    others = [start_process(WORKER, postgres_url, name) for name in ("a", "b")]
    store = LightningStore(postgres_url)
    made = await store.enqueue_many_rollouts([EnqueueRolloutRequest(number) for number in range(100)])
    finished = await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id for rollout in made], timeout=60)
    assert len(finished) == 100
    told = [(await asyncio.to_thread(other.communicate))[0] for other in others]
    assert sorted("".join(told).split()) == sorted(rollout.rollout_id for rollout in made)
    await store.close()


async def test_calls_get_through_a_connection_that_is_cut_again_and_again(relay: Any) -> None:
    store = LightningStore(relay.url)
    done: list[str] = []

    async def work() -> None:
        for number in range(5):
            made = await store.enqueue_rollout(number)
            attempted = await store.dequeue_rollout(timeout=30)
            assert attempted is not None
            ids = attempted.rollout_id, attempted.attempt.attempt_id
            await store.add_many_spans([Span(*ids, "work", 1.0) for _ in range(3)])
            await finish(store, attempted)
            assert len(await store.query_spans(ids[0])) == 3
            done.append(made.rollout_id)

    working = asyncio.gather(*(work() for _ in range(4)))
    for kind in ("lose question", "lose answer") * 3:
        while relay.next == "pass" and not working.done():
            await asyncio.sleep(0.02)
            relay.next = kind
    await working
    relay.next = "pass"
    assert len(done) == 20
    statistics = await store.statistics()
    assert (statistics["rollouts.succeeded"], statistics["attempts"], statistics["spans"]) == (20, 20, 60)
    await store.close()


async def test_while_the_server_is_away_calls_wait_and_then_say_so(relay: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "RECONNECT_SECONDS", 0.3)
    store = LightningStore(relay.url)
    await store.enqueue_rollout("task")
    relay.close()
    for call in (store.enqueue_rollout("another"), store.query_rollouts()):
        with pytest.raises(StoreError, match="cannot be reached"):
            await call
    await store.close()


async def test_closing_does_not_wait_long_for_a_server_that_is_away(
    relay: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `agl serve` does when it is stopped: calls wait for a minute otherwise, one after another."""
    monkeypatch.setattr(server, "CLOSE_SECONDS", 0.3)
    store = LightningStore(relay.url)
    await store.enqueue_rollout("task")
    relay.close()
    waiting = asyncio.create_task(store.enqueue_rollout("another"))
    await asyncio.sleep(0.1)
    async with asyncio.timeout(20):
        await store.close()
        with pytest.raises(StoreError, match="cannot be reached"):
            await waiting
