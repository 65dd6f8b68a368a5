"""Runners as actors of a real Ray on this machine, half of which are killed."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from agentlightning.attempt_address import attempt_secret
from agentlightning.errors import MissingExtraError
from agentlightning.integrations.ray import RayRunners
from agentlightning.rollouts import EnqueueRolloutRequest, RolloutConfig
from agentlightning.server.app import Server
from agentlightning.span import REWARD, SCORE_VALUE
from agentlightning.store import LightningStore

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("AGL_RAY", ROOT / ".peers" / "ray")) / "bin" / "python"
AGENT = """
import asyncio

async def solve(task):
    await asyncio.sleep(task["seconds"])
    return float(task["number"])
"""
ACTORS, CONCURRENCY = 4, 16


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"agentlightning\[ray\]"):
        RayRunners("http://127.0.0.1:9", "agent.py:solve", count=1)


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(400)
@pytest.mark.skipif(not PYTHON.exists(), reason="no Ray: run tests/integrations/ray/setup.sh, or set AGL_RAY")
async def test_a_thousand_rollouts_end_once_each_though_half_of_the_actors_are_killed(tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    store = LightningStore(tmp_path / "s.db")
    config = RolloutConfig(max_attempts=3)
    async with Server(store, secret=attempt_secret(None)) as server:
        tasks = [{"number": number, "seconds": 0.3} for number in range(1000)]
        queued = await store.enqueue_many_rollouts([EnqueueRolloutRequest(task, config=config) for task in tasks])
        arguments = [str(PYTHON), str(Path(__file__).with_name("driver.py")), server.url, str(ACTORS), str(CONCURRENCY)]
        driver = await asyncio.create_subprocess_exec(
            *arguments,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path), "RAY_DEDUP_LOGS": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            before = await asyncio.wait_for(said(driver), 120)
            async with asyncio.timeout(120):
                while await finished(store) < 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            for worker in before[: ACTORS // 2]:
                os.kill(worker["pid"], signal.SIGKILL)
            ids = [rollout.rollout_id for rollout in queued]
            ended = await store.wait_for_rollouts(rollout_ids=ids, timeout=180)
            driver.stdin.write(b"stop\n")
            after = await asyncio.wait_for(said(driver), 60)
            assert await asyncio.wait_for(driver.wait(), 60) == 0
        finally:
            if driver.returncode is None:
                driver.kill()
                await driver.wait()
        assert Counter(rollout.status for rollout in ended) == {"succeeded": 1000}
        attempts = [await store.query_attempts(rollout_id) for rollout_id in ids]
        statuses = Counter(attempt.status for each in attempts for attempt in each)
        assert statuses["succeeded"] == 1000
        assert set(statuses) == {"succeeded", "unresponsive"}
        assert 0 < statuses["unresponsive"] <= 2 * CONCURRENCY
        for task, each in zip(tasks, attempts, strict=True):
            spans = await store.query_spans(each[-1].rollout_id, each[-1].attempt_id, name=REWARD)
            assert [span.attributes[SCORE_VALUE] for span in spans] == [task["number"]]
        killed = {worker["worker_id"] for worker in before[: ACTORS // 2]}
        assert {worker["worker_id"] for worker in after} - {worker["worker_id"] for worker in before}
        assert killed & {worker["worker_id"] for worker in after} == set()
    await store.close()


async def finished(store):
    return len(await store.query_rollouts(status_in=["succeeded"], limit=1000))


async def said(driver):
    """The next thing that the driver says; Ray writes to its stdout, too."""
    while line := await driver.stdout.readline():
        if line.startswith(b"driver: "):
            return json.loads(line.removeprefix(b"driver: "))
    raise AssertionError("the driver has ended")
