"""A real store, real runners, and a small server that stands in for the gateway."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from agentlightning.attempt_address import read_attempt_key
from agentlightning.attempt_variables import attempt_environment
from agentlightning.rollouts import Attempt, AttemptedRollout, EnqueueRolloutRequest, Rollout, RolloutConfig
from agentlightning.runner.agents.arguments import Invocation
from agentlightning.runner.runner import Runner
from agentlightning.span import REWARD, SCORE_VALUE, Span, new_span_id
from agentlightning.store import LightningStoreBase

SECRET = "a secret"
SERVER = "http://127.0.0.1:9"
"""Nobody listens there."""


@pytest.fixture
async def start(store: LightningStoreBase) -> AsyncIterator[Callable[..., Awaitable[Runner]]]:
    """Start a runner for an agent; it is stopped when the test ends."""
    runners: list[Runner] = []

    async def start(agent: Any, **options: Any) -> Runner:
        defaults = {"secret": SECRET, "server_url": SERVER, "grace": 0.2, "poll_seconds": 0.05}
        runner = Runner(store, agent, **{**defaults, **options})
        runners.append(runner)
        await runner.start()
        return runner

    yield start
    for runner in runners:
        await runner.stop(0)


@pytest.fixture
def roll(store: LightningStoreBase) -> Callable[..., Awaitable[list[Rollout]]]:
    """Queue a rollout for each task and wait for their ends."""

    async def roll(*tasks: Any, mode: Any = "train", wait: float = 30, **config: Any) -> list[Rollout]:
        requests = [EnqueueRolloutRequest(task, mode=mode, config=RolloutConfig(**config)) for task in tasks]
        queued = await store.enqueue_many_rollouts(requests)
        ids = [rollout.rollout_id for rollout in queued]
        return await store.wait_for_rollouts(rollout_ids=ids, timeout=wait)

    return roll


@pytest.fixture
def attempt_of(store: LightningStoreBase) -> Callable[[Rollout], Awaitable[Attempt]]:
    """The latest attempt of a rollout."""

    async def attempt_of(rollout: Rollout) -> Attempt:
        attempt = await store.get_latest_attempt(rollout.rollout_id)
        assert attempt is not None
        return attempt

    return attempt_of


@pytest.fixture
def rewards_of(store: LightningStoreBase) -> Callable[[Rollout], Awaitable[list[Any]]]:
    """The plain rewards of a rollout, in the store's order."""

    async def rewards_of(rollout: Rollout) -> list[Any]:
        spans = await store.query_spans(rollout.rollout_id, name=REWARD)
        return [span.attributes.get(SCORE_VALUE) for span in spans]

    return rewards_of


@pytest.fixture
def make_call() -> Callable[..., Invocation]:
    """One attempt as an agent sees it, without a runner."""

    def make_call(task: Any = None, resources: Any = None, mode: Any = "train") -> Invocation:
        attempt = Attempt("ro-1", "at-1", 1, time.time())
        rollout = AttemptedRollout("ro-1", task, time.time(), mode=mode, attempt=attempt)
        return Invocation(rollout, resources or {}, attempt_environment(SERVER, SECRET, "ro-1", "at-1"), task)

    return make_call


# -- a stand-in for the gateway --------------------------------------------------------------------------------------


@dataclass
class Gateway:
    """Answers model calls from a script, and keeps posted rewards in the store."""

    store: LightningStoreBase
    loop: asyncio.AbstractEventLoop
    script: Sequence[dict[str, Any]] = ()
    requests: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        _, kind, *rest = path.split("/")
        if kind == "key":
            key, *rest = rest
            rollout_id, attempt_id = read_attempt_key(SECRET, key) or ("", "")
        else:
            rollout_id, _, attempt_id, *rest = rest
        if rest == ["events"]:
            now = time.time()
            attributes = {SCORE_VALUE: body["data"]["value"]}
            self.keep(Span(rollout_id, attempt_id, REWARD, now, now, span_id=new_span_id(), attributes=attributes))
            return {}
        assert rest == ["v1", "chat", "completions"]
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        time.sleep(0.05)  # a model takes its time
        now = time.time()
        self.keep(Span(rollout_id, attempt_id, "chat", now, now, span_id=new_span_id()))
        message = {"role": "assistant", **self.script[turn]}
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "finish_reason": reason, "message": message}
        return {"id": "c", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}

    def keep(self, span: Span) -> None:
        asyncio.run_coroutine_threadsafe(self.store.add_span(span), self.loop).result(10)


@pytest.fixture
async def gateway(store: LightningStoreBase) -> AsyncIterator[Gateway]:
    gateway = Gateway(store, asyncio.get_running_loop())
    with _serving(gateway) as url:
        gateway.url = url
        yield gateway


class _serving:
    def __init__(self, gateway: Gateway) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                key = self.headers["Authorization"]
                gateway.requests.append({"path": self.path, "key": key, "body": body})
                data = json.dumps(gateway.answer(self.path, body)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))

    def __enter__(self) -> str:
        self.thread.start()
        return f"http://127.0.0.1:{self.server.server_port}"

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
