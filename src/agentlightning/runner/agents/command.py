"""Agents that are programs in any language.

A program reads its task as JSON from stdin and from `AGL_TASK` (absent if the task is too long for an environment
variable), and the URLs of its model and events from the environment (`attempt_variables.py`). Its stdout is
its output, of which the last 1 MB is stored. With a non-zero exit code the attempt fails, and the end of stderr is its
traceback. It runs in its own process group, which is killed when the attempt ends.
"""

from __future__ import annotations

import os
import selectors
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, cast

from agentlightning.errors import AgentError
from agentlightning.runner.agents.arguments import Invocation
from agentlightning.runner.agents.loading import import_advice
from agentlightning.util.json_values import dumps

OUTPUT_BYTES = 1_000_000
ERROR_BYTES = 64_000
TASK_VARIABLE_BYTES = 100_000
"""Linux limits one variable to 128 KiB."""
POLL_SECONDS = 0.05
"""Poll interval for the exit of a program whose children keep its pipes open."""


class CommandError(AgentError):
    """A program exited with a non-zero code, or was killed by a signal."""

    def __init__(self, message: str, stderr: str) -> None:
        super().__init__(message)
        if stderr:
            self.add_note(f"stderr:\n{stderr}")


def check_executable(words: Sequence[str], forms: str) -> None:
    """Raise AgentError if there is no such program."""
    if shutil.which(words[0]) is not None:
        return
    hint = ""
    if words[0].endswith(".py"):
        hint = f"; did you mean `python {shlex.join(words)}` or `{words[0]}:NAME`?"
    raise AgentError(f"agent {shlex.join(words)!r}: there is no program {words[0]!r} on the PATH{hint} ({forms})")


@dataclass(frozen=True, slots=True)
class Command:
    """A program and its arguments, run once per attempt."""

    words: tuple[str, ...]
    grace: float = 2.0
    """Seconds between SIGTERM and SIGKILL."""

    def blocks(self, invocation: Invocation) -> bool:
        return True

    def start(self, invocation: Invocation) -> str:
        """Run the program and return its output. Raises CommandError."""
        task = dumps(invocation.task)
        environment = {**os.environ, **invocation.environment, **task_variable(invocation.task)}
        process = RunningCommand(self.words, environment, self.grace, invocation.on_program)
        invocation.program = process
        if invocation.cancelled:  # cancelled before the program was started
            process.terminate()
        return process.communicate(task)


def task_variable(task: Any) -> dict[str, str]:
    """`AGL_TASK` with the task as JSON; empty if the task is too long for a variable."""
    text = dumps(task)
    return {"AGL_TASK": text.decode()} if len(text) <= TASK_VARIABLE_BYTES else {}


class RunningCommand:
    """A running program and its process group, whose id `on_group` is told, and 0 once all of it has ended."""

    def __init__(
        self, words: Sequence[str], environment: dict[str, str], grace: float, on_group: Callable[[int], None]
    ) -> None:
        self.name, self.program = shlex.join(words), words[0]
        self._grace, self._on_group = grace, on_group
        pipe = subprocess.PIPE
        try:
            self.process = subprocess.Popen(
                words, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, start_new_session=True
            )
        except OSError as error:
            raise AgentError(f"agent {self.name!r} cannot be started: {error}") from error
        on_group(self.process.pid)
        self._killing: threading.Timer | None = None

    def terminate(self) -> None:
        """Send SIGTERM to the group, and SIGKILL after the grace. Returns immediately; `communicate` returns soon
        after."""
        self._signal(signal.SIGTERM)
        self._killing = threading.Timer(self._grace, self.kill)
        self._killing.daemon = True
        self._killing.start()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            signal_group(self.process.pid, number)

    def communicate(self, task: bytes) -> str:
        """Write the task to stdin, read the output and wait for the program to exit."""
        stdout, stderr = _Tail(OUTPUT_BYTES), _Tail(ERROR_BYTES)
        try:
            self._pump(task, stdout, stderr)
        finally:
            self._wait()
        if self.process.returncode:
            raise CommandError(self._failure(stderr.text()), stderr.text())
        return stdout.text()

    def _failure(self, stderr: str) -> str:
        ended = f"{self.name!r} {describe_exit(self.process.returncode)}"
        advice = import_advice(stderr, self.program)
        return f"{ended}: {advice}" if advice else ended

    def _pump(self, task: bytes, stdout: _Tail, stderr: _Tail) -> None:
        process = self.process
        stdin = cast(IO[bytes], process.stdin)
        waiting = memoryview(task)
        os.set_blocking(stdin.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(stdin, selectors.EVENT_WRITE)
            selector.register(cast(IO[bytes], process.stdout), selectors.EVENT_READ, stdout)
            selector.register(cast(IO[bytes], process.stderr), selectors.EVENT_READ, stderr)
            while selector.get_map():
                ready = selector.select(POLL_SECONDS)
                for key, _ in ready:
                    if key.fileobj is stdin:
                        waiting = _write(key.fd, waiting)
                        done = not waiting
                    else:
                        done = not cast(_Tail, key.data).read(key.fd)
                    if done:
                        selector.unregister(key.fileobj)
                        cast(IO[bytes], key.fileobj).close()
                if process.poll() is not None:
                    signal_group(process.pid, signal.SIGKILL)  # processes it left behind; the pipes then close
                    if not ready:
                        return  # a daemon in another group keeps them open

    def _wait(self) -> None:
        process = self.process
        process.wait()
        signal_group(process.pid, signal.SIGKILL)
        self._on_group(0)
        if self._killing is not None:
            self._killing.cancel()
        for pipe in (process.stdin, process.stdout, process.stderr):
            cast(IO[bytes], pipe).close()


class _Tail:
    """The last bytes of a stream."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.data = bytearray()

    def read(self, fd: int) -> bool:
        """Read available bytes; False at the end of the stream."""
        piece = os.read(fd, 65536)
        self.data += piece
        if len(self.data) > 2 * self.limit:
            del self.data[: -self.limit]
        return bool(piece)

    def text(self) -> str:
        return bytes(self.data[-self.limit :]).decode(errors="replace")


def _write(fd: int, waiting: memoryview) -> memoryview:
    """Write a part; the rest. A program may close its stdin without reading it."""
    try:
        return waiting[os.write(fd, waiting[:65536]) :]
    except BlockingIOError:
        return waiting
    except BrokenPipeError:
        return waiting[len(waiting) :]


def signal_group(group: int, number: signal.Signals) -> None:
    """Signal what is left of a process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def describe_exit(code: int) -> str:
    """Describe a return code: `ended with exit code 3`, `was killed by SIGSEGV`."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
