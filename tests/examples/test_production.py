"""The example of a web service: sessions and their late feedback are learned from at night."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest
from tests.support.threads import in_thread

import agentlightning as agl
from agentlightning.assemble import trajectory
from agentlightning.attempt_address import attempt_secret
from agentlightning.gateway.app import Gateway
from agentlightning.server.app import Server
from agentlightning.testing import ScriptedEngine

Load = Callable[[str, str], ModuleType]
HERE = Path(__file__).parents[2] / "examples" / "production"


TOKEN = "the-token"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, agl.LightningStore]]:
    """URL and store of a model server, in a thread: the service waits for it."""

    @asynccontextmanager
    async def serve() -> AsyncIterator[tuple[str, agl.LightningStore]]:
        store, secret = agl.LightningStore(tmp_path / "served.db"), attempt_secret(TOKEN)
        engine = ScriptedEngine(lambda messages: "billing" if "invoice" in messages[-1]["content"] else "shipping")
        gateway = Gateway(store, {"support": engine}, secret=secret, default_model="support")
        async with Server(store, gateway, secret=secret, token=TOKEN) as running:
            yield running.url, store
        await store.close()

    with in_thread(serve) as served:
        yield served


@pytest.fixture
async def web(
    server: tuple[str, agl.LightningStore], module_of: Load, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    """A client of the service, and the store of its server."""
    pytest.importorskip("fastapi", reason="pip install fastapi")
    monkeypatch.setenv("AGL_STORE", server[0])
    monkeypatch.setenv("AGL_TOKEN", TOKEN)
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server[0]}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", TOKEN)
    service = module_of("production", "service")
    async with service.lifespan(service.app):
        transport = httpx.ASGITransport(service.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            yield client, server[1]


async def test_a_session_is_recorded_with_the_tokens_of_its_call_and_feedback_is_its_reward(web: Any) -> None:
    client, store = web
    answer = (await client.post("/ask", json={"text": "my invoice is wrong"})).json()
    assert answer["department"] == "billing"
    assert (await client.post("/feedback", json={"session": answer["session"], "score": 1.0})).status_code == 204
    assert await asyncio.to_thread(agl.flush_recording)
    spans = await asyncio.to_thread(lambda: asyncio.run(store.query_spans(answer["session"])))
    found = trajectory(answer["session"], spans[0].attempt_id, spans)
    assert found.reward == 1.0
    assert [call.agent for call in found.transitions] == ["support"]
    assert bytes(found.transitions[0].response_token_ids[:7]) == b"billing"
    assert len(found.transitions[0].logprobs) == len(found.transitions[0].response_token_ids)


async def test_a_model_server_that_refuses_is_a_503_and_a_session_that_failed(
    web: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, store = web
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/none")
    monkeypatch.setattr("support.AsyncOpenAI", lambda max_retries: openai.AsyncOpenAI(max_retries=0))
    answer = await client.post("/ask", json={"text": "my invoice is wrong"})
    assert answer.status_code == 503
    assert "the model does not answer" in answer.json()["detail"]
    assert await asyncio.to_thread(agl.flush_recording)
    (rollout,) = await asyncio.to_thread(lambda: asyncio.run(store.query_rollouts()))
    assert rollout.status == "failed"


async def test_feedback_on_nothing_and_feedback_out_of_range_are_refused(web: Any) -> None:
    client, _ = web
    assert (await client.post("/feedback", json={"session": "ro-0", "score": 1.0})).status_code == 404
    answer = (await client.post("/ask", json={"text": "where is my parcel"})).json()
    assert (await client.post("/feedback", json={"session": answer["session"], "score": 7})).status_code == 422
    assert (await client.post("/ask", json={"text": ""})).status_code == 422


def test_the_link_moves_to_the_new_model_and_never_points_nowhere(tmp_path: Path, module_of: Load) -> None:
    learn = module_of("production", "learn")
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    learn.point(tmp_path / "current", tmp_path / "old")
    assert (tmp_path / "current").resolve() == tmp_path / "old"
    learn.point(tmp_path / "current", tmp_path / "new")
    assert (tmp_path / "current").resolve() == tmp_path / "new"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["current", "new", "old"]


@pytest.mark.slow
def test_a_night_without_sessions_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "current").symlink_to(tmp_path / "model")
    golden = tmp_path / "golden.jsonl"
    golden.write_text(json.dumps({"question": "where is my parcel", "department": "shipping"}) + "\n")
    options = ["--store", tmp_path / "store.db", "--current", tmp_path / "current", "--golden", golden]
    ran = subprocess.run(
        [sys.executable, "learn.py", *options, "--runs", tmp_path / "nights"], cwd=HERE, capture_output=True, text=True
    )
    assert ran.returncode == 3, ran.stderr[-2000:]
    assert "nothing learned" in ran.stderr
    assert (tmp_path / "current").resolve() == tmp_path / "model"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_day_a_night_and_another_day(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="pip install fastapi")
    program = (
        "import json, pathlib, sys, day_and_night;"
        "print(json.dumps(day_and_night.main(pathlib.Path(sys.argv[1]), sessions=60, golden=12)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "days"], cwd=HERE, capture_output=True, text=True, env={**os.environ}
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["sessions learned from"] == 54
    assert found["left out"] == {"missing_reward": 6}
    assert found["method"] == "importance"
    assert found["golden questions"]["tasks"] == 12
