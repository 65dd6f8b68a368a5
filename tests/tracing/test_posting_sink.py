"""A program that runs for one attempt: what it emits is sent to the attempt its environment names."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agentlightning.attempt_variables import attempt_environment
from agentlightning.server.app import Server
from agentlightning.span import AGENT_NAME, MESSAGE, OPERATION, REWARD, Span
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracing.posting_sink import PostingSink
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
async def store() -> AsyncIterator[Any]:
    store = InMemoryLightningStore()
    yield store
    await store.close()


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


def test_a_server_that_is_gone_costs_a_warning_and_no_exception(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agentlightning.tracing.posting_sink.RETRY_DELAYS_SECONDS", (0.0, 0.0))
    sink = PostingSink("http://127.0.0.1:9", "k")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            sink.put((Span("ro", "at", "x", 1.0),))
    [warned] = caplog.messages
    assert "could not be sent to http://127.0.0.1:9" in warned
