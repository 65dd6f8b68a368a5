"""Every page there is, of a demo, a finished run and a run that trains: in a real Chromium, wide and narrow."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest
from tests.dashboard.browsing import Served, Window
from tests.dashboard.every_page import PAGES, report, walk
from tests.dashboard.test_live_run import Running
from tests.e2e.conftest import AGL, Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Link:
    """The address of a dashboard and its token, from the link that a command prints."""

    def __init__(self, link: str) -> None:
        self.url, _, self.token = link.partition("#token=")


@contextmanager
def dashboard(*arguments: str | Path) -> Iterator[Link]:
    """`agl dashboard` in a process of its own."""
    command = [AGL, "dashboard", *map(str, arguments), "--port", "0", "--no-browser", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Link(orjson.loads(process.stdout.readline())["link"])
        finally:
            process.terminate()


def check(browser, served: Link | Served | Running) -> None:
    visits = walk(Window(browser, served, token=served.token))  # type: ignore[arg-type, union-attr]
    assert not [kind for kind, each in visits.items() if each.wrong], report(visits)
    assert {kind.partition("?")[0] for kind in visits} == set(PAGES), "every kind of page is linked from another"


def test_every_page_of_a_demo(browser):
    with dashboard("--demo") as link:
        check(browser, link)


def test_every_page_of_a_finished_run(browser, tmp_path: Path):
    job = Job(tmp_path)
    done = job.run(job.command("--run", "run", "algorithm.steps=3"))
    assert done.returncode == 0, done.stderr
    with dashboard(tmp_path / "run") as link:
        check(browser, link)


def test_every_page_of_a_run_while_it_trains(browser, tmp_path: Path):
    running = Running(tmp_path)
    try:
        window = Window(browser, running, token=running.token)
        window.open("/runs/run", ".u-over")
        check(browser, running)
        assert running.process.poll() is None, "all of this while it trains"
    finally:
        running.close()
