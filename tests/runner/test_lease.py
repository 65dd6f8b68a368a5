"""A runner and its store: who is alive, whose attempt it is, and what is asked for again.

Agents run in this process here; that hosts do what they should is for the other tests of the runner.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import threading
import time
from contextlib import closing
from typing import Any

import pytest
from tests.support.waiting import until

from agentlightning.errors import AgentError, ConfigError, StoreAuthError, StoreError, StoreServerError
from agentlightning.observability.logs import JsonFormatter
from agentlightning.rollouts import EnqueueRolloutRequest, RolloutConfig
from agentlightning.runner import runner
from agentlightning.runner.hosts.messages import Done
from agentlightning.runner.runner import Runner
from agentlightning.span import EXCEPTION
from agentlightning.store import LightningStore
from agentlightning.store.http.client import LightningStoreClient

pytestmark = pytest.mark.integration

OPTIONS: Any = {"secret": "s", "server_url": "http://127.0.0.1:9", "poll_seconds": 0.05, "grace": 0.2}


class Inside:
    """In place of agent hosts: agents that run right here."""

    crashes = 0

    def __init__(self, load: Any, *, concurrency: int, **options: Any) -> None:
        self.agent, self.capacity = load.agent, concurrency

    def spawn(self, variables: Any = None) -> None: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def run(self, job: Any, *rest: Any) -> Done:
        return Done(job.attempt_id, None, await self.agent(job.rollout.input))


@pytest.fixture(autouse=True)
def agents_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "HostPool", Inside)
    monkeypatch.setattr(runner, "agent_spec", lambda agent: agent)


async def quick(task: Any) -> Any:
    return task


async def endless(task: Any) -> None:
    await asyncio.Event().wait()


class Proxy:
    """A store that does one thing differently."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


async def test_a_runner_is_registered_before_it_claims_and_signs_off_when_it_stops(store: Any) -> None:
    async with Runner(store, quick, worker_id="w", lease_seconds=20, **OPTIONS):
        [known] = await store.query_workers()
        assert (known.worker_id, known.lease_seconds) == ("w", 20)
    [known] = await store.query_workers()
    assert known.stats["stopped"] is True


