"""What agents emit reaches the store, whatever it holds, and never ends the runner that writes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.rollouts import EnqueueRolloutRequest
from agentlightning.runner.runner import SpanWriter
from agentlightning.server.app import Server
from agentlightning.span import MESSAGE_BODY, REWARD, SCORE_VALUE, Span, new_span_id
from agentlightning.store import InMemoryLightningStore, LightningStoreBase, LightningStoreClient
from agentlightning.tracing.outbox import Retry
from agentlightning.tracing.tracer import tracer

pytestmark = pytest.mark.integration


def odd(task: dict[str, Any]) -> None:
    """An agent that says what JSON and databases cannot hold, as models and instrumentors make it say."""
    agl.emit_message("cut in an emoji \ud83d")
    agl.emit_annotation({"score": float("nan"), "count": 2**80})
    tracer().start_span("a\0b").end()
    agl.emit_reward(1.0)
    if "fail" in task:
        raise ValueError("cut in an emoji \ud83d")


async def test_what_cannot_be_stored_as_it_is_is_stored_as_text_and_nothing_beside_it_is_lost(
    start: Any, roll: Any, store: Any, attempt_of: Any
) -> None:
    runner = await start(odd)
    good, failed = await roll({}, {"fail": True}, wait=20)
    assert (good.status, failed.status, runner.error) == ("succeeded", "failed", None)
    message, annotation, named, reward = await store.query_spans(good.rollout_id)
    assert message.attributes[MESSAGE_BODY] == "cut in an emoji \ufffd"
    assert (annotation.attributes["score"], annotation.attributes["count"]) == ("NaN", str(2**80))
    assert named.name == "a\ufffdb"
    assert (reward.name, reward.attributes[SCORE_VALUE]) == (REWARD, 1.0)
    error = (await attempt_of(failed)).metadata["error"]
    assert error["message"] == "cut in an emoji \\ud83d"


@pytest.fixture(params=["here", "over HTTP"])
async def written(request: pytest.FixtureRequest) -> AsyncIterator[LightningStoreBase]:
    store = InMemoryLightningStore()
    if request.param == "here":
        yield store
    else:
        async with Server(store, secret="s") as server:
            client = LightningStoreClient(server.url)
            yield client
            await client.close()
    await store.close()


async def test_one_span_that_no_store_takes_costs_nothing_but_itself(
    written: LightningStoreBase, caplog: pytest.LogCaptureFixture
) -> None:
    (rollout,) = await written.enqueue_many_rollouts([EnqueueRolloutRequest({})])
    claimed = await written.dequeue_rollout()
    assert claimed is not None
    assert claimed.rollout_id == rollout.rollout_id

    def span(name: str, **fields: Any) -> Span:
        fields = {"span_id": new_span_id(), "attributes": {"cut": "\ud83d"}, **fields}
        return Span(claimed.rollout_id, claimed.attempt.attempt_id, name, 1.0, 2.0, **fields)

    writer = SpanWriter(written, Retry(5.0))
    work = asyncio.create_task(writer.run())
    writer.put([span("one"), span("two", span_id="x" * 600), span("three")])
    await asyncio.wait_for(writer.written(), 10)
    assert [each.name for each in await written.query_spans(claimed.rollout_id)] == ["one", "three"]
    assert "rejects span 'two'" in caplog.text
    assert (writer.counts.sent, writer.counts.dropped) == (2, 1)
    work.cancel()
