"""What the dashboard costs: its pages over a million rollouts, and the server beneath an open page.

`python benchmarks/studies/dashboard.py pages` fills a database (finished rollouts of two calls, every twentieth failed)
to two sizes and opens pages of it in Chromium; then those of two made-up runs of `--steps` steps. It prints how long
the server took to answer, how long after its answer the first row, curve or token was painted, and what the page holds
in memory after fifty pages of the table. Limits: the first row within 300 ms of the answer, the page below 200 MB (heap
and renderer process).

`python benchmarks/studies/dashboard.py load` drives a server, which has store and gateway, while a page of it is open
(`--page`: Live, the table of rollouts, or the page of the one rollout that all calls belong to; they ask every two or
three seconds) and while none is, in turn: calls of the gateway, then cycles of the store over HTTP. It
prints the ratio of the rates, and of the server's CPU time for each call; and the CPU time of the browser, with which
the server shares the machine here. Limit: at most 3% slower.

    python benchmarks/studies/dashboard.py pages [--rollouts 1000000] [--small 10000] [--store FILE] [--check]
    python benchmarks/studies/dashboard.py load [--page live] [--rounds 8] [--seconds 5] [--check] [--json]

Needs playwright (pip install playwright) and a Chromium of the system (apt-get install chromium).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import HERE

sys.path.insert(0, str(HERE / "arms"))
sys.path.append(str(HERE.parent))
from gateway_load import BODY
from ours import cycle, drive
from tests.support.made_up_runs import MadeUpRun, write_run

from agentlightning import span as names
from agentlightning.rollouts import Attempt, Rollout
from agentlightning.span import Span
from agentlightning.store import LightningStore, LightningStoreClient
from agentlightning.store.types import RolloutRecord
from gateway import ours, running, stub_of

FIRST_ROW_MS, PAGE_MB, SLOWER = 300.0, 200.0, 0.97
PAGES = 50
SETTLE_SECONDS, IDLE_PERCENT = 60, 10.0
CHROMIUM = next((path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
WATCH = """new MutationObserver(() => {
  const shown = "main tbody tr, main .u-over, main .tokens, main .timeline, main h2.mono";
  if (window.firstRow === undefined && document.querySelector(shown)) {
    window.firstRow = null;
    requestAnimationFrame(() => setTimeout(() => { window.firstRow = performance.now(); }));
  }
}).observe(document, { subtree: true, childList: true });"""
TIMES = """() => {
  const own = performance.getEntriesByType("resource").filter((each) => each.name.includes("/dashboard/api/"));
  const before = own.filter((each) => each.responseEnd <= window.firstRow);
  const last = before.at(-1);
  return { server: last.responseEnd - last.requestStart, row: window.firstRow - last.responseEnd };
}"""


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        sys.exit("playwright is not installed: pip install playwright")
    if CHROMIUM is None:
        sys.exit("no Chromium is installed: apt-get install chromium")
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


# -- pages -------------------------------------------------------------------------------------------------------------


def record(number: int) -> RolloutRecord:
    """A finished rollout of two calls with a reward; every twentieth has failed."""
    rollout_id, attempt_id = f"ro-{number:08d}", f"at-{number:08d}"
    start, failed = 1.76e9 + number / 10, number % 20 == 0
    status = "failed" if failed else "succeeded"
    task = {"question": f"What is {number} times {number % 97}?", "answer": number * (number % 97)}
    rollout = Rollout(
        rollout_id, task, start, status, ("train", "val")[number % 10 == 9], end_time=start + 2,
        metadata={"group": f"g-{number // 8:07d}"},
    )  # fmt: skip
    error = {"error": {"type": "TimeoutError", "message": "the service did not answer"}} if failed else {}
    attempt = Attempt(rollout_id, attempt_id, 1, start, status, start + 2, "worker-1", metadata=error)
    call = {
        names.OPERATION_NAME: "chat", names.REQUEST_MODEL: "policy", names.AGENT_NAME: "solver",
        names.INPUT_MESSAGES: '[{"role":"user","parts":[{"type":"text","content":"What is it?"}]}]',
        names.OUTPUT_MESSAGES: '[{"role":"assistant","parts":[{"type":"text","content":"I compute."}]}]',
        names.PROMPT_TOKEN_IDS: list(range(24)), names.RESPONSE_TOKEN_IDS: list(range(12)),
        names.LOGPROBS: [-0.5] * 12, names.POLICY_VERSION: number // 1000,
    }  # fmt: skip
    reward = {names.SCORE_VALUE: number % 3 / 2, names.EVALUATION_NAME: "reward"}
    spans = [
        Span(rollout_id, attempt_id, "chat policy", start + k, start + k + 0.5, k + 1, "0" * 32, f"{number:08d}{k:08d}",
             attributes=call)
        for k in range(2)
    ]  # fmt: skip
    spans.append(
        Span(
            rollout_id, attempt_id, names.REWARD, start + 2, start + 2, 3, "0" * 32, f"{number:08d}r", attributes=reward
        )
    )
    return RolloutRecord(rollout, (attempt,), tuple(spans))


async def fill(path: Path, size: int) -> float:
    """Seconds to have `size` rollouts in a database, which may have some already."""
    store, began = LightningStore(path), time.perf_counter()
    have = await store.count_rollouts()
    for first in range(have, size, 1000):
        await store.add_records([record(number) for number in range(first, min(size, first + 1000))])
    await store.close()
    return time.perf_counter() - began


@contextlib.contextmanager
def dashboard(path: Path) -> Iterator[str]:
    """The link of a dashboard of a database, or of the runs of a directory."""
    program = "from agentlightning.cli import main; main()"
    command = [sys.executable, "-c", program, "dashboard", str(path), "--port", "0", "--no-browser", "--json"]
    with running(command, said=True) as (_, line):
        yield json.loads(line)["link"]


def views(last: int) -> dict[str, str]:
    middle = f"ro-{last // 2:08d}"
    table = "/runs/store/rollouts"
    return {
        "rollouts": table,
        "rollouts, page in the middle": f"{table}?after={middle}",
        "rollouts, failed": f"{table}?state=failed",
        "rollouts, by state": f"{table}?sort=status",
        "rollouts, oldest first": f"{table}?sort=created&order=asc",
        "rollouts, id contains": f"{table}?id={last // 3:08d}",
        "rollouts, task contains": f"{table}?task=97%20times",
        "rollouts, of the newest group": f"{table}?group=g-{last // 8:07d}",
        "rollouts, cancelled (none)": f"{table}?state=cancelled",
        "rollouts, whole id": f"{table}?id={middle}",
        "a rollout, its spans": f"{table}/{middle}?tab=spans",
        "tokens": f"{table}/{middle}/tokens",
        "group side by side": f"{table}/{middle}/group",
        "live": "/runs/store/server",
    }


def run_views(steps: int, rollout: str) -> dict[str, str]:
    run, rollouts = "/runs/first", "/runs/first/rollouts"
    return {
        "runs": "/",
        "run": run,
        "step": f"{run}/steps/{steps // 2}",
        "step, as a table": f"{rollouts}?step={steps // 2}",
        "validation": f"{run}/tasks?set=validation",
        "held-out": f"{run}/tasks?set=held_out",
        "group side by side, of a run": f"{rollouts}/{rollout}/group",
        "tokens, of a run": f"{rollouts}/{rollout}/tokens",
        "resources": f"{run}/resources",
        "weights": f"{run}/weights",
        "compare": "/compare?runs=first,second",
    }


def opened(browser: Any, link: str) -> tuple[Any, Any, str]:
    """A browser's context with a page that has the token, and the address of the dashboard."""
    base, _, fragment = link.partition("#")
    context = browser.new_context(viewport={"width": 1400, "height": 900}, bypass_csp=True)
    context.add_init_script(WATCH)
    page = context.new_page()
    page.set_default_timeout(180_000)
    page.goto(f"{base}#{fragment}")
    page.wait_for_selector("h1")
    return context, page, base


