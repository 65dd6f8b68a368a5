"""The machine's clock is set forwards and backwards by an hour: live attempts go on, dead ones end in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agentlightning.rollouts import RolloutConfig
from agentlightning.store import LightningStoreBase
from agentlightning.store.clock import Clock
from agentlightning.store.sql.store import SqlStore

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

HOUR = 3600.0
LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))


class SetClock(Clock):
    """A clock that somebody sets while the store is open."""

    shift = 0.0

    def wall(self) -> float:
        return super().wall() + self.shift


@pytest.mark.parametrize("shift", [HOUR, -HOUR])
async def test_setting_the_clock_of_an_embedded_store_ends_only_what_is_dead(tmp_path: Path, shift: float) -> None:
    clock = SetClock()
    store = SqlStore(tmp_path / "store.db", clock)
    await check(store, lambda: setattr(clock, "shift", shift))
    await store.close()


@pytest.mark.parametrize("shift", [HOUR, -HOUR])
@pytest.mark.skipif(not LIBRARIES, reason="libfaketime is not installed: apt-get install libfaketime")
def test_setting_the_clock_of_a_server_ends_only_what_is_dead(
    tmp_path: Path, make_server, connect, shift: float
) -> None:
    setting = tmp_path / "faketime"
    setting.write_text("+0")
    environment = {
        "LD_PRELOAD": str(LIBRARIES[0]),
        "FAKETIME_TIMESTAMP_FILE": str(setting),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    server = make_server()
    server.start(environment=environment)
    asyncio.run(check_server(connect(server.url), lambda: setting.write_text(f"{shift:+.0f}"), shift))
    assert server.process.end() == 0, server.process.said()


async def check_server(connection, set_clock: Callable[[], object], shift: float) -> None:
    async with connection as store:
        before = (await store.enqueue_rollout("before", queue="aside")).start_time
        await check(store, set_clock)
        after = (await store.enqueue_rollout("after", queue="aside")).start_time
        assert abs(after - before - shift) < 0.2 * HOUR, "the clock of the server was not set at all"


async def check(store: LightningStoreBase, set_clock: Callable[[], object]) -> None:
    """One attempt keeps its heartbeat, one has fallen silent, and one worker has, when the clock is set."""
    config = RolloutConfig(unresponsive_seconds=1.0, max_attempts=1)
    alive, silent = [await store.start_rollout(name, config=config) for name in ("alive", "silent")]
    await store.update_worker("gone", lease_seconds=1.0)
    await store.update_worker("here", lease_seconds=1.0)
    lost = await store.start_rollout("lost", worker_id="gone")
    kept = await store.start_rollout("kept", worker_id="here")
    set_clock()
    end, ended = time.monotonic() + 30, []
    while len(ended) < 2 and time.monotonic() < end:
        await store.update_attempt(alive.rollout_id, alive.attempt.attempt_id, last_heartbeat_time=time.time())
        await store.update_worker("here")
        ids = [silent.rollout_id, lost.rollout_id]
        ended = await store.wait_for_rollouts(rollout_ids=ids, timeout=0.2)
    assert [rollout.status for rollout in ended] == ["failed", "failed"], "dead attempts were kept alive"
    for live in (alive, kept):
        rollout = await store.get_rollout_by_id(live.rollout_id)
        assert rollout is not None
        assert not rollout.finished, f"{rollout.input} was ended although it was alive"
        await store.update_attempt(live.rollout_id, live.attempt.attempt_id, status="succeeded")
