"""What attempts in one process share: one that changes it, or that ends the process, changes no other's result."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from opentelemetry.sdk.trace import SpanProcessor

from agentlightning.span import REWARD
from agentlightning.tracing.tracer import tracer_provider

pytestmark = pytest.mark.integration

TASKS = [{"number": number, "pause": number % 3 * 0.02} for number in range(6)]


# -- the state of the process ----------------------------------------------------------------------------------------


def changes_directory(task: dict[str, Any]) -> float:
    import tempfile

    os.chdir(tempfile.mkdtemp())
    return writes_here(task)


def enters_directory(task: dict[str, Any]) -> float:
    import contextlib
    import tempfile

    with contextlib.chdir(tempfile.mkdtemp()):
        return writes_here(task)


def changes_directory_and_hides_errors(task: dict[str, Any]) -> float:
    import tempfile

    try:
        os.fchdir(os.open(tempfile.mkdtemp(), os.O_RDONLY))
    except Exception:
        return 0.0
    return writes_here(task)


def writes_here(task: dict[str, Any]) -> float:
    with open("out.txt", "a") as file:
        file.write(f"{task['number']}\n")
    time.sleep(task["pause"])
    return float(Path("out.txt").read_text() == f"{task['number']}\n")


async def changes_directory_async(task: dict[str, Any]) -> float:
    import tempfile

    os.chdir(tempfile.mkdtemp())
    Path("out.txt").write_text(str(task["number"]))  # noqa: ASYNC240
    await asyncio.sleep(task["pause"])
    return float(Path("out.txt").read_text() == str(task["number"]))  # noqa: ASYNC240


def captures_output(task: dict[str, Any]) -> float:
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out:
        time.sleep(task["pause"])
        print(task["number"])  # noqa: T201
    return float(out.getvalue() == f"{task['number']}\n")


def sets_an_alarm(task: dict[str, Any]) -> float:
    import signal

    def rings(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, rings)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(5)
    except TimeoutError:
        return 1.0
    return 0.0


def asks_for_a_loop(task: dict[str, Any]) -> float:
    return asyncio.get_event_loop().run_until_complete(asyncio.sleep(0, 1.0))


async def handles_a_signal_async(task: dict[str, Any]) -> float:
    import signal

    received = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, received.set)
    os.kill(os.getpid(), signal.SIGUSR1)
    await asyncio.wait_for(received.wait(), 10)
    return 1.0


AGENTS = [
    changes_directory,
    enters_directory,
    changes_directory_and_hides_errors,
    changes_directory_async,
    captures_output,
    sets_an_alarm,
    asks_for_a_loop,
    handles_a_signal_async,
]


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_an_agent_that_changes_its_process_gets_one_of_its_own(
    agent: Any, start: Any, roll: Any, rewards_of: Any, caplog: Any
) -> None:
    with caplog.at_level(logging.WARNING):
        runner = await start(agent, concurrency=3)
        ended = await roll(*TASKS)
    assert [rollout.status for rollout in ended] == ["succeeded"] * len(TASKS)
    assert [(await rewards_of(rollout))[-1] for rollout in ended] == [1.0] * len(TASKS)
    assert 1 <= runner.statistics.requeued <= 3, "those that ran at the time are repeated, and no other"
    assert len([text for text in caplog.messages if "--fresh-process" in text]) == 1


@pytest.mark.parametrize("fresh_process", [False, True])
async def test_what_an_attempt_emits_in_a_thread_of_its_own_is_recorded_under_it(
    fresh_process: bool, start: Any, roll: Any, rewards_of: Any
) -> None:
    def agent(task: dict[str, Any]) -> None:
        import threading

        import agentlightning as agl

        thread = threading.Thread(target=agl.emit_reward, args=(float(task["number"]),))
        thread.start()
        thread.join()

    await start(agent, concurrency=3, fresh_process=fresh_process)
    assert [await rewards_of(rollout) for rollout in await roll(*TASKS)] == [[float(n)] for n in range(len(TASKS))]


async def test_a_process_in_which_an_attempt_has_left_workers_of_pools_is_no_crash(
    start: Any, roll: Any, attempt_of: Any
) -> None:
    runner = await start(starts_a_pool, concurrency=1)
    workers = [(await attempt_of(rollout)).metadata["output"] for rollout in await roll({}, {}, {})]
    assert len({pid for pids in workers for pid in pids}) == sum(len(set(pids)) for pids in workers)
    assert runner.statistics.crashes == 0


async def test_a_reward_that_needs_the_main_thread_has_it(start: Any, roll: Any, rewards_of: Any) -> None:
    async def agent(task: Any) -> str:
        return "an answer"

    def reward(task: Any, output: str) -> float:
        try:  # as math_verify does: no error of the timeout leaves it
            return sets_an_alarm(task)
        except Exception:
            return 0.0

    await start(agent, reward=reward, concurrency=3)
    assert [await rewards_of(rollout) for rollout in await roll(*TASKS)] == [[1.0]] * len(TASKS)


async def test_no_attempt_sees_what_another_one_has_changed(start: Any, roll: Any, attempt_of: Any) -> None:
    def agent(task: Any) -> list[Any]:
        import signal

        before = [os.getcwd(), signal.getsignal(signal.SIGALRM) == signal.SIG_DFL, os.getpid()]
        os.chdir("/")
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.alarm(3600)
        return [*before, signal.alarm(3600) == 0]

    await start(agent, concurrency=2)
    outputs = [(await attempt_of(rollout)).metadata["output"] for rollout in await roll(*range(12))]
    assert {tuple(output[:2]) for output in outputs} == {(os.getcwd(), True)}
    assert len({output[2] for output in outputs}) == 12, "each has a new process"


async def test_a_process_that_an_attempt_forks_is_its_own(start: Any, roll: Any, rewards_of: Any) -> None:
    def agent(task: Any) -> float:
        if (child := os.fork()) == 0:
            try:
                os.chdir("/")
                os._exit(0)
            finally:
                os._exit(1)
        return float(os.waitpid(child, 0)[1] == 0)

    runner = await start(agent, concurrency=3)
    assert [await rewards_of(rollout) for rollout in await roll(*TASKS)] == [[1.0]] * len(TASKS)
    assert runner.statistics.requeued == 0


async def test_an_attempt_alone_in_its_process_can_be_cancelled_in_its_own_loop(
    start: Any, roll: Any, tmp_path: Any
) -> None:
    file = str(tmp_path / "cleaned up")

    async def agent(task: Any) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            open(file, "w").close()  # noqa: ASYNC230

    await start(agent, fresh_process=True, grace=5.0)
    [ended] = await roll({}, timeout_seconds=0.5)
    assert ended.status == "failed"
    async with asyncio.timeout(10):
        while not os.path.exists(file):  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.02)


async def ends_a_span_later(task: Any) -> float:
    span = tracer_provider().get_tracer("a library").start_span("late")

    async def end() -> None:
        await asyncio.sleep(0.3)
        span.end()

    KEPT.append(asyncio.create_task(end()))
    return 1.0


async def test_a_span_that_ends_after_its_attempt_is_said_to_be_dropped(
    start: Any, roll: Any, store: Any, tmp_path: Path
) -> None:
    log = tmp_path / "agent.log"
    await start(ends_a_span_later, log=log)
    [ended] = await roll({})
    async with asyncio.timeout(20):
        while "'late' has ended after its attempt" not in log.read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert [span.name for span in await store.query_spans(ended.rollout_id)] == [REWARD]


# -- the end of the process ------------------------------------------------------------------------------------------


def exits(task: Any) -> float:
    time.sleep(task["pause"])
    return os._exit(3) if task.get("bad") else 1.0


async def exits_async(task: Any) -> float:
    await asyncio.sleep(task["pause"])
    return os._exit(3) if task.get("bad") else 1.0


def is_killed(task: Any) -> float:
    time.sleep(task["pause"])
    if task.get("bad"):
        os.kill(os.getpid(), 9)
    return 1.0


def sends_garbage(task: Any) -> float:
    """Writes to the socket of its host what is no message."""
    import socket
    import stat

    time.sleep(task["pause"])
    for fd in range(3, 40) if task.get("bad") else ():
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                socket.socket(fileno=os.dup(fd)).send(b"\xff" * 64)
        except OSError:
            continue
    time.sleep(0.2)
    return 1.0


@pytest.mark.parametrize("agent", [exits, exits_async, is_killed, sends_garbage], ids=lambda agent: agent.__name__)
async def test_a_crash_fails_the_attempt_that_caused_it_and_no_other(
    agent: Any, start: Any, roll: Any, store: Any, attempt_of: Any
) -> None:
    tasks = [{"pause": 0.3, "bad": number == 3} for number in range(8)]
    runner = await start(agent, concurrency=8, max_rollouts=8)
    ended = {rollout.input["bad"]: rollout for rollout in await roll(*tasks)}
    assert {rollout.status for rollout in await store.query_rollouts() if not rollout.input["bad"]} == {"succeeded"}
    assert ended[True].status == "failed"
    assert (await attempt_of(ended[True])).metadata["error"]["type"] == "AgentCrashedError"
    assert runner.statistics.failed == 1


async def test_an_attempt_lost_to_a_crash_does_not_count_against_its_limit(start: Any, roll: Any, store: Any) -> None:
    def agent(task: Any) -> float:
        time.sleep(1.0)  # both run when the process ends
        if task["bad"]:
            os._exit(3)
        raise RuntimeError("by itself")

    await start(agent, concurrency=2)
    ended = await roll({"bad": True}, {"bad": False}, max_attempts=2)
    for rollout in ended:
        attempts = await store.query_attempts(rollout.rollout_id)
        assert [attempt.status for attempt in attempts] == ["unresponsive", "failed", "failed"]


# -- what is left of it ----------------------------------------------------------------------------------------------


KEPT: list[Any] = []


def starts_a_pool(task: Any) -> list[int]:
    from concurrent.futures import ProcessPoolExecutor

    pool = ProcessPoolExecutor(2)
    KEPT.append(pool)
    return list(pool.map(slow_pid, range(2)))


def slow_pid(_: int) -> int:
    time.sleep(0.1)
    return os.getpid()


def starts_a_session(task: Any) -> list[int]:
    import subprocess

    return [subprocess.Popen(["sleep", "600"], start_new_session=task["leaves"]).pid]


@pytest.mark.parametrize(
    ("agent", "task", "end"),
    [
        (starts_a_pool, {}, "by itself"),  # a process with the workers of a pool takes no further attempt
        (starts_a_session, {"leaves": False}, "stop"),
        (starts_a_session, {"leaves": True}, "stop"),
        (starts_a_session, {"leaves": False}, "kill"),
    ],
)
async def test_what_an_agent_has_started_ends_with_its_host(
    agent: Any, task: Any, end: str, start: Any, roll: Any, attempt_of: Any
) -> None:
    runner = await start(agent)
    [ended] = await roll(task)
    left = (await attempt_of(ended)).metadata["output"]
    if end != "by itself":
        assert all(map(psutil.pid_exists, left))
    if end == "kill":
        psutil.Process(left[0]).parent().kill()  # type: ignore[union-attr]
    elif end == "stop":
        await runner.stop()
    async with asyncio.timeout(20):
        while any(map(psutil.pid_exists, left)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


# -- exporters of the agent's own ------------------------------------------------------------------------------------


class Exporter(SpanProcessor):
    """Takes its time to flush, and fails."""

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        time.sleep(1.0)
        raise ConnectionError("nobody listens")


async def exports_slowly(task: dict[str, Any]) -> float:
    """The longest time for which the event loop stood still meanwhile."""
    if task["exports"]:
        tracer_provider().add_span_processor(Exporter())
        return 0.0
    longest = 0.0
    for _ in range(30):
        before = time.monotonic()
        await asyncio.sleep(0.05)
        longest = max(longest, time.monotonic() - before)
    return longest


async def test_a_slow_exporter_of_an_agent_holds_no_other_attempt_up_and_fails_none(
    start: Any, roll: Any, rewards_of: Any
) -> None:
    await start(exports_slowly, concurrency=2)
    exports, works = await roll({"exports": True}, {"exports": False})
    assert (exports.status, works.status) == ("succeeded", "succeeded")
    assert (await rewards_of(works))[-1] < 0.9
