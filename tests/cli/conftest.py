"""`agl serve` and `agl runner` as real processes, and the program within this process where that is enough."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, Queue

import pytest
from typer.testing import CliRunner, Result

from agentlightning.cli.main import build

AGL = str(Path(sys.executable).parent / "agl")
AGENT = """
import asyncio, json, os, pathlib, urllib.request

async def work(task):
    if "marks" in task:
        pathlib.Path(task["marks"]).write_text(str(os.getpid()))
    until = task.get("until")
    while until and not os.path.exists(until):
        await asyncio.sleep(0.01)
    await asyncio.sleep(task.get("seconds", 0))
    return float(task.get("reward", 1.0))

def posts(task):
    body = json.dumps({"event_type": "reward", "data": {"value": task["reward"]}}).encode()
    headers = {"Authorization": "Bearer " + os.environ["AGL_KEY"]}
    with urllib.request.urlopen(urllib.request.Request(os.environ["AGL_EVENT_URL"], body, headers)):
        return None
"""


class Program:
    """One process of `agl`."""

    def __init__(self, directory: Path, *arguments: str, **environment: str) -> None:
        own = {name: value for name, value in os.environ.items() if not name.startswith("AGL_")}
        self.process = subprocess.Popen(
            [AGL, *arguments],
            cwd=directory,
            env={**own, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.errors: list[str] = []
        self._lines: Queue[str] = Queue()
        for stream, keep in ((self.process.stdout, self._lines.put), (self.process.stderr, self.errors.append)):
            threading.Thread(target=_pump, args=(stream, keep), daemon=True).start()

    def line(self, timeout: float = 30) -> dict:
        """The next line of its stdout, which is JSON."""
        try:
            return json.loads(self._lines.get(timeout=timeout))
        except Empty:
            raise AssertionError(f"nothing was said within {timeout} s; stderr: {''.join(self.errors)}") from None

    def stop(self, number: int = signal.SIGTERM, timeout: float = 30) -> int:
        """Send a signal and wait for the end; its exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout)


def _pump(stream, keep) -> None:
    with stream:
        for line in stream:
            keep(line)


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Program]]:
    """Start `agl` with arguments, in a directory that holds `agent.py`; it is killed when the test ends."""
    (tmp_path / "agent.py").write_text(AGENT)
    programs: list[Program] = []

    def start(*arguments: str, **environment: str) -> Program:
        programs.append(Program(tmp_path, *arguments, **environment))
        return programs[-1]

    yield start
    for program in programs:
        if program.process.poll() is None:
            program.process.send_signal(signal.SIGCONT)
            program.process.kill()
        program.process.wait(10)


@pytest.fixture
def invoke(monkeypatch) -> Iterator[Callable[..., Result]]:
    """Run `agl` with arguments in this process; for what ends by itself, and is told to if it does not."""
    monkeypatch.delenv("AGL_TOKEN", raising=False)
    root, ours = logging.getLogger(), logging.getLogger("agentlightning")
    handlers, levels = root.handlers[:], (root.level, ours.level)

    def invoke(*arguments: str) -> Result:
        insist = threading.Timer(20, os.kill, (os.getpid(), signal.SIGTERM))
        insist.start()
        try:
            return CliRunner().invoke(build(), list(arguments))
        finally:
            insist.cancel()

    yield invoke
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
