"""Made-up runs, written once, and a client of their dashboard."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from tests.dashboard.browsing import CHROMIUM, FLAGS, TOKEN, Served
from tests.support.made_up_runs import write_runs

from agentlightning.dashboard.app import dashboard_routes
from agentlightning.dashboard.data.run_data import Catalog
from agentlightning.dashboard.serve import write_demo
from agentlightning.store.instrumented import CallRecord

GRPO, RLOO = "calculator-grpo", "calculator-rloo"


class Asked(Counter[str]):
    """Counts the calls of a store by method."""

    def on_start(self, method: str) -> None:
        self[method] += 1

    def on_end(self, call: CallRecord) -> None:
        pass


def in_thread(work: Coroutine[Any, Any, object]) -> None:
    """Wait for it beside the loop that a browser has in this thread."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, work).result()


@pytest.fixture(scope="session")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with both runs. Read it; copy it to change something."""
    root = tmp_path_factory.mktemp("made-up")
    in_thread(write_runs(root))
    return root


@pytest.fixture
def copied(made_up: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made_up, tmp_path / "runs"))


@pytest.fixture(name="client_of")
def _client_of() -> object:
    return client_of


def client_of(data: Catalog, token: str | None = TOKEN) -> httpx.AsyncClient:
    """A client that sends the token."""
    transport = httpx.ASGITransport(Starlette(routes=list(dashboard_routes(data, token))))
    return httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1/dashboard/api", headers={"authorization": f"Bearer {TOKEN}"}
    )


@pytest.fixture
async def client(made_up: Path) -> AsyncIterator[httpx.AsyncClient]:
    data = Catalog(roots=[made_up])
    async with client_of(data) as client:
        yield client
    await data.close()


@pytest.fixture
async def writer(copied: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client that may change the store."""
    data = Catalog(roots=[copied], writable=True)
    async with client_of(data) as client:
        yield client
    await data.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    if not CHROMIUM:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the runs of the demo. Read it."""
    root = tmp_path_factory.mktemp("demo")
    in_thread(write_demo(root))
    return root


@pytest.fixture
def demo(recorded: Path) -> Iterator[Served]:
    with Served(roots=[recorded]) as served:
        yield served


@pytest.fixture
def served(made_up: Path, tmp_path: Path) -> Iterator[Served]:
    with Served(roots=[Path(shutil.copytree(made_up, tmp_path / "runs"))]) as served:
        yield served
