"""The page of a run while it trains, in a real Chromium: it grows without being loaded again."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.dashboard.browsing import Window
from tests.e2e.conftest import Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 400


class Running:
    """`agl train` in the background, and the link of its dashboard."""

    def __init__(self, directory: Path) -> None:
        job = Job(directory)
        self._said = (directory / "said.txt").open("w")
        command = job.command("--run", "run", f"algorithm.steps={STEPS}")
        self.process = subprocess.Popen(
            command, cwd=directory, env=job.environment, stdout=self._said, stderr=subprocess.STDOUT, text=True
        )
        self.url, self.token = self._link(directory / "said.txt")

    def _link(self, path: Path) -> tuple[str, str]:
        while self.process.poll() is None:
            if found := re.search(r"dashboard: (http\S+/dashboard)#token=(\S+)\n", path.read_text()):
                return found[1], found[2]
            time.sleep(0.2)
        self.close()
        raise AssertionError(path.read_text())

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        self._said.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path)
    yield running
    running.close()


def step_of(page: Any) -> int:
    """The step that the list of runs or the page of a run names."""
    found = re.search(rf"(\d+) (?:of|/) {STEPS}", " ".join(page.locator("main").inner_text().split()))
    return int(found[1]) if found else 0


def wait_until(page: Any, condition: Callable[[], bool], seconds: float = 300) -> None:
    """The page forbids evaluated text, which the waiting of playwright would need."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, page.locator("main").inner_text()
        page.wait_for_timeout(200)


def test_every_page_follows_a_run_that_trains(browser, running: Running):
    window = Window(browser, running, token=running.token)
    page = window.open("/runs/run", ".pill.running")
    page.wait_for_selector(".u-over", timeout=300_000)
    first = step_of(page)
    wait_until(page, lambda: step_of(page) > first)
    for path, shown in (
        ("", ".pill.running"), ("/runs/run/steps/1", "tbody a"), ("/runs/run/rollouts", "tbody a"),
        ("/runs/run/server", "tbody a"),
        ("/runs/run/resources", ".panel tbody tr"), ("/runs/run/weights", "tbody tr"),
    ):  # fmt: skip
        window.open(path, shown)
        assert page.locator(".notice.bad").count() == 0, path
    window.open("/runs/run/rollouts", "tbody a").locator("tbody a").first.click()
    page.wait_for_url("**/rollouts/*")
    page.wait_for_selector("h1.mono")
    assert running.process.poll() is None, "all of this while it trains"
    assert window.problems == []