class Beats(Proxy):
    """Counts the calls of `update_worker`; the first `away` of them after the registration fail."""

    def __init__(self, store: Any, away: int = 0) -> None:
        super().__init__(store)
        self.calls, self._away = 0, away

    async def update_worker(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        if 1 < self.calls <= 1 + self._away:
            raise StoreServerError("away")
        return await self._store.update_worker(*args, **options)


async def test_the_heart_beats_while_the_loop_is_busy(store: Any) -> None:
    beats = Beats(store)
    async with Runner(beats, quick, heartbeat_seconds=0.02, **OPTIONS):  # type: ignore[arg-type]
        time.sleep(0.3)  # noqa: ASYNC251  a loop that does nothing else is what this is about
        assert beats.calls > 3
    assert not [thread for thread in threading.enumerate() if thread.name == "agl-heartbeat"]


async def test_a_heart_survives_a_store_that_is_away(store: Any) -> None:
    beats = Beats(store, away=2)
    async with Runner(beats, quick, heartbeat_seconds=0.02, **OPTIONS):  # type: ignore[arg-type]
        await until(lambda: beats.calls > 4)


async def test_no_heartbeat_comes_after_the_runner_has_signed_off(store: Any) -> None:
    class Slow(Proxy):
        """Takes its time to sign a runner off."""

        async def update_worker(self, worker_id: str, stats: Any, **options: Any) -> Any:
            found = await self._store.update_worker(worker_id, stats, **options)
            if stats.get("stopped"):
                await asyncio.sleep(0.2)
            return found

    async with Runner(Slow(store), quick, heartbeat_seconds=0.02, **OPTIONS):  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
    [known] = await store.query_workers()
    assert known.stats.get("stopped") is True


def test_a_lease_of_no_time_is_refused(store: Any) -> None:
    with pytest.raises(ConfigError, match="lease_seconds=0"):
        Runner(store, quick, lease_seconds=0, **OPTIONS)


async def test_a_runner_whose_lease_ran_out_loses_its_attempts_to_another(store: Any) -> None:
    class Mute(Proxy):
        """Its worker is never heard of again once it has claimed."""

        async def update_worker(self, worker_id: str, *args: Any, **options: Any) -> Any:
            if not await self._store.query_rollouts(status_in=("preparing", "running")):
                await self._store.update_worker(worker_id, *args, **options)

    async with Runner(Mute(store), endless, worker_id="mute", lease_seconds=0.3, **OPTIONS) as mute:  # type: ignore[arg-type]
        queued = await store.enqueue_rollout({"hang": True}, config=RolloutConfig(max_attempts=2))
        await until(lambda: mute.statistics.running == 1)
        claimed = await store.dequeue_rollout("other", timeout=20)
        assert claimed is not None
        assert (claimed.rollout_id, claimed.attempt.sequence_id) == (queued.rollout_id, 2)
        await until(lambda: mute.statistics.discarded == 1 and mute.statistics.running == 0)
    latest = await store.get_latest_attempt(queued.rollout_id)
    assert (latest.worker_id, latest.status) == ("other", "preparing")
    first, _ = await store.query_attempts(queued.rollout_id)
    assert first.status == "unresponsive"
    assert "mute" in first.metadata["error"]["message"]


async def test_a_claim_that_waits_for_a_lost_worker_takes_nothing(store: Any) -> None:
    await store.update_worker("suspended", lease_seconds=0.3)
    started = await store.start_rollout("a task", worker_id="suspended", config=RolloutConfig(max_attempts=2))
    waiting = asyncio.create_task(store.dequeue_rollout("suspended", timeout=20))
    await asyncio.sleep(0)
    claimed = await store.dequeue_rollout("other", timeout=20)
    assert claimed is not None
    assert claimed.rollout_id == started.rollout_id
    assert await waiting is None


async def test_the_store_is_asked_once_for_all_attempts_that_run(store: Any) -> None:
    class Counting(Proxy):
        asked: list[int]

        async def get_latest_attempts(self, rollout_ids: Any) -> Any:
            self.asked.append(len(rollout_ids))
            return await self._store.get_latest_attempts(rollout_ids)

    counting, options = Counting(store), {**OPTIONS, "heartbeat_seconds": 0.05, "concurrency": 8}
    counting.asked = []
    async with Runner(counting, endless, **options) as runner:  # type: ignore[arg-type]
        queued = [await store.enqueue_rollout(number) for number in range(8)]
        await until(lambda: 8 in counting.asked)
        await store.cancel_rollout(queued[0].rollout_id)
        await until(lambda: runner.statistics.discarded == 1)
        assert runner.statistics.running == 7
        await runner.stop(0.0)


async def test_an_attempt_thought_lost_comes_back_while_nobody_else_has_it(store: Any) -> None:
    class Late(Proxy):
        silent = False

        async def update_worker(self, *args: Any, **options: Any) -> Any:
            if not self.silent:
                return await self._store.update_worker(*args, **options)

        async def get_latest_attempts(self, rollout_ids: Any) -> Any:
            found = await self._store.get_latest_attempts(rollout_ids)
            self.silent = self.silent and any(each.status != "unresponsive" for each in found)
            return found

    late = Late(store)
    options = {**OPTIONS, "queues": ["work"]}
    async with Runner(late, endless, lease_seconds=0.3, concurrency=1, **options) as runner:  # type: ignore[arg-type]
        queued = await store.enqueue_rollout({"hang": True}, queue="work", config=RolloutConfig(max_attempts=2))
        await until(lambda: runner.statistics.running == 1)
        late.silent = True
        await until(lambda: not late.silent)

        async def is_running() -> bool:
            return (await store.get_latest_attempt(queued.rollout_id)).status == "running"

        await until(is_running)
        assert (runner.statistics.running, runner.statistics.discarded) == (1, 0)
        runner.stop_at_once()
        await runner.stop(0)
    assert len(await store.query_attempts(queued.rollout_id)) == 1


async def test_a_claim_whose_answer_was_lost_is_made_once(store: Any) -> None:
    class Lossy(Proxy):
        lost = 0

        async def dequeue_many_rollouts(self, *args: Any, **options: Any) -> Any:
            claimed = await self._store.dequeue_many_rollouts(*args, **options)
            if claimed and self.lost < 2:
                self.lost += 1
                raise StoreServerError("the answer was lost")
            return claimed

    async with Runner(Lossy(store), quick, **OPTIONS):  # type: ignore[arg-type]
        queued = await store.enqueue_rollout({"reward": 1})
        [ended] = await store.wait_for_rollouts(rollout_ids=[queued.rollout_id], timeout=20)
    assert ended.status == "succeeded"
    assert len(await store.query_attempts(queued.rollout_id)) == 1


async def test_a_report_is_made_once_the_server_is_back(store: Any) -> None:
    class Down(Proxy):
        down = True

        async def update_attempt(self, *args: Any, **options: Any) -> Any:
            if self.down:
                raise StoreServerError("connection refused")
            return await self._store.update_attempt(*args, **options)

    down = Down(store)
    async with Runner(down, quick, **OPTIONS) as runner:  # type: ignore[arg-type]
        queued = await store.enqueue_rollout({"reward": 1})
        await until(lambda: runner.statistics.running == 1)
        assert await store.wait_for_rollouts(rollout_ids=[queued.rollout_id], timeout=0.2) == []
        down.down = False
        [ended] = await store.wait_for_rollouts(rollout_ids=[queued.rollout_id], timeout=20)
    assert ended.status == "succeeded"


async def test_an_attempt_that_fails_is_logged_with_its_ids(store: Any, caplog: Any, monkeypatch: Any) -> None:
    async def fails(task: Any) -> None:
        raise AgentError("no idea")

    monkeypatch.setattr(caplog.handler, "formatter", JsonFormatter())  # the handler serves all tests of the process
    with caplog.at_level(logging.INFO, "agentlightning.runner.runner"):
        async with Runner(store, fails, worker_id="w", **OPTIONS):
            queued = await store.enqueue_rollout({})
            await store.wait_for_rollouts(rollout_ids=[queued.rollout_id], timeout=20)
    records = [json.loads(line) for line in caplog.text.splitlines()]
    [line] = [record for record in records if "no idea" in record["message"]]
    assert (line["rollout_id"], line["worker_id"]) == (queued.rollout_id, "w")


async def test_a_token_that_is_refused_ends_the_runner_at_once(store: Any) -> None:
    class Refusing(Proxy):
        async def dequeue_many_rollouts(self, *args: Any, **options: Any) -> Any:
            raise StoreAuthError("the server wants another token")

    runner = Runner(Refusing(store), quick, **OPTIONS)  # type: ignore[arg-type]
    await runner.start()
    with pytest.raises(StoreAuthError):
        await asyncio.wait_for(runner.wait(), 20)
    with pytest.raises(StoreAuthError):
        await runner.stop()


async def test_a_runner_ends_after_as_many_rollouts_as_it_was_told(store: Any) -> None:
    async with Runner(store, quick, max_rollouts=3, **OPTIONS) as runner:
        for _ in range(5):
            await store.enqueue_rollout({"reward": 1})
        await asyncio.wait_for(runner.wait(), 20)
    assert (runner.statistics.succeeded, runner.statistics.claimed) == (3, 3)
    assert (await store.statistics())["rollouts.queuing"] == 2


async def test_a_runner_claims_from_its_own_queues_only(store: Any) -> None:
    async with Runner(store, quick, queues=["val"], **OPTIONS) as runner:
        train = await store.enqueue_rollout({"reward": 1}, mode="train")
        val = await store.enqueue_rollout({"reward": 1}, mode="val")
        await store.wait_for_rollouts(rollout_ids=[val.rollout_id], timeout=20)
        assert (await store.get_rollout_by_id(train.rollout_id)).status == "queuing"
    assert runner.statistics.claimed == 1


async def test_a_drain_without_a_limit_waits_until_somebody_hurries(store: Any) -> None:
    runner = Runner(store, endless, **OPTIONS)
    await runner.start()
    queued = await store.enqueue_rollout({"hang": True})
    await until(lambda: runner.statistics.running == 1)
    stopping = asyncio.create_task(runner.stop(None))
    done, _ = await asyncio.wait({stopping}, timeout=0.3)
    assert not done
    runner.stop_at_once()
    await asyncio.wait_for(stopping, 20)
    assert (await store.get_rollout_by_id(queued.rollout_id)).status == "requeuing"


class Slow(Proxy):
    """A store whose claims are answered late, and whose attempts are read slowly."""

    async def dequeue_many_rollouts(self, *args: Any, **options: Any) -> Any:
        claimed = await self._store.dequeue_many_rollouts(*args, **options)
        await asyncio.shield(asyncio.sleep(0.2 if claimed else 0))
        return claimed

    async def get_attempt(self, attempt_id: str) -> Any:
        await asyncio.sleep(0.2)
        return await self._store.get_attempt(attempt_id)


def has_claimed(store: Any) -> Any:
    """Whether the store has answered a claim, whose caller may not know yet."""

    async def asked() -> bool:
        return any(rollout.status == "preparing" for rollout in await store.query_rollouts())

    return asked


async def statuses(store: Any) -> list[str]:
    return [rollout.status for rollout in await store.query_rollouts()]


@pytest.mark.parametrize("cancels", [1, 2])
async def test_a_cancelled_claim_is_released_though_its_client_is_closed(store: Any, hub: Any, cancels: int) -> None:
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(number) for number in range(3)])
    client = LightningStoreClient(hub.serve(Slow(store)))
    claiming = asyncio.create_task(client.dequeue_many_rollouts(5, "w", 10))
    await until(has_claimed(store))
    for _ in range(cancels):
        claiming.cancel()
        await asyncio.sleep(0.01)
    if cancels == 1:
        with pytest.raises(asyncio.CancelledError):
            await claiming
    await client.close()
    assert await statuses(store) == ["requeuing"] * 3


