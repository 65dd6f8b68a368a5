"""Opens a page of every kind by following links, and says what is wrong with each and what it costs.

By hand, for any dashboard: `python -m tests.dashboard.every_page LINK`, with the link that `agl dashboard` prints.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

from tests.dashboard.browsing import CHROMIUM, FLAGS, Window

from agentlightning.dashboard.app import VIEWS

ONLY_JSON: Final = {"/runs/{run}/changes", "/runs/{run}/search", "/runs/{run}/status"}
"""What a page asks for beside its own view."""
PAGES: Final = {path: re.compile(re.sub(r"\{\w+\}", "[^/]+", path)) for path in VIEWS if path not in ONLY_JSON}
TABS: Final = ("tab", "set", "by")
NO_VALUE: Final = re.compile(r"\bundefined\b|\bNaN\b|\[object Object\]|\bInfinity\b")
NARROW: Final = 400
WATCH: Final = """new MutationObserver(() => {
  const shown = "main :is(tbody tr, .u-over, .tokens, .timeline, .message, h2, .facts, .empty:not([aria-busy]))";
  if (window.firstRow === undefined && document.querySelector(shown)) {
    window.firstRow = null;
    requestAnimationFrame(() => setTimeout(() => { window.firstRow = performance.now(); }));
  }
}).observe(document, { subtree: true, childList: true });"""
"""Notes when the first content of a page was painted."""
TIMES: Final = """() => {
  const own = performance.getEntriesByType("resource").filter((each) => each.name.includes("/dashboard/api/"));
  const first = own.find((each) => each.responseEnd > 0);
  return first ? [first.responseEnd - first.requestStart, window.firstRow - first.responseEnd] : [0, 0];
}"""
"""Milliseconds of the server's answer, and from it to the first content."""
TEXT: Final = """() => [document.body.innerText, ...[...document.querySelectorAll("[aria-label], [title], [alt]")]
  .flatMap((each) => ["aria-label", "title", "alt"].map((name) => each.getAttribute(name) || ""))].join("\\n")"""
LINKS: Final = (
    """() => [...document.querySelectorAll("a[href^='/dashboard']")].map((each) => each.getAttribute("href"))"""
)


@dataclass(slots=True)
class Visit:
    """One page that was opened."""

    path: str
    server_ms: float
    row_ms: float
    heap_mb: float
    wrong: list[str] = field(default_factory=list[str])


def kind_of(path: str) -> str | None:
    """The view of a page, with the tab of it; None for what is no page."""
    place, _, query = path.partition("?")
    view = next((view for view, pattern in PAGES.items() if pattern.fullmatch(place or "/runs")), None)
    tabs = [each for each in query.split("&") if each.partition("=")[0] in TABS]
    return None if view is None else "?".join([view, *sorted(tabs)])


def walk(window: Window, *, most: int = 80) -> dict[str, Visit]:
    """By kind, the first page of it that links lead to."""
    window.context.add_init_script(WATCH)
    window.page.set_default_timeout(120_000)
    session = window.context.new_cdp_session(window.page)
    session.send("Performance.enable")
    queue, seen = ["", *_compared(window)], dict[str, Visit]()
    while queue and len(seen) < most:
        path = queue.pop(0)
        kind = kind_of(path)
        if kind is not None and kind not in seen:
            seen[kind] = _visit(window, session, path)
            queue += _links(window)
    return seen


def _visit(window: Window, session: Any, path: str) -> Visit:
    page, before = window.page, len(window.problems)
    page.set_viewport_size({"width": 1400, "height": 900})
    window.open(path, "main h1, main h2, main .empty, main .notice")
    page.wait_for_timeout(300)
    server, row = page.evaluate(TIMES)
    session.send("HeapProfiler.collectGarbage")
    metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
    found = Visit(path, server, row or 0.0, metrics["JSHeapUsedSize"] / 1e6)
    text = page.evaluate(TEXT)
    found.wrong += [f"shows {text[max(0, m.start() - 40) : m.end() + 20]!r}" for m in NO_VALUE.finditer(text)]
    if page.locator(".notice.bad").count():
        found.wrong.append(page.locator(".notice.bad").first.inner_text())
    page.set_viewport_size({"width": NARROW, "height": 900})
    page.wait_for_timeout(150)
    width = page.evaluate("document.documentElement.scrollWidth")
    if width > NARROW:
        found.wrong.append(f"is {width} px wide in a window of {NARROW}")
    found.wrong += window.problems[before:]
    return found


def _links(window: Window) -> Iterator[str]:
    for href in window.page.evaluate(LINKS):
        yield href.removeprefix("/dashboard")


def _compared(window: Window) -> list[str]:
    """The comparison of two runs, which is behind check boxes."""
    read = """async (url) => {
      const token = sessionStorage.getItem("agl-token");
      return (await fetch(url, token ? { headers: { authorization: `Bearer ${token}` } } : {})).json();
    }"""
    names = [each["name"] for each in window.page.evaluate(read, f"{window.url}/api/runs")["runs"]]
    runs = [name for name in names if name != "store"][:2]
    return [f"/compare?runs={','.join(runs)}"] if len(runs) == 2 else []


def report(visits: dict[str, Visit]) -> str:
    lines = [f"{'page':64}{'server ms':>10}{'row ms':>8}{'heap MB':>9}"]
    for kind, each in visits.items():
        lines.append(f"{kind:64}{each.server_ms:10,.0f}{each.row_ms:8,.0f}{each.heap_mb:9.1f}")
        lines += [f"    {problem}" for problem in each.wrong]
    return "\n".join(lines)


def main() -> int:
    from playwright.sync_api import sync_playwright

    url, _, token = sys.argv[1].partition("#token=")
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        visits = walk(Window(browser, SimpleNamespace(url=url), token=token))  # type: ignore[arg-type]
        browser.close()
    sys.stdout.write(f"{report(visits)}\n")
    return int(any(each.wrong for each in visits.values()))


if __name__ == "__main__":
    sys.exit(main())
