"""Attempts of one process that share pools, queues and worker processes: every call is its own attempt's."""

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
    """count_wrong(shape, kind) -> (calls recorded under another rollout than their own, all calls, rollouts)"""

    async def count(shape: str, kind: str) -> tuple[int, int, list[Any]]:
        monkeypatch.setenv("TEST_CLIENT_KIND", kind)
        await start(f"{AGENTS}:in_{shape}", server_url=server.url, secret=SECRET, concurrency=ATTEMPTS)
        ended = await roll(*({"word": f"word-{number:02}"} for number in range(ATTEMPTS)), wait=100)
        wrong = calls = 0
        for rollout in ended:
            for span in await store.query_spans(rollout.rollout_id):
                if ATTRIBUTION in span.attributes:
                    calls += 1
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
async def test_where_nothing_proves_whose_a_call_is_it_is_refused(shape: str, kind: str, count_wrong: Any) -> None:
    """One client for all, used by consumers that the first attempt has started."""
    wrong, _, ended = await count_wrong(shape, kind)
    assert wrong == 0
    assert "failed" in {rollout.status for rollout in ended}


SCRIPT = """
import asyncio, os, queue, threading, traceback
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
import anyio
from agentlightning.runner import attempt_environ
from agentlightning.runner.hosts import context_propagation
from agentlightning.tracing.scope import current_scope, scope

attempt_environ.install(); context_propagation.install(); context_propagation.install()

class Sink:
    def put(self, spans): pass

def here():
    inside = current_scope()
    return inside and inside.rollout_id

def attempt(name):
    return scope(name, "at-" + name, Sink())

# Pools carry the scope of each call, and none where there is none.
with attempt("one"):
    pools = ThreadPool(2), ThreadPoolExecutor(2)
    assert pools[0].map(lambda _: here(), range(4)) == ["one"] * 4
assert pools[0].apply(here) is None and list(pools[0].imap(lambda _: here(), range(2))) == [None] * 2
with attempt("two"):
    assert pools[0].starmap(lambda a, b: here(), [(1, 2)] * 3) == ["two"] * 3
    assert pools[1].submit(here).result() == "two"

    called = queue.Queue()
    pools[0].apply_async(here, callback=lambda _: called.put(here())).get()
    pools[1].submit(here).add_done_callback(lambda _: called.put(here()))
    assert [called.get(), called.get()] == ["two", "two"]

# A thread is in the scope that started it, until that ends or another attempt's work comes.
def consumer(work, answers):
    while (item := work.get()) is not None:
        answers.put((item, here()))

for kind in (queue.Queue, queue.SimpleQueue, queue.PriorityQueue):
    work, answers = kind(), queue.Queue()
    with attempt("one"):
        thread = threading.Thread(target=consumer, args=(work, answers))
        thread.start()
        work.put("a")
        assert answers.get() == ("a", "one")
        with attempt("two"):
            work.put("b")
            assert answers.get() == ("b", None)
            assert here() == "two"  # taking an answer changes nothing for the attempt itself
        work.put("c")
        assert answers.get() == ("c", "one")
    work.put("d")
    assert answers.get() == ("d", None)
    if kind is queue.PriorityQueue:
        work.put("e")
        break
    work.put(None)
    thread.join()

# What lies in a last-in-first-out queue is a thing that is shared, not work.
with attempt("one"):
    shared = queue.LifoQueue()
    shared.put("connection")
with attempt("two"):
    assert ThreadPoolExecutor(1).submit(lambda: (shared.get(), here())).result() == ("connection", "two")

async def tasks():
    work, answers = asyncio.Queue(), asyncio.Queue()
    send, receive = anyio.create_memory_object_stream(0)

    async def consume(get):
        while True:
            await answers.put((await get(), here()))

    ways = {
        "get": (work.put, work.get),
        "wait_for": (work.put, lambda: asyncio.wait_for(work.get(), 60)),
        "create_task": (work.put, lambda: asyncio.create_task(work.get())),
        "anyio": (send.send, receive.receive),
    }
    for way, (put, get) in ways.items():
        with attempt("one"):
            task = asyncio.create_task(consume(get))
            await put("a")
            assert await answers.get() == ("a", "one"), way
            with attempt("two"):
                await put("b")
                assert await answers.get() == ("b", None), way
                child = asyncio.create_task(asyncio.to_thread(here))
                assert await child == here() == "two"
            assert here() == "one"
        await put("c")
        assert await answers.get() == ("c", None), way
        task.cancel()
        await asyncio.wait([task])

try:
    asyncio.run(tasks())
    print("fine", flush=True)
except AssertionError:
    traceback.print_exc()
os._exit(0)
"""


def test_a_scope_is_carried_by_pools_and_not_inherited_by_whoever_works_for_another_attempt() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], text=True, capture_output=True, timeout=100)
    assert ended.stdout == "fine\n", ended.stderr
