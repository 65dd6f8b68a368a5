"""A reward function that asks a model: never the policy, and never part of what is learned from."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentlightning.assemble import calls
from agentlightning.gateway.app import Gateway
from agentlightning.server.app import Server
from agentlightning.span import AGENT_NAME, ATTRIBUTION, JUDGE, MESSAGE, MESSAGE_BODY, REWARD_MISSING
from agentlightning.testing import ScriptedEngine

pytestmark = pytest.mark.integration

SECRET = "a secret"

CODE = """
import os
import httpx
import agentlightning as agl

def client():
    return httpx.Client(
        base_url=os.environ["OPENAI_BASE_URL"], headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    )

SHARED = client()

def ask(client, model):
    reply = client.post("/chat/completions", json={"model": model, "messages": [{"role": "user", "content": "hi"}]})
    if reply.status_code != 200:
        raise RuntimeError(reply.text)
    return reply.json()["choices"][0]["message"]["content"]

def agent(task):
    return ask(client(), "policy")

async def agent_async(task):
    return ask(client(), "policy")

def judge(output):
    agl.emit_message("judging")
    assert "AGL_KEY" not in os.environ and "AGL_EVENT_URL" not in os.environ
    return float(ask(client(), "gpt-4o-mini") == "from the provider" and output == "from the policy")

def judge_with_the_agents_client(output):
    return float(ask(SHARED, "gpt-4o-mini") == "from the provider")
"""


@pytest.fixture
def provider() -> Iterator[Any]:
    """Where model calls of the process that runs the runner always go."""
    seen: list[tuple[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((body["model"], self.headers["Authorization"]))
            data = json.dumps({"choices": [{"message": {"content": "from the provider"}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.seen = seen  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
async def server(store: Any, provider: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{provider.server_port}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-its-user")
    engine = ScriptedEngine(lambda messages: "from the policy")
    gateway = Gateway(store, {"policy": engine}, secret=SECRET, default_model="policy", accept_any_model=True)
    async with Server(store, gateway, secret=SECRET) as s:
        yield s


@pytest.mark.parametrize("agent", ["agent", "agent_async"])
async def test_a_judge_is_answered_where_it_always_is_and_not_learned_from(
    agent: str, start: Any, roll: Any, rewards_of: Any, store: Any, server: Server, provider: Any, tmp_path: Path
) -> None:
    code = tmp_path / "judged.py"
    code.write_text(CODE)
    await start(f"{code}:{agent}", reward=f"{code}:judge", server_url=server.url, secret=SECRET)
    [ended] = await roll({})
    assert (ended.status, await rewards_of(ended)) == ("succeeded", [1.0])
    assert provider.seen == [("gpt-4o-mini", "Bearer sk-of-its-user")]
    spans = await store.query_spans(ended.rollout_id)
    assert [ATTRIBUTION in span.attributes for span in calls(spans)] == [True]
    [said] = [span for span in spans if span.name == MESSAGE]
    assert [said.attributes.get(name) for name in (MESSAGE_BODY, AGENT_NAME, JUDGE)] == ["judging", "judge", True]


async def test_a_judge_that_takes_the_client_of_the_agent_is_refused_with_the_way_out(
    start: Any, roll: Any, attempt_of: Any, store: Any, server: Server, provider: Any, tmp_path: Path
) -> None:
    code = tmp_path / "judged.py"
    code.write_text(CODE)
    reward = f"{code}:judge_with_the_agents_client"
    await start(f"{code}:agent", reward=reward, server_url=server.url, secret=SECRET)
    [ended] = await roll({})
    error = (await attempt_of(ended)).metadata["error"]["message"]
    assert (ended.status, provider.seen) == ("failed", [])
    assert "Make a client in the reward function" in error
    assert len(calls(await store.query_spans(ended.rollout_id))) == 1


JUDGES = """
import agentlightning as agl

def agent(task):
    return "an answer"

def judge(**settings):
    return agl.LLMJudge("a-judge", "Good.", retries=0, backoff=0.0, **settings)

at_provider = judge(base_url={provider!r})
too_slow = judge(base_url={provider!r}, timeout=0.001)
the_policy = judge(base_url={server!r})
"""


async def judged(name: str, start: Any, roll: Any, server: Server, provider: Any, tmp_path: Path) -> Any:
    code = tmp_path / f"{name}.py"
    urls = {"provider": f"http://127.0.0.1:{provider.server_port}/v1", "server": f"{server.url}/v1"}
    code.write_text(JUDGES.format(**urls))
    await start(f"{code}:agent", reward=f"{code}:{name}", server_url=server.url, secret=SECRET)
    [ended] = await roll({})
    return ended


async def test_a_judge_without_a_score_leaves_the_reward_missing_and_says_why(
    start: Any, roll: Any, rewards_of: Any, store: Any, server: Server, provider: Any, tmp_path: Path
) -> None:
    """The provider's answer has no score in it."""
    ended = await judged("at_provider", start, roll, server, provider, tmp_path)
    assert (ended.status, await rewards_of(ended)) == ("succeeded", [])
    [reason] = [span for span in await store.query_spans(ended.rollout_id) if REWARD_MISSING in span.attributes]
    assert "gave no score" in reason.attributes[REWARD_MISSING]
    assert not calls(await store.query_spans(ended.rollout_id)), "what a judge asks is no part of the rollout"
    assert provider.seen == [("a-judge", "Bearer sk-of-its-user")]


async def test_a_judge_that_times_out_leaves_the_reward_missing(
    start: Any, roll: Any, rewards_of: Any, store: Any, server: Server, provider: Any, tmp_path: Path
) -> None:
    ended = await judged("too_slow", start, roll, server, provider, tmp_path)
    assert (ended.status, await rewards_of(ended)) == ("succeeded", [])


async def test_a_judge_that_asks_the_policy_in_training_is_refused(
    start: Any, roll: Any, attempt_of: Any, store: Any, server: Server, provider: Any, tmp_path: Path
) -> None:
    ended = await judged("the_policy", start, roll, server, provider, tmp_path)
    assert ended.status == "failed"
    assert "answered 401" in (await attempt_of(ended)).metadata["error"]["message"], "it has no key of an attempt"
    assert not calls(await store.query_spans(ended.rollout_id))
