"""Agents that keep pools, queues and worker processes between attempts: every call is its own attempt's.

What asyncio and thread pools carry is right where attempts share a process. Where nothing proves whose a call is, it is
refused, and the attempts are repeated in processes of their own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentlightning.gateway.app import Gateway
from agentlightning.resources import LLM
from agentlightning.server.app import Server
from agentlightning.span import ATTRIBUTION, INPUT_MESSAGES
from agentlightning.testing import ScriptedEngine

SECRET = "a secret"
AGENTS = Path(__file__).with_name("pooled_agents.py")
ATTEMPTS = CALLS = 20

SHAPES = {
    "thread_pool": ("given", "environment", "cached", "module"),
    "async_queue": ("given", "environment"),
    "queue_thread": ("given", "environment"),
    "process_pool": ("given", "environment", "module"),
    "threads": ("given", "environment", "cached", "module"),
    "anyio_threads": ("given", "environment", "cached", "module"),
    "tasks": ("given", "environment", "cached", "module"),
    "executor": ("given", "environment", "cached", "module"),
    "joblib": ("given", "module"),
    "joblib_processes": ("given", "environment"),
    "worker_pool": ("given", "environment", "module"),
}


@pytest.fixture
async def server(store: Any) -> AsyncIterator[Server]:
    engine = ScriptedEngine(lambda messages: "yes")
    async with Server(store, Gateway(store, {"scripted": engine}, secret=SECRET, require_key=True), secret=SECRET) as s:
        await store.add_resources({"policy": LLM(endpoint=s.url, model="scripted")})
        yield s


@pytest.fixture
def count_wrong(start: Any, roll: Any, store: Any, server: Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    """count_wrong(shape, kind) -> (calls recorded under another rollout than their own, whatever attempt of it; calls
    of the attempts that count; rollouts)"""

    async def count(shape: str, kind: str) -> tuple[int, int, list[Any]]:
        monkeypatch.setenv("TEST_CLIENT_KIND", kind)
        await start(f"{AGENTS}:in_{shape}", server_url=server.url, secret=SECRET, concurrency=ATTEMPTS // 2)
        ended = await roll(*({"word": f"word-{number:02}"} for number in range(ATTEMPTS)), wait=100)
        wrong = calls = 0
        for rollout in ended:
            latest = await store.get_latest_attempt(rollout.rollout_id)
            for span in await store.query_spans(rollout.rollout_id):
                if ATTRIBUTION in span.attributes:
                    calls += span.attempt_id == latest.attempt_id
                    wrong += rollout.input["word"] not in str(span.attributes[INPUT_MESSAGES])
        return wrong, calls, ended

    return count


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "kind"), [(shape, kind) for shape, kinds in SHAPES.items() for kind in kinds])
async def test_no_call_is_recorded_under_another_rollout(shape: str, kind: str, count_wrong: Any) -> None:
    if shape.startswith("joblib"):
        pytest.importorskip("joblib")
    wrong, calls, ended = await count_wrong(shape, kind)
    assert (wrong, calls, {rollout.status for rollout in ended}) == (0, ATTEMPTS * CALLS, {"succeeded"})


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["async_queue", "simple_queue", "memory_stream"])
@pytest.mark.parametrize("kind", ["given", "environment"])
async def test_other_queues_and_other_ways_to_wait_for_them(
    shape: str, kind: str, count_wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_QUEUE_WAIT", "yes")
    wrong, calls, ended = await count_wrong(shape, kind)
    assert (wrong, calls, {rollout.status for rollout in ended}) == (0, ATTEMPTS * CALLS, {"succeeded"})


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["async_queue", "queue_thread", "simple_queue", "memory_stream"])
@pytest.mark.parametrize("kind", ["cached", "module"])
async def test_where_nothing_proves_whose_a_call_is_its_attempt_gets_a_process(
    shape: str, kind: str, count_wrong: Any
) -> None:
    """One client for all, used by consumers that the first attempt has started."""
    wrong, calls, ended = await count_wrong(shape, kind)
    assert (wrong, calls, {rollout.status for rollout in ended}) == (0, ATTEMPTS * CALLS, {"succeeded"})


SCRIPT = """
import asyncio, os, queue, threading, time, traceback
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing.pool import ThreadPool
import anyio
from agentlightning.runner import attempt_environ
from agentlightning.tracing.scope import current_scope, mark_owner, scope, serve_attempts, uncertainty

