"""A command that runs in our place: it has our terminal, gets the signals we get, and we end as it ends.

Called by `agl run`. It stays in our process group, as a program must that reads from the terminal.
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
"""Windows has two of them."""
FROM_TERMINAL: Final = frozenset(number for number in FORWARDED if number.name in ("SIGINT", "SIGQUIT"))
"""A terminal sends these to the whole group: the command has them already."""
GRACE_SECONDS: Final = 5.0
"""Between SIGTERM and SIGKILL for a command whose time is over."""
KEPT_BYTES: Final = 1_000_000
"""How much of the end of its output is kept, where somebody wants it."""


class Child:
    """One command. `run` it once."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], *, keep_output: bool = False) -> None:
        self.words = tuple(words)
        self.output = b""
        """The end of its stdout, with `keep_output`: stdout is then a pipe, and passed on as it comes."""
        self.timed_out = False
        self.returncode = 0
        """Once it has ended: its exit code, or the signal that ended it as a negative number."""
        self._environment = dict(environment)
        self._keep_output = keep_output
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, timeout: float | None = None) -> int:
        """Its exit code; 128 and the signal's number where one ended it, as shells have it. After `timeout` seconds it
        is ended. Raises AgentError where it cannot be started."""
        if sys.platform == "win32":
            raise AgentError("a command is run on Linux and macOS only; on Windows, use WSL")
        loop = asyncio.get_running_loop()
        stdout = asyncio.subprocess.PIPE if self._keep_output else None
        for number in FORWARDED:
            loop.add_signal_handler(number, self._forward, number)
        try:
            self._process = await asyncio.create_subprocess_exec(*self.words, env=self._environment, stdout=stdout)
            code = self.returncode = await self._end(self._process, timeout)
        except OSError as error:
            raise AgentError(f"{self.words[0]!r} cannot be started: {error.strerror or error}") from error
        finally:
            for number in FORWARDED:
                loop.remove_signal_handler(number)
        return 128 - code if code < 0 else code

    async def _end(self, process: asyncio.subprocess.Process, timeout: float | None) -> int:
        passing = asyncio.create_task(self._pass_on(process.stdout)) if process.stdout else None
        try:
            async with asyncio.timeout(timeout):
                code = await process.wait()
        except TimeoutError:
            self.timed_out = True
            code = await _insist(process)
        if passing is not None:  # what it has left behind may hold the pipe for ever
            await asyncio.wait({passing}, timeout=1.0)
            passing.cancel()
        return code

    async def _pass_on(self, stream: asyncio.StreamReader) -> None:
        while piece := await stream.read(65536):
            self.output = (self.output + piece)[-KEPT_BYTES:]
            with suppress(BrokenPipeError):  # nobody listens to us; the command need not know
                sys.stdout.buffer.write(piece)
                sys.stdout.buffer.flush()

    def _forward(self, number: signal.Signals) -> None:
        process = self._process
        if process is None or (number in FROM_TERMINAL and _has_terminal()):
            return
        with suppress(ProcessLookupError):
            process.send_signal(number)


async def _insist(process: asyncio.subprocess.Process) -> int:
    """End the command and what it has started: SIGTERM, and SIGKILL after the grace."""
    family = [process.pid, *descendants(process.pid)]
    _signal(family, signal.SIGTERM)
    try:
        async with asyncio.timeout(GRACE_SECONDS):
            return await process.wait()
    except TimeoutError:
        return await _kill(process)
    finally:
        _signal([pid for pid in family[1:] if pid in _parents()], signal.SIGKILL)


async def _kill(process: asyncio.subprocess.Process) -> int:
    _signal([process.pid, *descendants(process.pid)], signal.SIGKILL)
    return await process.wait()


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def descendants(pid: int) -> list[int]:
    """The processes a process has started, and those that they have, as far as the system says (Linux does)."""
    parents = _parents()
    found = [pid]
    for known in found:
        found += [child for child, parent in parents.items() if parent == known]
    return found[1:]


def _parents() -> dict[int, int]:
    """process -> its parent."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            fields = entry.read_text().rpartition(")")[2].split()
            parents[int(entry.parent.name)] = int(fields[1])
    return parents


def _has_terminal() -> bool:
    """Whether we are what the terminal's user sees: Ctrl-C then goes to all of our group."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