def time_views(page: Any, base: str, paths: dict[str, str]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for name, path in paths.items():
        tries = []
        print(f"  {name}", file=sys.stderr, flush=True)
        for _ in range(3):
            page.goto(f"{base}{path}")
            if "cancelled" in name:
                page.wait_for_selector("main .empty:not([aria-busy])")
                continue
            page.wait_for_function("typeof window.firstRow === 'number'")
            tries.append(page.evaluate(TIMES))
        if tries:
            found[name] = {key: statistics.median(each[key] for each in tries) for key in ("server", "row")}
    return found


def measure_run(browser: Any, folder: Path, steps: int) -> dict[str, dict[str, float]]:
    """The pages of two runs, the first of them with `steps` steps."""
    first, second = (
        MadeUpRun(name, credit, number, number, 9.0, place)
        for place, (name, credit, number) in enumerate(
            (("first", "group_relative", steps), ("second", "leave_one_out", max(12, steps // 2))), 1
        )
    )
    for run in (first, second):
        in_thread(write_run(folder, run))
    rollout = next(each.rollout.rollout_id for each in reversed(first.records) if "-train-" in each.rollout.rollout_id)
    print(f"a run of {len(first.records):,} rollouts", file=sys.stderr)
    with dashboard(folder) as link:
        context, page, base = opened(browser, link)
        found = time_views(page, base, run_views(steps, rollout))
        context.close()
    return found


def measure_pages(browser: Any, link: str, size: int) -> dict[str, dict[str, float]]:
    context, page, base = opened(browser, link)
    found = time_views(page, base, views(size - 1))
    context.close()
    context, page, base = opened(browser, link)
    page.goto(f"{base}/runs/store/rollouts?limit=100")
    for _ in range(min(PAGES, size // 100 - 1)):
        page.locator("button.primary", has_text="Next page").click()
        page.wait_for_load_state("networkidle")
    page.wait_for_selector("tbody tr")
    found["memory"] = memory(context, page)
    context.close()
    return found


def memory(context: Any, page: Any) -> dict[str, float]:
    """MB of the page's heap, and of its renderer process alone (what no other process shares)."""
    session = context.new_cdp_session(page)
    session.send("Performance.enable")
    metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
    own = [
        each
        for each in psutil.Process().children(recursive=True)
        if any("--type=renderer" in part for part in each.cmdline())
    ]
    return {"heap": metrics["JSHeapUsedSize"] / 1e6, "process": max(each.memory_full_info().uss for each in own) / 1e6}


def pages(options: argparse.Namespace) -> int:
    folder = Path(tempfile.mkdtemp(prefix="agl-bench-"))
    path = options.store or folder / "store.db"
    table: dict[int, dict[str, dict[str, float]]] = {}
    try:
        with chromium() as browser:
            for size in sorted({min(options.small, options.rollouts), options.rollouts}):
                print(f"{size:,} rollouts: filled in {in_thread(fill(path, size)):.0f} s", file=sys.stderr)
                with dashboard(path) as link:
                    table[size] = measure_pages(browser, link, size)
            run = measure_run(browser, folder / "runs", options.steps)
    finally:
        shutil.rmtree(folder)
    largest = table[options.rollouts]
    rows = [each["row"] for name, each in (largest | run).items() if name != "memory"]
    met = max(rows) <= FIRST_ROW_MS and max(largest["memory"].values()) <= PAGE_MB
    if options.json:
        print(json.dumps({"pages": table, "run": run, "met": met}))
    else:
        print_pages(table, met)
        print(f"of a run of {options.steps} steps")
        for name, each in run.items():
            print(f"  {name:32}  server {each['server']:,.0f}, row {each['row']:,.0f}")
    return int(options.check and not met)


def print_pages(table: dict[int, dict[str, dict[str, float]]], met: bool) -> None:
    print("ms of the server's answer, and from it to the first row; by the number of rollouts")
    for name in next(iter(table.values())):
        cells = "".join(
            f"{size:>10,}: " + ", ".join(f"{key} {value:,.0f}" for key, value in found[name].items())
            for size, found in table.items()
        )
        print(f"  {name:32}{cells}{' MB' if name == 'memory' else ''}")
    print(f"  {'MET   ' if met else 'MISSED'}  first row within {FIRST_ROW_MS:g} ms, page below {PAGE_MB:g} MB")


# -- load --------------------------------------------------------------------------------------------------------------


async def calls(url: str, connections: int, seconds: float) -> float:
    """Calls of the gateway a second, over connections that stay open."""
    host, port, path = re.fullmatch(r"http://([^:]+):(\d+)(/.*)", url).groups()  # type: ignore[union-attr]
    body = json.dumps(BODY).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    end = time.perf_counter() + seconds

    async def one() -> int:
        reader, writer = await asyncio.open_connection(host, int(port))
        count = 0
        while time.perf_counter() < end:
            writer.write(head.encode() + body)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            if b" 200 " not in answer.splitlines()[0]:
                raise RuntimeError(answer.decode())
            await reader.readexactly(int(re.search(rb"content-length: (\d+)", answer)[1]))  # type: ignore[index]
            count += 1
        writer.close()
        return count

    began = time.perf_counter()
    done = sum(await asyncio.gather(*(one() for _ in range(connections))))
    return done / (time.perf_counter() - began)


async def cycles(server: str, callers: int, seconds: float) -> float:
    """Cycles of the store over HTTP a second."""
    client = LightningStoreClient(server)
    try:
        return (await drive(lambda _: cycle(client, True), callers, seconds))["cycles_per_second"]
    finally:
        await client.close()


def in_thread(work: Any) -> Any:
    """The result of a coroutine: the browser has an event loop in this thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def settle(process: psutil.Process) -> None:
    """Wait until the server has stored what it recorded of the measurement before; it answers calls sooner."""
    until = time.monotonic() + SETTLE_SECONDS
    while process.cpu_percent(interval=1.0) > IDLE_PERCENT:
        if time.monotonic() > until:
            sys.exit(f"the server was still busy {SETTLE_SECONDS} s after a measurement")


def browser_seconds() -> float:
    """The CPU time of the browser so far."""
    seconds = 0.0
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            seconds += sum(each.cpu_times()[:2]) if "chrom" in each.name() else 0.0
    return seconds


def load(options: argparse.Namespace) -> int:
    found: dict[str, list[dict[str, float]]] = {"gateway": [], "store": []}
    with (
        tempfile.TemporaryDirectory() as name,
        stub_of([]) as stub,
        ours(stub, Path(name)) as arm,
        chromium() as browser,
    ):
        server = re.match(r"http://[^/]+", arm.urls[0])[0]  # type: ignore[index]
        page, process = browser.new_page(), psutil.Process(arm.pid)
        rollout = re.search(r"/rollout/([^/]+)/", arm.urls[0])[1]  # type: ignore[index]
        path = {"live": "live", "rollouts": "rollouts", "rollout": f"rollouts/{rollout}?tab=spans"}[options.page]
        jobs = {
            "gateway": lambda: in_thread(calls(arm.urls[0], 16, options.seconds)),
            "store": lambda: in_thread(cycles(server, 64, options.seconds)),
        }
        for turn in range(options.rounds + 1):
            for job, run in jobs.items():
                row: dict[str, float] = {}
                for state in ("closed", "open") if turn % 2 else ("open", "closed"):
                    page.goto(f"{server}/dashboard/runs/store/{path}" if state == "open" else "about:blank")
                    if state == "open":
                        page.wait_for_selector("main table")
                    settle(process)
                    before, drawn = sum(process.cpu_times()[:2]), browser_seconds()
                    row[state] = run()
                    row[f"{state}_browser_ms"] = (browser_seconds() - drawn) / options.seconds * 1000
                    if not row[state]:
                        sys.exit(f"{job}: none ended in {options.seconds:g} s with the page {state}; raise --seconds")
                    spent = sum(process.cpu_times()[:2]) - before
                    row[f"{state}_cpu_us"] = spent / (row[state] * options.seconds) * 1e6
                if turn:  # the first one warms up
                    found[job].append(row)
    verdicts = {job: verdict(rows) for job, rows in found.items()}
    print(json.dumps(verdicts)) if options.json else print_load(verdicts)
    return int(options.check and not all(each["met"] for each in verdicts.values()))


def verdict(rows: list[dict[str, float]]) -> dict[str, Any]:
    rates = [row["open"] / row["closed"] for row in rows]
    cpu = [row["open_cpu_us"] / row["closed_cpu_us"] for row in rows]
    return {
        "rate": statistics.median(row["closed"] for row in rows),
        "ratio": statistics.median(rates),
        "interval": interval(rates),
        "cpu_ratio": statistics.median(cpu),
        "cpu_interval": interval(cpu),
        "browser_ms": statistics.mean(row["open_browser_ms"] for row in rows),
        "met": statistics.median(rates) >= SLOWER,
    }


def interval(values: list[float]) -> tuple[float, float]:
    """The 95% interval of the median, by the ranks of the values; of fewer than six, the lowest and the highest."""
    ordered, number, place = sorted(values), len(values), 0
    while sum(math.comb(number, k) for k in range(place + 2)) / 2**number <= 0.025:
        place += 1
    return ordered[place], ordered[-1 - place]


def print_load(verdicts: dict[str, dict[str, Any]]) -> None:
    print("with the page open beside closed: median (its 95% interval over the rounds)")
    for job, each in verdicts.items():
        (low, high), (cpu_low, cpu_high) = each["interval"], each["cpu_interval"]
        print(
            f"  {'MET   ' if each['met'] else 'MISSED'}  {job:8}{each['rate']:9,.0f}/s closed; rate"
            f" {each['ratio']:.3f}x ({low:.3f} to {high:.3f}), limit at least {SLOWER:g}x;"
            f" CPU of the server for each {each['cpu_ratio']:.3f}x ({cpu_low:.3f} to {cpu_high:.3f});"
            f" browser {each['browser_ms']:.0f} ms a second"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("pages", "load"))
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument("--small", type=int, default=10_000, help="the size that is measured beside it")
    parser.add_argument("--store", type=Path, help="a database that an earlier run has filled, or is to fill and keep")
    parser.add_argument("--steps", type=int, default=400, help="of the made-up run whose pages are timed")
    parser.add_argument("--rounds", type=int, default=8, help="how often open and closed take turns")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument(
        "--page", choices=("live", "rollouts", "rollout"), default="live", help="that is open in `load`"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 where a limit is missed")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    return pages(options) if options.part == "pages" else load(options)


if __name__ == "__main__":
    sys.exit(main())
