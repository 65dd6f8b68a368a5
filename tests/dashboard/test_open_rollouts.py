"""Pages of rollouts that are not finished, in a real Chromium: they follow what happens without being loaded again."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.dashboard.browsing import Served, Window

from agentlightning import span as names
from agentlightning.span import Span
from agentlightning.store import LightningStore

pytestmark = pytest.mark.slow


class Hub:
    """A database and its dashboard. Tests write to it as runners do: from elsewhere."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pool = ThreadPoolExecutor(1)  # the browser has an event loop in the thread of the test

    def write(self, work: Callable[[LightningStore], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            store = LightningStore(self.path)
            try:
                return await work(store)
            finally:
                await store.close()

        return self.run(run)

    def run(self, work: Callable[[], Awaitable[Any]]) -> Any:
        return self._pool.submit(lambda: asyncio.run(work())).result()  # type: ignore[arg-type]

    def start(self, task: str = "6 x 7") -> tuple[str, str]:
        """A rollout that runs, as (rollout_id, attempt_id)."""
        started = self.write(lambda store: store.start_rollout({"question": task}, worker_id="worker-1"))
        return started.rollout_id, started.attempt.attempt_id


@pytest.fixture
def hub(tmp_path: Path) -> Hub:
    return Hub(tmp_path / "hub.db")


@pytest.fixture
def served(hub: Hub, tmp_path: Path) -> Iterator[Served]:
    hub.start()
    store = LightningStore(tmp_path / "hub.db")
    with Served(store=store) as served:
        yield served
    hub.run(store.close)


def test_on_a_narrow_screen_every_row_of_a_table_with_many_columns_is_a_card(browser, served: Served):
    window = Window(browser, served, width=400)
    page = window.open("/runs/store/server", "tbody tr")
    rows = page.locator("table:has(th:nth-child(5)) tbody tr")
    assert rows.count() == 2, "the running rollout, and its worker"
    for place in range(rows.count()):
        assert rows.nth(place).evaluate("(row) => getComputedStyle(row).display") == "grid"
        assert rows.nth(place).evaluate("(row) => row.scrollWidth <= innerWidth")
    assert window.problems == []


def call(ids: tuple[str, str], number: int) -> list[Span]:
    """A model call and a step that follows it."""
    at = time.time()
    attributes = {
        names.OPERATION_NAME: "chat", names.REQUEST_MODEL: "policy",
        names.INPUT_MESSAGES: json.dumps([_message("user", f"question {number}")]),
        names.OUTPUT_MESSAGES: json.dumps([_message("assistant", f"answer {number}")]),
        names.PROMPT_TOKEN_IDS: [1, 2, 3], names.RESPONSE_TOKEN_IDS: [4, 5], names.LOGPROBS: [-0.5, -0.25],
    }  # fmt: skip
    return [
        Span(*ids, "chat policy", at, at + 0.1, span_id=f"call-{number:05d}", attributes=attributes),
        Span(*ids, f"step {number}", at + 0.2, at + 0.3, span_id=f"step-{number:05d}"),
    ]


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def requests_of(window: Window) -> list[str]:
    asked: list[str] = []
    window.page.on("request", lambda request: asked.append(request.url))
    return asked


def test_the_page_of_an_open_rollout_follows_it_until_it_has_finished(browser, hub: Hub, served: Served):
    ids = hub.start()
    hub.write(lambda store: store.add_many_spans([each for n in range(30) for each in call(ids, n)]))
    window = Window(browser, served)
    page = window.open(f"/runs/store/rollouts/{ids[0]}?tab=spans", ".timeline .row")
    page.locator(".timeline .row").nth(3).click()
    page.evaluate("document.querySelector('.timeline').dataset.kept = 'yes'")
    page.mouse.wheel(0, 350)
    page.wait_for_timeout(500)
    assert page.evaluate("scrollY") > 200
    before = page.evaluate("[scrollY, document.querySelector('.timeline pre').getBoundingClientRect().top]")
    asked = requests_of(window)
    page.wait_for_timeout(4500)
    assert [url for url in asked if "mark=" not in url] == [], "without a change it only asks whether there is one"
    hub.write(lambda store: store.add_many_spans(call(ids, 30)))
    page.get_by_text("Spans (62)").wait_for()
    assert page.locator(".timeline .row").count() == 62
    assert page.evaluate("[scrollY, document.querySelector('.timeline pre').getBoundingClientRect().top]") == before
    assert page.locator(".timeline[data-kept=yes]").count() == 1
    hub.write(lambda store: store.update_attempt(*ids, status="succeeded"))
    page.locator("h1 + .pill", has_text="succeeded").wait_for()
    asked.clear()
    page.wait_for_timeout(4500)
    assert asked == [], "a finished rollout is not asked for again"
    assert window.problems == []


def test_the_conversation_of_an_open_rollout_grows_and_what_is_opened_or_written_stays(browser, hub, served):
    ids = hub.start("a task that runs")
    hub.write(lambda store: store.add_many_spans(call(ids, 0)))
    window = Window(browser, served)
    page = window.open(f"/runs/store/rollouts/{ids[0]}", ".message")
    page.locator("summary", has_text="Annotate").click()
    page.get_by_label("Label", exact=True).fill("half a lab")
    hub.write(lambda store: store.add_many_spans(call(ids, 1)))
    page.locator(".message", has_text="answer 1").wait_for()
    assert page.locator(".message", has_text="answer 0").count() == 1
    assert page.locator("details[open] summary", has_text="Annotate").count() == 1
    assert page.get_by_label("Label", exact=True).input_value() == "half a lab"
    again = hub.write(lambda store: store.start_attempt(ids[0]))
    page.get_by_text("2 (shown)").wait_for()
    hub.write(lambda store: store.add_many_spans(call((ids[0], again.attempt.attempt_id), 7)))
    page.locator(".message", has_text="answer 7").wait_for()
    assert page.get_by_text("answer 1").count() == 0, "the page shows the latest attempt"
    assert window.problems == []


def test_of_many_spans_some_are_shown_and_more_on_request_with_the_totals_of_all(browser, hub, served):
    ids = hub.start()
    hub.write(lambda store: store.add_many_spans([each for n in range(400) for each in call(ids, n)]))
    window = Window(browser, served, width=400)
    page = window.open(f"/runs/store/rollouts/{ids[0]}?tab=spans", ".timeline .row")
    page.get_by_text("Spans (800)").wait_for()
    assert page.locator(".timeline .row").count() == 300
    page.locator(".facts div", has_text="Calls").filter(has_text="400").wait_for()
    page.get_by_text("300 of 800 spans are shown, with 150 of 400 calls").wait_for()
    page.get_by_role("button", name="Show 300 more spans").click()
    page.get_by_text("600 of 800 spans are shown").wait_for()
    hub.write(lambda store: store.add_many_spans(call(ids, 400)))
    page.get_by_text("600 of 802 spans are shown, with 300 of 401 calls").wait_for()
    page.get_by_role("button", name="Show 202 more spans").click()
    page.locator(".more").wait_for(state="detached")
    assert page.locator(".timeline .row").count() == 802
    page = window.open(f"/runs/store/rollouts/{ids[0]}/tokens?call=150", ".turn")
    page.get_by_text("Calls 141 to 160 of 401 are shown").wait_for()
    assert page.locator(".turn", has_text="Call 151").locator(".t.chosen").count() == 1
    page.get_by_role("button", name="Later calls").click()
    page.get_by_text("Calls 161 to 180 of 401 are shown").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert window.problems == []


def test_rows_of_the_table_change_in_place_and_newer_rollouts_wait_for_a_click(browser, hub: Hub, served: Served):
    ids = hub.start("the one that runs")
    window = Window(browser, served)
    page = window.open("/runs/store/rollouts", "tbody tr")
    row = page.locator("tbody tr", has_text="the one that runs")
    place = row.bounding_box()
    for number in range(3):
        hub.start(f"newer {number}")
    hub.write(lambda store: store.add_many_spans(call(ids, 0)))
    hub.write(lambda store: store.update_attempt(*ids, status="succeeded"))
    row.locator(".pill", has_text="succeeded").wait_for()
    page.get_by_role("button", name="3 newer: show").wait_for()
    assert row.bounding_box() == place
    assert page.locator("tbody tr").count() == 2
    page.get_by_role("button", name="3 newer: show").click()
    page.locator("tbody tr", has_text="newer 2").wait_for()
    assert page.locator("tbody tr").count() == 5
    assert page.get_by_role("button", name="newer: show").count() == 0
    page = window.open("/runs/store/rollouts?task=soon", ".empty")
    hub.start("soon")
    page.locator("tbody tr", has_text="soon").wait_for()
    assert window.problems == []
