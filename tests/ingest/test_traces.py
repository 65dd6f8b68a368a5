"""Promises about traces of programs that know nothing of rollouts, where the server is told to keep them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentlightning import span as names
from agentlightning.ingest import otlp as traces_module
from agentlightning.ingest.otlp import QUEUE, OtlpReceiver, UnknownTraces, ids_of_trace
from agentlightning.rollouts import Rollout
from agentlightning.span import Span
from agentlightning.store import LightningStore, LightningStoreBase
from agentlightning.tracing.otlp.codec import Request

TRACE, OTHER = "0af7651916cd43dd8448eb211c80319c", "1" * 32


def span(span_id: str, parent_id: str | None = None, trace_id: str = TRACE, **fields: Any) -> Span:
    attributes = fields.pop("attributes", {})
    status = fields.pop("status", "UNSET")
    resource = {"service.name": "shop"}
    return Span("", "", "work", 1.0, 2.0, 0, trace_id, span_id, parent_id, status, None, attributes, (), resource)


@asynccontextmanager
async def receiver(store: LightningStoreBase) -> AsyncGenerator[OtlpReceiver]:
    otlp = OtlpReceiver(store, "secret", adopt=True)
    await otlp.start()
    yield otlp
    await otlp.close()


async def adopted(store: LightningStoreBase, trace_id: str = TRACE) -> Rollout:
    rollout = await store.get_rollout_by_id(ids_of_trace(trace_id)[0])
    assert rollout is not None
    return rollout


async def test_each_unknown_trace_becomes_a_rollout(store: LightningStoreBase) -> None:
    async with receiver(store) as otlp:
        refused = await otlp.store_spans(Request([span("a", "b"), span("c", "d", OTHER), span("e", "b")]))
    assert not refused
    first, second = await store.query_rollouts()
    assert {first.queue, second.queue} == {QUEUE}
    assert (first.status, first.mode, first.metadata) == (
        "running",
        None,
        {"source": "otlp", "trace_id": TRACE, "service": "shop"},
    )
    assert [kept.span_id for kept in await store.query_spans(first.rollout_id)] == ["a", "e"]
    assert [kept.span_id for kept in await store.query_spans(second.rollout_id)] == ["c"]


@pytest.mark.parametrize(("status", "ends"), [("UNSET", "succeeded"), ("OK", "succeeded"), ("ERROR", "failed")])
async def test_it_ends_as_its_root_does_and_keeps_what_it_was_asked(
    store: LightningStoreBase, status: str, ends: str
) -> None:
    async with receiver(store) as otlp:
        await otlp.store_spans(Request([span("child", "root")]))
        await otlp.store_spans(Request([span("root", status=status, attributes={names.OPERATION_INPUT: "6 x 7?"})]))
        rollout = await adopted(store)
        assert (rollout.status, rollout.input) == (ends, "6 x 7?")
        await otlp.store_spans(Request([span("late", "root"), span("root", status=status)]))
    assert (await adopted(store)).status == ends
    kept = await store.query_spans(rollout.rollout_id)
    assert [one.span_id for one in kept] == ["child", "root", "late"]
    assert not any(one.attributes.get(names.SUPERSEDED) for one in kept)


async def test_rewards_in_a_trace_are_rewards_of_the_rollout(store: LightningStoreBase) -> None:
    reward = replace(span("reward", "root", attributes={names.SCORE_VALUE: 0.5}), name=names.REWARD)
    async with receiver(store) as otlp:
        await otlp.store_spans(Request([reward, span("root")]))
    kept = await store.query_spans((await adopted(store)).rollout_id, name=names.REWARD)
    assert [one.attributes[names.SCORE_VALUE] for one in kept] == [0.5]


async def test_a_trace_without_a_root_ends_when_it_is_silent(store: LightningStoreBase) -> None:
    adopter = UnknownTraces(store, idle_seconds=0.05)
    await adopter.start()
    try:
        ((rollout_id, attempt_id), _) = (await adopter.adopt([span("a", "b")]))[0]
        (done,) = await store.wait_for_rollouts(rollout_ids=[rollout_id], timeout=10)
    finally:
        await adopter.close()
    assert done.status == "succeeded"
    attempt = await store.get_attempt(attempt_id)
    assert attempt is not None
    assert attempt.metadata["incomplete"] == "its root span has not arrived"


async def test_open_traces_are_bounded(store: LightningStoreBase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces_module, "MAX_OPEN", 2)
    monkeypatch.setattr(traces_module, "CHECK_SECONDS", 0.01)
    async with receiver(store) as otlp:
        traces = [f"{number + 1:032x}" for number in range(5)]
        for trace_id in traces:
            await otlp.store_spans(Request([span("a", "b", trace_id)]))
        oldest = [ids_of_trace(trace_id)[0] for trace_id in traces[:3]]
        assert len(await store.wait_for_rollouts(rollout_ids=oldest, timeout=10)) == 3
    assert [(await adopted(store, trace_id)).status for trace_id in traces[3:]] == ["running"] * 2


async def test_another_server_takes_up_what_is_open(tmp_path: Path) -> None:
    store = LightningStore(tmp_path / "store.db")
    async with receiver(store) as otlp:
        await otlp.store_spans(Request([span("a", "root")]))
    await store.close()
    store = LightningStore(tmp_path / "store.db")
    async with receiver(store) as otlp:
        await otlp.store_spans(Request([span("root")]))
    assert (await adopted(store)).status == "succeeded"
    await store.close()


async def test_two_requests_of_one_trace_at_once_are_one_rollout(store: LightningStoreBase) -> None:
    async with receiver(store) as otlp:
        await asyncio.gather(*(otlp.store_spans(Request([span(str(number), "root")])) for number in range(8)))
    assert len(await store.query_rollouts()) == 1
    assert len(await store.query_attempts((await adopted(store)).rollout_id)) == 1
    assert len(await store.query_spans((await adopted(store)).rollout_id)) == 8


async def test_spans_of_known_rollouts_stay_with_them(store: LightningStoreBase) -> None:
    started = await store.start_rollout({})
    ids = {"agentlightning.rollout_id": started.rollout_id, "agentlightning.attempt_id": started.attempt.attempt_id}
    async with receiver(store) as otlp:
        await otlp.store_spans(Request([span("root", attributes=ids)]))
    (rollout,) = await store.query_rollouts()
    assert (rollout.rollout_id, rollout.status) == (started.rollout_id, "running")
