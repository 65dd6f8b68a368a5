"""Runs a command in the foreground for `agl run`: with our terminal, our signals, and its exit code as ours.

The command stays in our process group, as a program that reads from the terminal must.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from agentlightning.errors import AgentError

_NAMES: Final = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
FORWARDED: Final = tuple(signal.Signals[name] for name in _NAMES if name in signal.Signals.__members__)
"""Windows has only two of them."""
FROM_TERMINAL: Final = frozenset(number for number in FORWARDED if number.name in ("SIGINT", "SIGQUIT"))
"""A terminal sends these to the whole process group, so that the command has them already."""
GRACE_SECONDS: Final = 5.0
"""Time between SIGTERM and SIGKILL for a command that timed out."""
OUTPUT_BYTES: Final = 1_000_000
"""How much of the end of the output is kept."""


class ChildProcess:
    """A command. Call `run` once."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], *, keep_output: bool = False) -> None:
        self.words = tuple(words)
        self.output = b""
        """The end of its stdout, with `keep_output`; stdout is then a pipe whose data is passed on at once."""
        self.timed_out = False
        self.returncode = 0
        """After the end: its exit code, or the negative number of the signal that ended it."""
        self._environment = dict(environment)
        self._keep_output = keep_output
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, timeout: float | None = None) -> int:
        """The exit code; if a signal ended the command, 128 plus its number, as in a shell. The command is terminated
        after `timeout` seconds. Raises AgentError if it cannot be started."""
        if sys.platform == "win32":
            raise AgentError("commands run on Linux and macOS only; on Windows, use WSL")
        loop = asyncio.get_running_loop()
        stdout = asyncio.subprocess.PIPE if self._keep_output else None
        for number in FORWARDED:
            loop.add_signal_handler(number, self._forward, number)
        try:
            self._process = await asyncio.create_subprocess_exec(*self.words, env=self._environment, stdout=stdout)
            code = self.returncode = await self._wait(self._process, timeout)
        except OSError as error:
            raise AgentError(f"{self.words[0]!r} cannot be started: {error.strerror or error}") from error
        finally:
            for number in FORWARDED:
                loop.remove_signal_handler(number)
        return 128 - code if code < 0 else code

    async def _wait(self, process: asyncio.subprocess.Process, timeout: float | None) -> int:
        copying = asyncio.create_task(self._copy_output(process.stdout)) if process.stdout else None
        try:
            async with asyncio.timeout(timeout):
                code = await process.wait()
        except TimeoutError:
            self.timed_out = True
            code = await _terminate(process)
        if copying is not None:  # processes that it has left behind may keep the pipe open
            await asyncio.wait({copying}, timeout=1.0)
            copying.cancel()
        return code

    async def _copy_output(self, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(65536):
            self.output = (self.output + data)[-OUTPUT_BYTES:]
            with suppress(BrokenPipeError):  # our reader is gone, which is no concern of the command
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()

    def _forward(self, number: signal.Signals) -> None:
        process = self._process
        if process is None or (number in FROM_TERMINAL and _has_terminal()):
            return
        with suppress(ProcessLookupError):
            process.send_signal(number)


async def _terminate(process: asyncio.subprocess.Process) -> int:
    """Terminate the command and its descendants: SIGTERM, and SIGKILL after the grace period."""
    tree = [process.pid, *descendants(process.pid)]
    _signal(tree, signal.SIGTERM)
    try:
        async with asyncio.timeout(GRACE_SECONDS):
            return await process.wait()
    except TimeoutError:
        return await _kill(process)
    finally:
        _signal([pid for pid in tree[1:] if pid in _parents()], signal.SIGKILL)


async def _kill(process: asyncio.subprocess.Process) -> int:
    _signal([process.pid, *descendants(process.pid)], signal.SIGKILL)
    return await process.wait()


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def descendants(pid: int) -> list[int]:
    """The descendants of a process; none where the system has no /proc."""
    parents = _parents()
    tree = [pid]
    for ancestor in tree:
        tree += [child for child, parent in parents.items() if parent == ancestor]
    return tree[1:]


def _parents() -> dict[int, int]:
    """The parent of each process."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):  # the process has ended
            fields = entry.read_text().rpartition(")")[2].split()
            parents[int(entry.parent.name)] = int(fields[1])
    return parents


def _has_terminal() -> bool:
    """Whether we are in the foreground of a terminal, so that Ctrl-C goes to our whole process group."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
