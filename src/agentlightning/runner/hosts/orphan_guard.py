"""Kills the commands of a process that was killed: a separate process reads `+GROUP` and `-GROUP` from its input.

When its input ends, because the owner has exited in whatever way, every process group that was added and not removed
gets SIGKILL. One such guard watches over all commands of an agent host; it is started with the
first. Run by its path, without the package: standard library only.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import cache

logger = logging.getLogger(__name__)


class Guard:
    """The guard of this process' commands. One that dies, as by the kernel when memory is short, is replaced."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups = set[int]()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def start(self) -> None:
        """Have the guard running. Before the first command, so that no time is lost once there is one."""
        with self._lock, suppress(OSError):  # without a guard, commands run as well
            if self._owner != os.getpid():
                self._owner, self._groups = os.getpid(), set()
                self._spawn()
                threading.Thread(target=self._replace, name="agl-guard", daemon=True).start()

    def add(self, group: int) -> None:
        """Kill the process group if this process goes first."""
        with self._lock:
            self._groups.add(group)
            self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """The group has ended. Call it before its leader is waited for: its id may be reused afterwards."""
        with self._lock:
            self._groups.discard(group)
            self._tell(f"-{group}\n")

    def _spawn(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        atexit.register(_end, self._process)
        self._tell("".join(f"+{group}\n" for group in self._groups))

    def _tell(self, lines: str) -> None:
        with suppress(OSError):  # it has died: the next one gets all groups
            if self._process is not None and self._process.stdin is not None and not self._process.stdin.closed:
                self._process.stdin.write(lines.encode())

    def _replace(self) -> None:
        """Start another guard whenever one has died, until the end of this process closes its input."""
        while (process := self._process) is not None:
            process.wait()
            with self._lock, suppress(OSError):
                if process.stdin is None or process.stdin.closed:
                    return
                process.stdin.close()
                logger.warning("the process that guards the commands of this one has died; another one replaces it")
                self._process = None
                self._spawn()


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    if process.stdin.closed:
        return  # it was replaced
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