attempt_environ.install(); attempt_environ.carry_context(); attempt_environ.carry_context()
told = []
serve_attempts(alone=False, on_doubt=told.append)

class Sink:
    def put(self, spans): pass

def here():
    inside = current_scope()
    return inside and inside.rollout_id, uncertainty()

def waits_a_moment():
    time.sleep(0.05)
    return here()

async def here_async():
    await asyncio.sleep(0.01)
    return here()

def attempt(name):
    return scope(name, "at-" + name, Sink())

# A pool of the standard library carries the scope of each call, whoever has made it. Others carry none.
with attempt("one"):
    pools = ThreadPoolExecutor(2), ThreadPool(2)
    assert pools[0].submit(waits_a_moment).result() == ("one", "")
    assert pools[1].apply(here) == (None, "uncertain")
with attempt("two"):
    assert [each.result() for each in wait([pools[0].submit(waits_a_moment) for _ in range(2)])[0]] == [("two", "")] * 2
    dropped = queue.Queue()
    pools[0].submit(lambda: dropped.put(waits_a_moment()))
    time.sleep(0.1)
    assert dropped.get() == ("two", "uncertain")
    found = []
    thread = threading.Thread(target=lambda: found.append(here()))
    thread.start(); thread.join()
    assert found == [(None, "uncertain")]
told.clear()

# What a task asks for is its attempt's as long as the attempt waits for the task.
async def waits():
    own = lambda: asyncio.create_task(here_async())
    certain = ("one", "")
    assert await here_async() == certain
    assert await own() == certain
    assert await asyncio.to_thread(here) == certain
    assert await asyncio.get_running_loop().run_in_executor(None, here) == certain
    assert await anyio.to_thread.run_sync(here) == certain
    assert await asyncio.to_thread(lambda: asyncio.run(here_async())) == certain
    assert await asyncio.gather(own(), asyncio.to_thread(waits_a_moment)) == [certain] * 2
    assert await asyncio.gather(own(), here_async(), asyncio.gather(own())) == [certain, certain, [certain]]
    assert await asyncio.wait_for(own(), 5) == certain
    assert await asyncio.wait_for(here_async(), 5) == certain
    assert await asyncio.shield(here_async()) == certain
    assert {await each for each in asyncio.as_completed([here_async(), own()])} == {certain}
    done, _ = await asyncio.wait([own(), own()])
    assert {each.result() for each in done} == {certain}
    async with asyncio.TaskGroup() as group:
        task = group.create_task(here_async())
    assert task.result() == certain
    found = []
    async def note():
        await asyncio.gather(here_async())
        found.append(await here_async())
    async with anyio.create_task_group() as group:
        group.start_soon(note)
    assert found == [certain]
    assert not told

async def does_not_wait():
    background, answer = set(), asyncio.get_running_loop().create_future()
    async def serve():
        answer.set_result(await here_async())
    task = asyncio.create_task(serve())
    background.add(task)
    task.add_done_callback(background.discard)
    assert await answer == ("one", "uncertain")
    assert told == ["a task or thread that its attempt does not wait for calls a model or emits something"]
    return asyncio.create_task(asyncio.sleep(0.1, None)), asyncio.create_task(later())

async def later():
    await asyncio.sleep(0.05)
    return here()

async def tasks():
    with attempt("one"):
        await waits()
        _, task = await does_not_wait()
    assert await task == (None, "ended")

try:
    asyncio.run(tasks())
    print("fine", flush=True)
except BaseException:
    traceback.print_exc()
os._exit(0)
"""


def test_what_carries_a_scope_where_attempts_share_a_process() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], text=True, capture_output=True, timeout=100)
    assert ended.stdout == "fine\n", ended.stderr
