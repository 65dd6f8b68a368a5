"""Promises about model calls that a session sends to a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from tests.support.threads import in_thread

import agentlightning as agl
from agentlightning.assemble import trajectory
from agentlightning.attempt_address import attempt_secret
from agentlightning.gateway.app import Gateway
from agentlightning.recording.session import Session
from agentlightning.server.app import Server
from agentlightning.testing import ScriptedEngine

TOKEN = "the-token"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, agl.LightningStore]]:
    """The URL and the store of a server with a gateway, in a thread of its own."""

    @asynccontextmanager
    async def serve() -> AsyncIterator[tuple[str, agl.LightningStore]]:
        store, secret = agl.LightningStore(tmp_path / "served.db"), attempt_secret(TOKEN)
        gateway = Gateway(store, {"scripted": ScriptedEngine(["42", "43", "44", "45"])}, secret=secret)
        async with Server(store, gateway, secret=secret, token=TOKEN) as server:
            yield server.url, store
        await store.close()

    with in_thread(serve) as served:
        yield served


BODY = {"model": "scripted", "messages": [{"role": "user", "content": "6 x 7?"}]}


def test_they_are_calls_of_the_session_with_their_tokens(
    server: tuple[str, agl.LightningStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, store = server
    monkeypatch.setenv("AGL_STORE", url)
    monkeypatch.setenv("AGL_TOKEN", TOKEN)
    sessions: list[Session] = []
    with httpx.Client() as client:
        for reward in (1.0, 0.0):
            with agl.track_session("6 x 7?") as session, agl.track_agent("writer"):
                answer = client.post(f"{url}/v1/chat/completions", json=BODY)
                assert answer.status_code == 200, answer.text
                agl.emit_reward(reward)
            sessions.append(session)
    assert agl.flush_recording()
    for session, reward in zip(sessions, (1.0, 0.0), strict=True):
        ids = session.rollout_id, session.attempt_id
        found = trajectory(*ids, asyncio.run(store.query_spans(*ids)))
        assert (len(found.transitions), found.reward) == (1, reward)
        assert found.transitions[0].agent == "writer"
        assert len(found.transitions[0].logprobs) == len(found.transitions[0].response_token_ids) > 0


def test_a_session_that_is_not_recorded_names_no_attempt(
    server: tuple[str, agl.LightningStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, store = server
    monkeypatch.setenv("AGL_STORE", url)
    agl.configure_recording(sampling_rate=0)
    with agl.track_session(), httpx.Client() as client:
        sent = client.build_request("POST", f"{url}/v1/chat/completions", json=BODY)
        client.send(sent)
        assert "x-agentlightning-attempt" not in sent.headers
    assert asyncio.run(store.query_rollouts()) == []