@pytest.mark.parametrize("drain", [None, 0, 5.0])
async def test_a_runner_that_stops_leaves_no_rollout_to_its_lease(store: Any, hub: Any, drain: float | None) -> None:
    client = LightningStoreClient(hub.serve(Slow(store)))
    runner = Runner(client, quick, **OPTIONS)
    await runner.start()
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(number) for number in range(40)])
    await until(has_claimed(store))
    await runner.stop(drain)
    await client.close()
    assert set(await statuses(store)) <= {"queuing", "requeuing", "succeeded"}


async def test_what_was_claimed_but_not_started_is_queued_again_when_a_runner_stops(store: Any) -> None:
    class Reading(Proxy):
        async def get_latest_resources(self) -> None:
            await asyncio.sleep(30)

    runner = Runner(Reading(store), quick, **OPTIONS)  # type: ignore[arg-type]
    await runner.start()
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(number) for number in range(3)])
    await until(has_claimed(store))
    await runner.stop(0)
    assert await statuses(store) == ["requeuing"] * 3


async def test_an_attempt_that_a_runner_gives_back_does_not_count_against_its_limit(store: Any) -> None:
    config = RolloutConfig(max_attempts=2)
    queued = await store.enqueue_rollout("task", config=config)
    for _ in range(3):
        runner = Runner(store, endless, **OPTIONS)
        await runner.start()
        await until(lambda runner=runner: runner.statistics.running == 1)
        await runner.stop(0)

    async def fails(task: Any) -> None:
        raise AgentError("by itself")

    async with Runner(store, fails, **OPTIONS):
        [ended] = await store.wait_for_rollouts(rollout_ids=[queued.rollout_id], timeout=20)
    attempts = await store.query_attempts(queued.rollout_id)
    assert (ended.status, [attempt.status for attempt in attempts]) == ("failed", ["unresponsive"] * 3 + ["failed"] * 2)


