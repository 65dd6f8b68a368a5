"""Deadlines count the time in which a server is alive to receive heartbeats."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentlightning.rollouts import Attempt, AttemptedRollout, RolloutConfig
from agentlightning.store.clock import OUTAGE_SECONDS, SYNC_SECONDS, Clock
from agentlightning.store.sql.store import SqlStore

pytestmark = pytest.mark.integration

LEASE = 30.0


class Machine(Clock):
    """A machine whose clocks are set by the test. One object is one machine, however often it opens a store."""

    away = 0.0
    """Seconds that went by while nothing ran: its steady clock counts them."""
    set_by = 0.0
    """By how much somebody set the clock that people read."""

    def wall(self) -> float:
        return super().wall() + self.away + self.set_by

    def reading(self) -> float:
        return super().reading() + self.away

    def restarted(self) -> Machine:
        """For the next process on it."""
        other = Machine.__new__(Machine)
        other.away, other.set_by = self.away, self.set_by
        other.__init__()
        return other


async def claim(store: SqlStore, **limits: Any) -> AttemptedRollout:
    await store.update_worker("worker", lease_seconds=LEASE)
    return await store.start_rollout("task", worker_id="worker", config=RolloutConfig(**limits))


async def attempt_of(store: SqlStore, claimed: AttemptedRollout) -> Attempt:
    await store.update_worker("somebody else")  # the clock looks within any transaction once it is due
    attempt = await store.get_latest_attempt(claimed.rollout_id)
    assert attempt is not None
    return attempt


@pytest.mark.parametrize("boot", ["same", "rebooted"])
async def test_an_outage_longer_than_the_lease_ends_nothing_that_is_alive(tmp_path: Path, boot: str) -> None:
    machine = Machine()
    store = SqlStore(tmp_path / "store.db", machine)
    claimed = await claim(store, unresponsive_seconds=20.0, timeout_seconds=35.0)
    await store.close()
    machine.away += 3_600.0 if boot == "same" else -machine.reading()  # the machine's clock starts again from nothing
    store = SqlStore(tmp_path / "store.db", machine.restarted())
    assert (await attempt_of(store, claimed)).status == "preparing"
    told = await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
    assert told.status == "succeeded"
    assert "superseded" not in told.metadata
    await store.close()


@pytest.mark.parametrize("path", ["store.db", ":memory:"])
async def test_a_server_that_was_suspended_hears_those_who_are_alive_before_it_judges_them(
    tmp_path: Path, path: str
) -> None:
    machine = Machine()
    store = SqlStore(path if path == ":memory:" else tmp_path / path, machine)
    claimed = await claim(store, unresponsive_seconds=20.0)
    machine.away += 25.0
    await asyncio.sleep(2 * 0.25)  # it looks by itself
    machine.away += 25.0
    assert (await attempt_of(store, claimed)).status == "preparing"
    await store.close()


async def test_time_that_a_server_was_there_counts_whether_in_one_piece_or_not(tmp_path: Path) -> None:
    machine = Machine()
    store = SqlStore(tmp_path / "store.db", machine)
    claimed = await claim(store)
    statuses = list[str]()
    for _ in range(5):
        for _ in range(4):
            machine.away += 2.0
            statuses.append((await attempt_of(store, claimed)).status)
        await store.close()
        machine.away += 1_000.0
        store = SqlStore(tmp_path / "store.db", machine.restarted())
        machine = store.clock  # type: ignore[assignment]
    lived = statuses.index("unresponsive")
    assert LEASE <= 2.0 * (lived + 1) <= LEASE + 4.0, statuses
    worker = await store.get_worker("worker")
    assert worker is not None
    assert worker.status == "lost"
    await store.close()


@pytest.mark.parametrize("step", [-3_600.0, 3_600.0])
async def test_a_clock_that_is_set_before_a_restart_moves_no_deadline(tmp_path: Path, step: float) -> None:
    machine = Machine()
    store = SqlStore(tmp_path / "store.db", machine)
    claimed = await claim(store, unresponsive_seconds=0.5)
    await store.close()
    machine.set_by = step
    store = SqlStore(tmp_path / "store.db", machine.restarted())
    assert (await attempt_of(store, claimed)).status == "preparing"
    (ended,) = await store.wait_for_rollouts(rollout_ids=[claimed.rollout_id], timeout=10)
    assert ended.status == "failed"
    await store.close()


async def test_a_process_that_opens_the_file_after_a_suspend_agrees_with_the_one_that_has_it_open(
    tmp_path: Path,
) -> None:
    """A suspended machine goes on by the clock of people and by that which counts suspends, not by every other."""
    machine = Machine()
    first = SqlStore(tmp_path / "store.db", machine)
    claimed = await claim(first, unresponsive_seconds=20.0)
    machine.away += 3_600.0
    second = SqlStore(tmp_path / "store.db", machine.restarted())
    assert (await attempt_of(second, claimed)).status == "preparing"
    new = await claim(second, unresponsive_seconds=20.0)
    for store in (first, second):
        assert (await attempt_of(store, claimed)).status == "preparing"
        assert (await attempt_of(store, new)).status == "preparing"
    await first.close()
    await second.close()


@pytest.mark.slow
async def test_a_store_in_which_nothing_else_happens_ends_an_attempt_in_time() -> None:
    store = SqlStore(":memory:")
    attempted = await store.start_rollout("task", config=RolloutConfig(timeout_seconds=6.0))
    (ended,) = await store.wait_for_rollouts(rollout_ids=[attempted.rollout_id], timeout=15)
    assert ended.status == "failed"
    await store.close()


@pytest.mark.slow
async def test_a_quiet_store_says_that_it_is_alive_only_while_there_are_deadlines(tmp_path: Path) -> None:
    machine = Machine()
    store = SqlStore(tmp_path / "store.db", machine)
    await store.enqueue_rollout("task")

    def mark() -> float:
        with closing(sqlite3.connect(tmp_path / "store.db")) as raw:
            return float(raw.execute("SELECT reading FROM clocks").fetchone()[0])

    before = mark()
    machine.away += SYNC_SECONDS
    await asyncio.sleep(0.6)
    assert mark() == before
    await store.start_rollout("task", config=RolloutConfig(timeout_seconds=100.0))
    claimed = mark()
    assert claimed > before
    for _ in range(2):
        machine.away += SYNC_SECONDS
        await asyncio.sleep(0.6)
    assert SYNC_SECONDS <= mark() - claimed <= OUTAGE_SECONDS + 3
    await store.close()


# -- retries ---------------------------------------------------------------------------------------------------------


async def test_a_retry_that_was_promised_is_kept_when_the_lost_attempts_time_is_up() -> None:
    limits = {"unresponsive_seconds": 0.1, "timeout_seconds": 0.4}
    config = RolloutConfig(**limits, max_attempts=2, retry_condition=("unresponsive",))
    store = SqlStore(":memory:")
    first = await store.start_rollout("task", config=config)
    end = time.monotonic() + 30
    while (await attempt_of(store, first)).status != "timeout":
        assert time.monotonic() < end
        await asyncio.sleep(0.1)
    rollout = await store.get_rollout_by_id(first.rollout_id)
    assert rollout is not None
    assert rollout.status == "requeuing"
    again = await store.dequeue_rollout()
    assert again is not None
    assert (again.rollout_id, again.attempt.sequence_id) == (first.rollout_id, 2)
    await store.close()


async def test_an_attempt_that_comes_back_from_silence_is_still_held_to_its_time_limit() -> None:
    config = RolloutConfig(unresponsive_seconds=0.1, timeout_seconds=0.6, retry_condition=("unresponsive",))
    store = SqlStore(":memory:")
    first = await store.start_rollout("task", config=config.model_copy(update={"max_attempts": 2}))
    lost = False
    while (status := (await attempt_of(store, first)).status) != "timeout":
        lost |= status == "unresponsive"
        if lost:
            await store.update_attempt(first.rollout_id, first.attempt.attempt_id, last_heartbeat_time=time.time())
        await asyncio.sleep(0.05)
    rollout = await store.get_rollout_by_id(first.rollout_id)
    assert rollout is not None
    assert rollout.status == "failed"
    await store.close()
