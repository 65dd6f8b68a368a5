"""Sorting, filters by parts of ids and any-of filters, whatever the store is made of."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.rollouts import AttemptedRollout, EnqueueRolloutRequest
from agentlightning.span import Span
from agentlightning.store import LightningStoreBase

pytestmark = pytest.mark.integration

Store = LightningStoreBase


def ids(found: Any) -> list[str]:
    return [each.rollout_id for each in found]


async def test_rollouts_are_sorted_by_any_field_with_missing_values_first(store: Store) -> None:
    requests = [
        EnqueueRolloutRequest("a", rollout_id="b", mode="val", priority=3),
        EnqueueRolloutRequest("b", rollout_id="c", priority=1),
        EnqueueRolloutRequest("c", rollout_id="a", mode="train", priority=2),
    ]
    await store.enqueue_many_rollouts(requests)
    assert ids(await store.query_rollouts()) == ["b", "c", "a"]
    assert ids(await store.query_rollouts(sort_order="desc")) == ["a", "c", "b"]
    assert ids(await store.query_rollouts(sort_by="rollout_id")) == ["a", "b", "c"]
    assert ids(await store.query_rollouts(sort_by="mode")) == ["c", "a", "b"]
    assert ids(await store.query_rollouts(sort_by="mode", sort_order="desc")) == ["b", "a", "c"]
    assert ids(await store.query_rollouts(sort_by="priority", limit=1, offset=1)) == ["a"]
    assert ids(await store.query_rollouts(sort_by="end_time", sort_order="desc")) == ["a", "c", "b"]


async def test_sorted_rollouts_are_read_to_the_end(store: Store) -> None:
    number = 1203
    names = [f"r{place * 7919 % number:04d}" for place in range(number)]
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(0, rollout_id=name) for name in names])
    assert ids(await store.query_rollouts(sort_by="rollout_id")) == sorted(names)


async def test_rollouts_are_found_and_sorted_by_state(store: Store) -> None:
    rollouts = [EnqueueRolloutRequest(n, rollout_id=f"r{n}", mode="train" if n % 2 else "val") for n in range(8)]
    await store.enqueue_many_rollouts(rollouts)
    for name in ("r1", "r6"):
        await store.cancel_rollout(name)
    for name in ("r2", "r5"):
        attempt = (await store.start_attempt(name)).attempt
        await store.update_attempt(name, attempt.attempt_id, status="succeeded" if name == "r5" else "running")
    await store.requeue_rollout("r6", "again")
    assert {each.rollout_id: each.status for each in await store.query_rollouts()} == {
        "r0": "queuing", "r1": "cancelled", "r2": "running", "r3": "queuing", "r4": "queuing", "r5": "succeeded",
        "r6": "requeuing", "r7": "queuing",
    }  # fmt: skip
    order = ["r1", "r0", "r3", "r4", "r7", "r6", "r2", "r5"]
    assert ids(await store.query_rollouts(sort_by="status")) == order
    assert ids(await store.query_rollouts(sort_by="status", sort_order="desc")) == order[::-1]
    for start in range(9):
        assert ids(await store.query_rollouts(sort_by="status", limit=3, offset=start)) == order[start : start + 3]
    some: Any = {"sort_by": "status", "status_in": ["requeuing", "queuing", "failed"]}
    assert ids(await store.query_rollouts(**some, limit=3, offset=2)) == ["r4", "r7", "r6"]
    assert ids(await store.query_rollouts(sort_by="status", mode_in=["train"])) == ["r1", "r3", "r7", "r5"]
    assert ids(await store.query_rollouts(status_in=["queuing", "requeuing"], newest_first=True, limit=3)) == [
        "r7", "r6", "r4",
    ]  # fmt: skip
    assert ids(await store.query_rollouts(status_in=["queuing"], after="r0", limit=2)) == ["r3", "r4"]
    assert ids(await store.query_rollouts(status_in=["cancelled", "succeeded"])) == ["r1", "r5"]
    assert ids(await store.query_rollouts(status_in=["failed"])) == []
    assert ids(await store.query_rollouts(status_in=["failed"], mode_in=["train"], filter_logic="or", limit=2)) == [
        "r1", "r3",
    ]  # fmt: skip


async def test_one_filter_is_enough_where_that_is_asked_for(store: Store) -> None:
    await store.enqueue_many_rollouts(
        [
            EnqueueRolloutRequest("a", rollout_id="task-1", mode="train"),
            EnqueueRolloutRequest("b", rollout_id="task-2", mode="val"),
            EnqueueRolloutRequest("c", rollout_id="other", queue="mine"),
        ]
    )
    await store.cancel_rollout("task-2")
    wishes: dict[str, Any] = {"status_in": ["cancelled"], "rollout_id_contains": "other"}
    assert ids(await store.query_rollouts(**wishes, filter_logic="or")) == ["task-2", "other"]
    assert ids(await store.query_rollouts(**wishes)) == []
    assert await store.count_rollouts(**wishes, filter_logic="or") == 2
    assert await store.count_rollouts(status_in=["cancelled"], queue_in=["mine"], filter_logic="or") == 2
    assert await store.count_rollouts(status_in=["cancelled"], queue_in=["mine"]) == 0
    assert ids(await store.query_rollouts(filter_logic="or")) == ["task-1", "task-2", "other"]


async def a_family_of_spans(store: Store) -> AttemptedRollout:
    attempted = await store.start_rollout("task")
    parts = (("search", "t1", "s1", None), ("answer", "t2", "s2", "s1"), ("search more", "t1", "x3", "s1"))
    for place, (name, trace_id, span_id, parent_id) in enumerate(parts):
        span = Span(attempted.rollout_id, attempted.attempt.attempt_id, name, 9.0 - place)
        rest = {"trace_id": trace_id, "span_id": span_id, "parent_id": parent_id}
        await store.add_span(Span(span.rollout_id, span.attempt_id, name, span.start_time, **rest))
    return attempted


async def test_spans_are_sorted_and_filtered_by_parts(store: Store) -> None:
    rollout_id = (await a_family_of_spans(store)).rollout_id

    async def found(**wishes: Any) -> list[str]:
        return [span.span_id for span in await store.query_spans(rollout_id, **wishes)]

    assert await found(sort_by="start_time") == ["x3", "s2", "s1"]
    assert await found(sort_by="parent_id") == ["s1", "s2", "x3"]
    assert await found(sort_by="sequence_id") == ["s1", "s2", "x3"]
    assert await found(sort_order="desc", limit=2) == ["x3", "s2"]
    assert await found(span_id_contains="s") == ["s1", "s2"]
    assert await found(trace_id_contains="1", parent_id_contains="s") == ["x3"]
    assert await found(trace_id="t2", name_contains="more", filter_logic="or") == ["s2", "x3"]
    assert await found(sort_by="name", name_contains="search", offset=1) == ["x3"]
    assert await found(name="nothing", span_id="nothing", filter_logic="or") == []


async def test_attempts_are_sorted_and_cut(store: Store) -> None:
    first = await store.start_rollout("task", worker_id="w2")
    await store.requeue_rollout(first.rollout_id, "again")
    await store.start_attempt(first.rollout_id, "w1")
    await store.start_attempt(first.rollout_id)

    async def workers(**wishes: Any) -> list[str | None]:
        return [attempt.worker_id for attempt in await store.query_attempts(first.rollout_id, **wishes)]

    assert await workers(sort_order="desc") == [None, "w1", "w2"]
    assert await workers(sort_by="worker_id") == [None, "w1", "w2"]
    assert await workers(sort_by="worker_id", sort_order="desc", limit=1) == ["w2"]
    assert await workers(limit=1, offset=1) == ["w1"]


async def test_the_latest_attempts_of_many_rollouts_are_read_at_once(store: Store) -> None:
    first, second = await store.start_rollout("a"), await store.start_rollout("b")
    again = await store.start_attempt(first.rollout_id)
    waiting = await store.enqueue_rollout("c")
    asked = [first.rollout_id, second.rollout_id, waiting.rollout_id, "nope"]
    latest = {attempt.rollout_id: attempt for attempt in await store.get_latest_attempts(asked)}
    assert latest == {first.rollout_id: again.attempt, second.rollout_id: second.attempt}


async def test_resources_are_found_by_parts_of_their_id_and_sorted(store: Store) -> None:
    for name in ("prod-b", "test-a", "prod-a"):
        await store.update_resources(name, {})
    await store.update_resources("prod-b", {})

    async def found(**wishes: Any) -> list[str]:
        return [update.resources_id for update in await store.query_resources(**wishes)]

    assert await found(sort_by="resources_id") == ["prod-a", "prod-b", "test-a"]
    assert await found(resources_id_contains="prod", sort_by="resources_id", sort_order="desc") == ["prod-b", "prod-a"]
    assert await found(sort_by="version", limit=2) == ["test-a", "prod-a"]
    assert await found(sort_by="update_time", sort_order="desc", limit=1) == ["prod-b"]
    assert await found(resources_id="test-a", resources_id_contains="prod") == []
    assert await found(resources_id="test-a") == ["test-a"]


async def test_workers_are_found_by_status_and_parts_of_their_id(store: Store) -> None:
    for name in ("gpu-1", "cpu-1", "cpu-2"):
        await store.update_worker(name)
    await store.start_rollout("task", worker_id="cpu-2")

    async def found(**wishes: Any) -> list[str]:
        return [worker.worker_id for worker in await store.query_workers(**wishes)]

    assert await found(status_in=["busy"]) == ["cpu-2"]
    assert await found(status_in=["idle"], worker_id_contains="cpu") == ["cpu-1"]
    assert await found(status_in=["busy"], worker_id_contains="gpu", filter_logic="or") == ["gpu-1", "cpu-2"]
    assert await found(sort_by="worker_id", limit=1, offset=1) == ["cpu-2"]
    assert await found(sort_by="status", sort_order="desc") == ["cpu-1", "gpu-1", "cpu-2"]
    assert await found(offset=2) == ["cpu-2"]
    assert await found(status_in=["idle"], limit=1, offset=1) == ["cpu-1"]
    assert await found(status_in=["idle", "busy"], after="gpu-1", limit=1) == ["cpu-1"]
    assert await found(worker_id_contains="-1", sort_by="worker_id", limit=1) == ["cpu-1"]
    assert await found(status_in=["lost"]) == await found(status_in=[]) == await found(worker_id_contains="tpu") == []
    worker = await store.get_worker_by_id("cpu-1")
    assert worker is not None
    assert worker.status == "idle"


async def test_a_field_that_no_list_is_sorted_by_is_named_with_those_there_are(store: Store) -> None:
    made = await store.start_rollout("task")
    calls: Any = (
        (store.query_rollouts, (), "rollout_id, start_time"),
        (store.query_spans, (made.rollout_id,), "sequence_id, start_time"),
        (store.query_attempts, (made.rollout_id,), "worker_id"),
        (store.query_resources, (), "version"),
        (store.query_workers, (), "open_attempts"),
    )
    for query, given, named in calls:
        with pytest.raises(ConfigError, match=f"nothing.*{named}"):
            await query(*given, sort_by="nothing")
    with pytest.raises(ConfigError, match="offset"):
        await store.query_rollouts(sort_by="status", after=made.rollout_id)


async def test_numbers_are_reserved_for_many_attempts_in_one_call(store: Store) -> None:
    first, second = await store.start_rollout("a"), await store.start_rollout("b")
    one, two = ((each.rollout_id, each.attempt.attempt_id) for each in (first, second))
    assert await store.get_many_span_sequence_ids([one, two, one]) == [1, 1, 2]
    assert await store.get_next_span_sequence_id(*one) == 3
    assert await store.get_many_span_sequence_ids([]) == []
    with pytest.raises(NotFoundError, match="nope"):
        await store.get_many_span_sequence_ids([one, (first.rollout_id, "nope")])
    assert await store.get_next_span_sequence_id(*one) == 4


async def test_a_span_of_the_opentelemetry_sdk_is_added(store: Store) -> None:
    attempted = await store.start_rollout("task")
    span = TracerProvider(shutdown_on_exit=False).get_tracer("mine").start_span("work", attributes={"a": 1})
    span.end()
    added: Any = span
    kept = await store.add_otel_span(attempted.rollout_id, attempted.attempt.attempt_id, added)
    assert (kept.name, kept.attributes["a"], kept.sequence_id) == ("work", 1, 1)
    numbered = TracerProvider(shutdown_on_exit=False).get_tracer("mine").start_span("more")
    numbered.end()
    again: Any = numbered
    kept = await store.add_otel_span(attempted.rollout_id, attempted.attempt.attempt_id, again, sequence_id=7)
    assert kept.sequence_id == 7


async def test_claiming_none_at_all_claims_none(store: Store) -> None:
    await store.enqueue_rollout("task")
    assert await store.dequeue_many_rollouts(0) == []
    assert await store.count_rollouts(status_in=["queuing"]) == 1
