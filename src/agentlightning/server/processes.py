"""Several processes that serve one port: `agl serve --workers N`.

The parent binds a socket for each process and forks them; the kernel divides new connections between the sockets
(SO_REUSEPORT). The parent serves nothing itself: it passes signals on, kills a process whose event loop has stopped, to
which the kernel would send connections for ever, and starts a process again that has died. The
socket of such a process keeps the connections that come meanwhile. What the processes share beside the store lies in a
directory that the parent makes and removes.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from agentlightning.errors import ConfigError
from agentlightning.observability.metrics import Metrics, counters
from agentlightning.server.app import listen
from agentlightning.util.event_loop import in_background

logger = logging.getLogger(__name__)

RESTART_SECONDS: Final = 1.0
"""Time before a process is started again that died before it served."""
POLL_SECONDS: Final = 0.05
"""Between two looks at a process that is about to serve."""
BEAT_SECONDS: Final = 1.0
"""How often the event loop of a process shows that it runs."""
LOOK_SECONDS: Final = 5.0
"""How often the parent looks."""
MOST_SILENT_LOOKS: Final = 12
"""After so many in which its event loop has not run, a process hangs."""
ASK_SECONDS: Final = 2.0
"""How long a process waits for what another one says."""
_PR_SET_PDEATHSIG: Final = 1
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_FORK: Final = multiprocessing.get_context("fork")


class ServerProcess:
    """One of the processes. `directory` holds what they share beside the store."""

    def __init__(self, number: int, count: int, listener: socket.socket, directory: Path) -> None:
        self.number, self.count = number, count
        """From 1, and of all processes."""
        self.listener, self.directory = listener, directory
        self.restarts = 0
        self.running: BaseProcess | None = None
        self.start_at = 0.0
        """When it may be started (monotonic seconds)."""
        self.end = ""
        """How it ended last."""
        self._serves = _FORK.RawValue("b", False)
        self._beats = _FORK.RawValue("Q", 0)
        """Both in memory that it shares with its parent."""
        self._beats_seen, self._silent_looks = 0, 0

    # -- in the process --------------------------------------------------------------------------------------------

    def ready(self) -> None:
        """To be called once it serves."""
        self._serves.value = True

    @asynccontextmanager
    async def sharing(self, metrics: Metrics) -> AsyncGenerator[None]:
        """Give the metrics of this process to the others, and `metrics` theirs; show the parent that it runs."""

        async def give(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(metrics.render_own())
            writer.close()

        async def beat() -> None:
            while True:
                self._beats.value += 1
                await asyncio.sleep(BEAT_SECONDS)

        metrics.add_source(lambda: counters("process", "The process of the server", {"restarts": self.restarts}))
        metrics.process, metrics.others = self.number, self._ask_others
        async with await asyncio.start_unix_server(give, self._socket_of(self.number)), in_background(beat()):
            yield

    async def _ask_others(self) -> dict[int, bytes]:
        """The metrics of the other processes; one that does not answer in time is left out."""
        others = [number for number in range(1, self.count + 1) if number != self.number]
        found = await asyncio.gather(*map(self._ask, others))
        return {number: text for number, text in zip(others, found, strict=True) if text is not None}

    async def _ask(self, number: int) -> bytes | None:
        try:
            async with asyncio.timeout(ASK_SECONDS):
                reader, writer = await asyncio.open_unix_connection(self._socket_of(number))
                with closing(writer):
                    return await reader.read()
        except (OSError, TimeoutError):
            return None

    def _socket_of(self, number: int) -> Path:
        return self.directory / f"{number}.sock"

    # -- in the parent ---------------------------------------------------------------------------------------------

    @property
    def serves(self) -> bool:
        return bool(self._serves.value)

    def hangs(self) -> bool:
        """Whether its event loop has stopped. Looks are counted, not seconds: the parent may have stopped with it."""
        silent = self.serves and self._beats.value == self._beats_seen
        self._beats_seen, self._silent_looks = self._beats.value, self._silent_looks + 1 if silent else 0
        return self._silent_looks >= MOST_SILENT_LOOKS

    def take_end(self) -> int | None:
        """The exit status of a process that has ended, once; as in a shell, 128 and the number of a signal."""
        if self.running is None or self.running.is_alive():
            return None
        running, self.running = self.running, None
        code = running.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        self.end = f"process {self.number} of the server (pid {running.pid}) {how}"
        return 128 - code if code < 0 else code

    def plan_restart(self) -> None:
        self.start_at = time.monotonic() + (0.0 if self.serves else RESTART_SECONDS)
        self._serves.value = False
        self.restarts += 1
        logger.error("%s; it is started again, time %d", self.end, self.restarts)


class Processes:
    """The parent. `work` is what each process does until it is stopped, and returns its exit status; `on_ready(port)`
    is called once all processes serve. Raises ServerError if the address is not available."""

    def __init__(
        self, count: int, host: str, port: int, work: Callable[[ServerProcess], int], on_ready: Callable[[int], None]
    ) -> None:
        if not sys.platform.startswith("linux"):
            raise ConfigError(
                f"--workers {count} needs Linux, whose kernel divides connections between processes; start several"
                " servers on ports of their own instead, behind a load balancer"
            )
        self._work, self._on_ready = work, on_ready
        listeners, self._num_signals, self._look_at = _listen(count, host, port), 0, 0.0
        self._directory = TemporaryDirectory(prefix="agl-serve-")
        directory = Path(self._directory.name)
        self._children = [ServerProcess(number, count, each, directory) for number, each in enumerate(listeners, 1)]

    def run(self) -> int:
        """Returns the exit status once all processes have ended. One that fails at the first start, for its options
        perhaps, reports that itself and ends the others."""
        first, announced = self._children[0], False
        with self._directory, _received_signals() as signals:
            while not self._num_signals:
                for child in self._children if announced or first.serves else [first]:
                    if child.running is None and child.start_at <= time.monotonic():
                        self._start(child)
                self._wait(signals)
                self._kill_hanging()
                for child in self._children:
                    status = child.take_end()
                    if status is not None and not announced:
                        logger.error(child.end)
                        return max(status, self._end(signals))
                    if status is not None:
                        child.plan_restart()
                if not announced and all(child.serves for child in self._children):
                    announced = True
                    self._on_ready(first.listener.getsockname()[1])
            return self._end(signals)

    def _start(self, child: ServerProcess) -> None:
        child.running = _FORK.Process(target=self._run_child, args=(child, os.getpid()), daemon=True)
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until the child has let go of our handlers
        child.running.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def _run_child(self, process: ServerProcess, parent: int) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # where the parent is killed
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if os.getppid() != parent:
            return
        os.setpgid(0, 0)  # Ctrl-C goes to the parent alone, which passes it on
        for child in self._children:
            if child.number != process.number:
                child.listener.close()
        sys.exit(self._work(process))

    def _kill_hanging(self) -> None:
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_SECONDS
        for child in self._children:
            if child.running and child.hangs():
                seconds = LOOK_SECONDS * MOST_SILENT_LOOKS
                logger.error("process %d of the server has done nothing for %g s; it is killed", child.number, seconds)
                child.running.kill()

    def _wait(self, signals: socket.socket) -> None:
        """Until a signal has come, a process has ended, or one may be started, and no longer than to the next look; a
        while, if one is about to serve."""
        running = [child.running.sentinel for child in self._children if child.running]
        starts = [child.start_at for child in self._children if not child.running and child.start_at]
        due = [LOOK_SECONDS, *(start_at - time.monotonic() for start_at in starts)]
        if any(child.running and not child.serves for child in self._children):
            due.append(POLL_SECONDS)
        wait([signals, *running], max(0.0, min(due)))
        with suppress(BlockingIOError):
            self._num_signals += len(signals.recv(64))

    def _end(self, signals: socket.socket) -> int:
        """Pass signals on until all processes have ended; the first is SIGTERM in any case."""
        for child in self._children:  # that of a process takes connections until the process closes it
            child.listener.close()
            child.start_at = 0.0
        status, passed, self._num_signals = 0, 0, max(1, self._num_signals)
        while running := [child.running for child in self._children if child.running]:
            if passed == self._num_signals:
                self._wait(signals)
            else:
                passed += 1
                for process in running:
                    process.terminate()
            for child in self._children:
                if ended := child.take_end():
                    logger.error(child.end)
                    status = max(status, ended)
        return status


@contextmanager
def _received_signals() -> Generator[socket.socket]:
    """A socket that receives a byte for each SIGTERM and SIGINT."""
    reader, writer = socket.socketpair()

    def received(*_: object) -> None:
        writer.send(b"\0")

    with reader, writer:
        reader.setblocking(False)
        before = {number: signal.signal(number, received) for number in _SIGNALS}
        try:
            yield reader
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _listen(count: int, host: str, port: int) -> Sequence[socket.socket]:
    """A socket for each process, all with one port."""
    if port != 0:  # with SO_REUSEPORT alone, two servers would share the port unnoticed
        listen(host, port).close()
    listeners = [listen(host, port, shared=True)]
    port = listeners[0].getsockname()[1]
    return listeners + [listen(host, port, shared=True) for _ in range(1, count)]
