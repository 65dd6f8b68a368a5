"""A runner whose clock is ten minutes before or behind that of its server: leases, heartbeats and timeouts are those of
the server."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from agentlightning.rollouts import RolloutConfig

from .conftest import AGL, wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

CLOCK = """
import time

real = time.time, time.time_ns
time.time = lambda: real[0]() + {shift}
time.time_ns = lambda: real[1]() + {shift} * 10**9
"""
AGENT = """
import time


def work(task):
    time.sleep(task["seconds"])
    return 1.0
"""
LEASE = 6.0


def clock(folder: Path, shift: int) -> dict[str, str]:
    """The environment of a Python process whose clock is so many seconds apart."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(CLOCK.format(shift=shift))
    return {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}


@pytest.mark.parametrize("shift", [600, -600])
def test_work_on_a_runner_with_another_clock_ends_when_it_is_done_or_its_time_is_over(
    tmp_path: Path, make_server, start_process, connect, shift: int
) -> None:
    server = make_server()
    server.start()
    (tmp_path / "agent.py").write_text(AGENT)
    command = [AGL, "runner", "--server", server.url, "--agent", f"{tmp_path / 'agent.py'}:work", "--concurrency", "4"]
    command += ["--lease", str(LEASE)]
    runner = start_process(command, tmp_path / "runner.log", clock(tmp_path / "clock", shift))

    async def run() -> None:
        async with connect(server.url) as store:
            once = RolloutConfig(max_attempts=1)
            done = await store.enqueue_rollout({"seconds": 2 * LEASE}, config=once)
            limited = RolloutConfig(max_attempts=1, timeout_seconds=LEASE)
            late = await store.enqueue_rollout({"seconds": 120}, config=limited)
            ids = [done.rollout_id, late.rollout_id]
            ended = {each.rollout_id: each for each in await store.wait_for_rollouts(rollout_ids=ids, timeout=100)}
            assert set(ended) == set(ids), runner.said()
            assert [ended[each].status for each in ids] == ["succeeded", "failed"]
            statuses = [attempt.status for each in ids for attempt in await store.query_attempts(each)]
            assert statuses == ["succeeded", "timeout"]
            lost = await store.enqueue_rollout({"seconds": 120}, config=once)
            await asyncio.to_thread(wait_until, lambda: asyncio.run(runs(lost.rollout_id)), "it runs", runner)
            runner.kill()
            (ended_one,) = await store.wait_for_rollouts(rollout_ids=[lost.rollout_id], timeout=100)
            assert ended_one.status == "failed", "the runner is gone, whatever its clock said"

    async def runs(rollout_id: str) -> bool:
        async with connect(server.url) as store:
            rollout = await store.get_rollout_by_id(rollout_id)
            return rollout is not None and rollout.status in ("preparing", "running")

    asyncio.run(run())
    assert server.process.end() == 0, server.process.said()
