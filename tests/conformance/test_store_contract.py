"""What every store promises, whatever it is made of. The promises are those of store/base.py."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import pytest

from agentlightning.errors import ConfigError, ConflictError, NotFoundError, StoreClosedError
from agentlightning.resources import LLM, PromptTemplate, ProxyLLM
from agentlightning.rollouts import AttemptedRollout, EnqueueRolloutRequest, RolloutConfig
from agentlightning.span import (
    INPUT_TOKENS,
    KEPT_SETS,
    LOGPROBS,
    OUTPUT_TOKENS,
    PROMPT_TOKEN_IDS,
    RESPONSE_TOKEN_IDS,
    SUPERSEDED,
    Span,
    SpanEvent,
)
from agentlightning.store import LightningStoreBase, LightningStoreClient
from agentlightning.util.kept_sets import KeptSets

pytestmark = pytest.mark.integration

Store = LightningStoreBase


def a_span(attempted: AttemptedRollout, name: str = "work", **values: Any) -> Span:
    return Span(attempted.rollout_id, attempted.attempt.attempt_id, name, start_time=1.0, **values)


async def claimed(store: Store, config: RolloutConfig | None = None, worker_id: str | None = None) -> AttemptedRollout:
    await store.enqueue_rollout({"question": "6 x 7"}, config=config)
    attempted = await store.dequeue_rollout(worker_id)
    assert attempted is not None
    return attempted


async def status_of(store: Store, rollout_id: str) -> str:
    rollout = await store.get_rollout_by_id(rollout_id)
    assert rollout is not None
    return rollout.status


async def finish(store: Store, attempted: AttemptedRollout, status: Any = "succeeded") -> None:
    await store.update_attempt(attempted.rollout_id, attempted.attempt.attempt_id, status=status)


# -- the queue -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [b"x", bytearray(b"x"), memoryview(b"x"), {1}, object()], ids=lambda each: type(each).__name__
)
async def test_what_json_cannot_hold_is_refused_and_never_kept_as_something_else(store: Store, value: Any) -> None:
    attempted = await claimed(store)
    for given in (value, {"inner": value}):
        with pytest.raises(ConfigError, match="cannot be stored as JSON"):
            await store.enqueue_rollout(given)
        with pytest.raises(ConfigError, match="cannot be stored as JSON"):
            await store.enqueue_rollout("a task", metadata={"given": given})
        with pytest.raises(ConfigError, match="cannot be stored as JSON"):
            await store.add_span(a_span(attempted, attributes={"given": given}))


async def test_a_rollout_is_kept_as_it_was_enqueued(store: Store) -> None:
    resources = await store.add_resources({"prompt": PromptTemplate(template="{x}")})
    config = RolloutConfig(timeout_seconds=60, max_attempts=3, retry_condition=("failed",))
    task = {"question": "¿6 x 7?", "numbers": [1, 2.5, None, True], "nested": {"a": []}}
    made = await store.enqueue_rollout(
        task, mode="train", resources_id=resources.resources_id, config=config, metadata={"group": "g1"}
    )
    assert made.status == "queuing"
    assert await store.get_rollout_by_id(made.rollout_id) == made
    assert made.input == task
    assert made.config == config


@pytest.mark.parametrize("task", ["text", 42, 1.5, None, True, [1, 2], {}])
async def test_any_json_value_can_be_a_task(store: Store, task: Any) -> None:
    made = await store.enqueue_rollout(task)
    kept = await store.get_rollout_by_id(made.rollout_id)
    assert kept is not None
    assert kept.input == task


async def test_the_oldest_waiting_rollout_is_claimed_first(store: Store) -> None:
    made = await store.enqueue_many_rollouts([EnqueueRolloutRequest(index) for index in range(5)])
    order = [attempted.rollout_id for attempted in await store.dequeue_many_rollouts(limit=3)]
    last = await store.dequeue_many_rollouts(limit=10)
    assert order + [attempted.rollout_id for attempted in last] == [rollout.rollout_id for rollout in made]


async def test_claiming_starts_the_first_attempt(store: Store) -> None:
    attempted = await claimed(store, worker_id="w1")
    assert attempted.status == "preparing"
    assert (attempted.attempt.sequence_id, attempted.attempt.status) == (1, "preparing")
    assert attempted.attempt.worker_id == "w1"
    assert await store.get_latest_attempt(attempted.rollout_id) == attempted.attempt
    assert await store.dequeue_rollout() is None


async def test_enqueueing_the_same_id_again_changes_nothing(store: Store) -> None:
    first = await store.enqueue_rollout("one", rollout_id="my-id")
    again = await store.enqueue_rollout("two", rollout_id="my-id")
    assert again == first
    both = await store.enqueue_many_rollouts(
        [EnqueueRolloutRequest("three", rollout_id="my-id"), EnqueueRolloutRequest("four")]
    )
    assert [rollout.input for rollout in both] == ["one", "four"]
    assert len(await store.query_rollouts()) == 2


async def test_an_id_that_cannot_be_part_of_a_url_is_refused(store: Store) -> None:
    with pytest.raises(ConfigError, match="a/b"):
        await store.enqueue_rollout("task", rollout_id="a/b")


async def test_a_started_rollout_never_enters_the_queue(store: Store) -> None:
    attempted = await store.start_rollout("task", worker_id="me", rollout_id="mine")
    assert (attempted.rollout_id, attempted.status, attempted.attempt.worker_id) == ("mine", "preparing", "me")
    assert await store.dequeue_rollout() is None
    with pytest.raises(ConflictError, match="mine"):
        await store.start_rollout("task", rollout_id="mine")


async def test_dequeue_wakes_up_when_something_is_enqueued(store: Store) -> None:
    waiting = asyncio.create_task(store.dequeue_rollout(timeout=30))
    await asyncio.sleep(0.05)
    made = await store.enqueue_rollout("task")
    attempted = await waiting
    assert attempted is not None
    assert attempted.rollout_id == made.rollout_id


async def test_dequeue_gives_up_after_its_timeout(store: Store) -> None:
    assert await store.dequeue_rollout(timeout=0.05) is None
    assert await store.dequeue_many_rollouts(limit=2, timeout=0.05) == []


async def test_a_cancelled_dequeue_takes_nothing_away(store: Store) -> None:
    waiting = [asyncio.create_task(store.dequeue_rollout(timeout=30)) for _ in range(20)]
    await asyncio.sleep(0.02)
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(index) for index in range(10)])
    for task in waiting:
        task.cancel()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    received = [each for each in ended if isinstance(each, AttemptedRollout)]
    rest = [await store.dequeue_rollout(timeout=10) for _ in range(10 - len(received))]
    assert None not in rest
    assert await store.dequeue_rollout(timeout=0.2) is None
    for attempted in rest:
        if isinstance(store, LightningStoreClient):  # one whose answer was under way comes back as a second attempt
            for given_back in (await store.query_attempts(attempted.rollout_id))[:-1]:
                assert given_back.metadata["error"]["message"] == "its claim was cancelled"
        else:
            assert attempted.attempt.sequence_id == 1


async def test_fifty_runners_claim_each_of_500_rollouts_exactly_once(store: Store) -> None:
    made = await store.enqueue_many_rollouts([EnqueueRolloutRequest(index) for index in range(500)])
    seen: list[str] = []

    async def runner() -> None:
        while (attempted := await store.dequeue_rollout()) is not None:
            seen.append(attempted.rollout_id)

    await asyncio.gather(*(runner() for _ in range(50)))
    assert sorted(seen) == sorted(rollout.rollout_id for rollout in made)


async def test_a_limit_below_zero_is_refused(store: Store) -> None:
    with pytest.raises(ConfigError, match="limit=-1"):
        await store.dequeue_many_rollouts(limit=-1)


# -- how status follows ----------------------------------------------------------------------------------------------


async def test_the_first_span_sets_attempt_and_rollout_running(store: Store) -> None:
    attempted = await claimed(store)
    await store.add_span(a_span(attempted))
    attempt = await store.get_latest_attempt(attempted.rollout_id)
    assert attempt is not None
    assert attempt.status == "running"
    assert attempt.last_heartbeat_time is not None
    assert await status_of(store, attempted.rollout_id) == "running"


async def test_the_first_heartbeat_sets_attempt_and_rollout_running(store: Store) -> None:
    attempted = await claimed(store)
    attempt = await store.update_attempt(attempted.rollout_id, "latest", last_heartbeat_time=5.0)
    assert (attempt.status, attempt.last_heartbeat_time) == ("running", 5.0)
    assert await status_of(store, attempted.rollout_id) == "running"


@pytest.mark.parametrize(("attempt", "rollout"), [("succeeded", "succeeded"), ("failed", "failed")])
async def test_a_rollout_ends_as_its_attempt_does(store: Store, attempt: Any, rollout: str) -> None:
    attempted = await claimed(store)
    ended = await store.update_attempt(attempted.rollout_id, attempted.attempt.attempt_id, status=attempt)
    assert ended.end_time is not None
    kept = await store.get_rollout_by_id(attempted.rollout_id)
    assert kept is not None
    assert (kept.status, kept.end_time is not None, kept.finished) == (rollout, True, True)


async def test_a_failed_attempt_is_tried_again_while_attempts_are_left(store: Store) -> None:
    first = await claimed(store, RolloutConfig(max_attempts=2))
    await finish(store, first, "failed")
    assert await status_of(store, first.rollout_id) == "requeuing"
    second = await store.dequeue_rollout()
    assert second is not None
    assert (second.rollout_id, second.attempt.sequence_id) == (first.rollout_id, 2)
    await finish(store, second, "failed")
    assert await status_of(store, first.rollout_id) == "failed"
    assert [attempt.status for attempt in await store.query_attempts(first.rollout_id)] == ["failed", "failed"]


async def test_a_state_outside_the_retry_condition_is_final(store: Store) -> None:
    attempted = await claimed(store, RolloutConfig(max_attempts=5, retry_condition=("timeout",)))
    await finish(store, attempted, "failed")
    assert await status_of(store, attempted.rollout_id) == "failed"


async def test_an_illegal_change_is_refused_and_changes_nothing(store: Store) -> None:
    attempted = await claimed(store)
    await finish(store, attempted)
    with pytest.raises(ConflictError, match="'succeeded' and cannot become 'running'"):
        await finish(store, attempted, "running")
    with pytest.raises(ConflictError, match="cannot become 'failed'"):
        await store.update_rollout(attempted.rollout_id, status="failed", metadata={"lost": True})
    kept = await store.get_rollout_by_id(attempted.rollout_id)
    assert kept is not None
    assert (kept.status, kept.metadata) == ("succeeded", {})


async def test_the_same_status_twice_is_harmless(store: Store) -> None:
    attempted = await claimed(store)
    await finish(store, attempted)
    await finish(store, attempted)
    assert await status_of(store, attempted.rollout_id) == "succeeded"


async def test_an_update_merges_metadata_of_an_attempt(store: Store) -> None:
    attempted = await claimed(store)
    await store.update_attempt(attempted.rollout_id, "latest", metadata={"a": 1, "b": 1}, worker_id="w9")
    attempt = await store.update_attempt(attempted.rollout_id, "latest", metadata={"b": 2})
    assert attempt.metadata == {"a": 1, "b": 2}
    assert attempt.worker_id == "w9"


async def test_an_update_replaces_what_is_given_of_a_rollout(store: Store) -> None:
    made = await store.enqueue_rollout("task", mode="train", metadata={"a": 1})
    changed = await store.update_rollout(
        made.rollout_id, input="other", mode=None, metadata={"b": 2}, config=RolloutConfig(max_attempts=4)
    )
    assert (changed.input, changed.mode, changed.metadata) == ("other", None, {"b": 2})
    assert changed.config.max_attempts == 4
    assert changed.status == "queuing"


async def test_a_rollout_can_be_ended_by_hand(store: Store) -> None:
    attempted = await claimed(store, RolloutConfig(max_attempts=5))
    await store.update_rollout(attempted.rollout_id, status="failed")
    assert await status_of(store, attempted.rollout_id) == "failed"
    assert (await store.query_attempts(attempted.rollout_id))[0].status == "failed"
    with pytest.raises(ConflictError, match="dequeue_rollout"):
        await store.update_rollout(attempted.rollout_id, status="preparing")


# -- fencing ---------------------------------------------------------------------------------------------------------


async def test_a_superseded_attempt_changes_nothing_but_its_spans_are_kept(store: Store) -> None:
    old = await claimed(store)
    new = await store.start_attempt(old.rollout_id, worker_id="w2")
    assert new.attempt.sequence_id == 2
    span = await store.add_span(a_span(old))
    assert span.attributes[SUPERSEDED] is True
    refused = await store.update_attempt(old.rollout_id, old.attempt.attempt_id, status="succeeded")
    assert refused.metadata["superseded"] is True
    assert refused.status == "unresponsive"
    assert await status_of(store, old.rollout_id) == "preparing"
    await finish(store, new)
    assert await status_of(store, old.rollout_id) == "succeeded"
    spans = await store.query_spans(old.rollout_id)
    assert [each.attributes.get(SUPERSEDED) for each in spans] == [True]


async def test_spans_after_the_end_of_an_attempt_are_kept_and_not_superseded(store: Store) -> None:
    attempted = await claimed(store)
    await finish(store, attempted)
    span = await store.add_span(a_span(attempted))
    assert SUPERSEDED not in span.attributes
    assert await store.query_spans(attempted.rollout_id) == [span]
    assert await status_of(store, attempted.rollout_id) == "succeeded"


async def test_requeueing_fences_the_open_attempt_off(store: Store) -> None:
    old = await claimed(store)
    again = await store.requeue_rollout(old.rollout_id, reason="the run was restarted")
    assert again.status == "requeuing"
    attempt = (await store.query_attempts(old.rollout_id))[0]
    assert attempt.status == "unresponsive"
    assert attempt.metadata["error"]["message"] == "the run was restarted"
    await store.add_span(a_span(old))
    assert await status_of(store, old.rollout_id) == "requeuing"
    new = await store.dequeue_rollout()
    assert new is not None
    assert new.attempt.sequence_id == 2


@pytest.mark.parametrize("end", ["failed", "cancelled"])
async def test_a_finished_rollout_moves_only_when_queued_again(store: Store, end: str) -> None:
    attempted = await claimed(store)
    if end == "cancelled":
        await store.cancel_rollout(attempted.rollout_id)
    else:
        await finish(store, attempted, "failed")
    assert await status_of(store, attempted.rollout_id) == end
    assert (await store.requeue_rollout(attempted.rollout_id, "once more")).status == "requeuing"


async def test_a_succeeded_rollout_is_not_done_again(store: Store) -> None:
    attempted = await claimed(store)
    await finish(store, attempted)
    with pytest.raises(ConflictError, match="succeeded"):
        await store.requeue_rollout(attempted.rollout_id, "once more")
    with pytest.raises(ConflictError, match="succeeded"):
        await store.start_attempt(attempted.rollout_id)


async def test_cancelling_takes_a_waiting_rollout_out_of_the_queue(store: Store) -> None:
    made = await store.enqueue_rollout("task")
    assert (await store.cancel_rollout(made.rollout_id)).status == "cancelled"
    assert await store.dequeue_rollout() is None
    with pytest.raises(NotFoundError, match="nope"):
        await store.cancel_rollout("nope")


async def test_cancelling_a_running_rollout_fences_its_attempt_off(store: Store) -> None:
    attempted = await claimed(store)
    await store.cancel_rollout(attempted.rollout_id)
    told = await store.update_attempt(attempted.rollout_id, "latest", status="succeeded")
    assert told.metadata["superseded"] is True
    assert (await store.add_span(a_span(attempted))).attributes[SUPERSEDED] is True
    assert await status_of(store, attempted.rollout_id) == "cancelled"


async def test_cancelling_a_finished_rollout_returns_it_unchanged(store: Store) -> None:
    attempted = await claimed(store)
    await finish(store, attempted)
    assert (await store.cancel_rollout(attempted.rollout_id)).status == "succeeded"


# -- time ------------------------------------------------------------------------------------------------------------


async def test_an_attempt_that_takes_too_long_times_out_unasked(store: Store) -> None:
    attempted = await claimed(store, RolloutConfig(timeout_seconds=0.05))
    ended = await store.wait_for_rollouts(rollout_ids=[attempted.rollout_id], timeout=20)
    assert [rollout.status for rollout in ended] == ["failed"]
    attempt = (await store.query_attempts(attempted.rollout_id))[0]
    assert attempt.status == "timeout"
    assert "0.05 s" in attempt.metadata["error"]["message"]


async def test_a_silent_attempt_becomes_unresponsive_and_another_runner_gets_the_rollout(store: Store) -> None:
    lost = await claimed(store, RolloutConfig(unresponsive_seconds=0.05, max_attempts=2))
    again = await store.dequeue_rollout(timeout=20)
    assert again is not None
    assert (again.rollout_id, again.attempt.sequence_id) == (lost.rollout_id, 2)
    assert (await store.query_attempts(lost.rollout_id))[0].status == "unresponsive"


@pytest.mark.parametrize("sign", ["span", "heartbeat", "worker"])
async def test_signs_of_life_keep_an_attempt_alive(store: Store, sign: str) -> None:
    longest, status = math.inf, ""
    while longest > 0.4:  # A machine that held up the signs for so long says nothing of the store.
        attempted = await claimed(store, RolloutConfig(unresponsive_seconds=0.5), worker_id="w1")
        longest, status = await send_signs(store, attempted, sign)
    assert status in ("preparing", "running")


async def send_signs(store: Store, attempted: AttemptedRollout, sign: str) -> tuple[float, str]:
    """Signs of life for a second. Returns the longest that the store can have waited for one, and the status then."""
    pauses, since = [0.0], time.monotonic()
    while sum(pauses) < 1.0:
        if sign == "span":
            await store.add_span(a_span(attempted))
        elif sign == "heartbeat":
            await store.update_attempt(attempted.rollout_id, "latest", last_heartbeat_time=time.time())
        else:
            await store.update_worker("w1")
        pauses.append(time.monotonic() - since)
        since += pauses[-1]
        await asyncio.sleep(0.05)
    status = await status_of(store, attempted.rollout_id)
    return max(*pauses, time.monotonic() - since), status


@pytest.mark.parametrize("before", ["preparing", "unresponsive"])
async def test_an_attempt_that_is_said_to_run_is_watched_from_then_on(store: Store, before: str) -> None:
    attempted = await claimed(store, RolloutConfig(unresponsive_seconds=0.3, max_attempts=2))
    if before == "unresponsive":
        await finish(store, attempted, "unresponsive")
    await finish(store, attempted, "running")
    assert await status_of(store, attempted.rollout_id) == "running"
    again = await store.dequeue_rollout(timeout=20)
    assert again is not None
    assert again.attempt.sequence_id == 2


async def test_an_unresponsive_attempt_may_come_back_while_it_is_the_latest(store: Store) -> None:
    attempted = await claimed(store, RolloutConfig(max_attempts=2))
    await finish(store, attempted, "unresponsive")
    assert await status_of(store, attempted.rollout_id) == "requeuing"
    await store.add_span(a_span(attempted))
    assert await status_of(store, attempted.rollout_id) == "running"
    assert await store.dequeue_rollout() is None
    await finish(store, attempted)
    assert await status_of(store, attempted.rollout_id) == "succeeded"


async def test_an_attempt_given_up_for_good_is_told_so(store: Store) -> None:
    attempted = await claimed(store)
    await finish(store, attempted, "unresponsive")
    assert await status_of(store, attempted.rollout_id) == "failed"
    told = await store.update_attempt(attempted.rollout_id, "latest", status="succeeded")
    assert (told.status, told.metadata["superseded"]) == ("unresponsive", True)


# -- waiting ---------------------------------------------------------------------------------------------------------


async def test_waiting_ends_when_all_have_finished_in_the_order_asked_for(store: Store) -> None:
    attempts = [await claimed(store) for _ in range(3)]
    ids = [attempted.rollout_id for attempted in reversed(attempts)]
    waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=ids, timeout=30))
    for attempted in attempts:
        assert not waiting.done()
        await finish(store, attempted)
    assert [rollout.rollout_id for rollout in await waiting] == ids


async def test_waiting_for_a_minimum_or_a_time_returns_those_that_have_finished(store: Store) -> None:
    one, two = await claimed(store), await claimed(store)
    ids = [one.rollout_id, two.rollout_id]
    assert await store.wait_for_rollouts(rollout_ids=ids, timeout=0) == []
    waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=ids, minimum=1))
    await asyncio.sleep(0.02)
    await finish(store, two)
    assert [rollout.rollout_id for rollout in await waiting] == [two.rollout_id]
    assert [r.rollout_id for r in await store.wait_for_rollouts(rollout_ids=ids, timeout=0.05)] == [two.rollout_id]


async def test_waiting_for_what_cannot_come_is_refused(store: Store) -> None:
    made = await store.enqueue_rollout("task")
    with pytest.raises(NotFoundError, match="nope"):
        await store.wait_for_rollouts(rollout_ids=[made.rollout_id, "nope"])
    with pytest.raises(ConfigError, match="minimum=2"):
        await store.wait_for_rollouts(rollout_ids=[made.rollout_id], minimum=2)
    assert await store.wait_for_rollouts(rollout_ids=[]) == []


async def test_waiting_can_be_cancelled(store: Store) -> None:
    attempted = await claimed(store)
    waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=[attempted.rollout_id]))
    await asyncio.sleep(0.02)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await finish(store, attempted)
    assert len(await store.wait_for_rollouts(rollout_ids=[attempted.rollout_id])) == 1


# -- looking ---------------------------------------------------------------------------------------------------------


async def test_rollouts_are_found_by_every_filter_together(store: Store) -> None:
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(n, rollout_id=f"run1-{n}") for n in range(4)])
    await store.enqueue_rollout("x", rollout_id="run2-0")
    await store.dequeue_many_rollouts(limit=2)

    async def found(**filters: Any) -> list[str]:
        return [rollout.rollout_id for rollout in await store.query_rollouts(**filters)]

    assert await found(status_in=["preparing"]) == ["run1-0", "run1-1"]
    assert await found(rollout_id_contains="run2") == ["run2-0"]
    assert await found(rollout_id_contains="%") == []
    assert await found(rollout_id_in=["run1-3", "run1-0", "nope"]) == ["run1-0", "run1-3"]
    assert await found(status_in=["queuing"], rollout_id_contains="run1", limit=1, offset=1) == ["run1-3"]
    assert await found(status_in=[]) == []
    assert len(await found()) == 5


async def test_unknown_ids_are_named(store: Store) -> None:
    made = await store.enqueue_rollout("task")
    for awaitable in (
        store.query_attempts("nope"),
        store.get_latest_attempt("nope"),
        store.query_spans("nope"),
        store.update_rollout("nope", mode="val"),
        store.start_attempt("nope"),
        store.requeue_rollout("nope", "why"),
        store.update_attempt(made.rollout_id, "nope"),
        store.get_next_span_sequence_id(made.rollout_id, "nope"),
        store.query_spans(made.rollout_id, "nope"),
        store.add_span(Span(made.rollout_id, "nope", "work", 1.0)),
        store.add_span(Span("nope", "at-1", "work", 1.0)),
        store.enqueue_rollout("task", resources_id="nope"),
    ):
        with pytest.raises(NotFoundError, match="nope"):
            await awaitable
    assert await store.get_rollout_by_id("nope") is None
    assert await store.get_resources_by_id("nope") is None
    assert await store.get_latest_resources() is None
    assert await store.get_latest_attempt(made.rollout_id) is None
    assert await store.query_spans(made.rollout_id, "latest") == []


async def test_statistics_count_everything(store: Store) -> None:
    attempted = await claimed(store, worker_id="w1")
    await store.enqueue_rollout("waiting")
    await store.add_span(a_span(attempted))
    counts = await store.statistics()
    assert (counts["rollouts.running"], counts["rollouts.queuing"], counts["rollouts.failed"]) == (1, 1, 0)
    assert (counts["attempts"], counts["spans"], counts["workers"], counts["resources"]) == (1, 1, 1, 0)


# -- spans -----------------------------------------------------------------------------------------------------------


async def test_a_span_is_kept_whole(store: Store) -> None:
    attempted = await claimed(store)
    span = a_span(
        attempted,
        name="chat tiny",
        end_time=2.0,
        trace_id="t" * 32,
        span_id="s" * 16,
        parent_id="p" * 16,
        status_code="ERROR",
        status_message="broke",
        attributes={"a": [1, {"b": None}], PROMPT_TOKEN_IDS: [1, 2, 3], RESPONSE_TOKEN_IDS: [4], LOGPROBS: [-0.25]}
        | {KEPT_SETS: KeptSets.of([(4, 9)]).to_text()},
        events=(SpanEvent("first", 1.5, {"k": "v"}),),
        resource={"service.name": "agent"},
        sequence_id=7,
    )
    assert await store.add_span(span) == span
    assert await store.query_spans(attempted.rollout_id) == [span]


async def test_spans_are_numbered_and_returned_in_order(store: Store) -> None:
    attempted = await claimed(store)
    kept = await store.add_many_spans([a_span(attempted, name=f"{n}") for n in range(3)])
    assert [span.sequence_id for span in kept] == [1, 2, 3]
    assert len({span.span_id for span in kept}) == 3
    reserved = await store.get_next_span_sequence_id(attempted.rollout_id, attempted.attempt.attempt_id)
    assert reserved == 4
    await store.add_span(a_span(attempted, name="later"))
    await store.add_span(a_span(attempted, name="reserved", sequence_id=reserved))
    names = [span.name for span in await store.query_spans(attempted.rollout_id)]
    assert names == ["0", "1", "2", "reserved", "later"]


async def test_the_same_span_again_changes_nothing(store: Store) -> None:
    attempted = await claimed(store)
    first = await store.add_span(a_span(attempted, span_id="0123456789abcdef", attributes={"n": 1}))
    again, other = await store.add_many_spans(
        [a_span(attempted, span_id="0123456789abcdef", attributes={"n": 2}), a_span(attempted, name="other")]
    )
    assert again == first
    assert await store.query_spans(attempted.rollout_id) == [first, other]


async def test_spans_are_found_by_attempt_name_and_place(store: Store) -> None:
    first = await claimed(store, RolloutConfig(max_attempts=2))
    await store.add_many_spans([a_span(first, name="a"), a_span(first, name="b")])
    await finish(store, first, "failed")
    second = await store.dequeue_rollout()
    assert second is not None
    await store.add_many_spans([a_span(second, name="b"), a_span(second, name="c")])

    async def names(*args: Any, **filters: Any) -> list[str]:
        return [span.name for span in await store.query_spans(first.rollout_id, *args, **filters)]

    assert await names() == ["a", "b", "b", "c"]
    assert await names(first.attempt.attempt_id) == ["a", "b"]
    assert await names("latest") == ["b", "c"]
    assert await names("latest", name="b") == ["b"]
    assert await names(limit=2, offset=1) == ["b", "b"]


async def test_the_spans_of_an_attempt_are_counted_without_reading_them(store: Store) -> None:
    attempted = await claimed(store)
    ids = attempted.rollout_id, attempted.attempt.attempt_id
    assert await store.count_spans(*ids) == 0
    await store.add_many_spans([a_span(attempted, name=name, span_id=f"s-{name}") for name in "abc"])
    await store.add_span(a_span(attempted, name="a", span_id="s-a"))
    assert await store.count_spans(*ids) == await store.count_spans(ids[0], "latest") == 3
    waits = await store.enqueue_rollout("input")
    assert await store.count_spans(waits.rollout_id, "latest") == 0
    for unknown in (("ro-none", "latest"), (ids[0], "at-none")):
        with pytest.raises(NotFoundError, match="none"):
            await store.count_spans(*unknown)


@pytest.mark.parametrize("usage", [True, False])
async def test_spans_are_read_without_tokens_but_with_their_numbers(store: Store, usage: bool) -> None:
    attempted = await claimed(store)
    ids = attempted.rollout_id, attempted.attempt.attempt_id
    recorded = {INPUT_TOKENS: 299, OUTPUT_TOKENS: 2} if usage else {}
    prompt = list(range(300))  # longer than a block, so that its beginning is stored apart
    tokens = {PROMPT_TOKEN_IDS: prompt, RESPONSE_TOKEN_IDS: [7, 8], LOGPROBS: [-0.5, -0.25]}
    call = a_span(attempted, name="chat", attributes={"note": "x", **tokens, **recorded})
    stored = await store.add_many_spans([call, a_span(attempted, name="b"), call])
    found = await store.query_spans(*ids, tokens=False)
    counted = recorded or {INPUT_TOKENS: 300, OUTPUT_TOKENS: 2}
    assert [span.attributes for span in found] == [{"note": "x", **counted}, stored[1].attributes, found[0].attributes]
    assert [span.span_id for span in found] == [span.span_id for span in stored]
    after = await store.query_spans(*ids, tokens=False, after=found[0].span_id, limit=1)
    assert [span.name for span in after] == ["b"]
    assert await store.query_spans(*ids) == stored


async def test_the_newest_spans_are_those_stored_last_whatever_rollout_they_belong_to(store: Store) -> None:
    assert await store.newest_spans() == []
    first, second = await claimed(store), await claimed(store)
    stored = await store.add_many_spans([a_span(first, name="a"), a_span(first, name="b")])
    stored += [await store.add_span(a_span(each, name=name)) for each, name in ((second, "c"), (first, "d"))]
    assert await store.newest_spans() == stored[::-1]
    assert [span.name for span in await store.newest_spans(3)] == ["d", "c", "b"]
    assert await store.newest_spans(limit=0) == []
    with pytest.raises(ConfigError, match="limit=-1"):
        await store.newest_spans(-1)


async def test_spans_of_many_rollouts_are_read_in_the_order_asked_for(store: Store) -> None:
    attempts = [await claimed(store) for _ in range(70)]
    await store.add_many_spans([a_span(each, name=each.rollout_id) for each in attempts for _ in range(2)])
    empty = await store.enqueue_rollout("never claimed")
    ids = [attempted.rollout_id for attempted in reversed(attempts)] + [empty.rollout_id]
    read = [(rollout_id, [span.name for span in spans]) async for rollout_id, spans in store.iter_spans(ids)]
    assert read == [(rollout_id, [rollout_id] * 2) for rollout_id in ids[:-1]] + [(empty.rollout_id, [])]
    with pytest.raises(NotFoundError, match="nope"):
        _ = [each async for each in store.iter_spans(["nope"])]


async def test_what_json_cannot_hold_is_refused_by_name(store: Store) -> None:
    attempted = await claimed(store)
    with pytest.raises(ConfigError, match=r"attributes\['reward'\].* is nan"):
        await store.add_span(a_span(attempted, attributes={"reward": math.nan}))
    with pytest.raises(ConfigError, match=r"input\['a'\]\[1\] is inf"):
        await store.enqueue_rollout({"a": [1, math.inf]})
    with pytest.raises(ConfigError, match=r"logprobs\[1\] is -inf"):
        await store.add_span(a_span(attempted, attributes={LOGPROBS: [-0.5, -math.inf]}))
    with pytest.raises(ConfigError, match="metadata"):
        await store.update_attempt(attempted.rollout_id, "latest", metadata={"object": object()})
    assert await store.query_spans(attempted.rollout_id) == []


# -- resources and workers -------------------------------------------------------------------------------------------


async def test_resources_have_versions_and_the_last_one_published_is_the_latest(store: Store) -> None:
    first = await store.add_resources({"llm": LLM(endpoint="http://x", model="tiny", policy_version=0)})
    second = await store.add_resources({"prompt": PromptTemplate(template="{q}")}, resources_id="mine")
    assert (first.version, second.version) == (1, 2)
    assert await store.get_latest_resources() == second
    assert await store.get_resources_by_id(first.resources_id) == first
    with pytest.raises(ConflictError, match="mine"):
        await store.add_resources({}, resources_id="mine")
    changed = await store.update_resources(first.resources_id, {"llm": LLM(endpoint="http://y", model="tiny")})
    assert changed.version == 3
    assert await store.get_latest_resources() == changed
    assert [each.resources_id for each in await store.query_resources()] == [first.resources_id, "mine"]
    assert [each.resources_id for each in await store.query_resources(limit=1, offset=1)] == ["mine"]
    assert [await store.delete_resources(first.resources_id) for _ in range(2)] == [1, 0]
    assert await store.get_latest_resources() == second
    assert await store.get_resources_by_id(first.resources_id) is None
    with pytest.raises(NotFoundError, match=first.resources_id):
        await store.enqueue_rollout("x", resources_id=first.resources_id)


async def test_resources_are_published_under_a_new_id_and_keep_the_time_of_their_creation(store: Store) -> None:
    made = await store.update_resources("default", {"llm": LLM(endpoint="http://x", model="tiny")})
    assert (made.resources_id, made.version, made.update_time) == ("default", 1, None)
    changed = await store.update_resources("default", {"llm": ProxyLLM(endpoint="http://y/v1", model="tiny")})
    assert changed.create_time == made.create_time
    assert changed.update_time is not None
    assert changed.update_time >= made.create_time
    assert await store.get_resources_by_id("default") == await store.get_latest_resources() == changed
    with pytest.raises(ConfigError, match="a b"):
        await store.update_resources("a b", {})


async def test_what_is_no_resource_is_refused(store: Store) -> None:
    with pytest.raises(ConfigError, match="resources"):
        await store.add_resources({"bad": 3})  # pyright: ignore[reportArgumentType]


async def test_a_worker_is_known_by_its_heartbeats_and_its_work(store: Store) -> None:
    worker = await store.update_worker("w1", {"cpu": 0.5})
    assert (worker.stats, worker.current_rollout_id) == ({"cpu": 0.5}, None)
    attempted = await claimed(store, worker_id="w1")
    worker = await store.update_worker("w1")
    assert worker.stats == {"cpu": 0.5}
    assert (worker.current_rollout_id, worker.current_attempt_id) == (
        attempted.rollout_id,
        attempted.attempt.attempt_id,
    )
    await finish(store, attempted)
    assert [(each.worker_id, each.current_rollout_id) for each in await store.query_workers()] == [("w1", None)]


# -- life ------------------------------------------------------------------------------------------------------------


async def test_a_closed_store_says_so(store: Store) -> None:
    attempted = await claimed(store)
    waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=[attempted.rollout_id]))
    await asyncio.sleep(0.02)
    await store.close()
    await store.close()
    with pytest.raises(StoreClosedError):
        await waiting
    with pytest.raises(StoreClosedError, match="closed"):
        await store.enqueue_rollout("task")
    with pytest.raises(StoreClosedError, match="closed"):
        await store.query_rollouts()


@pytest.mark.parametrize(
    ("method", "positional"),
    [
        ("enqueue_rollout", ("task", None, None, None, None, None, "queue")),
        ("start_rollout", ("task", None, None, None, None, None, None, "queue")),
        ("dequeue_rollout", (None, 0.0, ["queue"])),
        ("dequeue_many_rollouts", (1, None, 0.0, ["queue"])),
        ("start_attempt", ("ro-1", None, "cl-1")),
        ("query_rollouts", (["queuing"],)),
        ("count_rollouts", (["queuing"],)),
        ("update_rollout", ("ro-1", "task")),
        ("wait_for_rollouts", (["ro-1"],)),
        ("query_attempts", ("ro-1", "start_time")),
        ("update_attempt", ("ro-1", "at-1", "running")),
        ("query_spans", ("ro-1", None, "name")),
        ("query_resources", ("rs-1",)),
        ("update_worker", ("w1", {}, 30.0)),
        ("query_workers", (["idle"],)),
    ],
)
async def test_what_has_a_name_in_the_contract_is_not_taken_by_position(
    store: LightningStoreBase, method: str, positional: tuple[Any, ...]
) -> None:
    with pytest.raises(TypeError):
        await getattr(store, method)(*positional)
    assert await store.query_rollouts() == []
