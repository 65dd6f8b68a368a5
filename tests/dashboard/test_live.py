"""What the page of a server reads: the newest calls, once for all who look, whatever runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from tests.dashboard.conftest import Asked

from agentlightning import span as names
from agentlightning.dashboard.data import run_data as live
from agentlightning.dashboard.data.run_data import Catalog
from agentlightning.span import Span
from agentlightning.store import LightningStore
from agentlightning.store.instrumented import instrument

SPANS = {"newest_spans", "query_spans", "iter_spans", "read_records"}


class Watched:
    """The server of a store with one running rollout."""

    def __init__(self) -> None:
        self.asked = Asked()
        self.store = LightningStore(":memory:")
        watched = instrument(self.store, [self.asked])
        watched.iter_spans = self._iter_spans  # which observers are not told of
        self.data = Catalog(watched)
        self.count = 0

    def _iter_spans(self, rollout_ids: Sequence[str], tokens: bool = True) -> AsyncIterator[tuple[str, list[Span]]]:
        self.asked["iter_spans"] += len(rollout_ids)
        return self.store.iter_spans(rollout_ids, tokens)

    async def start(self) -> None:
        rollout = await self.store.start_rollout({"question": "6 x 7"})
        self.ids = rollout.rollout_id, rollout.attempt.attempt_id

    async def calls(self, number: int) -> list[str]:
        """Store so many more calls of the rollout, each with a span that is none; returns the ids of the calls."""
        spans, ids = list[Span](), list[str]()
        for _ in range(number):
            self.count += 1
            ids.append(f"call-{self.count:04d}")
            call = {names.OPERATION_NAME: "chat", names.REQUEST_MODEL: "policy"}
            start = 1000.0 + self.count
            spans.append(Span(*self.ids, "chat policy", start, start + 0.5, span_id=ids[-1], attributes=call))
            spans.append(Span(*self.ids, "note", start, start + 0.5, span_id=f"note-{self.count:04d}"))
        await self.store.add_many_spans(spans)
        return ids

    async def look(self) -> list[str]:
        run = await self.data.run("store")
        return [call["span_id"] for call in (await run.live(None))["calls"]]

    async def close(self) -> None:
        await self.data.close()
        await self.store.close()


@pytest.fixture
async def watched(monkeypatch):
    monkeypatch.setattr(live, "SECONDS", 0.0)
    watched = Watched()
    await watched.start()
    yield watched
    await watched.close()


async def test_every_call_is_shown_that_ends_between_two_polls(watched: Watched):
    seen: list[str] = []
    for number in (3, 0, 29, 1, 12, 30):
        new = await watched.calls(number)
        found = await watched.look()
        assert found[:number] == new[::-1]
        seen += new
    assert found == seen[: -live.NEWEST - 1 : -1]


async def test_a_poll_that_finds_nothing_new_reads_no_span(watched: Watched):
    await watched.calls(5)
    first = await watched.look()
    read = {method: watched.asked[method] for method in SPANS}
    assert await watched.look() == first
    assert {method: watched.asked[method] for method in SPANS} == read


async def test_no_spans_of_a_running_rollout_are_read_but_the_newest(watched: Watched):
    await watched.calls(300)
    shown = await (await watched.data.run("store")).live(None)
    assert len(shown["calls"]) == live.NEWEST
    assert {method for method in SPANS if watched.asked[method]} == {"newest_spans"}
    assert [row.spans_read for row in shown["running"]] == [False]
    assert shown["running"][0].attempt_start is not None


async def test_all_who_look_at_the_same_time_share_what_is_read(watched: Watched, monkeypatch):
    monkeypatch.setattr(live, "SECONDS", 60.0)
    await watched.calls(2)
    found = await asyncio.gather(*(watched.look() for _ in range(5)))
    assert all(each == ["call-0002", "call-0001"] for each in found)
    assert (watched.asked["statistics"], watched.asked["newest_spans"]) == (1, 1)


async def test_calls_of_other_runs_in_the_same_store_are_not_shown(watched: Watched):
    own = await watched.calls(2)
    other = await watched.store.start_rollout({"question": "1"}, rollout_id="other-run")
    call = {names.OPERATION_NAME: "chat"}
    await watched.store.add_span(Span("other-run", other.attempt.attempt_id, "chat", 2000.0, 2001.0, attributes=call))
    shown = await (await watched.data.run("store")).live(watched.ids[0])
    assert [each["span_id"] for each in shown["calls"]] == own[::-1]
