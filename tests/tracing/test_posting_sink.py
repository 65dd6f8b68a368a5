"""A program that runs for one attempt: what it emits is sent to the attempt its environment names."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agentlightning.attempt_variables import attempt_environment
from agentlightning.server.app import Server
from agentlightning.span import AGENT_NAME, MESSAGE, OPERATION, REWARD, Span
from agentlightning.tracing.outbox import PostingSink
from agentlightning.tracing.rewards import find_final_reward
from agentlightning.tracing.scope import process_scope

pytestmark = pytest.mark.integration

SECRET = "a secret"
PROGRAM = """
import multiprocessing, threading
import agentlightning as agl

agl.emit_message("from the main thread")
thread = threading.Thread(target=agl.emit_message, args=("from another thread",))
thread.start()
thread.join()
with agl.track_agent("writer"), agl.operation("step"):
    agl.emit_reward(0.25)
child = multiprocessing.get_context("fork").Process(target=agl.emit_message, args=("from a child",))
child.start()
child.join()
agl.emit_reward({"correctness": 1.0, "format": 0.5})
"""


@pytest.fixture
async def server(store: Any) -> AsyncIterator[Server]:
    async with Server(store, secret=SECRET, token="t") as server:
        yield server


async def test_what_a_program_emits_is_recorded_in_order_by_the_time_it_exits(server: Server, store: Any) -> None:
    started = await store.start_rollout("a task")
    ids = started.rollout_id, started.attempt.attempt_id
    own = attempt_environment(server.url, SECRET, *ids)
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    await asyncio.to_thread(subprocess.run, command, env={**os.environ, **own}, check=True, timeout=60)
    spans = await store.query_spans(*ids)
    assert [span.name for span in spans] == [MESSAGE, MESSAGE, REWARD, OPERATION, MESSAGE, REWARD]
    assert find_final_reward(spans) == {"correctness": 1.0, "format": 0.5}
    reward, step = spans[2:4]
    assert (reward.attributes[AGENT_NAME], reward.parent_id) == ("writer", step.span_id)


def test_an_environment_without_an_attempt_is_in_no_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    for url, key in (("", "k"), ("http://h/rollout/ro/attempt/at/events", ""), ("http://h/somewhere", "k")):
        monkeypatch.setenv("AGL_EVENT_URL", url)
        monkeypatch.setenv("AGL_KEY", key)
        assert process_scope() is None
    monkeypatch.setenv("AGL_EVENT_URL", "https://h:1/base/api/rollouts/ro/attempt/at/events")
    scope = process_scope()
    assert scope is not None
    assert (scope.rollout_id, scope.attempt_id, scope.address, scope.key) == ("ro", "at", "https://h:1/base", "k")


async def test_what_is_emitted_while_the_server_is_away_arrives_when_it_is_back(store: Any) -> None:
    started = await store.start_rollout("a task")
    ids = started.rollout_id, started.attempt.attempt_id
    with socket.socket() as holder:  # nobody else gets the port, and nobody listens there yet
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        own = attempt_environment(f"http://127.0.0.1:{port}", SECRET, *ids)
        sink = PostingSink(f"http://127.0.0.1:{port}", own["AGL_KEY"], patience=60)
        puts = [
            asyncio.create_task(asyncio.to_thread(sink.put, (Span(*ids, name, 1.0, 1.0, span_id=f"{number:016x}"),)))
            for number, name in enumerate((REWARD, MESSAGE, OPERATION), start=1)
        ]
        await asyncio.sleep(0.5)
        assert not any(put.done() for put in puts)
        async with Server(store, secret=SECRET, token="t", port=port):
            await asyncio.gather(*puts)
            sink._connection.close()
    assert {span.name for span in await store.query_spans(*ids)} == {REWARD, MESSAGE, OPERATION}


@pytest.mark.parametrize(
    "program",
    [
        "agl.emit_reward(1.0)",
        "try: agl.emit_reward(1.0)\nexcept Exception: pass",
        "thread = threading.Thread(target=agl.emit_reward, args=(1.0,))\nthread.start()\nthread.join()",
        "with agl.operation('step'): pass",
        "agl.emit_prompt('a question', 'an answer')",
    ],
)
def test_a_program_whose_spans_are_lost_fails_and_names_server_and_spans(program: str) -> None:
    ids = "ro-1", "at-1"
    environment = {**os.environ, **attempt_environment("http://127.0.0.1:9", SECRET, *ids), "AGL_PATIENCE": "0.05"}
    code = f"import threading\nimport agentlightning as agl\n{program}\nprint('went on')"
    command = [sys.executable, "-W", "ignore", "-c", code]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1, ended.stdout
    last = ended.stderr.strip().splitlines()[-1]
    assert "1 spans (" in last
    assert "could not be sent to http://127.0.0.1:9 and are lost: ConnectionRefusedError" in last


async def test_a_key_that_the_server_refuses_is_no_matter_of_waiting(server: Server) -> None:
    environment = {**os.environ, **attempt_environment(server.url, "another secret", "ro-1", "at-1")}
    command = [sys.executable, "-W", "ignore", "-c", "import agentlightning as agl; agl.emit_reward(1.0)"]
    ended = await asyncio.to_thread(subprocess.run, command, env=environment, capture_output=True, timeout=60)
    assert ended.returncode == 1
    assert b"lost: HTTP 401" in ended.stderr
