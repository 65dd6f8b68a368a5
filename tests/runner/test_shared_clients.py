"""A client that was made once, at import or in the first attempt, serves every attempt of its process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentlightning.attempt_variables import import_environment
from agentlightning.gateway.app import Gateway
from agentlightning.server.app import Server
from agentlightning.span import AGENT_NAME, ATTRIBUTION, INPUT_MESSAGES
from agentlightning.testing import ScriptedEngine

pytestmark = pytest.mark.integration

SECRET = "a secret"

AGENT = """
import os
from functools import cache

import httpx

import agentlightning as agl

AT_IMPORT = httpx.AsyncClient(
    base_url=os.environ["OPENAI_BASE_URL"],
    headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    timeout=30,
)


@cache
def lazily():
    return httpx.AsyncClient(
        base_url=os.environ["OPENAI_BASE_URL"],
        headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
        timeout=30,
    )


async def ask(client, text):
    asked = {"model": "scripted", "messages": [{"role": "user", "content": text}]}
    answer = await client.post("/chat/completions", json=asked)
    answer.raise_for_status()


async def agent(task):
    with agl.track_agent("importer"):
        await ask(AT_IMPORT, task["word"])
    await ask(lazily(), task["word"])
    return 1.0
"""


@pytest.fixture
async def server(store: Any) -> AsyncIterator[Server]:
    engine = ScriptedEngine(lambda messages: "yes")
    async with Server(store, Gateway(store, {"scripted": engine}, secret=SECRET, require_key=True), secret=SECRET) as s:
        yield s


async def test_calls_of_shared_clients_belong_to_the_attempt_that_makes_them(
    start: Any, roll: Any, store: Any, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-its-user")
    (tmp_path / "shared.py").write_text(AGENT)
    await start(f"{tmp_path}/shared.py:agent", server_url=server.url, secret=SECRET, concurrency=8)
    words = [f"word-{number}" for number in range(24)]
    ended = await roll(*({"word": word} for word in words))
    assert {rollout.status for rollout in ended} == {"succeeded"}
    for rollout in ended:
        calls = [span for span in await store.query_spans(rollout.rollout_id) if ATTRIBUTION in span.attributes]
        assert [rollout.input["word"] in span.attributes[INPUT_MESSAGES] for span in calls] == [True, True]
        assert [span.attributes.get(AGENT_NAME) for span in calls] == ["importer", None]
        assert [span.attributes[ATTRIBUTION] for span in calls] == ["header", "header"]


SHARING = Path(__file__).with_name("sharing_agents.py")


@pytest.fixture
def calls_of(start: Any, roll: Any, store: Any, server: Server) -> Any:
    """calls_of(agent, size) -> for each of many rollouts of the agent in one process, `size` at a time: its status, why
    it failed, and for each call recorded under it whether it is its own"""

    async def calls_of(agent: str, size: int = 6) -> list[tuple[str, str, list[bool]]]:
        await start(f"{SHARING}:{agent}", server_url=server.url, secret=SECRET, concurrency=size, redirect=True)
        found: list[tuple[str, str, list[bool]]] = []
        for rollout in await roll(*({"word": f"word-{number:02}"} for number in range(12)), wait=120):
            spans = [span for span in await store.query_spans(rollout.rollout_id) if INPUT_MESSAGES in span.attributes]
            own = [rollout.input["word"] in str(span.attributes[INPUT_MESSAGES]) for span in spans]
            attempt = await store.get_latest_attempt(rollout.rollout_id)
            found.append((rollout.status, str(attempt.metadata.get("error", "")), own))
        return found

    return calls_of


async def test_attempts_that_share_a_client_and_a_connection_to_tools_keep_their_calls(calls_of: Any) -> None:
    for status, error, own in await calls_of("with_tools"):
        assert (status, error, own) == ("succeeded", "", [True] * 3)


@pytest.mark.parametrize(("agent", "size"), [("with_worker", 6), ("with_list", 1)])
async def test_a_task_that_works_for_several_is_refused_and_its_attempts_get_processes(
    agent: str, size: int, calls_of: Any, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    for status, error, own in await calls_of(agent, size):
        assert (status, error, own) == ("succeeded", "", [True])
    assert server.gateway is not None
    assert server.gateway.metrics()["attribution_refused"] >= 1
    assert [text for text in caplog.messages if "that its attempt does not wait for" in text]


async def test_a_judge_keeps_the_key_it_has_and_what_an_agent_sets_stays(
    start: Any, roll: Any, rewards_of: Any, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-judge")
    (tmp_path / "own.py").write_text(
        "import os\n"
        "KEY = os.environ['OPENAI_API_KEY']\n"
        "os.environ['SET_BY_AGENT'] = 'yes'\n"
        "def agent(task):\n"
        "    return KEY == 'sk-agentlightning' and os.environ['SET_BY_AGENT'] == 'yes'\n"
    )
    (tmp_path / "judge.py").write_text(
        "import os\n"
        "KEY = os.environ['OPENAI_API_KEY']\n"
        "def judge(output):\n"
        "    return float(output is True and KEY == 'sk-judge')\n"
    )
    reward = f"{tmp_path}/judge.py:judge"
    await start(f"{tmp_path}/own.py:agent", reward=reward, server_url=server.url, secret=SECRET)
    [ended] = await roll({})
    assert await rewards_of(ended) == [1.0]


def test_the_address_an_agent_is_imported_with_is_its_workers() -> None:
    own = import_environment("http://127.0.0.1:1", SECRET, "w")
    assert own["AGL_WORKER_BASE_URL"] == "http://127.0.0.1:1/worker/w/v1"
    assert own["OPENAI_BASE_URL"] == f"http://127.0.0.1:1/key/{own['AGL_WORKER_KEY']}/v1"
    assert own["ANTHROPIC_BASE_URL"] == f"http://127.0.0.1:1/key/{own['AGL_WORKER_KEY']}"
