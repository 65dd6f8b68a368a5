"""The page in a real Chromium: every page of a finished run, three clicks from a curve to a token, nothing injected.

Needs the package `playwright` and a Chromium of the system (`apt-get install chromium`); skipped without, by name.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import uvicorn

from agentlightning import span as names
from agentlightning.dashboard.app import dashboard_routes
from agentlightning.dashboard.data.catalog import Catalog
from agentlightning.dashboard.data.run_data import DashboardData
from agentlightning.dashboard.serve import dashboard_app
from agentlightning.resources import PromptTemplate
from agentlightning.rollouts import Attempt, Rollout
from agentlightning.server.app import listen
from agentlightning.span import Span
from agentlightning.store import LightningStore
from agentlightning.store.types import RolloutRecord

pytestmark = pytest.mark.slow
TOKEN = "a-token"
GRPO = "calculator-grpo"
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)


class Served:
    """A dashboard in a thread of its own."""

    def __init__(self, **catalog: Any) -> None:
        self._catalog = catalog
        self._listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/dashboard"
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self) -> None:
        data = DashboardData(Catalog(**self._catalog), writable=True)
        app = dashboard_app(dashboard_routes(data, TOKEN), "127.0.0.1", has_token=True)
        config = uvicorn.Config(
            app, lifespan="off", ws="none", log_config=None, access_log=False, timeout_graceful_shutdown=1
        )
        self.server = uvicorn.Server(config)
        await self.server.serve(sockets=[self._listener])
        await data.close()

    def __enter__(self) -> Served:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self._thread.join(20)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    if not CHROMIUM:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def served(made_up: Path, tmp_path: Path) -> Iterator[Served]:
    with Served(roots=[Path(shutil.copytree(made_up, tmp_path / "runs"))]) as served:
        yield served


class Window:
    """A page that collects what went wrong in it."""

    def __init__(
        self, browser: Any, served: Served, *, width: int = 1400, theme: str = "light", token: str = TOKEN
    ) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
        self.page = self.context.new_page()
        self.page.set_default_timeout(30_000)
        self.url = served.url
        self.problems: list[str] = []
        self.page.on("console", lambda said: self._console(said))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("dialog", lambda dialog: self.problems.append(f"dialog {dialog.message}"))
        if token:
            self.page.goto(f"{served.url}#token={token}")
            self.page.wait_for_selector("h1")

    def _console(self, said: Any) -> None:
        if said.type in ("error", "warning"):
            self.problems.append(said.text)

    def open(self, path: str, selector: str = "h1") -> Any:
        self.page.goto(f"{self.url}{path}")
        self.page.wait_for_selector(selector)
        self.page.wait_for_selector("[aria-busy=true]", state="detached")
        return self.page


def a_group(window: Window) -> str:
    """A rollout of a group in which a tool failed."""
    read = "async ([url, token]) => (await fetch(url, {headers: {authorization: `Bearer ${token}`}})).json()"
    step = window.page.evaluate(read, [f"{window.url}/api/runs/{GRPO}/steps/9", TOKEN])
    return next(group["worst"] for group in step["groups"] if group["tool_errors"])


def pages(window: Window) -> list[str]:
    rollout, run = a_group(window), f"/runs/{GRPO}"
    return [
        "",
        run,
        f"{run}/steps/9",
        f"{run}/rollouts",
        f"{run}/rollouts?failure=any",
        f"{run}/rollouts/{rollout}",
        f"{run}/rollouts/{rollout}?tab=spans",
        f"{run}/rollouts/{rollout}?tab=raw",
        *(f"{run}/rollouts/{rollout}/tokens?by={by}" for by in ("advantage", "logprob", "version", "loss")),
        f"{run}/rollouts/{rollout}/group",
        *(f"{run}/{name}" for name in ("resources", "weights", "workers", "queues", "live")),
        "/compare?runs=calculator-grpo,calculator-rloo",
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("width", "theme"), [(1400, "light"), (1400, "dark"), (400, "light")])
def test_every_page_opens_without_an_error_fits_its_window_and_can_be_read(browser, served, width, theme):
    window = Window(browser, served, width=width, theme=theme)
    for path in pages(window):
        page = window.open(path)
        assert page.locator(".notice.bad").count() == 0, path
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path} is wider than its window"
        assert page.evaluate(FAINT) == [], path
    assert window.problems == []


FAINT = """() => {
  const rgb = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return {c: n.slice(0, 3), a: n[3] ?? 1}; };
  const light = (c) => c.map((v) => v / 255).map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const found = getComputedStyle(e).backgroundColor;
      if (found.startsWith("rgb") && rgb(found).a === 1) return rgb(found).c;
    }
    return [255, 255, 255];
  };
  const faint = [];
  for (const element of document.querySelectorAll("main *, header *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const style = getComputedStyle(element);
    if (!own || element.disabled || !element.getClientRects().length || element.closest("svg, .skip")) continue;
    const [a, b] = [light(rgb(style.color).c), light(ground(element))].sort((x, y) => y - x);
    const weak = style.color.startsWith("rgb") && (a + 0.05) / (b + 0.05) < 4.5;
    if (weak) faint.push(`${element.className} ${element.textContent.slice(0, 30)} ${style.color}`);
  }
  return faint.slice(0, 5);
}"""
"""The texts whose contrast with their ground is below 4.5 (WCAG 2.2 AA)."""


def test_three_clicks_lead_from_a_curve_to_the_tokens_of_the_turn_with_a_tool_error(browser, served):
    window = Window(browser, served)
    page = window.open(f"/runs/{GRPO}", ".u-over")
    over = page.locator(".u-over").first
    box = over.bounding_box()
    over.click(position={"x": box["width"] * 8 / 23, "y": box["height"] / 2})
    page.wait_for_url("**/steps/*")
    page.wait_for_selector("tbody a")
    row = page.locator("tbody tr").filter(has=page.locator("td .error-text")).first
    row.locator("a").first.click()
    page.wait_for_url("**/group")
    page.wait_for_selector(".t.differs")
    assert page.locator(".t.differs").count() in (1, 2)
    assert page.locator(".t.p1, .t.p2, .t.p3").count() > 0
    assert page.locator(".t.n1, .t.n2, .t.n3").count() > 0
    page.locator(".t.differs").last.click()
    assert "advantage −" in page.locator(".inspector").inner_text()
    assert window.problems == []


def test_a_step_is_reached_by_keyboard(browser, served):
    window = Window(browser, served)
    page = window.open(f"/runs/{GRPO}", ".u-over")
    page.locator(".plot").first.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    page.wait_for_url("**/steps/3")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("u")
    page.wait_for_url(f"**/runs/{GRPO}")


def test_the_page_shows_nothing_without_the_token(browser, served):
    window = Window(browser, served, token="")
    page = window.open("", "input[type=password]")
    assert "calculator" not in page.content()
    page.fill("input[type=password]", "wrong")
    page.click("button[type=submit]")
    page.wait_for_selector("input[type=password]")
    assert "calculator" not in page.content()
    page.fill("input[type=password]", TOKEN)
    page.click("button[type=submit]")
    page.wait_for_selector("tbody a")
    assert GRPO in page.content()


def test_rollouts_are_filtered_annotated_and_exported(browser, served, tmp_path):
    window = Window(browser, served)
    page = window.open(f"/runs/{GRPO}/rollouts", "tbody tr")
    page.select_option("select[name=state]", "failed")
    page.wait_for_url("**state=failed**")
    page.locator("tbody .pill", has_text="succeeded").first.wait_for(state="detached")
    page.locator("tbody input[type=checkbox]").first.check()
    page.fill("input[aria-label=Label]", "a label")
    page.get_by_text("Annotate", exact=True).click()
    page.get_by_text("annotate: 1 of 1 done").wait_for()
    page.get_by_text("a label", exact=True).first.wait_for()
    with page.expect_download() as download:
        page.get_by_text("Export JSONL").click()
    download.value.save_as(tmp_path / "export.jsonl")
    kinds = [orjson.loads(line)["type"] for line in (tmp_path / "export.jsonl").read_bytes().splitlines()]
    assert kinds == ["header", "rollout", "end"]


PAYLOAD = '<img src=x onerror="window.injected=1"><script>window.injected=1</script>"\'><svg onload=window.injected=1>'


def a_hostile_record() -> RolloutRecord:
    """A rollout whose agent wrote the payload into every field that it controls."""
    message = {
        "role": PAYLOAD,
        "parts": [
            {"type": "text", "content": PAYLOAD},
            {"type": "reasoning", "content": PAYLOAD},
            {"type": "tool_call", "id": PAYLOAD, "name": PAYLOAD, "arguments": {PAYLOAD: PAYLOAD}},
            {"type": "tool_call_response", "id": "1", "response": f"error {PAYLOAD}"},
            {"type": "uri", "modality": "image", "uri": "javascript:window.injected=1"},
            {"type": "uri", "modality": "image", "uri": "data:image/svg+xml,<svg onload='window.injected=1'/>"},
            {"type": PAYLOAD, "more": PAYLOAD},
        ],
    }
    text = orjson.dumps([message]).decode()
    call = {
        names.OPERATION_NAME: "chat",
        names.REQUEST_MODEL: PAYLOAD,
        names.AGENT_NAME: PAYLOAD,
        names.INPUT_MESSAGES: text,
        names.OUTPUT_MESSAGES: text,
        names.FINISH_REASONS: [PAYLOAD],
        PAYLOAD: PAYLOAD,
    }
    tool = {names.OPERATION_NAME: "execute_tool", names.TOOL_NAME: PAYLOAD, names.TOOL_RESULT: PAYLOAD}
    label = {names.FEEDBACK_LABEL: PAYLOAD, names.REWARD_VALUES: {PAYLOAD: 1.0}}
    spans = (
        Span("hostile", "a1", PAYLOAD, 1.0, 2.0, 1, span_id="s1", attributes=call),
        Span("hostile", "a1", PAYLOAD, 1.2, 1.5, 2, "", "s2", "s1", "ERROR", PAYLOAD, tool),
        Span("hostile", "a1", names.REWARD, 2.0, 2.0, 3, span_id="s3", attributes=label),
    )
    error = {"type": PAYLOAD, "message": PAYLOAD, "traceback": PAYLOAD}
    attempt = Attempt("hostile", "a1", 1, 1.0, "failed", 2.0, PAYLOAD, metadata={"error": error, "output": PAYLOAD})
    rollout = Rollout("hostile", {PAYLOAD: PAYLOAD}, 1.0, "failed", "train", end_time=2.0, metadata={"group": PAYLOAD})
    return RolloutRecord(rollout, (attempt,), spans)


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[Served]:
    async def fill() -> None:
        store = LightningStore(tmp_path / "runs" / "run" / "store.db")
        await store.add_records([a_hostile_record()])
        await store.add_resources({"prompt": PromptTemplate(template=PAYLOAD, engine="plain")}, "r1")
        await store.add_resources({"prompt": PromptTemplate(template=f"{PAYLOAD}\n2", engine="plain")}, "r2")
        await store.update_worker("worker", {PAYLOAD: PAYLOAD})
        await store.close()

    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    filling = threading.Thread(target=lambda: asyncio.run(fill()))  # the browser has an event loop in this thread
    filling.start()
    filling.join()
    (run / "state.json").write_bytes(orjson.dumps({"run_id": "hostile", "warnings": {PAYLOAD: PAYLOAD}}))
    (run / "metrics.jsonl").write_bytes(
        orjson.dumps({"step": 1, "reward": 1, PAYLOAD: 2, f"reward_of_{PAYLOAD}": 1}) + b"\n"
    )
    with Served(roots=[tmp_path / "runs"]) as served:
        yield served


@pytest.mark.timeout(300)
def test_no_text_of_an_agent_runs_or_becomes_an_element(browser, hostile):
    window = Window(browser, hostile)
    run = "/runs/run"
    rollout = f"{run}/rollouts/hostile"
    shown = 0
    for path in (
        "", run, f"{run}/rollouts", rollout, f"{rollout}?tab=spans", f"{rollout}?tab=raw", f"{rollout}/tokens",
        f"{rollout}/group", f"{run}/resources", f"{run}/workers", f"{run}/live", f"{run}/steps/1",
    ):  # fmt: skip
        page = window.open(path)
        for row in page.locator(".timeline .row").all():
            row.click()
        time.sleep(0.3)
        shown += "onerror=" in page.locator("main").inner_text()
        assert page.evaluate("window.injected") is None, path
        assert page.locator("main script, main img[src='x'], main [onerror], main [onload]").count() == 0, path
        assert (
            page.locator("main [src^='javascript'], main [href^='javascript'], main [src*='svg+xml']").count() == 0
        ), path
    assert shown >= 8, "the payload is shown as the text that it is"
    assert window.problems == []
