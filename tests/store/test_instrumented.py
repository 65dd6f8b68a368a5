"""A store whose calls are observed: the same store, and every call told once."""

import asyncio
import logging
from dataclasses import replace

import pytest

from agentlightning.errors import ConflictError, NotFoundError
from agentlightning.rollouts import Attempt, Rollout
from agentlightning.span import Span
from agentlightning.store import InMemoryLightningStore
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.instrumented import METHODS, ids_of, instrument
from agentlightning.store.types import RolloutRecord


class Listener:
    def __init__(self):
        self.began_calls, self.calls = [], []

    def on_start(self, method):
        self.began_calls.append(method)

    def on_end(self, call):
        self.calls.append(call)


@pytest.fixture
async def heard():
    bare, listener = InMemoryLightningStore(), Listener()
    yield instrument(bare, [listener]), listener
    await bare.close()


async def test_every_call_is_told_with_its_result_and_its_time(heard):
    store, listener = heard
    rollout = await store.enqueue_rollout("a task")
    (call,) = listener.calls
    assert (call.method, call.arguments, call.result, call.error) == (
        "enqueue_rollout",
        {"input": "a task"},
        rollout,
        None,
    )
    assert call.seconds > 0


async def test_an_error_is_told_and_raised(heard):
    store, listener = heard
    with pytest.raises(NotFoundError):
        await store.cancel_rollout("ro-nobody")
    assert isinstance(listener.calls[0].error, NotFoundError)


async def test_a_call_that_is_cancelled_has_ended_too(heard):
    store, listener = heard
    waiting = asyncio.create_task(store.dequeue_rollout("w", timeout=60))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (listener.began_calls, [call.method for call in listener.calls]) == (["dequeue_rollout"],) * 2


async def test_an_observer_that_fails_costs_nobody_their_call(caplog):
    class Broken(Listener):
        def on_end(self, call):
            raise ValueError("cannot count")

    store = instrument(InMemoryLightningStore(), [Broken()])
    with caplog.at_level(logging.CRITICAL):
        assert (await store.enqueue_rollout("a task")).input == "a task"
    await store.close()


async def test_the_ids_a_call_is_about_are_found_in_its_arguments(heard):
    store, listener = heard
    started = await store.start_rollout("a task", worker_id="w1")
    ids = {"rollout_id": started.rollout_id, "attempt_id": started.attempt.attempt_id}
    await store.add_many_spans([Span(*ids.values(), "s", 1.0, 2.0)])
    await store.update_attempt(*ids.values(), status="succeeded")
    await store.wait_for_rollouts(rollout_ids=[started.rollout_id], timeout=0)
    found = [ids_of(call) for call in listener.calls]
    assert found == [{"worker_id": "w1"}, ids, ids, {"rollout_id": started.rollout_id}]


async def test_spans_are_read_through(heard):
    store, _ = heard
    started = await store.start_rollout("a task")
    assert [each async for each in store.iter_spans([started.rollout_id])] == [(started.rollout_id, [])]


def test_the_whole_contract_is_observed():
    public = {name for name in vars(LightningStoreBase) if not name.startswith("_")}
    assert set(METHODS) == public - {"iter_spans", "get_successful_trajectories"}


def record(number, *names):
    """A finished rollout with a span of each name."""
    ids = f"ro-{number}", f"at-{number}"
    spans = tuple(Span(*ids, name, 1.0, 1.0, place, span_id=f"{place:016x}") for place, name in enumerate(names, 1))
    attempt = Attempt(*ids, 1, 1.0, "succeeded", 2.0)
    return RolloutRecord(Rollout(ids[0], "a task", 1.0, "succeeded", end_time=2.0), (attempt,), spans)


async def test_every_call_that_stores_spans_tells_them(heard):
    store, listener = heard
    rollout = await store.start_rollout("a task")
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    await store.add_span(Span(*ids, "one", 1.0))
    await store.add_many_spans([Span(*ids, "two", 1.0), Span(*ids, "three", 1.0)])
    await store.add_records([record(1, "four", "five"), record(2)])
    assert [[span.name for span in call.spans] for call in listener.calls] == [
        [],
        ["one"],
        ["two", "three"],
        ["four", "five"],
    ]


async def test_of_records_only_those_that_are_new_are_told(heard):
    store, listener = heard
    await store.add_records([record(1, "one")])
    await store.add_records([record(1, "one")])
    await store.add_records(records=[record(1, "one"), record(2, "two")])
    await store.add_records([record(3)])
    with pytest.raises(ConflictError):
        await store.add_records([record(1), replace(record(4, "four"), attempts=record(1).attempts, spans=())])
    assert [[span.name for span in call.spans] for call in listener.calls] == [["one"], [], ["two"], [], []]