@pytest.mark.parametrize(
    "method", ["update_worker", "dequeue_many_rollouts", "get_latest_resources", "add_many_spans", "update_attempt"]
)
async def test_an_embedded_store_that_is_busy_is_given_time(store: Any, method: str) -> None:
    class Busy(Proxy):
        left = 3

        def __getattr__(self, name: str) -> Any:
            found = super().__getattr__(name)

            async def busy(*args: Any, **options: Any) -> Any:
                if self.left:
                    self.left -= 1
                    raise StoreError("the database is locked by another process")
                return await found(*args, **options)

            return busy if name == method else found

    async with Runner(Busy(store), refused, **OPTIONS):  # type: ignore[arg-type]
        queued = await store.enqueue_rollout({})
        [ended] = await store.wait_for_rollouts(rollout_ids=[queued.rollout_id], timeout=20)
    assert ended.status == "failed"
    assert [span.name for span in await store.query_spans(ended.rollout_id)] == [EXCEPTION]


async def refused(task: Any) -> None:
    raise AgentError("no")


async def test_a_locked_database_is_waited_for_as_long_as_patience_says(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("agentlightning.store.sql.sqlite.BUSY_SECONDS", 0.01)
    store = LightningStore(tmp_path / "store.db")
    runner = Runner(store, quick, patience=20, **OPTIONS)
    hasty = Runner(store, quick, patience=0.01, **OPTIONS)
    queued = await store.enqueue_rollout({})
    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError):
            await hasty.start()
        starting = asyncio.create_task(runner.start())
        await asyncio.sleep(0.3)
        assert not starting.done()
        other.execute("ROLLBACK")
    await starting
    assert [r.status for r in await store.wait_for_rollouts(rollout_ids=[queued.rollout_id], timeout=20)]
    await runner.stop()
    await store.close()
