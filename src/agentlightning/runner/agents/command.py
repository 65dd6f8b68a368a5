"""An agent that is a program in any language.

It reads its task as JSON from `AGL_TASK` (left out where the task is longer than an environment variable may be) and
from stdin, finds its model and its event URL in the environment (`rollouts.attempt_environment`), and its stdout is its
output, of which the last 1 MB is kept. An exit code other than 0 is a failed attempt whose traceback is the end of
stderr. It runs in a process group of its own, of which nothing is left when the attempt has ended.
"""

from __future__ import annotations

import os
import selectors
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

import orjson

from agentlightning.errors import AgentError
from agentlightning.runner.agents.arguments import Call
from agentlightning.runner.hosts.orphan_guard import guard

OUTPUT_BYTES = 1_000_000
ERROR_BYTES = 64_000
TASK_VARIABLE_BYTES = 100_000
"""Linux takes 128 KiB for one variable."""
POLL_SECONDS = 0.05
"""How soon the end of a program is seen whose children still hold its pipes."""


class CommandError(AgentError):
    """A program that ended with an exit code other than 0, or by a signal."""

    def __init__(self, message: str, stderr: str) -> None:
        super().__init__(message)
        if stderr:
            self.add_note(f"stderr:\n{stderr}")


def check_executable(words: Sequence[str], forms: str) -> None:
    """Raises AgentError where there is no such program."""
    if shutil.which(words[0]) is not None:
        return
    hint = ""
    if words[0].endswith(".py"):
        hint = f"; did you mean `python {shlex.join(words)}` or `{words[0]}:NAME`?"
    raise AgentError(f"agent {shlex.join(words)!r}: there is no program {words[0]!r} on the PATH{hint} ({forms})")


@dataclass(frozen=True, slots=True)
class Command:
    """A program and its arguments, run once for each attempt."""

    words: tuple[str, ...]
    grace: float = 2.0
    """Seconds between SIGTERM and SIGKILL."""

    def blocks(self, call: Call) -> bool:
        return True

    def start(self, call: Call) -> str:
        """Run the program to its end; its output. Raises CommandError."""
        task = orjson.dumps(call.task)
        environment = {**os.environ, **call.environment, **task_variable(call.task)}
        process = Running(self.words, environment, self.grace)
        call.program = process
        if call.cancelled:  # it was, before there was a program to stop
            process.terminate()
        return process.communicate(task)


def task_variable(task: Any) -> dict[str, str]:
    """`AGL_TASK`, which holds a task as JSON; nothing for one that is too long for a variable."""
    text = orjson.dumps(task)
    return {"AGL_TASK": text.decode()} if len(text) <= TASK_VARIABLE_BYTES else {}


class Running:
    """A program while it runs."""

    def __init__(self, words: Sequence[str], environment: dict[str, str], grace: float) -> None:
        self.name = shlex.join(words)
        self.grace = grace
        pipe = subprocess.PIPE
        guard().start()
        try:
            self.process = subprocess.Popen(
                words, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, start_new_session=True
            )
        except OSError as error:
            raise AgentError(f"agent {self.name!r} cannot be started: {error}") from error
        guard().add(self.process.pid)
        self._lock = threading.Lock()
        self._killing: threading.Timer | None = None

    def terminate(self) -> None:
        """SIGTERM to the whole group, SIGKILL after the grace. Returns at once; `communicate` ends soon after."""
        self._signal(signal.SIGTERM)
        self._killing = threading.Timer(self.grace, self.kill)
        self._killing.daemon = True
        self._killing.start()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with self._lock:  # the group's id is ours until the program has been waited for
            if self.process.returncode is None:
                _signal_group(self.process.pid, number)

    def communicate(self, task: bytes) -> str:
        """Feed the program its task, read what it says, wait for its end."""
        stdout, stderr = _Tail(OUTPUT_BYTES), _Tail(ERROR_BYTES)
        try:
            self._pump(task, stdout, stderr)
        finally:
            self._reap()
        if self.process.returncode:
            raise CommandError(f"{self.name!r} {describe_exit(self.process.returncode)}", stderr.text())
        return stdout.text()

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
                if self._ended():
                    self._signal(signal.SIGKILL)  # what it left behind; the pipes then close
                    if not ready:
                        return  # a daemon in a group of its own still holds them

    def _ended(self) -> bool:
        """Whether the program has ended. Where the system can be asked so, it is not waited for: its process group
        keeps its id."""
        if not _can_look():
            return self._waited_for()
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _waited_for(self) -> bool:
        """What a program left behind is killed at once: nobody else can have got the group's id meanwhile."""
        with self._lock:
            if self.process.returncode is None and self.process.poll() is not None:
                _signal_group(self.process.pid, signal.SIGKILL)
            return self.process.returncode is not None

    def _reap(self) -> None:
        if _can_look():
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        while not self._ended():
            time.sleep(POLL_SECONDS)
        self._signal(signal.SIGKILL)
        guard().remove(self.process.pid)  # before anybody else can get the id
        with self._lock:
            self.process.wait()
        if self._killing is not None:
            self._killing.cancel()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


def _can_look() -> bool:
    """Whether a program can be looked at without being waited for: not on macOS before Python 3.13."""
    return hasattr(os, "waitid")


class _Tail:
    """The last bytes of a stream."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.data = bytearray()

    def read(self, fd: int) -> bool:
        """Take what is there; False at the end of the stream."""
        piece = os.read(fd, 65536)
        self.data += piece
        if len(self.data) > 2 * self.limit:
            del self.data[: -self.limit]
        return bool(piece)

    def text(self) -> str:
        return bytes(self.data[-self.limit :]).decode(errors="replace")


def _write(fd: int, waiting: memoryview) -> memoryview:
    """What is left to write. A program that does not read its stdin is within its rights."""
    try:
        return waiting[os.write(fd, waiting[:65536]) :]
    except BlockingIOError:
        return waiting
    except BrokenPipeError:
        return waiting[len(waiting) :]


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def describe_exit(code: int) -> str:
    """A return code in words: `ended with exit code 3`, `was killed by SIGSEGV`."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
