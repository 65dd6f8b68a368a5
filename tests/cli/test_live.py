"""The display of `agl train` in a real terminal (a pty): what it shows, and plain lines without one."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

PROGRAM = """
import time
from rich.console import Console
from agentlightning.util.progress import Progress, RolloutCounts

with Progress(Console(highlight=False)) as progress:
    progress.phase("warm start", 2)
    progress.update(2, loss=0.5)
    progress.phase("training", 8)
    for step, reward in enumerate((0.25, 0.5, 0.75), 1):
        progress.step({"step": step, "reward": reward, "validation_greedy": reward / 2})
        progress.update(step, reward=reward, tokens_per_second=3570)
    progress.rollouts(RolloutCounts(12, 3, 96, 2, 1, "KeyError: \\x1b[31m'x'"))
    progress.note("warning: all rewards are 0")
    print("ready", flush=True)
    time.sleep(SECONDS)
"""


def environment() -> dict[str, str]:
    unset = ("CI", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "PYTEST_VERSION")
    return {**{k: v for k, v in os.environ.items() if k not in unset}, "TERM": "xterm-256color", "COLUMNS": "160"}


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, folder: Path, program: str) -> None:
        self.ours, theirs = pty.openpty()
        command = [sys.executable, "-c", program]

        def lead() -> None:
            os.setsid()
            import fcntl
            import termios

            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=environment(), preexec_fn=lead
        )
        os.close(theirs)
        self.text = ""

    def read_until(self, wanted: str, seconds: float = 100, times: int = 1) -> None:
        until = time.monotonic() + seconds
        while self.text.count(wanted) < times and time.monotonic() < until:
            if select.select([self.ours], [], [], 0.2)[0]:
                try:
                    self.text += os.read(self.ours, 65536).decode("utf-8", "replace")
                except OSError:
                    break
        assert wanted in self.text, self.text

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)


def test_the_display_shows_reward_validation_rollouts_and_warnings(tmp_path):
    terminal = Terminal(tmp_path, PROGRAM.replace("SECONDS", "10"))
    try:
        terminal.read_until("ready")
        terminal.text = ""
        terminal.read_until("the last:", times=2)  # the first may have begun before
        shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.text)
        assert "0.750  ▁▅█  from 0.250, best 0.750" in shown
        assert "greedy 0.375  (step 3)" in shown
        assert "3 running, 12 waiting, 96 done, 2 failed, 1 retried; last failure: KeyError: \\x1b[31m'x'" in shown
        assert "1, the last: all rewards are 0" in shown
        assert "3,570 tokens/s" in shown
        assert "warm start" in shown
    finally:
        terminal.close()


def test_without_a_terminal_there_are_plain_lines_and_no_control_sequences(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("SECONDS", "0.1")],
        cwd=tmp_path, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "training: 8 to do" in done.stdout
    assert "warning: all rewards are 0" in done.stdout
