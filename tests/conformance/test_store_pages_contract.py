"""Cursors, filters, retention and records, whatever the store is made of."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from agentlightning.errors import ConfigError, ConflictError, NotFoundError
from agentlightning.resources import PromptTemplate
from agentlightning.rollouts import AttemptedRollout, EnqueueRolloutRequest, RolloutConfig
from agentlightning.span import LOGPROBS, PROMPT_TOKEN_IDS, RESPONSE_TOKEN_IDS, Span
from agentlightning.store import InMemoryLightningStore, LightningStoreBase
from agentlightning.store.types import Pruned, Retention

pytestmark = pytest.mark.integration

Store = LightningStoreBase


def a_span(attempted: AttemptedRollout, name: str = "work", **values: Any) -> Span:
    return Span(attempted.rollout_id, attempted.attempt.attempt_id, name, start_time=1.0, **values)


async def finished(store: Store, rollout_id: str, spans: int = 1, status: Any = "succeeded") -> AttemptedRollout:
    attempted = await store.start_rollout(f"task of {rollout_id}", rollout_id=rollout_id)
    await store.add_many_spans([a_span(attempted, f"span {n}", attributes={"text": "x" * 200}) for n in range(spans)])
    await store.update_attempt(rollout_id, attempted.attempt.attempt_id, status=status)
    return attempted


# -- pages -----------------------------------------------------------------------------------------------------------


async def test_rollouts_are_paged_through_whatever_is_added_meanwhile(store: Store) -> None:
    made = await store.enqueue_many_rollouts([EnqueueRolloutRequest(n, rollout_id=f"r{n}") for n in range(7)])
    ids = [rollout.rollout_id for rollout in made]
    seen: list[str] = []
    last: str | None = None
    while page := await store.query_rollouts(after=last, limit=3):
        seen += [rollout.rollout_id for rollout in page]
        last = seen[-1]
        if len(seen) == 3:
            await store.enqueue_rollout("late", rollout_id="late")
    assert seen == [*ids, "late"]
    newest = await store.query_rollouts(newest_first=True, limit=2)
    assert [rollout.rollout_id for rollout in newest] == ["late", "r6"]
    older = await store.query_rollouts(newest_first=True, after="r6", limit=2)
    assert [rollout.rollout_id for rollout in older] == ["r5", "r4"]
    with pytest.raises(NotFoundError, match="nope"):
        await store.query_rollouts(after="nope")


async def test_rollouts_are_found_and_counted_by_queue_and_mode(store: Store) -> None:
    await store.enqueue_many_rollouts(
        [
            EnqueueRolloutRequest("a", mode="train"),
            EnqueueRolloutRequest("b", mode="train", queue="urgent"),
            EnqueueRolloutRequest("c", mode="val"),
            EnqueueRolloutRequest("d"),
        ]
    )

    async def found(**filters: Any) -> list[str]:
        rollouts = await store.query_rollouts(**filters)
        assert await store.count_rollouts(**filters) == len(rollouts)
        return [rollout.input for rollout in rollouts]

    assert await found(queue_in=["train", "default"]) == ["a", "d"]
    assert await found(mode_in=["train"]) == ["a", "b"]
    assert await found(mode_in=["train"], queue_in=["urgent"], status_in=["queuing"]) == ["b"]
    assert await found(mode_in=[]) == []
    assert await found() == ["a", "b", "c", "d"]


async def test_spans_are_paged_through_in_order(store: Store) -> None:
    first = await store.start_rollout("task", rollout_id="mine", config=RolloutConfig(max_attempts=2))
    await store.add_many_spans([a_span(first, f"a{n}", sequence_id=n) for n in (2, 4, 9)])
    await store.add_many_spans([a_span(first, f"a{n}", sequence_id=n) for n in (1, 3, 5)])
    second = await store.start_attempt("mine")
    await store.add_many_spans([a_span(second, f"b{n}") for n in range(40)])
    await store.add_span(a_span(second, "b40"))
    everything = await store.query_spans("mine")
    names = [span.name for span in everything]
    assert names == ["a1", "a2", "a3", "a4", "a5", "a9", *(f"b{n}" for n in range(41))]
    for step in (1, 4, 100):
        seen: list[Span] = []
        while page := await store.query_spans("mine", after=seen[-1].span_id if seen else None, limit=step):
            seen += page
        assert seen == everything
    latest = await store.query_spans("mine", "latest", after=everything[8].span_id, limit=2)
    assert [span.name for span in latest] == ["b3", "b4"]
    assert [span.name for span in await store.query_spans("mine", offset=45)] == ["b39", "b40"]
    assert await store.query_spans("mine", limit=0) == []
    with pytest.raises(NotFoundError, match="nope"):
        await store.query_spans("mine", after="nope")


async def test_spans_are_found_by_every_filter_together(store: Store) -> None:
    attempted = await store.start_rollout("task")
    await store.add_many_spans(
        [
            a_span(attempted, "chat tiny", trace_id="t1", span_id="s1"),
            a_span(attempted, "chat large", trace_id="t1", span_id="s2", parent_id="s1"),
            a_span(attempted, "tool", trace_id="t2", span_id="s3", parent_id="s1"),
        ]
    )

    async def found(**filters: Any) -> list[str]:
        return [span.span_id for span in await store.query_spans(attempted.rollout_id, **filters)]

    assert await found(name_contains="chat") == ["s1", "s2"]
    assert await found(name="tool") == ["s3"]
    assert await found(trace_id="t1") == ["s1", "s2"]
    assert await found(parent_id="s1", name_contains="chat") == ["s2"]
    assert await found(span_id="s3") == ["s3"]
    assert await found(parent_id="s1", limit=1, offset=1) == ["s3"]


async def test_resources_are_paged_through(store: Store) -> None:
    for number in range(5):
        await store.add_resources({"p": PromptTemplate(template=str(number))}, resources_id=f"rs{number}")
    page = await store.query_resources(after="rs1", limit=2)
    assert [each.resources_id for each in page] == ["rs2", "rs3"]
    with pytest.raises(NotFoundError, match="nope"):
        await store.query_resources(after="nope")


async def test_publishing_the_same_resources_again_is_harmless(store: Store) -> None:
    first = await store.add_resources({"p": PromptTemplate(template="{q}")}, resources_id="mine")
    assert await store.add_resources({"p": PromptTemplate(template="{q}")}, resources_id="mine") == first
    with pytest.raises(ConflictError, match="mine"):
        await store.add_resources({"p": PromptTemplate(template="other")}, resources_id="mine")
    assert len(await store.query_resources()) == 1


async def test_an_attempt_is_found_by_its_id_alone(store: Store) -> None:
    attempted = await store.start_rollout("task")
    assert await store.get_attempt(attempted.attempt.attempt_id) == attempted.attempt
    assert await store.get_attempt("at-nope") is None


# -- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "offset"), [(-2, 0), (1, -1), (-1, -5)])
async def test_a_page_that_cannot_be_is_refused_by_its_number(store: Store, limit: int, offset: int) -> None:
    made = await store.enqueue_rollout("task")
    for awaitable in (
        store.query_rollouts(limit=limit, offset=offset),
        store.query_spans(made.rollout_id, limit=limit, offset=offset),
        store.query_resources(limit=limit, offset=offset),
    ):
        with pytest.raises(ConfigError, match=r"(limit|offset)=-"):
            await awaitable


@pytest.mark.parametrize("bad", ["nul\0byte", "\ud800", "x" * 600])
async def test_text_that_not_every_database_keeps_is_refused(store: Store, bad: str) -> None:
    attempted = await store.start_rollout("task")
    for awaitable in (
        store.enqueue_rollout("task", rollout_id=bad),
        store.enqueue_rollout("task", queue=bad),
        store.dequeue_rollout(bad),
        store.update_worker(bad),
        store.update_attempt(attempted.rollout_id, "latest", worker_id=bad),
        store.add_span(a_span(attempted, span_id=bad)),
        store.add_span(a_span(attempted, trace_id=bad)),
    ):
        with pytest.raises((ConfigError, NotFoundError)):
            await awaitable
    assert await store.query_spans(attempted.rollout_id) == []
    assert len(await store.query_rollouts()) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
async def test_a_time_that_is_none_is_refused(store: Store, bad: float) -> None:
    attempted = await store.start_rollout("task")
    with pytest.raises(ConfigError):
        await store.update_attempt(attempted.rollout_id, "latest", last_heartbeat_time=bad)
    with pytest.raises(ConfigError, match="start_time"):
        await store.add_span(replace(a_span(attempted), start_time=bad))
    with pytest.raises(ConfigError, match="end_time"):
        await store.add_span(a_span(attempted, end_time=bad))
    assert await store.query_spans(attempted.rollout_id) == []


async def test_sql_in_every_text_is_only_text(store: Store) -> None:
    bad = "'; DROP TABLE rollouts; --"
    attempted = await store.start_rollout(bad, worker_id=bad, metadata={bad: bad})
    span = await store.add_span(a_span(attempted, bad, span_id=bad, trace_id=bad, attributes={bad: bad}))
    assert await store.query_spans(attempted.rollout_id, name=bad, trace_id=bad, span_id=bad) == [span]
    assert await store.query_rollouts(rollout_id_in=[bad]) == []
    assert await store.query_rollouts(rollout_id_contains=bad) == []
    assert await store.get_rollout_by_id(bad) is None
    worker = await store.get_worker(bad)
    assert worker is not None
    assert worker.current_rollout_id == attempted.rollout_id


async def test_ten_megabytes_in_one_attribute_come_back(store: Store) -> None:
    attempted = await store.start_rollout("task")
    span = await store.add_span(a_span(attempted, attributes={"text": "x" * 10_000_000}))
    assert await store.query_spans(attempted.rollout_id) == [span]


# -- retention -------------------------------------------------------------------------------------------------------


async def test_deleted_rollouts_are_gone_with_everything_of_theirs(store: Store) -> None:
    for name in ("a", "b", "c"):
        await finished(store, name)
    assert await store.delete_rollouts(["a", "nope", "c"]) == 2
    assert [rollout.rollout_id for rollout in await store.query_rollouts()] == ["b"]
    counts = await store.statistics()
    assert (counts["attempts"], counts["spans"]) == (1, 1)
    with pytest.raises(NotFoundError, match="'a'"):
        await store.query_spans("a")
    again = await store.start_rollout("new", rollout_id="a")
    assert await store.query_spans("a") == []
    with pytest.raises(ConflictError, match="'a'"):
        await store.delete_rollouts(["b", again.rollout_id])
    assert len(await store.query_rollouts()) == 2


async def test_pruning_removes_the_oldest_finished_rollouts_first(store: Store) -> None:
    for number in range(6):
        await finished(store, f"r{number}", spans=2)
    waiting = await store.enqueue_rollout("waits")
    retention = Retention(max_rollouts=2)
    planned = await store.prune(retention, dry_run=True)
    assert (planned.rollouts, planned.spans) == (4, 8)
    assert planned.bytes > 4 * 2 * 200
    assert len(await store.query_rollouts()) == 7
    assert await store.prune(retention) == planned
    left = [rollout.rollout_id for rollout in await store.query_rollouts()]
    assert left == ["r4", "r5", waiting.rollout_id]
    assert await store.prune(retention) == Pruned(0, 0, 0)


async def test_pruning_by_age_and_by_size(store: Store) -> None:
    for number in range(4):
        await finished(store, f"r{number}")
    assert await store.prune(Retention(max_age_seconds=3600)) == Pruned(0, 0, 0)
    whole = await store.prune(Retention(max_bytes=0), dry_run=True)
    assert whole.rollouts == 4
    half = await store.prune(Retention(max_bytes=whole.bytes // 2))
    assert half.rollouts == 2
    assert (await store.prune(Retention(max_age_seconds=0))).rollouts == 2
    assert await store.query_rollouts() == []


@pytest.mark.parametrize("name", ["max_age_seconds", "max_rollouts", "max_bytes"])
async def test_a_retention_that_cannot_be_is_refused(store: Store, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=-1"):
        await store.prune(Retention(**{name: -1}))


async def test_vacuum_drops_the_tokens_that_nothing_refers_to(store: Store, request: pytest.FixtureRequest) -> None:
    for name, start in (("a", 0), ("b", 100_000)):
        attempted = await store.start_rollout("task", rollout_id=name)
        await store.add_span(a_span(attempted, attributes={PROMPT_TOKEN_IDS: list(range(start, start + 50_000))}))
        await store.update_attempt(name, "latest", status="succeeded")
    before = (await store.statistics())["bytes"]
    await store.delete_rollouts(["a"])
    await store.vacuum()
    if "postgres" not in request.node.name:  # which uses the space again, and maps it
        assert (await store.statistics())["bytes"] <= before
    (span,) = await store.query_spans("b")
    assert span.attributes[PROMPT_TOKEN_IDS] == list(range(100_000, 150_000))


# -- records ---------------------------------------------------------------------------------------------------------


async def recorded(store: Store) -> list[str]:
    """Rollouts in every state: ended, failed and tried again, cancelled, running, waiting."""
    done = await finished(store, "done", spans=3)
    await store.add_span(
        a_span(done, attributes={PROMPT_TOKEN_IDS: list(range(600)), RESPONSE_TOKEN_IDS: [7], LOGPROBS: [-0.5]})
    )
    first = await store.start_rollout("t", rollout_id="twice", config=RolloutConfig(max_attempts=2), mode="train")
    await store.add_span(a_span(first, "before"))
    await store.update_attempt("twice", "latest", status="failed")
    second = await store.start_attempt("twice", worker_id="w1")
    await store.add_span(a_span(first, "late"))
    await store.add_span(a_span(second, "again"))
    await store.update_attempt("twice", "latest", status="succeeded")
    await store.enqueue_rollout("gone", rollout_id="cancelled")
    await store.cancel_rollout("cancelled")
    return ["done", "twice", "cancelled"]


async def test_records_taken_to_another_store_are_the_same_there(store: Store) -> None:
    source = InMemoryLightningStore()
    ids = await recorded(source)
    records = await source.read_records(ids)
    assert await store.add_records(records) == 3
    assert await store.read_records(ids) == records
    assert await store.add_records(records) == 0
    assert await store.query_spans("twice") == await source.query_spans("twice")
    with pytest.raises(NotFoundError, match="nope"):
        await store.read_records(["nope"])
    await source.close()


async def test_an_unfinished_record_waits_again(store: Store) -> None:
    source = InMemoryLightningStore()
    running = await source.start_rollout("task", rollout_id="running", queue="q")
    await source.add_span(a_span(running))
    await source.enqueue_rollout("task", rollout_id="waiting", priority=3)
    await store.add_records(await source.read_records(["running", "waiting"]))
    await source.close()
    (attempt,) = await store.query_attempts("running")
    assert attempt.status == "unresponsive"
    assert "error" in attempt.metadata
    claimed = await store.dequeue_many_rollouts(limit=5)
    assert [(each.rollout_id, each.attempt.sequence_id) for each in claimed] == [("waiting", 1), ("running", 2)]
    late = await store.add_span(a_span(running))
    assert late.attributes["agentlightning.superseded"] is True


async def test_the_open_rollouts_of_some_states_are_paged_in_either_order(store: Store) -> None:
    for place in range(9):
        await store.enqueue_rollout({"n": place}, rollout_id=f"r{place}")
    claimed = [each for _ in range(7) if (each := await store.dequeue_rollout()) is not None]
    for attempted in claimed[1:6]:
        await store.update_attempt(attempted.rollout_id, attempted.attempt.attempt_id, status="running")
    await store.update_attempt("r3", claimed[3].attempt.attempt_id, status="succeeded")

    async def ids(**query: Any) -> list[str]:
        return [each.rollout_id for each in await store.query_rollouts(**query)]

    assert await ids(status_in=["running"]) == ["r1", "r2", "r4", "r5"]
    assert await ids(status_in=["running"], newest_first=True, limit=2) == ["r5", "r4"]
    assert await ids(status_in=["running"], newest_first=True, after="r4", limit=2) == ["r2", "r1"]
    assert await ids(status_in=["running"], after="r2", limit=9) == ["r4", "r5"]
    assert await ids(status_in=["preparing"]) == ["r0", "r6"]
    assert await ids(status_in=["preparing", "running"], rollout_id_contains="5") == ["r5"]
    assert await ids(status_in=["preparing", "running"], sort_by="rollout_id", sort_order="desc", limit=2) == [
        "r6",
        "r5",
    ]
    assert await ids(status_in=["running", "succeeded"], after="r1", limit=9) == ["r2", "r3", "r4", "r5"]
