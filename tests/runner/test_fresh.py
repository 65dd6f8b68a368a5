"""Every attempt in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support import agents

from agentlightning.runner.hosts import messages

pytestmark = pytest.mark.integration

STATE: list[Any] = []


def says_who_it_is(task: Any) -> list[Any]:
    STATE.append(task)
    return [os.getpid(), len(STATE)]


async def is_gone(pid: int) -> None:
    """A process ends a moment after its attempt."""
    async with asyncio.timeout(10):
        while Path(f"/proc/{pid}").exists():  # noqa: ASYNC110, ASYNC240  what is awaited sets no event
            await asyncio.sleep(0.01)


async def test_no_two_attempts_share_a_process_and_none_is_left(start: Any, roll: Any, attempt_of: Any) -> None:
    runner = await start(says_who_it_is, concurrency=2, fresh_process=True)
    ended = await roll(*range(8))
    seen = [(await attempt_of(rollout)).metadata["output"] for rollout in ended]
    assert len({pid for pid, _ in seen}) == 8
    assert {number for _, number in seen} == {1}, "an attempt saw what another one had left"
    for pid, _ in seen:
        await is_gone(pid)
    assert runner.statistics.crashes == 0


async def test_what_an_attempt_emits_arrives_before_its_process_is_gone(start: Any, roll: Any, store: Any) -> None:
    await start(agents.emits_rewards, concurrency=4, fresh_process=True)
    for rollout in await roll(*({"rewards": list(range(20))} for _ in range(8))):
        assert len(await store.query_spans(rollout.rollout_id)) == 40


async def test_a_task_that_cannot_be_sent_leaves_no_process(
    start: Any, roll: Any, attempt_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = await start(says_who_it_is, fresh_process=True)
    monkeypatch.setattr(messages, "MAX_BYTES", 10_000)
    [ended] = await roll("x" * 20_000)
    assert "at most 10000 can be sent" in (await attempt_of(ended)).metadata["error"]["message"]
    assert not runner.pool._processes


@pytest.mark.slow
async def test_one_that_hangs_is_killed_at_its_timeout_and_makes_room(start: Any, roll: Any, attempt_of: Any) -> None:
    def agent(task: Any) -> None:
        time.sleep(600 if task else 0)

    await start(agent, concurrency=1, fresh_process=True)
    late, good = await roll(True, False, timeout_seconds=0.5)
    assert (await attempt_of(late)).status == "timeout"
    assert good.status == "succeeded"


async def test_one_that_dies_fails_alone(start: Any, roll: Any) -> None:
    def agent(task: Any) -> float:
        return os._exit(3) if task else 1.0

    await start(agent, concurrency=2, fresh_process=True)
    died, good = await roll(True, False)
    assert [died.status, good.status] == ["failed", "succeeded"]


async def test_its_reward_does_not_see_the_environment_that_the_agent_has_left(
    start: Any, roll: Any, rewards_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_USER", "1")

    def agent(task: Any) -> str:
        os.environ["OPENAI_BASE_URL"] = "http://of.the.agent/"
        del os.environ["OF_THE_USER"]
        return "done"

    def reward(output: str) -> float:
        return float(os.environ.get("OPENAI_BASE_URL") != "http://of.the.agent/" and "OF_THE_USER" in os.environ)

    await start(agent, reward=reward, fresh_process=True, redirect=True)
    [ended] = await roll({})
    assert await rewards_of(ended) == [1.0]


async def keeps_its_loop(task: Any) -> str:
    STATE.append(asyncio.get_running_loop())
    return "done"


def is_given_that_loop(output: str) -> float:
    return float(asyncio.get_event_loop() is STATE[-1])


async def test_its_reward_function_finds_the_loop_that_the_agent_ran_in(start: Any, roll: Any, rewards_of: Any) -> None:
    await start(keeps_its_loop, reward=is_given_that_loop, fresh_process=True)
    [ended] = await roll({})
    assert await rewards_of(ended) == [1.0]


async def test_an_interrupt_cancels_what_it_awaits(start: Any, roll: Any, attempt_of: Any, tmp_path: Path) -> None:
    file = tmp_path / "cleaned up"

    async def agent(task: Any) -> None:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            await asyncio.sleep(3600)
        finally:
            file.touch()

    await start(agent, fresh_process=True)
    [ended] = await roll({})
    assert (await attempt_of(ended)).metadata["error"]["type"] == "KeyboardInterrupt"
    assert file.exists()


async def test_one_that_is_stopped_before_it_awaits_begins_nothing_more(start: Any, roll: Any, tmp_path: Path) -> None:
    began, goes_on = tmp_path / "began", tmp_path / "goes on"

    async def rest() -> None:
        goes_on.touch()

    def agent(task: Any) -> Any:
        began.touch()
        time.sleep(0.6)
        return rest()

    runner = await start(agent, fresh_process=True, grace=10.0)
    await roll({}, timeout_seconds=0.2)
    async with asyncio.timeout(10):
        while runner.pool._processes:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert (began.exists(), goes_on.exists()) == (True, False)
