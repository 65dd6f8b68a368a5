"""What a store says there is, is what there is: after anything in any order, by several servers, after a kill."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentlightning.errors import AgentLightningError
from agentlightning.rollouts import Attempt, EnqueueRolloutRequest, RolloutConfig
from agentlightning.span import Span
from agentlightning.store.clock import Clock
from agentlightning.store.sql import committer
from agentlightning.store.sql.store import SqlStore
from agentlightning.store.types import Retention

pytestmark = pytest.mark.integration

RETRIED = RolloutConfig(max_attempts=2, retry_condition=("failed", "timeout"), timeout_seconds=60)

ENQUEUE_UNTIL_KILLED = """
import asyncio, sys
from agentlightning.span import Span
from agentlightning.store import LightningStore

async def work(store):
    while True:
        await store.enqueue_rollout("task", mode="train")
        claimed = await store.dequeue_rollout()
        ids = claimed.rollout_id, claimed.attempt.attempt_id
        await store.add_span(Span(*ids, "work", 1.0))
        await store.update_attempt(*ids, status="succeeded")
        print("done")

async def main():
    store = LightningStore(sys.argv[1])
    await asyncio.gather(*(work(store) for _ in range(8)))

asyncio.run(main())
"""


class PassingClock(Clock):
    passed = 0.0

    def steady(self) -> float:
        return super().steady() + self.passed


async def check(store: SqlStore) -> None:
    """Compare every count with the rows."""
    rollouts = await store.query_rollouts()
    attempts = [each for rollout in rollouts for each in await store.query_attempts(rollout.rollout_id)]
    spans = [span for rollout in rollouts for span in await store.query_spans(rollout.rollout_id)]
    told = await store.statistics()
    by_status = Counter(rollout.status for rollout in rollouts)
    found = {name.removeprefix("rollouts."): n for name, n in told.items() if name.startswith("rollouts.")}
    assert {status: n for status, n in found.items() if n} == dict(by_status)
    assert (told["attempts"], told["spans"]) == (len(attempts), len(spans))
    by_queue = Counter((rollout.queue, rollout.status) for rollout in rollouts)
    for queue in await store.query_queues():
        assert queue.waiting == by_queue[queue.name, "queuing"] + by_queue[queue.name, "requeuing"]
        assert queue.open == by_queue[queue.name, "preparing"] + by_queue[queue.name, "running"]
        assert await store.count_rollouts(queue_in=[queue.name]) == sum(
            n for (name, _), n in by_queue.items() if name == queue.name
        )
    assert await store.count_rollouts() == len(rollouts)
    assert await store.count_rollouts(status_in=["failed", "requeuing"]) == by_status["failed"] + by_status["requeuing"]


class Users:
    """Some of everything, on one database behind any number of servers."""

    def __init__(self, stores: list[SqlStore], clock: PassingClock, seed: int) -> None:
        self.stores, self.clock, self.random = stores, clock, random.Random(seed)
        self.attempts: list[Attempt] = []
        self.records: list[Any] = []

    @property
    def store(self) -> SqlStore:
        return self.random.choice(self.stores)

    def some(self) -> tuple[str, str]:
        """Ids that may be those of nothing."""
        if not self.attempts or self.random.random() < 0.05:
            return "ro-none", "at-none"
        attempt = self.random.choice(self.attempts)
        return attempt.rollout_id, attempt.attempt_id

    async def enqueue(self) -> None:
        requests = [
            EnqueueRolloutRequest("task", queue=self.random.choice("ab"), priority=self.random.randrange(3), config=c)
            for c in [RETRIED, None][: self.random.randrange(1, 3)]
        ]
        await self.store.enqueue_many_rollouts(requests)

    async def claim(self) -> None:
        for claimed in await self.store.dequeue_many_rollouts(limit=3, worker_id="worker"):
            self.attempts.append(claimed.attempt)

    async def speak(self) -> None:
        ids = self.some()
        await self.store.add_many_spans([Span(*ids, "work", 1.0) for _ in range(self.random.randrange(1, 4))])

    async def finish(self) -> None:
        status: Any = self.random.choice(["succeeded", "failed", "timeout", "running"])
        await self.store.update_attempt(*self.some(), status=status)

    async def move(self) -> None:
        what: Any = self.random.choice([self.store.cancel_rollout, self.requeue, self.store.start_attempt])
        await what(self.some()[0])

    async def requeue(self, rollout_id: str) -> None:
        await self.store.requeue_rollout(rollout_id, "asked for")

    async def describe(self) -> None:
        await self.store.update_rollout(self.some()[0], metadata={"n": 1}, status=self.random.choice(["failed"]))

    async def delete(self) -> None:
        await self.store.delete_rollouts([self.some()[0] for _ in range(2)])

    async def prune(self) -> None:
        await self.store.prune(Retention(max_rollouts=5))

    async def copy(self) -> None:
        rollout_id = self.some()[0]
        if await self.store.get_rollout_by_id(rollout_id) is not None:
            self.records = await self.store.read_records([rollout_id])
        await self.store.add_records(self.records)

    async def pass_time(self) -> None:
        self.clock.passed += self.random.choice([1.0, 70.0])
        await self.store.update_worker("nobody")

    async def limit(self) -> None:
        await self.store.update_queue("a", self.random.choice([1, None]))

    async def work(self, calls: int) -> None:
        choices: list[Callable[[], Awaitable[None]]] = [
            *[self.enqueue, self.claim, self.speak, self.finish] * 3,
            *[self.move, self.describe, self.delete, self.copy, self.pass_time, self.limit],
            *([self.prune] if self.random.random() < 0.3 else []),
        ]
        for _ in range(calls):
            some = [self.quietly(self.random.choice(choices)) for _ in range(self.random.randrange(1, 8))]
            await asyncio.gather(*some)

    async def quietly(self, call: Callable[[], Awaitable[None]]) -> None:
        with contextlib.suppress(AgentLightningError):
            await call()


@given(st.integers(0, 2**32))
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
def test_counts_are_those_of_the_rows_whatever_was_done(seed: int) -> None:
    async def run() -> None:
        clock = PassingClock()
        store = SqlStore(":memory:", clock)
        users = Users([store], clock, seed)
        for _ in range(3):
            await users.work(8)
            await check(store)
        await store.close()

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["file", "postgres"])
async def test_counts_are_right_where_several_servers_write(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer, "POLL_SECONDS", 3_600.0)
    url = tmp_path / "store.db" if kind == "file" else request.getfixturevalue("postgres_store_url")
    clock = PassingClock()
    stores = [SqlStore(url, clock), SqlStore(url, clock)]
    users = Users(stores, clock, seed=7)
    await users.work(12)
    await check(stores[0])
    await stores[0].close()
    users.stores = [stores[1], SqlStore(url, clock)]
    await users.work(8)
    for store in users.stores:
        await check(store)
        await store.close()
    last = SqlStore(url)
    await check(last)
    await last.close()


async def test_what_servers_counted_that_are_gone_is_kept_in_a_few_rows(postgres_store_url: str) -> None:
    for _ in range(3):
        store = SqlStore(postgres_store_url)
        await store.enqueue_rollout("task", mode="train")
        await store.close()
    store = SqlStore(postgres_store_url)
    assert (await store.statistics())["rollouts.queuing"] == 3
    rows = await store.read("rows", lambda connection: connection._connection.execute("TABLE counts").fetchall())  # type: ignore[attr-defined]
    assert [row for row in rows if row[1] == "queuing"] == [("", "queuing", "train", 3)]
    await store.close()


async def test_spans_of_a_rollout_that_is_deleted_in_the_same_commit_are_gone(tmp_path: Path) -> None:
    store = SqlStore(tmp_path / "store.db")
    rollout_id, attempt_id = (started := await store.start_rollout("task")).rollout_id, started.attempt.attempt_id
    (record,) = await store.read_records([rollout_id])
    await store.cancel_rollout(rollout_id)
    await asyncio.gather(store.add_span(Span(rollout_id, attempt_id, "late", 1.0)), store.delete_rollouts([rollout_id]))
    await store.add_records([record])
    assert await store.query_spans(rollout_id) == []
    await check(store)
    await store.close()


async def test_counts_are_right_after_a_kill(tmp_path: Path, start_process: Any) -> None:
    process = start_process(ENQUEUE_UNTIL_KILLED, tmp_path / "store.db")
    for _ in range(40):
        process.stdout.readline()
    process.kill()
    process.wait()
    store = SqlStore(tmp_path / "store.db")
    await check(store)
    assert (await store.statistics())["rollouts.succeeded"] >= 40 - 8
    await store.close()
