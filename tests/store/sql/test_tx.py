"""Transactions: batches of commands, commands that fail, and changes by other processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import ConflictError, NotFoundError, StoreError
from agentlightning.rollouts import EnqueueRolloutRequest
from agentlightning.span import PROMPT_TOKEN_IDS, Span
from agentlightning.store import LightningStore
from agentlightning.store.sql import rollouts
from agentlightning.store.sql.store import SqlStore
from agentlightning.store.sql.tx import CHUNK_BYTES, OPEN_ATTEMPTS, Tx, chunks, insert

pytestmark = pytest.mark.integration

ADD_A_SPAN = """
import asyncio, sys
from agentlightning.span import Span
from agentlightning.store import LightningStore

async def main():
    store = LightningStore(sys.argv[1])
    await store.add_span(Span(sys.argv[2], sys.argv[3], "from afar", 1.0))
    await store.close()

asyncio.run(main())
"""


def a_span(ids: tuple[str, str], name: str = "work", **values: Any) -> Span:
    return Span(*ids, name, start_time=1.0, **values)


async def started(store: SqlStore) -> tuple[str, str]:
    attempted = await store.start_rollout("task")
    return attempted.rollout_id, attempted.attempt.attempt_id


# -- batches ---------------------------------------------------------------------------------------------------------


async def test_calls_made_at_once_share_a_commit(tmp_path: Path) -> None:
    store = SqlStore(tmp_path / "store.db")
    await store.enqueue_rollout("first")
    before = store.writer.commits
    await asyncio.gather(*(store.enqueue_rollout(index) for index in range(200)))
    assert store.writer.commits - before < 100
    await store.close()


async def test_one_call_the_database_refuses_fails_alone(tmp_path: Path) -> None:
    store = SqlStore(tmp_path / "store.db")

    def refused(tx: Tx) -> None:
        tx.run("INSERT INTO nowhere VALUES (1)")

    good = [store.enqueue_rollout(index) for index in range(20)]
    answers = await asyncio.gather(*good, store.do("refused", refused), return_exceptions=True)
    assert [isinstance(answer, StoreError) for answer in answers] == [False] * 20 + [True]
    assert len(await store.query_rollouts()) == 20
    assert (await store.statistics())["rollouts.queuing"] == 20
    claimed = await store.dequeue_many_rollouts(limit=50)
    assert [each.input for each in claimed] == list(range(20))
    await store.close()


@pytest.mark.parametrize("written", [False, True])
async def test_a_call_that_fails_takes_back_all_it_changed(tmp_path: Path, written: bool) -> None:
    store = SqlStore(tmp_path / "store.db")
    ids = await started(store)

    def fails(tx: Tx) -> None:
        rollout = tx.rollout(ids[0])
        tx.set(rollout, metadata='{"half": true}')
        rollouts.set_rollout_status(tx, rollout, "succeeded")
        if written:
            tx.flush()
        raise ConflictError("not after all")

    before = await store.get_rollout_by_id(ids[0])
    beat, failed = await asyncio.gather(
        store.update_attempt(*ids, last_heartbeat_time=5.0), store.do("fails", fails), return_exceptions=True
    )
    assert isinstance(failed, ConflictError)
    assert not isinstance(beat, BaseException)
    after = await store.update_attempt(*ids, metadata={"a": 1})
    kept = await store.get_rollout_by_id(ids[0])
    assert before is not None
    assert kept is not None
    assert (kept.metadata, kept.status) == ({}, "running")
    assert (after.last_heartbeat_time, after.metadata) == (5.0, {"a": 1})
    await store.close()


async def test_calls_that_fail_late_take_nothing_of_others_with_them(tmp_path: Path) -> None:
    store = SqlStore(tmp_path / "store.db")
    ids = await started(store)

    def fails(tx: Tx) -> None:
        tx.set(tx.attempt(*ids), metadata='{"half": true}')
        raise ConflictError("not after all")

    def calls(index: int) -> list[Awaitable[Any]]:
        return [
            store.do("fails", fails),
            store.enqueue_rollout(index),
            store.add_span(Span(*ids, f"span {index}", 1.0)),
        ]

    answers = await asyncio.gather(*(call for index in range(40) for call in calls(index)), return_exceptions=True)
    assert [isinstance(answer, ConflictError) for answer in answers] == [True, False, False] * 40
    assert [each.input for each in await store.query_rollouts(status_in=["queuing"])] == list(range(40))
    spans = await store.query_spans(*ids)
    assert [span.name for span in spans] == [f"span {index}" for index in range(40)]
    assert [span.sequence_id for span in spans] == list(range(1, 41))
    assert (await store.query_attempts(ids[0]))[0].metadata == {}
    statistics = await store.statistics()
    assert (statistics["rollouts.queuing"], statistics["spans"]) == (40, 40)
    await store.close()


async def test_who_observes_is_told_of_every_call(tmp_path: Path) -> None:
    store = SqlStore(tmp_path / "store.db")
    told: list[tuple[str, int]] = []

    def observe(name: str, waited: float, took: float, batch: int) -> None:
        assert waited >= 0
        assert took >= 0
        told.append((name, batch))

    store.observe = observe
    await asyncio.gather(*(store.enqueue_rollout(index) for index in range(3)))
    with pytest.raises(NotFoundError):
        await store.cancel_rollout("nope")
    await store.query_rollouts()
    await store.close()
    assert {name for name, _ in told} >= {"enqueue_rollout", "cancel_rollout", "query_rollouts"}
    assert max(batch for _, batch in told) <= 3


# -- what is kept in memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "memory"])
async def test_spans_read_soon_after_they_were_written_are_those_of_the_database(tmp_path: Path, kind: str) -> None:
    path: Any = tmp_path / "store.db" if kind == "file" else ":memory:"
    store = SqlStore(path)
    ids = await started(store)
    prompt = {PROMPT_TOKEN_IDS: list(range(700))}
    kept = await store.add_many_spans([a_span(ids, "a", attributes=prompt), a_span(ids, "b", attributes={"n": None})])
    kept += await store.add_many_spans([a_span(ids, "c", parent_id="p", resource={"r": 1})])
    assert await store.query_spans(ids[0]) == kept
    assert await store.query_spans(*ids, name="b") == [kept[1]]
    assert await store.query_spans(ids[0], limit=1, offset=2) == [kept[2]]
    assert [spans async for _, spans in store.iter_spans([ids[0]])] == [kept]
    early = await store.add_span(a_span(ids, "early", sequence_id=1))
    assert await store.query_spans(ids[0]) == [kept[0], early, *kept[1:]]
    await store.close()


async def test_what_another_process_added_is_read_at_once(tmp_path: Path) -> None:
    store = SqlStore(tmp_path / "store.db")
    ids = await started(store)
    own = await store.add_span(a_span(ids, "own"))
    assert await store.query_spans(ids[0]) == [own]
    command = [sys.executable, "-c", ADD_A_SPAN, str(tmp_path / "store.db"), *ids]
    await asyncio.to_thread(subprocess.run, command, check=True)
    assert [span.name for span in await store.query_spans(ids[0])] == ["own", "from afar"]
    after = await store.add_span(a_span(ids, "after"))
    assert after.sequence_id == 3
    assert [span.name for span in await store.query_spans(ids[0])] == ["own", "from afar", "after"]
    await store.close()


async def test_two_stores_of_one_process_see_what_the_other_changed(tmp_path: Path) -> None:
    one, other = SqlStore(tmp_path / "store.db"), SqlStore(tmp_path / "store.db")
    ids = await started(one)
    await one.add_span(a_span(ids, "one"))
    await other.update_attempt(*ids, status="succeeded")
    with pytest.raises(ConflictError, match="succeeded"):
        await one.update_attempt(*ids, status="failed")
    await other.delete_rollouts([ids[0]])
    with pytest.raises(NotFoundError):
        await one.query_spans(ids[0])
    with pytest.raises(NotFoundError):
        await one.add_span(a_span(ids))
    made = await other.enqueue_rollout("new")
    claimed = await one.dequeue_rollout()
    assert claimed is not None
    assert claimed.rollout_id == made.rollout_id
    assert await other.dequeue_rollout() is None
    await one.close()
    await other.close()


async def test_what_is_kept_in_memory_is_bounded_and_nothing_depends_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentlightning.store.sql.tx.CACHE_BYTES", 20_000)
    monkeypatch.setattr("agentlightning.store.sql.spans.CACHE_BYTES", 2_000)
    store = SqlStore(tmp_path / "store.db")
    made = await store.enqueue_many_rollouts([EnqueueRolloutRequest({"text": "x" * 500}) for _ in range(100)])
    claimed = await store.dequeue_many_rollouts(limit=100)
    assert [each.rollout_id for each in claimed] == [rollout.rollout_id for rollout in made]
    pairs = [(each.rollout_id, each.attempt.attempt_id) for each in claimed]
    prompts = [{PROMPT_TOKEN_IDS: list(range(number, number + 200))} for number in range(100)]
    first = [
        await store.add_span(a_span(ids, span_id="0123456789abcdef", attributes=prompt))
        for ids, prompt in zip(pairs, prompts, strict=True)
    ]
    again = [await store.add_span(a_span(ids, "other", span_id="0123456789abcdef")) for ids in pairs]
    assert again == first
    for ids, span, prompt in zip(pairs, first, prompts, strict=True):
        longer = await store.add_span(a_span(ids, attributes={PROMPT_TOKEN_IDS: [*prompt[PROMPT_TOKEN_IDS], 1]}))
        assert await store.query_spans(ids[0]) == [span, longer]
        await store.update_attempt(*ids, status="succeeded")
    assert (await store.statistics())["rollouts.succeeded"] == 100
    await store.close()


async def test_what_is_known_of_span_ids_is_bounded_where_all_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.store.sql.spans.CACHE_BYTES", 20_000)
    store = SqlStore(":memory:")
    spans = [
        [a_span((each.rollout_id, each.attempt.attempt_id), span_id=f"{number:016}") for number in range(50)]
        for each in [await store.start_rollout(number) for number in range(20)]
    ]
    for some in [*spans, *spans]:
        await store.add_many_spans(some)
    store.writer.spans.clear()
    for some in spans:
        await store.add_many_spans(some)
    assert sum(len(each.ids or ()) for each in store.writer.spans._known.values()) <= 200
    await store.close()


async def test_ids_of_an_attempt_with_more_than_is_remembered_of_all_are_read_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentlightning.store.sql.spans.CACHE_BYTES", 2_000)
    store = SqlStore(":memory:")
    attempted = await store.start_rollout("long")
    ids, reads = (attempted.rollout_id, attempted.attempt.attempt_id), list[str]()
    read = Tx.all
    monkeypatch.setattr(Tx, "all", lambda tx, sql, *values: reads.append(sql) or read(tx, sql, *values))
    for number in range(100):
        await store.add_span(a_span(ids, span_id=f"{number:016}"))
    assert not [sql for sql in reads if "ids FROM span_packs" in sql]
    await store.close()


async def test_heartbeats_of_many_workers_ask_once_for_what_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    store, reads = SqlStore(":memory:"), list[str]()
    for number in range(50):
        await store.start_rollout(number, worker_id=f"w{number}")
    read = Tx.all
    monkeypatch.setattr(Tx, "all", lambda tx, sql, *values: reads.append(sql) or read(tx, sql, *values))
    await asyncio.gather(*[store.update_worker(f"w{number}", {"alive": True}) for number in range(50)])
    assert len([sql for sql in reads if sql == OPEN_ATTEMPTS]) <= 2
    await store.close()


async def test_a_store_opened_again_goes_on_where_it_was(tmp_path: Path) -> None:
    store = LightningStore(tmp_path / "store.db")
    await store.update_queue("slow", 1)
    made = await store.enqueue_many_rollouts([EnqueueRolloutRequest(n, queue="slow", priority=n) for n in range(3)])
    assert await store.dequeue_rollout("w1") is not None
    await store.update_worker("w1", lease_seconds=600)
    await store.close()
    store = LightningStore(tmp_path / "store.db")
    assert await store.dequeue_rollout() is None
    await store.update_attempt(made[2].rollout_id, "latest", status="succeeded")
    claimed = await store.dequeue_rollout()
    assert claimed is not None
    assert claimed.rollout_id == made[1].rollout_id
    late = await store.enqueue_rollout("late")
    assert [rollout.rollout_id for rollout in await store.query_rollouts(newest_first=True, limit=1)] == [
        late.rollout_id
    ]
    await store.close()


# -- rows of one statement -------------------------------------------------------------------------------------------


def test_large_rows_are_written_by_statements_of_their_own_and_small_ones_together() -> None:
    statement = insert("span_packs", ("key", "spans"))
    large, small = bytes(CHUNK_BYTES // 4), b"small"
    rows = [(number, small if number >= 40 else large) for number in range(110)]
    written = list(chunks(statement, rows))
    assert [value for _, values in written for value in values] == [value for row in rows for value in row]
    sizes = [sum(len(value) for value in values if isinstance(value, bytes)) for _, values in written]
    assert max(sizes) <= CHUNK_BYTES
    assert max(len(values) for _, values in written) == 2 * 64, "64 small ones are one statement"
