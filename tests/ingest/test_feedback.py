"""Promises about what people say of recorded rollouts, by REST and by signed links."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import agentlightning as agl
from agentlightning.assemble import trajectory
from agentlightning.attempt_address import attempt_secret
from agentlightning.recording.feedback import FeedbackLink, read_link, sign_link
from agentlightning.server.app import Server

TOKEN = "the-token"


@pytest.fixture
async def server(store: agl.LightningStore) -> AsyncIterator[Server]:
    async with Server(store, secret=attempt_secret(TOKEN), token=TOKEN) as server:
        yield server


@pytest.fixture
async def rollout_id(store: agl.LightningStore) -> str:
    """A session that has ended with a reward of its own."""
    started = await store.start_rollout("a task")
    ids = started.rollout_id, started.attempt.attempt_id
    await store.add_span(
        agl.Span(*ids, "gen_ai.evaluation.result", 1.0, attributes={"gen_ai.evaluation.score.value": 0.3})
    )
    await store.update_attempt(*ids, status="succeeded")
    return started.rollout_id


async def post(server: Server, rollout_id: str, body: Any, token: str = TOKEN) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        headers = {"Authorization": f"Bearer {token}"}
        return await client.post(f"{server.url}/v1/agl/rollouts/{rollout_id}/feedback", json=body, headers=headers)


async def reward(store: agl.LightningStore, rollout_id: str) -> Any:
    spans = await store.query_spans(rollout_id)
    attempt = spans[0].attempt_id
    assert agl.find_final_reward(spans) == trajectory(rollout_id, attempt, spans).reward
    return agl.find_final_reward(spans)


async def test_a_score_becomes_the_final_reward(store: Any, server: Server, rollout_id: str) -> None:
    answer = await post(server, rollout_id, {"score": 0.9, "label": "correct", "comment": "right, and short"})
    assert answer.status_code == 201
    span = (await store.query_spans(rollout_id, span_id=answer.json()["span_id"]))[0]
    assert span.attributes["agentlightning.feedback.label"] == "correct"
    assert span.attributes["agentlightning.feedback.comment"] == "right, and short"
    assert await reward(store, rollout_id) == 0.9


async def test_a_label_alone_leaves_the_reward(store: Any, server: Server, rollout_id: str) -> None:
    assert (await post(server, rollout_id, {"label": "spam"})).status_code == 201
    spans = await store.query_spans(rollout_id, name="agentlightning.feedback")
    assert [span.attributes["agentlightning.feedback.label"] for span in spans] == ["spam"]
    assert await reward(store, rollout_id) == 0.3


async def test_a_repeat_changes_nothing_and_a_correction_counts(store: Any, server: Server, rollout_id: str) -> None:
    for score in (1.0, 1.0, 0.0, 0.0, 1.0):
        answer = await post(server, rollout_id, {"score": score, "source": "user-7"})
        assert await reward(store, rollout_id) == score
    assert answer.status_code == 201
    assert len(await store.query_spans(rollout_id)) == 4  # its own, and three different ones in turn


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 400, "says nothing"),
        ({"score": "high"}, 400, "score='high' is not a number"),
        ({"score": True}, 400, "score=True"),
        ({"score": 1e300}, 400, "score=1e"),
        ({"comment": 7}, 400, "comment=7 is not text"),
        ({"comment": "x" * 10_001}, 400, "10001 characters"),
        ({"source": 7, "score": 1}, 400, "source=7"),
        ({"stars": 5}, 400, "unknown fields"),
        ([1], 400, "is no object"),
    ],
)
async def test_bad_feedback_is_refused_by_name(
    server: Server, rollout_id: str, body: Any, status: int, words: str
) -> None:
    answer = await post(server, rollout_id, body)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


async def test_only_the_token_and_known_rollouts_count(server: Server, rollout_id: str) -> None:
    assert (await post(server, rollout_id, {"score": 1}, token="wrong")).status_code == 401
    assert (await post(server, "ro-unknown", {"score": 1})).status_code == 404
    async with httpx.AsyncClient() as client:
        url = f"{server.url}/v1/agl/rollouts/{rollout_id}/feedback"
        headers = {"Authorization": f"Bearer {TOKEN}"}
        assert (await client.post(url, content=b"{", headers=headers)).status_code == 400
        assert (await client.post(url, content=b" " * 70_000, headers=headers)).status_code == 413


async def test_a_link_leads_to_a_page_and_a_vote_is_a_reward(store: Any, server: Server, rollout_id: str) -> None:
    link = agl.feedback_link(rollout_id, server=server.url, token=TOKEN)
    async with httpx.AsyncClient() as client:
        page = await client.get(link)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "value=up" in page.text
        assert await reward(store, rollout_id) == 0.3  # opening it says nothing
        voted = await client.post(link, data={"vote": "up", "comment": "<b>thanks</b>"}, headers={"origin": server.url})
        assert (voted.status_code, "Thank you" in voted.text) == (200, True)
        await client.post(link, data={"vote": "up", "comment": "<b>thanks</b>"})
        assert await reward(store, rollout_id) == 1.0
        assert len(await store.query_spans(rollout_id)) == 2
        await client.post(link, data={"vote": "down"})
        assert await reward(store, rollout_id) == 0.0
        assert (await client.post(link, data={"vote": "sideways"})).status_code == 400
        assert (await client.post(link, content=b"&".join([b"a=1"] * 20))).status_code == 400
    span = (await store.query_spans(rollout_id))[1]
    assert span.attributes["agentlightning.feedback.label"] == "thumbs_up"
    assert span.attributes["agentlightning.feedback.comment"] == "<b>thanks</b>"


async def test_a_link_that_is_passed_on_gives_a_bounded_number_of_votes(
    store: Any, server: Server, rollout_id: str
) -> None:
    link = agl.feedback_link(rollout_id, server=server.url, token=TOKEN)
    before = len(await store.query_spans(rollout_id))
    async with httpx.AsyncClient() as client:
        statuses = [
            (await client.post(link, data={"vote": "up", "comment": str(number)})).status_code for number in range(40)
        ]
        assert statuses == [200] * 10 + [409] * 30
        assert len(await store.query_spans(rollout_id)) == before + 10
        assert (await client.post(link, data={"vote": "up", "comment": "9"})).status_code == 200, "the last one again"
        refused = await client.post(link, data={"vote": "down"})
        assert "has given 10 different feedbacks" in refused.text
        other = agl.feedback_link(rollout_id, server=server.url, token=TOKEN)
        assert (await client.post(other, data={"vote": "down"})).status_code == 200
    assert await reward(store, rollout_id) == 0.0


async def test_the_page_runs_and_loads_nothing(server: Server, rollout_id: str) -> None:
    async with httpx.AsyncClient() as client:
        page = await client.get(agl.feedback_link(rollout_id, server=server.url, token=TOKEN))
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert "script" not in page.text
    assert not re.search(r"(src|href)=", page.text)
    assert page.headers["cache-control"] == "no-store"
    assert page.headers["x-content-type-options"] == "nosniff"


async def test_links_that_are_forged_expired_or_of_another_server_are_refused(
    store: Any, server: Server, rollout_id: str
) -> None:
    secret = attempt_secret(TOKEN)
    link = agl.feedback_link(rollout_id, server=server.url, token=TOKEN)
    old = f"{server.url}/feedback/{sign_link(secret, FeedbackLink(rollout_id, 1.0, 'n'))}"
    other = agl.feedback_link(rollout_id, server=server.url, token="other")
    async with httpx.AsyncClient() as client:
        for bad, status in ((link[:-1] + "x", 403), (link + "1", 403), (other, 403), (old, 410)):
            for answer in (await client.get(bad), await client.post(bad, data={"vote": "up"})):
                assert answer.status_code == status
                assert "content-security-policy" in answer.headers
        missing = agl.feedback_link("ro-<script>", server=server.url, token=TOKEN)
        answer = await client.post(missing, data={"vote": "up"})
        assert answer.status_code == 404
        assert "<script>" not in answer.text
    assert await reward(store, rollout_id) == 0.3


@given(st.text(max_size=40), st.text(max_size=40))
def test_no_text_is_a_link_by_chance(secret: str, text: str) -> None:
    assert read_link(secret, text) is None


@given(st.text(min_size=1), st.floats(allow_nan=False, allow_infinity=False), st.text())
def test_a_link_says_what_was_signed(rollout_id: str, expiry: float, nonce: str) -> None:
    link = FeedbackLink(rollout_id, expiry, nonce)
    assert read_link("s", sign_link("s", link)) == link
    assert read_link("t", sign_link("s", link)) is None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"server": "hub.db"}, "no URL of a server"),
        ({"rollout_id": ""}, "is no id"),
        ({"expires_in": 0}, "expires_in=0"),
        ({"expires_in": float("nan")}, "expires_in=nan"),
    ],
)
def test_values_that_make_no_link_are_refused_by_name(wrong: Any, words: str) -> None:
    with pytest.raises(agl.errors.ConfigError, match=words):
        agl.feedback_link(**({"rollout_id": "ro-1", "server": "http://127.0.0.1:1"} | wrong))


def test_the_server_of_a_link_is_by_default_that_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_STORE", "http://hub:4747/")
    assert agl.feedback_link("ro-1").startswith("http://hub:4747/feedback/")
    monkeypatch.delenv("AGL_STORE")
    with pytest.raises(agl.errors.ConfigError, match="server='http://host:4747'"):
        agl.feedback_link("ro-1")
