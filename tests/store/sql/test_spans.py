"""Pages of spans: each costs what is on it, and together they are the whole list."""

from __future__ import annotations

import asyncio
import random
import threading
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentlightning.errors import NotFoundError
from agentlightning.span import PROMPT_TOKEN_IDS, Span
from agentlightning.store.http.client import LightningStoreClient
from agentlightning.store.sql import committer
from agentlightning.store.sql import pack as codec
from agentlightning.store.sql.schema import MAX_PACK, UNPLACED
from agentlightning.store.sql.spans import RECENT_ROLLOUTS
from agentlightning.store.sql.store import SqlStore

pytestmark = pytest.mark.integration


class Costs:
    """What reading has cost: SQLite's instructions, in hundreds, and the spans that were decoded."""

    def __init__(self, store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.instructions = self.decoded = 0
        unpack = codec.unpack

        def counted(*arguments: Any, **options: Any) -> list[Span]:
            spans = unpack(*arguments, **options)
            self.decoded += len(spans)
            return spans

        def ran() -> int:
            self.instructions += 1
            return 0

        monkeypatch.setattr(codec, "unpack", counted)
        store.reader._connection.raw.set_progress_handler(ran, 100)

    async def of(self, call: Any) -> tuple[int, int]:
        self.instructions = self.decoded = 0
        await call()
        return self.instructions, self.decoded


async def filled(store: SqlStore, count: int, pack: int) -> tuple[str, list[str]]:
    """A rollout with so many spans, added so many at a time, and their ids."""
    rollout = await store.start_rollout("a task")
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    for start in range(0, count, pack):
        names = range(start, min(start + pack, count))
        await store.add_many_spans([Span(*ids, f"{n % 7}", 1.0, span_id=f"{n:016x}") for n in names])
    return ids[0], [f"{n:016x}" for n in range(count)]


@pytest.mark.parametrize("pack", [1, 50, 3000])
@pytest.mark.parametrize("options", [{}, {"tokens": False}, {"name_contains": "3"}])
async def test_a_page_costs_the_same_however_many_spans_there_are(
    monkeypatch: pytest.MonkeyPatch, pack: int, options: dict[str, Any]
) -> None:
    store = SqlStore(":memory:")
    costs, found = Costs(store, monkeypatch), list[list[tuple[int, int]]]()
    for count in (300, 2700):
        rollout_id, ids = await filled(store, count, pack)
        page = partial(store.query_spans, rollout_id, limit=10, **options)
        found.append([await costs.of(partial(page, after=after)) for after in (None, ids[count // 2], ids[-90])])
    for kind, slack in ((0, 12), (1, 260)):
        assert max(cost[kind] for cost in found[1]) <= max(cost[kind] for cost in found[0]) + slack
    await store.close()


async def test_all_pages_together_decode_each_span_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqlStore(":memory:")
    rollout_id, ids = await filled(store, 3000, 3000)
    costs, seen = Costs(store, monkeypatch), list[str]()

    async def read() -> None:
        while page := await store.query_spans(rollout_id, after=seen[-1] if seen else None, limit=100):
            seen.extend(span.span_id for span in page)

    _, decoded = await costs.of(read)
    assert seen == ids
    assert decoded < 6 * 3000
    await store.close()


@pytest.mark.parametrize("seed", range(4))
async def test_pages_are_the_whole_list_whatever_numbers_the_spans_have(seed: int) -> None:
    chosen = random.Random(seed)
    store = SqlStore(":memory:")
    rollout = await store.start_rollout("a task")
    for _ in range(2):
        ids = rollout.rollout_id, (await store.start_attempt(rollout.rollout_id)).attempt.attempt_id
        for _ in range(25):
            start, size = chosen.choice([0, 0, chosen.randrange(1, 900)]), chosen.choice([1, 2, 30, 300])
            step = chosen.choice([1, 1, 2, -1, 0])
            numbers = [max(0, start + step * n) if start else 0 for n in range(size)]
            await store.add_many_spans([Span(*ids, "x", 1.0, sequence_id=number) for number in numbers])
    every = await store.query_spans(rollout.rollout_id)
    for attempt in await store.query_attempts(rollout.rollout_id):
        numbers = [span.sequence_id for span in every if span.attempt_id == attempt.attempt_id]
        assert numbers == sorted(numbers)
    for limit in (1, 7, 129):
        after = every[chosen.randrange(len(every) // 2)]
        seen = every[: every.index(after) + 1]
        for _ in range(40):
            seen += await store.query_spans(rollout.rollout_id, after=seen[-1].span_id, limit=limit)
        assert seen == every[: len(seen)]
    ((record,), other) = await store.read_records([rollout.rollout_id]), SqlStore(":memory:")
    await other.add_records([record])
    assert [span.span_id for span in await other.query_spans(rollout.rollout_id)] == [span.span_id for span in every]
    await store.close()
    await other.close()


async def test_spans_sent_again_in_other_parts_are_stored_once() -> None:
    store = SqlStore(":memory:")
    rollout = await store.start_rollout("a task")
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    spans = [Span(*ids, f"{n}", 1.0, span_id=f"{n:016x}") for n in range(400)]
    first = await store.add_many_spans(spans[50:300])
    again = await store.add_many_spans([*spans, spans[0], spans[60]])
    assert again[50:300] == first
    assert (again[400], again[401]) == (again[0], first[10])
    assert sorted(span.name for span in await store.query_spans(ids[0])) == sorted(span.name for span in spans)
    await store.close()


async def test_over_http_a_page_and_its_total_cost_the_same_and_a_list_is_read_in_few_requests(
    hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqlStore(":memory:")
    url = hub.serve(store)
    costs, found = Costs(store, monkeypatch), list[list[tuple[int, int]]]()
    async with httpx.AsyncClient(base_url=url + "/v1/agl", verify=False) as http:
        for count in (300, 2700):
            rollout_id, ids = await filled(store, count, 100)
            given = {"rollout_id": rollout_id, "limit": 10}
            found.append([])
            for after, total in ((None, count), (ids[count // 2], count)):
                page = partial(http.get, "/spans", params={**given, **({} if after is None else {"after": after})})
                found[-1].append(await costs.of(page))
                answer = (await page()).json()
                assert (len(answer["items"]), answer["total"]) == (10, total)
        for kind, slack in ((0, 12), (1, 260)):
            assert max(cost[kind] for cost in found[1]) <= max(cost[kind] for cost in found[0]) + slack
        named = (await http.get("/spans", params={**given, "name": "3"})).json()
        assert named["total"] == len([n for n in range(2700) if n % 7 == 3])
        more = {**given, "name": "3", "after": named["items"][-1]["span_id"]}
        assert (await http.get("/spans", params=more)).json()["total"] is None
    client, requests = LightningStoreClient(url), list[str]()
    query = store.query_spans
    monkeypatch.setattr(store, "query_spans", lambda *names, **options: requests.append("") or query(*names, **options))
    _, decoded = await costs.of(partial(client.query_spans, rollout_id))
    assert len(requests) <= 5
    assert decoded <= 2700 + 5 * 2 * MAX_PACK
    await client.close()
    await store.close()


# -- spans that were just written -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [1, 7, MAX_PACK])
async def test_a_list_continues_after_any_span_of_a_long_attempt(pack: int) -> None:
    store = SqlStore(":memory:")
    rollout_id, ids = await filled(store, UNPLACED + 2 * MAX_PACK, pack)
    for index in (0, 1, UNPLACED - 2, UNPLACED - 1, UNPLACED, UNPLACED + 1, len(ids) - 2):
        following = await store.query_spans(rollout_id, after=ids[index], limit=1)
        assert [span.span_id for span in following] == [ids[index + 1]]
    repeated = [
        Span(rollout_id, (await store.query_attempts(rollout_id))[0].attempt_id, "again", 2.0, span_id=each)
        for each in (ids[0], ids[-1])
    ]
    assert [span.name for span in await store.add_many_spans(repeated)] == ["0", f"{(len(ids) - 1) % 7}"]
    await store.close()


async def test_spans_that_were_just_written_are_read_without_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqlStore(tmp_path / "store.db")
    rollout_id, ids = await filled(store, 6, 2)
    costs = Costs(store, monkeypatch)

    async def read() -> None:
        assert [span.span_id for span in await store.query_spans(rollout_id)] == ids

    assert await costs.of(read) == (0, 6)
    other = SqlStore(tmp_path / "store.db")
    assert await other.query_spans(rollout_id) == await store.query_spans(rollout_id)
    await other.close()
    await store.close()


async def test_what_another_process_has_written_is_read(tmp_path: Path) -> None:
    store, other = SqlStore(tmp_path / "store.db"), SqlStore(tmp_path / "store.db")
    rollout_id, ids = await filled(store, 2, 1)
    attempt = (await store.query_attempts(rollout_id))[0]
    for number, writer in enumerate([other, store, other, other, store, store, other]):
        await writer.add_span(Span(rollout_id, attempt.attempt_id, "more", 1.0, span_id=f"{number + 2:016x}"))
        ids.append(f"{number + 2:016x}")
        for reader in (store, other):
            assert [span.span_id for span in await reader.query_spans(rollout_id)] == ids
    await store.update_attempt(rollout_id, attempt.attempt_id, status="succeeded")
    await other.delete_rollouts([rollout_id])
    for reader in (store, other):
        with pytest.raises(NotFoundError):
            await reader.query_spans(rollout_id)
    await store.close()
    await other.close()


async def test_processes_that_write_in_turn_read_only_the_ids_that_are_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = [SqlStore(tmp_path / "store.db") for _ in range(2)]
    rollout_id, ids = await filled(stores[0], 100, 1)
    (attempt,) = await stores[0].query_attempts(rollout_id)
    read: list[str] = []
    split_ids = codec.split_ids

    def counted(data: bytes) -> tuple[str, ...]:
        read.extend(found := split_ids(data))
        return found

    monkeypatch.setattr(codec, "split_ids", counted)
    for number in range(40):
        span = Span(rollout_id, attempt.attempt_id, "more", 1.0, span_id=f"{1000 + number:016x}")
        await stores[number % 2].add_span(span)
    assert len(read) < 3 * (len(ids) + 40)
    monkeypatch.undo()
    again = await stores[0].add_span(span)  # the other one has stored it
    assert (again.sequence_id, len(await stores[1].query_spans(rollout_id))) == (140, 140)
    for store in stores:
        await store.close()


@pytest.mark.parametrize("kind", ["file", "postgres"])
async def test_an_attempt_that_another_process_made_again_has_its_own_span_ids(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = tmp_path / "store.db" if kind == "file" else request.getfixturevalue("postgres_store_url")
    stores = [SqlStore(url) for _ in range(2)]
    for store, names in zip(stores, ("ab", "cd"), strict=True):
        await store.delete_rollouts(["ro-1"])
        started = await store.start_rollout("a task", rollout_id="ro-1", claim_id="claim-1")
        ids = started.rollout_id, started.attempt.attempt_id
        for name in names:
            await store.add_span(Span(*ids, name, 1.0, span_id=name))
        await store.cancel_rollout(ids[0])
    added = [await stores[0].add_span(Span(*ids, name, 1.0, span_id=name)) for name in "ac"]
    assert [span.sequence_id for span in added] == [3, 1]
    assert [span.span_id for span in await stores[0].query_spans(ids[0])] == ["c", "d", "a"]
    for store in stores:
        await store.close()


async def test_what_was_read_from_the_database_stays_readable_while_its_commit_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqlStore(tmp_path / "store.db")
    rollout_id, _ = await filled(store, 1, 1)
    (attempt,) = await store.query_attempts(rollout_id)
    recent, committed, ended = store.writer.spans.recent, threading.Event(), threading.Event()
    record = recent.committed

    def wait() -> None:
        committed.set()
        ended.wait(30)
        record()

    monkeypatch.setattr(recent, "committed", wait)
    write = asyncio.ensure_future(store.add_span(Span(rollout_id, attempt.attempt_id, "more", 1.0)))
    await asyncio.to_thread(committed.wait, 30)
    assert len(await store.query_spans(rollout_id, limit=10)) == 2  # from the database
    assert len(await store.query_spans(rollout_id)) == 2
    ended.set()
    await write
    assert recent.of(rollout_id, None) is not None
    await store.close()


async def test_spans_of_a_deleted_rollout_are_not_remembered(tmp_path: Path) -> None:
    store = SqlStore(tmp_path / "store.db")
    rollout_id, ids = await filled(store, 2, 1)
    attempt = (await store.query_attempts(rollout_id))[0]
    await store.update_attempt(rollout_id, attempt.attempt_id, status="succeeded")
    assert [span.span_id for span in await store.query_spans(rollout_id)] == ids
    await store.delete_rollouts([rollout_id])
    with pytest.raises(NotFoundError):
        await store.query_spans(rollout_id)
    await store.close()


async def test_only_the_rollouts_written_last_are_remembered() -> None:
    store = SqlStore(":memory:")
    filled_ids = [(await filled(store, 1, 1))[0] for _ in range(RECENT_ROLLOUTS + 1)]
    recent = store.writer.spans.recent
    assert [recent.of(each, None) is not None for each in filled_ids] == [False] + [True] * RECENT_ROLLOUTS
    await store.close()


async def test_idle_processes_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer, "POLL_SECONDS", 0.02)
    stores = [SqlStore(tmp_path / "store.db") for _ in range(2)]
    await filled(stores[0], 1, 1)
    await asyncio.sleep(0.2)
    log = (tmp_path / "store.db-wal").read_bytes()
    await asyncio.sleep(0.3)
    assert (tmp_path / "store.db-wal").read_bytes() == log
    for store in stores:
        await store.close()


@pytest.mark.parametrize("seed", range(12))
async def test_reads_of_recent_spans_are_those_of_the_database(tmp_path: Path, seed: int) -> None:
    """Whatever is written before: numbers, repeated ids, retries, late spans, long prompts, deletions."""
    draw = random.Random(seed)
    store = SqlStore(tmp_path / "store.db" if seed % 2 else ":memory:")
    attempts: list[tuple[str, str]] = []
    for _ in range(60):
        choice = draw.random()
        if choice < 0.15 or not attempts:
            started = await store.start_rollout("a task")
            attempts.append((started.rollout_id, started.attempt.attempt_id))
        elif choice < 0.22:
            again = await store.start_attempt(draw.choice(attempts)[0])
            attempts.append((again.rollout_id, again.attempt.attempt_id))
        elif choice < 0.26:
            gone = draw.choice(attempts)[0]
            await store.cancel_rollout(gone)
            await store.delete_rollouts([gone])
            attempts = [each for each in attempts if each[0] != gone]
        else:
            spans = []
            for _ in range(draw.choice([1, 1, 3, 9])):
                number = draw.choice([0, 0, 0, 0, draw.randrange(1, 30)])
                prompt = {PROMPT_TOKEN_IDS: [1] * draw.choice([3, 200])} if draw.random() < 0.1 else {}
                text = {"text": "x" * draw.choice([10, 10, 10, 40_000])}
                ids = draw.choice(attempts) if draw.random() < 0.1 else attempts[-1]
                span_id = draw.choice(["", f"{draw.randrange(40):x}"])
                spans.append(Span(*ids, "s", 1.0, None, number, "", span_id, attributes=prompt | text))
            await store.add_many_spans(spans)
        for rollout_id, attempt_id in attempts:
            for which in (None, attempt_id):
                read = await store.query_spans(rollout_id, which)
                assert read == await store.query_spans(rollout_id, which, limit=-1)
    await store.close()


async def test_a_task_that_polls_lets_others_write() -> None:
    store = SqlStore(":memory:")
    rollout_id, _ = await filled(store, 1, 1)
    attempt = (await store.query_attempts(rollout_id))[0]
    adding = asyncio.create_task(store.add_span(Span(rollout_id, attempt.attempt_id, "late", 1.0)))
    async with asyncio.timeout(20):
        while len(await store.query_spans(rollout_id)) < 2:
            pass
    await adding
    await store.close()
