"""An address in an agent's code gets a placeholder as its API key, never the key of an attempt; the calls of the agent
itself are attributed all the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentlightning.gateway.app import Gateway
from agentlightning.resources import LLM
from agentlightning.server.app import Server
from agentlightning.span import ATTRIBUTION
from agentlightning.testing import ScriptedEngine

pytestmark = pytest.mark.integration

SECRET = "a secret"
PLACEHOLDER = "sk-agentlightning"

AGENTS = """
import json, os, sys

import httpx
from anthropic import Anthropic
from openai import OpenAI

import agentlightning as agl

SAID = [{"role": "user", "content": "hi"}]


def ask(third_party, **given):
    # The keys come from the environment, as SDKs read them.
    for url in (third_party, None):
        client = OpenAI(base_url=url and url + "/v1", max_retries=0, **(given if url else {}))
        client.chat.completions.create(model="scripted", messages=SAID)
        Anthropic(base_url=url, max_retries=0).messages.create(model="scripted", messages=SAID, max_tokens=9)


AT_IMPORT = OpenAI(base_url=os.environ.get("THIRD_PARTY"), max_retries=0)


def function(task):
    ask(task)
    AT_IMPORT.chat.completions.create(model="scripted", messages=SAID)
    return 1.0


async def coroutine(task, base_url, api_key):
    ask(task, api_key=api_key)
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {api_key}"}) as client:
        for url in (f"{task}/v1", base_url):
            answer = await client.post(f"{url}/chat/completions", json={"model": "scripted", "messages": SAID})
            answer.raise_for_status()
    return 1.0


class Lit(agl.LitAgent):
    def rollout(self, task, resources, rollout):
        ask(task, api_key=resources["main"].api_key)
        return 1.0


class OneDotZero:
    def run(self):
        ask(json.loads(os.environ["AGL_TASK"]))
        own = OpenAI(base_url=os.environ["AGL_OPENAI_BASE_URL"], api_key=os.environ["AGL_KEY"])
        own.chat.completions.create(model="scripted", messages=SAID)


if __name__ == "__main__":
    ask(json.loads(sys.stdin.read()))
    agl.emit_reward(1.0)
"""


class ThirdParty(ThreadingHTTPServer):
    """A provider of somebody else, which records everything that it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Recorder)
        self.sent: list[str] = []
        self.keys: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Recorder(BaseHTTPRequestHandler):
    server: ThirdParty

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        self.server.sent.append(f"{self.path}\n{self.headers}\n{body}")
        self.server.keys.add(self.headers.get("x-api-key") or self.headers["authorization"].removeprefix("Bearer "))
        text = {"type": "text", "text": "yes"}
        message = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": [text]}
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}
        chat = {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        usage = {"usage": {"input_tokens": 1, "output_tokens": 1}, "stop_reason": "end_turn"}
        answer = json.dumps(message | usage if self.path.endswith("messages") else chat).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def third_party() -> Iterator[ThirdParty]:
    with ThirdParty() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
async def server(store: Any) -> AsyncIterator[Server]:
    engine = ScriptedEngine(lambda messages: "yes")
    async with Server(store, Gateway(store, {"scripted": engine}, secret=SECRET, require_key=True), secret=SECRET) as s:
        yield s


@pytest.mark.parametrize(
    ("agent", "calls"), [("function", 2), ("coroutine", 3), ("Lit", 2), ("OneDotZero", 3), ("a command", 2)]
)
async def test_an_address_in_the_code_gets_a_placeholder_and_own_calls_are_attributed(
    agent: str,
    calls: int,
    start: Any,
    roll: Any,
    store: Any,
    server: Server,
    third_party: ThirdParty,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("THIRD_PARTY", f"{third_party.url}/v1")
    file = tmp_path / "agents.py"
    file.write_text(AGENTS)
    llm = LLM(endpoint=server.url, model="scripted", policy_version=1)
    await store.add_resources({"main": llm})
    given = [sys.executable, str(file)] if agent == "a command" else f"{file}:{agent}"
    await start(given, server_url=server.url, secret=SECRET, concurrency=2, redirect=True)
    for rollout in await roll(*[third_party.url] * 3):
        attempt = await store.get_latest_attempt(rollout.rollout_id)
        assert (rollout.status, attempt.metadata.get("error")) == ("succeeded", None)
        spans = [span for span in await store.query_spans(rollout.rollout_id) if ATTRIBUTION in span.attributes]
        assert [span.attempt_id for span in spans] == [attempt.attempt_id] * calls
    assert third_party.keys == {PLACEHOLDER}
    assert not [text for text in third_party.sent if "agl-" in text]
    assert "agentlightning" not in "".join(third_party.sent).replace(PLACEHOLDER, "")


TRAINED = """
import os

from openai import OpenAI

SAID = [{"role": "user", "content": "hi"}]


def agent(question):
    OpenAI(base_url=os.environ["THIRD_PARTY"], max_retries=0).chat.completions.create(model="policy", messages=SAID)
    own = OpenAI(max_retries=0).chat.completions.create(model="policy", messages=SAID, max_tokens=2)
    return float(len(own.choices[0].message.content or "") % 2)
"""


def test_a_training_run_keeps_the_keys_of_its_attempts_from_third_parties(
    third_party: ThirdParty, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(TRAINED)
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"question": "{n}"}}\n' for n in range(60)))
    command = [str(Path(sys.executable).parent / "agl"), "train", "--agent", "agent.py:agent"]
    command += ["--data", "tasks.jsonl", "--model", "tiny", "--run", "run", "algorithm.steps=1"]
    command += ["algorithm.tasks_per_step=2", "algorithm.group_size=2", "evaluation.every=0"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "THIRD_PARTY": f"{third_party.url}/v1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["sampled_tokens"] > 0, "own calls reach the policy"
    assert third_party.keys == {PLACEHOLDER}
