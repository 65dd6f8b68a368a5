"""Pages of spans: each costs what is on it, and together they are the whole list."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import httpx
import pytest

from agentlightning.span import Span
from agentlightning.store.http.client import LightningStoreClient
from agentlightning.store.sql import pack as codec
from agentlightning.store.sql.schema import MAX_PACK
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
