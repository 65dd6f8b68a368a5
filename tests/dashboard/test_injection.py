"""No text of an agent runs or becomes an element, and nothing is loaded from elsewhere: in a real Chromium."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.dashboard.browsing import TOKEN, Served, Window
from tests.dashboard.every_page import ONLY_JSON
from tests.dashboard.hostile import CALLS, CODE, PAYLOADS, rollout_id, write_run

from agentlightning.dashboard.app import VIEWS

pytestmark = pytest.mark.slow
RUN = "/runs/hostile"
PLANTED = (
    "main script, main iframe, main object, main embed, main base, main meta, main link, main style, main video,"
    " main audio, main [onerror], main [onload], main [onfocus], main [ontoggle], main [onbegin],"
    " main [src^='javascript'], main [href^='javascript'], main [src*='svg+xml'], main img[src='x'],"
    " main [src^='http:']:not([src^='/'])"
)


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[Served]:
    run = tmp_path / "runs" / "hostile"
    run.mkdir(parents=True)
    writing = threading.Thread(target=lambda: asyncio.run(write_run(run)))  # the browser has a loop in this thread
    writing.start()
    writing.join()
    with Served(roots=[tmp_path / "runs"]) as served:
        yield served


class Watched(Window):
    """Counts the payloads that are shown as text; what runs, is planted or is asked of another server is a problem."""

    def look(self, path: str) -> int:
        page = self.open(path)
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        for place in range(page.locator(".timeline .row").count()):  # one is open at a time
            page.evaluate("(place) => document.querySelectorAll('.timeline .row')[place].click()", place)
        assert page.evaluate("window.injected") is None, path
        assert page.locator(PLANTED).count() == 0, path
        shown = page.locator("main").inner_text()
        return sum(payload in shown or json.dumps(payload)[1:-1] in shown for payload in PAYLOADS)


@pytest.fixture
def window(browser, hostile: Served) -> Iterator[Watched]:
    window = Watched(browser, hostile)
    elsewhere: list[str] = []
    window.page.on("request", lambda request: elsewhere.append(request.url))
    yield window
    origin = hostile.url.removesuffix("/dashboard")
    assert [url for url in elsewhere if not url.startswith((origin, "data:image/"))] == []
    failed = [each for each in window.problems if "data:image/png" not in each and "ERR_INVALID_URL" not in each]
    assert failed == []


def test_there_are_200_payloads_and_each_would_run_if_it_were_html(browser, hostile: Served):
    assert len(set(PAYLOADS)) == 200
    page = browser.new_context().new_page()
    page.set_content(
        f"<div></div><script>document.querySelector('div').innerHTML = `<img src=x onerror={CODE}>`</script>"
    )
    page.wait_for_function("window.injected === 1")


@pytest.mark.timeout(900)
def test_each_payload_in_the_fields_of_a_rollout_is_shown_as_the_text_that_it_is(window: Watched):
    assert window.look(f"{RUN}/rollouts?limit=200") == 200
    for number in range(len(PAYLOADS)):
        assert window.look(f"{RUN}/rollouts/{rollout_id(number)}?tab=raw") >= 1, PAYLOADS[number]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "pages", [("",), ("?tab=spans",), ("?tab=raw",), ("/tokens", "/tokens?from=20"), ("/group",)], ids="".join
)
def test_each_payload_in_the_fields_of_a_call_is_shown_as_the_text_that_it_is(window: Watched, pages: tuple[str, ...]):
    for number in range(len(PAYLOADS) // CALLS):
        shown = sum(window.look(f"{RUN}/rollouts/{rollout_id(number)}{page}") for page in pages)
        assert shown >= (CALLS if pages != ("/group",) else 1)


@pytest.mark.timeout(300)
def test_payloads_in_names_of_metrics_warnings_prompts_and_in_what_workers_report_are_text(window: Watched):
    for path, least in (
        ("", 0), (RUN, 200), (f"{RUN}/steps/1", 20), (f"{RUN}/resources", 200), (f"{RUN}/server", 20),
        (f"{RUN}/weights", 0), (f"{RUN}/tasks", 25),
        (f"{RUN}/failures", 200),
    ):  # fmt: skip
        assert window.look(path) >= least, path


def test_without_the_token_no_view_answers_and_no_page_shows_anything(browser, hostile: Served):
    window = Window(browser, hostile, token="")
    for view in VIEWS:
        path = view.format(run="hostile", step="1", rollout=rollout_id(0), task="x")
        answer = window.page.request.get(f"{hostile.url}/api{path}")
        assert answer.status == 401, path
        assert "hostile" not in answer.text()
        if view in ONLY_JSON:
            continue
        page = window.open(path, "input[type=password]")
        assert "onerror" not in page.content()
        assert page.locator("table, pre, .panel:not(.login)").count() == 0, path
    assert window.page.evaluate("Object.keys(sessionStorage).length + document.cookie.length") == 0
    assert TOKEN not in window.page.content()
