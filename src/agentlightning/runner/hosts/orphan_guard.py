"""Kills the commands of a process that was killed: a separate process reads `+GROUP` and `-GROUP` from its input.

When its input ends, because the owner has exited in whatever way, every process group that was added and not removed
gets SIGKILL. One such guard watches over all commands of an agent host; it is started with the
first. Run by its path, without the package: standard library only.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import cache


class Guard:
    """The guard of this process' commands."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def start(self) -> None:
        """Have the guard running. Before the first command, so that no time is lost once there is one."""
        self._tell("")

    def add(self, group: int) -> None:
        """Kill the process group if this process goes first."""
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """The group has ended. Call it before its leader is waited for: its id may be reused afterwards."""
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        with self._lock, suppress(OSError):  # without a guard, commands run as well
            if self._process is None or self._owner != os.getpid():
                self._owner = os.getpid()
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    bufsize=0,
                    start_new_session=True,
                )
                atexit.register(_end, self._process)
            if self._process.stdin is not None:
                self._process.stdin.write(line.encode())


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    with suppress(subprocess.TimeoutExpired):  # A process that was forked from this one has the pipe, too.
        process.wait(1)


@cache
def guard() -> Guard:
    """The one of this process."""
    return Guard()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups = set[int]()
    for line in sys.stdin.buffer:
        number = int(line[1:])
        if line.startswith(b"+"):
            groups.add(number)
        else:
            groups.discard(number)
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
