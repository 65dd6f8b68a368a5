"""The writer: claims whose callers are gone, transactions that are rolled back, and a crash of the thread."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from agentlightning.errors import StoreClosedError
from agentlightning.rollouts import AttemptedRollout, RolloutConfig
from agentlightning.store import LightningStore
from agentlightning.store.sql.store import SqlStore
from agentlightning.store.sql.tx import Tx

pytestmark = pytest.mark.integration


class HeldCommits:
    """Commits of a store, each of which waits until it is let go."""

    def __init__(self, store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self._go, self._waiting = threading.Semaphore(0), threading.Semaphore(0)
        commit = store.writer._connection.commit

        def held() -> None:
            self._waiting.release()
            assert self._go.acquire(timeout=30)
            commit()

        monkeypatch.setattr(store.writer._connection, "commit", held)

    async def one_waits(self) -> None:
        assert await asyncio.to_thread(self._waiting.acquire, timeout=30)

    def let_go(self, count: int = 1) -> None:
        self._go.release(count)


async def quiet(store: SqlStore) -> None:
    """After its first look at what there is."""
    await store.update_worker("w")


# -- batches ---------------------------------------------------------------------------------------------------------


async def test_callers_that_call_again_at_once_share_a_slow_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqlStore(tmp_path / "store.db")
    await quiet(store)
    commit = store.writer._connection.commit

    def slow() -> None:
        time.sleep(0.03)
        commit()

    async def caller() -> None:
        for index in range(20):
            await store.enqueue_rollout(index)

    monkeypatch.setattr(store.writer._connection, "commit", slow)
    first = [asyncio.create_task(caller()) for _ in range(4)]
    await asyncio.sleep(0.01)  # the others come while the first ones wait for the disk
    before = store.writer.commits
    await asyncio.gather(*first, *(caller() for _ in range(4)))
    assert store.writer.commits - before < 30, "they took turns: each waited for two commits"
    await store.close()


# -- notifications of other servers ----------------------------------------------------------------------------------


async def test_what_other_servers_did_is_tried_again_twice_a_second_while_the_database_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqlStore(tmp_path / "store.db")
    await quiet(store)
    failed: list[float] = []

    def begin(write: bool, durable: bool = True) -> None:
        failed.append(time.monotonic())
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patched:
        patched.setattr(store.writer._connection, "begin", begin)
        store.writer._on_notification(True, None)
        await asyncio.sleep(1.0)
    assert 1 <= len(failed) < 20
    await store.enqueue_rollout("task")
    await store.close()


# -- claims ----------------------------------------------------------------------------------------------------------


async def test_a_claim_that_was_repeated_is_not_taken_back_for_the_caller_that_gave_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqlStore(tmp_path / "store.db")
    await store.enqueue_rollout("task")
    commits = HeldCommits(store, monkeypatch)
    given_up = asyncio.create_task(store.dequeue_rollout("w", claim_id="cl-1"))
    await commits.one_waits()
    given_up.cancel()
    await asyncio.wait([given_up])
    again = asyncio.create_task(store.dequeue_rollout("w", claim_id="cl-1"))
    await asyncio.sleep(0.05)
    commits.let_go(100)
    owned = await again
    assert owned is not None
    assert await store.dequeue_rollout("v", timeout=0.1) is None
    told = await store.update_attempt(owned.rollout_id, owned.attempt.attempt_id, status="succeeded")
    assert told.status == "succeeded"
    await store.close()


async def test_a_claim_that_everybody_gave_up_waits_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqlStore(tmp_path / "store.db")
    made = await store.enqueue_rollout("task")
    commits = HeldCommits(store, monkeypatch)
    first = asyncio.create_task(store.dequeue_rollout("w", claim_id="cl-1"))
    await commits.one_waits()
    again = asyncio.create_task(store.dequeue_rollout("w", claim_id="cl-1"))
    await asyncio.sleep(0.05)
    first.cancel()
    commits.let_go()
    await commits.one_waits()
    again.cancel()
    commits.let_go(100)
    await asyncio.wait([first, again])
    claimed = await store.dequeue_rollout("v", timeout=10)
    assert claimed is not None
    assert claimed.rollout_id == made.rollout_id
    await store.close()


async def test_a_claim_that_was_repeated_at_another_server_is_not_taken_back(
    postgres_store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = SqlStore(postgres_store_url), SqlStore(postgres_store_url)
    await here.enqueue_rollout("task")
    loop = asyncio.get_running_loop()
    given_up = asyncio.create_task(here.dequeue_rollout("w", claim_id="cl-1"))
    settle, owned = here.writer._deliver, list[AttemptedRollout | None]()

    def after_the_repeat(answers: Any) -> None:
        if any(call.name == "dequeue_rollout" for call, _, _ in answers) and not owned:
            again = asyncio.run_coroutine_threadsafe(there.dequeue_rollout("w", claim_id="cl-1"), loop)
            owned.append(again.result(30))
            loop.call_soon_threadsafe(given_up.cancel)
        settle(answers)

    monkeypatch.setattr(here.writer, "_deliver", after_the_repeat)
    await asyncio.wait([given_up])
    assert given_up.cancelled()
    assert owned[0] is not None
    assert await here.dequeue_rollout("v", timeout=0.3) is None
    told = await there.update_attempt(owned[0].rollout_id, owned[0].attempt.attempt_id, status="succeeded")
    assert told.status == "succeeded"
    await here.close()
    await there.close()


async def test_a_claim_that_waits_behind_another_claims_nothing_once_its_lease_ran_out() -> None:
    store = SqlStore(":memory:")
    config = RolloutConfig(max_attempts=3, retry_condition=["unresponsive"])
    await store.update_worker("w", lease_seconds=0.5)
    lost = await store.start_rollout("task", config=config, worker_id="w")
    claims = store.dequeue_rollout("v", timeout=0.2), store.dequeue_rollout("w", timeout=20)
    assert await asyncio.gather(*claims) == [None, None]
    rollout = await store.get_rollout_by_id(lost.rollout_id)
    assert rollout is not None
    assert rollout.status == "requeuing"
    await store.close()


# -- transactions that are undone ------------------------------------------------------------------------------------


async def test_a_call_that_waits_keeps_its_timeout_when_the_transaction_that_ends_it_is_tried_again(
    postgres_store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqlStore(postgres_store_url)
    await quiet(store)
    commit, refusals = store.writer._connection.commit, list[float]()

    def refuse() -> None:
        if time.monotonic() >= ends and len(refusals) < 2:
            refusals.append(time.monotonic())
            raise psycopg.errors.SerializationFailure("could not serialize access")
        commit()

    monkeypatch.setattr(store.writer._connection, "commit", refuse)
    ends = time.monotonic() + 0.2
    claim = asyncio.create_task(store.dequeue_rollout(timeout=0.2))
    assert await asyncio.wait_for(claim, 20) is None
    assert len(refusals) == 2
    await store.close()


# -- after the commit ------------------------------------------------------------------------------------------------


async def test_what_fails_after_a_commit_runs_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqlStore(tmp_path / "store.db")
    made = await store.enqueue_rollout("first")
    ran = list[str]()

    def fail(*committed: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("no memory for this")

    monkeypatch.setattr(store.writer, "_after_commit", fail)

    def counted(name: str) -> Callable[[Tx], str]:
        def run(tx: Tx) -> str:
            ran.append(name)
            rollout = tx.rollout(made.rollout_id)
            said = (rollout.metadata.count("said") and "twice") or "once"
            tx.set(rollout, metadata=f'{{"said": "{said}"}}')
            return name

        return run

    assert await asyncio.gather(*(store.do(name, counted(name), made.rollout_id) for name in "ab")) == ["a", "b"]
    assert ran == ["a", "b"]
    claimed = await store.dequeue_rollout()
    assert claimed is not None
    assert claimed.rollout_id == made.rollout_id
    await store.close()


# -- its end ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_whoever_waits_is_told_when_the_writer_ends(tmp_path: Path) -> None:
    store = LightningStore(tmp_path / "store.db")
    assert isinstance(store, SqlStore)
    kept = await store.enqueue_rollout("kept", queue="aside")
    claim = asyncio.create_task(store.dequeue_rollout(queues=["none"], timeout=60))
    wait = asyncio.create_task(store.wait_for_rollouts(rollout_ids=[kept.rollout_id]))
    await asyncio.sleep(0.05)

    def die(tx: Tx) -> None:
        raise SystemExit("a bug")

    calls = [store.do("dies", die), store.enqueue_rollout("beside it"), claim, wait]
    answers = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
    assert [type(answer) for answer in answers] == [StoreClosedError] * 4, answers
    assert "a bug" in str(answers[0])
    with pytest.raises(StoreClosedError, match="open it again"):
        await store.enqueue_rollout("after")
    await store.close()
    store = LightningStore(tmp_path / "store.db")
    assert [each.rollout_id for each in await store.query_rollouts(queue_in=["aside"])] == [kept.rollout_id]
    await store.close()


async def test_an_observer_that_fails_is_asked_no_more(tmp_path: Path) -> None:
    store = SqlStore(tmp_path / "store.db")
    asked = list[str]()

    def observe(name: str, *figures: float) -> None:
        asked.append(name)
        raise RuntimeError("not today")

    store.observe = observe
    for number in range(3):
        await store.enqueue_rollout(number)
    assert asked == ["enqueue_rollout"]
    assert len(await store.query_rollouts()) == 3
    await store.close()
