"""Runs a command and ends it when its own input ends: `python guard.py SECONDS WORD...`.

Whoever starts it keeps the other end of its standard input. When that is closed, by intent or because its holder was
killed, the command and all it started get SIGTERM, and after SECONDS SIGKILL. Run by its path, without the package:
standard library only.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress


def main(seconds: float, words: list[str]) -> int:
    woken, wake = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda _number, _frame: os.write(wake, b".") and None)
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
    while process.poll() is None:
        readable, _, _ = select.select([0, woken], [], [])
        if readable and (woken in readable or not os.read(0, 1)):
            break
    return _end(process, seconds)


def _end(process: subprocess.Popen[bytes], seconds: float) -> int:
    """The group goes with its leader: a server's workers outlive one that crashed."""
    _signal(process.pid, signal.SIGTERM)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        code = None
    _signal(process.pid, signal.SIGKILL)
    return process.wait() if code is None else code


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(abs(main(float(sys.argv[1]), sys.argv[2:])))
