"""Another process on the same file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start_process() -> Iterator[Start]:
    """Runs Python code in a process of its own, with arguments; it is ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: str | Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-u", "-c", code, *map(str, arguments)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
