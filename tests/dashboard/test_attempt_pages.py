"""The page of an attempt with many spans: parts of it are read, totals are those of all; a poll reads what is new."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from tests.dashboard.conftest import Asked, client_of

from agentlightning import span as names
from agentlightning.dashboard.data import rollouts as attempt_index
from agentlightning.dashboard.data.run_data import Catalog
from agentlightning.dashboard.views import rollout as rollout_view
from agentlightning.span import Span
from agentlightning.store import LightningStore
from agentlightning.store.instrumented import instrument


class Page:
    """A running attempt whose spans a test adds, and the views of its rollout."""

    def __init__(self) -> None:
        self.asked = Asked()
        self.store = LightningStore(":memory:")
        self.data = Catalog(instrument(self.store, [self.asked]))
        self.client: httpx.AsyncClient = client_of(self.data)
        self.said: list[dict[str, Any]] = []
        self.turns = 0

    async def start(self) -> None:
        started = await self.store.start_rollout({"question": "6 x 7"})
        self.ids = started.rollout_id, started.attempt.attempt_id

    async def turn(self, number: int = 1, *, reward: float | None = None) -> None:
        """Add turns of a conversation: a call of 4 prompt and 2 sampled tokens, a tool, a step."""
        spans: list[Span] = []
        for _ in range(number):
            self.turns += 1
            at, key = 1000.0 + self.turns, f"{self.turns:05d}"
            self.said.append(_message("user", f"question {key}"))
            answer = _message("assistant", f"answer {key}")
            prompt = [*range(2), self.turns, self.turns]
            call = {
                names.OPERATION_NAME: "chat", names.REQUEST_MODEL: "policy",
                names.INPUT_MESSAGES: json.dumps(self.said), names.OUTPUT_MESSAGES: json.dumps([answer]),
                names.PROMPT_TOKEN_IDS: prompt, names.RESPONSE_TOKEN_IDS: [7, 8], names.LOGPROBS: [-0.5, -0.5],
            }  # fmt: skip
            tool = {names.OPERATION_NAME: "execute_tool", names.TOOL_NAME: "search", names.TOOL_RESULT: "error: none"}
            spans.append(Span(*self.ids, "chat", at, at + 0.1, span_id=f"c{key}", attributes=call))
            spans.append(Span(*self.ids, "search", at + 0.2, at + 0.3, span_id=f"t{key}", attributes=tool))
            spans.append(Span(*self.ids, "step", at + 0.4, at + 0.5, span_id=f"s{key}"))
            self.said.append(answer)
        if reward is not None:
            attributes = {names.SCORE_VALUE: reward}
            spans.append(Span(*self.ids, names.REWARD, at + 0.6, at + 0.6, attributes=attributes))
        await self.store.add_many_spans(spans)

    async def get(self, path: str = "", **query: Any) -> dict[str, Any]:
        response = await self.client.get(f"/runs/store/rollouts/{self.ids[0]}{path}", params=query)
        assert response.status_code == 200, response.text
        return response.json()

    async def close(self) -> None:
        await self.client.aclose()
        await self.data.close()
        await self.store.close()


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


@pytest.fixture
async def page(monkeypatch) -> AsyncIterator[Page]:
    monkeypatch.setattr(attempt_index, "REST", 0)
    monkeypatch.setattr(rollout_view, "SECONDS", 30.0)  # on a busy machine, too
    page = Page()
    await page.start()
    yield page
    await page.close()


async def test_a_part_of_the_spans_is_sent_and_the_totals_are_those_of_all(page: Page):
    await page.turn(200, reward=0.75)
    found = await page.get()
    assert (found["spans_total"], len(found["spans"]), found["next"]) == (601, 300, 300)
    assert (found["calls_total"], len(found["stream"])) == (200, 100)
    assert found["kinds"] == {"model": 200, "tool": 200, "operation": 200, "reward": 1}
    assert found["time"] == {"start": 1001.0, "end": 1200.6}
    assert (len(found["density"]), sum(found["density"])) == (100, 601)
    summary = found["summary"]
    assert (summary["calls"], summary["sampled_tokens"], summary["prompt_tokens"]) == (200, 400, 800)
    assert (summary["tool_calls"], summary["tool_errors"], summary["reward"]) == (200, 200, 0.75)


async def test_pages_together_hold_each_span_and_call_once_and_no_message_twice(page: Page):
    await page.turn(60)
    spans: list[str] = []
    stream: list[dict[str, Any]] = []
    start: int | None = 0
    while start is not None:
        found = await page.get(start=start, limit=50)
        spans += [span["span_id"] for span in found["spans"]]
        stream += found["stream"]
        start = found["next"]
    assert spans == [span.span_id for span in await page.store.query_spans(*page.ids)]
    assert [call["span_id"] for call in stream] == [span for span in spans if span.startswith("c")]
    questions = [each["parts"][0]["text"] for call in stream for each in call["messages"]]
    assert questions == [f"question {number:05d}" for number in range(1, 61)]
    assert (await page.get(start=180))["spans"] == []


async def test_a_page_in_the_middle_shows_what_is_new_in_each_call_as_the_whole_does(page: Page):
    await page.turn(5)
    whole = await page.get()
    later = await page.get(start=6)
    assert [call["messages"] for call in later["stream"]] == [call["messages"] for call in whole["stream"][2:]]
    assert [call["span_id"] for call in later["context"]] == [call["span_id"] for call in whole["stream"][:2]]


async def test_a_poll_that_sees_no_change_reads_no_span(page: Page):
    await page.turn(3)
    mark = (await page.get())["mark"]
    page.asked.clear()
    assert await page.get(mark=mark, start=9) == {"mark": mark, "unchanged": True}
    assert not {"query_spans", "newest_spans", "iter_spans", "read_records"} & set(page.asked)


async def test_a_poll_after_a_change_is_sent_what_is_new(page: Page):
    await page.turn(3)
    mark = (await page.get())["mark"]
    await page.turn(1, reward=0.5)
    found = await page.get(mark=mark, start=9)
    assert [span["span_id"][0] for span in found["spans"]][:3] == ["c", "t", "s"]
    assert (found["spans_total"], found["next"], found["summary"]["calls"]) == (13, None, 4)
    assert found["summary"]["reward"] == 0.5
    await page.store.update_attempt(*page.ids, status="succeeded")
    ended = await page.get(mark=found["mark"], start=13)
    assert (ended["spans"], ended["rollout"]["status"]) == ([], "succeeded")


async def test_a_reward_of_an_earlier_call_is_among_what_is_new(page: Page):
    await page.turn(2, reward=0.25)
    mark = (await page.get())["mark"]
    await page.turn(1, reward=1.0)
    found = await page.get(mark=mark, start=7)
    assert {call["span_id"]: call["reward"] for call in found["context"]} == {"c00001": None, "c00002": 0.25}


async def test_a_span_that_is_stored_between_others_is_counted_as_well(page: Page):
    reserved = await page.store.get_next_span_sequence_id(*page.ids)
    await page.turn(2)
    assert (await page.get())["calls_total"] == 2
    call = {names.OPERATION_NAME: "chat", names.OUTPUT_TOKENS: 5}
    await page.store.add_span(Span(*page.ids, "chat", 999.0, 999.5, reserved, span_id="first", attributes=call))
    found = await page.get()
    assert (found["calls_total"], found["spans"][0]["span_id"], found["summary"]["sampled_tokens"]) == (3, "first", 9)


async def test_totals_that_take_long_are_asked_for_again_and_the_first_spans_are_sent_at_once(page: Page, monkeypatch):
    await page.turn(40)
    monkeypatch.setattr(attempt_index, "CHUNK", 10)
    monkeypatch.setattr(rollout_view, "SECONDS", 0.0)
    found = await page.get()
    assert (found["spans_total"], len(found["spans"]), found["calls_total"], found["kinds"]) == (120, 120, None, None)
    assert found["summary"]["spans_read"] is False
    assert found["time"] == {"start": 1001.0, "end": 1040.5}
    while (again := await page.get(mark=found["mark"], start=120)).get("unchanged"):
        assert again["mark"] == found["mark"]
        await asyncio.sleep(0.01)
    assert (again["calls_total"], again["summary"]["calls"], again["mark"] != found["mark"]) == (40, 40, True)


async def test_totals_of_an_attempt_that_grows_take_a_share_of_the_time_and_those_of_a_finished_one_are_right(
    page: Page,
):
    await page.turn(3)
    first = await page.get()
    run = await page.data.run("store")
    index = await run.attempts.of(page.ids, 9)
    assert index is not None
    index._totals_until = float("inf")
    await page.turn(1)
    again = await page.get(mark=first["mark"], start=9)
    assert (again["spans_total"], again["calls_total"], again["summary"]["calls"]) == (12, 4, 3)
    assert again["mark"].endswith("-counting"), "so that the page asks again"
    await page.store.update_attempt(*page.ids, status="succeeded")
    ended = await page.get(mark=again["mark"], start=12)
    assert (ended["summary"]["calls"], ended["mark"].endswith("-counting")) == (4, False)


async def test_tokens_are_sent_for_some_calls_at_a_time(page: Page):
    await page.turn(50)
    first = await page.get("/tokens")
    assert (len(first["stream"]), first["first_call"], first["calls_total"], first["next"]) == (20, 0, 50, 20)
    assert first["stream"][-1]["tool_results"] != [], "what followed the last call of the page"
    later = await page.get("/tokens", **{"from": 40})
    assert (later["stream"][0]["span_id"], len(later["stream"]), later["next"]) == ("c00041", 10, None)
    assert later["stream"][0]["known_tokens"] == 2, "what it shares with the call before it, which is not of the page"
    assert (await page.get("/tokens", call=33))["first_call"] == 20
    assert (await page.get("/tokens", **{"from": 50}))["stream"] == []
    assert first["summary"]["sampled_tokens"] == later["summary"]["sampled_tokens"] == 100


async def test_tokens_of_the_first_calls_do_not_wait_for_the_totals(page: Page, monkeypatch):
    await page.turn(50)
    monkeypatch.setattr(rollout_view, "SECONDS", 0.0)
    found = await page.get("/tokens")
    assert (len(found["stream"]), found["calls_total"], found["next"]) == (20, None, 20)


async def test_two_rollouts_side_by_side_are_compared_by_their_first_calls(page: Page):
    await page.turn(25)
    found = await page.get("/group")
    assert [len(stream) for stream in found["streams"]] == [20, 20]
    assert found["more_calls"] == [True, True]


async def test_an_attempt_that_is_named_has_its_own_totals(page: Page):
    await page.turn(2, reward=1.0)
    await page.store.requeue_rollout(page.ids[0], "again")
    (claimed,) = await page.store.dequeue_many_rollouts()
    latest, first = await page.get(), await page.get(attempt=page.ids[1])
    assert (latest["attempt"], latest["spans_total"], latest["summary"]["calls"]) == (claimed.attempt.attempt_id, 0, 0)
    assert (first["spans_total"], first["summary"]["calls"], first["summary"]["reward"]) == (7, 2, 1.0)


# -- tables ------------------------------------------------------------------------------------------------------------


async def changes(page: Page, **query: Any) -> dict[str, Any]:
    response = await page.client.get("/runs/store/changes", params=query)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_table_is_told_of_its_open_rows_without_their_spans_and_of_newer_rollouts(page: Page):
    await page.turn(1)
    ids = [(await page.store.enqueue_rollout(number, mode="val")).rollout_id for number in range(3)]
    found = await changes(page, rows=page.ids[0], newest=page.ids[0], count=1)
    assert (found["newer"], found["more"], [row["status"] for row in found["rows"]]) == (3, False, ["running"])
    assert found["rows"][0]["spans_read"] is False
    assert (await changes(page, newest=ids[0], count=1, mode="val"))["newer"] == 2
    assert (await changes(page, newest=ids[0], count=1, mode="train"))["newer"] == 0
    assert (await changes(page, newest=ids[0], count=1, agent="nobody"))["newer"] == 0
    assert (await changes(page, count=1, state="queuing"))["newer"] == 3, "of a table that was empty"
    page.asked.clear()
    again = await changes(page, rows=page.ids[0], newest=page.ids[0], count=1, mark=found["mark"])
    assert again == {"mark": found["mark"], "unchanged": True}
    assert set(page.asked) == {"statistics"}
    await page.store.update_attempt(*page.ids, status="succeeded")
    (row,) = (await changes(page, rows=page.ids[0], mark=found["mark"]))["rows"]
    assert (row["status"], row["spans_read"], row["calls"]) == ("succeeded", True, 1)


async def test_newer_rollouts_are_counted_up_to_a_hundred(page: Page):
    for number in range(101):
        await page.store.enqueue_rollout(number)
    found = await changes(page, newest=page.ids[0], count=1)
    assert (found["newer"], found["more"]) == (100, True)
