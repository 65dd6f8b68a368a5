"""Agents that fail, hang and die: each is a failed attempt with its reason in the store, and the others go on."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support import agents

from agentlightning.span import EXCEPTION, EXCEPTION_STACKTRACE

pytestmark = pytest.mark.integration


async def test_an_exception_is_a_failed_attempt_with_its_traceback(
    start: Any, roll: Any, attempt_of: Any, store: Any
) -> None:
    await start(agents.raises)
    [ended] = await roll("this")
    error = (await attempt_of(ended)).metadata["error"]
    assert ended.status == "failed"
    assert (error["type"], error["message"]) == ("ValueError", "no idea what to do with 'this'")
    assert "agents.py" in error["traceback"].splitlines()[1]
    [span] = await store.query_spans(ended.rollout_id, name=EXCEPTION)
    assert span.attributes[EXCEPTION_STACKTRACE] == error["traceback"]


async def test_whatever_an_agent_raises_its_process_goes_on(start: Any, roll: Any, attempt_of: Any) -> None:
    class Mean(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def agent(task: str) -> Any:
        if task == "StopIteration":
            return next(iter(()))
        raise {"SystemExit": SystemExit(3), "KeyboardInterrupt": KeyboardInterrupt, "Mean": Mean}[task]

    runner = await start(agent, concurrency=1)
    for ended in await roll("SystemExit", "KeyboardInterrupt", "StopIteration", "Mean"):
        assert ended.status == "failed"
        assert ended.input in (await attempt_of(ended)).metadata["error"]["traceback"]
    assert runner.statistics.crashes == 0


async def test_a_missing_parameter_is_named_in_the_store(start: Any, roll: Any, attempt_of: Any) -> None:
    await start(lambda task, tools: None)
    [ended] = await roll({"question": "?"})
    error = (await attempt_of(ended)).metadata["error"]
    assert error["type"] == "AgentError"
    assert "there is no value for the parameter 'tools'" in error["message"]


async def test_a_failed_attempt_is_tried_again_as_its_rollout_says(start: Any, roll: Any, store: Any) -> None:
    await start(agents.fails_first)
    once, twice = (await roll({}))[0], (await roll({}, max_attempts=2))[0]
    assert (once.status, twice.status) == ("failed", "succeeded")
    assert [a.status for a in await store.query_attempts(twice.rollout_id)] == ["failed", "succeeded"]


@pytest.mark.parametrize(
    ("agent", "how"), [(agents.dies, "ended with exit code 7"), (agents.segfaults, "was killed by SIGSEGV")]
)
async def test_a_process_that_dies_fails_its_attempt_and_is_replaced(
    agent: Any, how: str, start: Any, roll: Any, attempt_of: Any
) -> None:
    runner = await start(agent, concurrency=1)
    ended = await roll(1, 2)
    for rollout in ended:
        error = (await attempt_of(rollout)).metadata["error"]
        assert error["type"] == "AgentCrashedError"
        assert error["message"] == f"the process the agent ran in {how}"
    assert runner.statistics.crashes == 2


async def test_a_crash_shows_where_it_happened(start: Any, roll: Any, attempt_of: Any) -> None:
    await start(agents.segfaults)
    [ended] = await roll({})
    assert "in segfaults" in (await attempt_of(ended)).metadata["error"]["traceback"]


HANGING = [agents.hangs, agents.hangs_async, agents.ignores_cancellation, agents.blocks_the_loop]


@pytest.mark.parametrize("agent", HANGING, ids=lambda agent: agent.__name__)
async def test_an_agent_that_hangs_is_stopped_at_its_timeout_and_the_others_go_on(
    agent: Any, start: Any, roll: Any, attempt_of: Any, rewards_of: Any
) -> None:
    runner = await start(agent, concurrency=2)
    [hung] = await roll({"hang": True}, timeout_seconds=0.3)
    ended = await roll(*({} for _ in range(6)))
    assert hung.status == "failed"
    attempt = await attempt_of(hung)
    assert attempt.status == "timeout"
    assert "did not end within its 0.3 s" in attempt.metadata["error"]["message"]
    assert [await rewards_of(rollout) for rollout in ended] == [[1.0]] * 6
    assert runner.statistics.crashes == 0


async def test_what_a_blocked_event_loop_takes_with_it_is_repeated(start: Any, roll: Any, store: Any) -> None:
    async def agent(task: dict[str, Any]) -> float:
        if task["block"]:
            __import__("time").sleep(3600)
        await __import__("asyncio").sleep(0.8)
        return 1.0

    await start(agent, concurrency=2)
    [waited], [blocked] = await asyncio.gather(
        roll({"block": False}), roll({"block": True}, timeout_seconds=0.5, max_attempts=1)
    )
    assert [waited.status, blocked.status] == ["succeeded", "failed"]
    first, second = await store.query_attempts(waited.rollout_id)
    assert (first.status, second.status) == ("unresponsive", "succeeded")
    assert "blocked its event loop" in first.metadata["error"]["message"]


async def test_a_process_that_hangs_lets_its_other_attempts_end(start: Any, roll: Any, store: Any) -> None:
    def agent(task: dict[str, Any]) -> float:
        __import__("time").sleep(task["seconds"])
        return float(os.getpid())

    await start(agent, concurrency=3)
    slow = await store.enqueue_rollout({"seconds": 2})
    [hung] = await roll({"seconds": 3600}, timeout_seconds=0.2)
    assert hung.status == "failed"
    [ended] = await store.wait_for_rollouts(rollout_ids=[slow.rollout_id], timeout=30)
    assert ended.status == "succeeded"


async def test_the_process_that_replaces_one_with_a_hanging_attempt_has_all_slots(
    start: Any, roll: Any, tmp_path: Path
) -> None:
    release = tmp_path / "release"

    def agent(task: str) -> None:
        while task == "hang" or (task == "long" and not release.exists()):
            time.sleep(0.02)

    await start(agent, concurrency=2)
    long = asyncio.create_task(roll("long"))
    await roll("hang", timeout_seconds=0.3)
    [short] = await roll("short")
    assert (short.status, long.done()) == ("succeeded", False)
    release.touch()
    [ended] = await long
    assert ended.status == "succeeded"


async def test_nothing_is_claimed_that_a_blocked_event_loop_would_keep_waiting(start: Any, roll: Any) -> None:
    async def agent(task: str) -> None:
        if task == "block":
            time.sleep(600)  # noqa: ASYNC251

    runner = await start(agent, concurrency=2, grace=1.0)
    await roll("block", timeout_seconds=0.3)
    async with asyncio.timeout(10):
        while not runner.statistics.timeout:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    [ended] = await roll("short", timeout_seconds=0.5)
    assert ended.status == "succeeded"


async def test_a_hanging_command_is_killed_with_everything_it_started(start: Any, roll: Any, attempt_of: Any) -> None:
    runner = await start(["sh", "-c", "trap '' TERM; sleep 600 & wait; wait"], concurrency=1)
    ended = await roll(1, 2, timeout_seconds=0.3)
    assert [(await attempt_of(rollout)).status for rollout in ended] == ["timeout", "timeout"]
    assert runner.statistics.crashes == 0


async def test_a_command_that_fails_shows_its_stderr(start: Any, roll: Any, attempt_of: Any) -> None:
    await start([*["sh", "-c"], 'echo "cannot read $AGL_TASK" >&2; exit 4'])
    [ended] = await roll("x")
    error = (await attempt_of(ended)).metadata["error"]
    assert "ended with exit code 4" in error["message"]
    assert 'cannot read "x"' in error["traceback"]
