"""Runs a command and terminates it when its standard input is closed: `python guard_process.py SECONDS WORD...`.

The process that starts it holds the other end of the pipe. When that is closed, on purpose or because its holder was
killed, the process group of the command gets SIGTERM, and SIGKILL after SECONDS. It runs by its path, without the
package: standard library only. It exits with the status of the command.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress


def main(seconds: float, words: list[str]) -> int:
    wakeup, wakeup_writer = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda _number, _frame: os.write(wakeup_writer, b".") and None)
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
    while process.poll() is None:
        readable, _, _ = select.select([0, wakeup], [], [])
        if readable and (wakeup in readable or not os.read(0, 1)):
            break
    return _terminate(process, seconds)


def _terminate(process: subprocess.Popen[bytes], seconds: float) -> int:
    """End the whole group, also if its leader has exited: the workers of a server that crashed still run."""
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
