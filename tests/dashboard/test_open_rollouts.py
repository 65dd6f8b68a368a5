"""Pages of rollouts that are not finished, in a real Chromium: they follow what happens without being loaded again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.dashboard.browsing import Served, Window

from agentlightning.store import LightningStore

pytestmark = pytest.mark.slow


class Hub:
    """A database and its dashboard. Tests write to it as runners do: from elsewhere."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pool = ThreadPoolExecutor(1)  # the browser has an event loop in the thread of the test

    def write(self, work: Callable[[LightningStore], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            store = LightningStore(self._path)
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
    page = window.open("/runs/store/live", "tbody tr")
    rows = page.locator("table:has(th:nth-child(5)) tbody tr")
    assert rows.count() == 2, "the running rollout, and the same as the newest"
    for place in range(rows.count()):
        assert rows.nth(place).evaluate("(row) => getComputedStyle(row).display") == "grid"
        assert rows.nth(place).evaluate("(row) => row.scrollWidth <= innerWidth")
    assert window.problems == []
