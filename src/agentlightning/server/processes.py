"""Several processes that serve one port: `agl serve --workers N`.

The parent binds a socket for each process and forks them; the kernel divides new connections between the sockets
(SO_REUSEPORT). The parent serves nothing itself: for each process it has a task that starts it, again if it dies, and
kills it if its event loop has stopped, since the kernel would send it connections for ever. Signals are passed on. The
socket of a process that is started again keeps the connections that come meanwhile. What the processes share beside the
store lies in a directory that the parent makes and removes.
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
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, closing, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from agentlightning.errors import ConfigError
from agentlightning.observability.metrics import Metrics, counters
from agentlightning.server.app import listen

logger = logging.getLogger(__name__)

RESTART_SECONDS: Final = 1.0
"""Time before a process is started again that died before it served."""
BEAT_SECONDS: Final = 1.0
"""How often the event loop of a process shows that it runs."""
LOOK_SECONDS: Final = 5.0
"""How long the parent waits for that."""
MOST_SILENT_LOOKS: Final = 12
"""After so many in a row, a process hangs. They are counted, not the seconds: the parent may have stopped with it."""
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
        self.serves = False
        self.running: BaseProcess | None = None
        self.parent: socket.socket
        """Receives a byte whenever the event loop of the process runs; closed where the process has ended."""

    def ready(self) -> None:
        """To be called in its event loop once it serves."""
        self._beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            with suppress(OSError):
                self.parent.send(b"\0", socket.MSG_DONTWAIT)
            await asyncio.sleep(BEAT_SECONDS)

    @asynccontextmanager
    async def sharing(self, metrics: Metrics) -> AsyncGenerator[None]:
        """Give the metrics of this process to the others, and `metrics` theirs."""

        async def give(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(metrics.render_own())
            writer.close()

        metrics.add_source(lambda: counters("process", "The process of the server", {"restarts": self.restarts}))
        metrics.process, metrics.others = self.number, self._ask_others
        async with await asyncio.start_unix_server(give, self.directory / f"{self.number}.sock"):
            yield

    async def _ask_others(self) -> dict[int, bytes]:
        """The metrics of the other processes; one that does not answer in time is left out."""
        others = [number for number in range(1, self.count + 1) if number != self.number]
        found = await asyncio.gather(*map(self._ask, others))
        return {number: text for number, text in zip(others, found, strict=True) if text is not None}

    async def _ask(self, number: int) -> bytes | None:
        try:
            async with asyncio.timeout(ASK_SECONDS):
                reader, writer = await asyncio.open_unix_connection(self.directory / f"{number}.sock")
                with closing(writer):
                    return await reader.read()
        except (OSError, TimeoutError):
            return None


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
        if port != 0:  # with SO_REUSEPORT alone, two servers would share the port unnoticed
            listen(host, port).close()
        listeners = [listen(host, port, shared=True)]
        port = listeners[0].getsockname()[1]
        listeners += [listen(host, port, shared=True) for _ in range(1, count)]
        self._directory = TemporaryDirectory(prefix="agl-serve-")
        directory = Path(self._directory.name)
        self._children = [ServerProcess(number, count, each, directory) for number, each in enumerate(listeners, 1)]
        self._announced = self._stopping = False
        self._first_serves = asyncio.Event()
        """Or all are to end: one that fails at the first start, for its options perhaps, reports that itself."""

    def run(self) -> int:
        """Returns the exit status once all processes have ended."""
        with self._directory:
            return asyncio.run(self._serve())

    async def _serve(self) -> int:
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._stop)
        return max(await asyncio.gather(*map(self._keep, self._children)))

    def _stop(self) -> None:
        """Have all processes end; a further signal is passed on, too."""
        self._stopping = True
        self._first_serves.set()
        for child in self._children:
            child.listener.close()  # it takes connections until the process, too, closes it
            if child.running is not None:
                child.running.terminate()

    async def _keep(self, child: ServerProcess) -> int:
        """Have a process run until all are to end. Returns the exit status."""
        if child is not self._children[0]:
            await self._first_serves.wait()
        status = 0
        while not self._stopping:
            status, end = await self._run(child)
            if self._stopping:
                if status:
                    logger.error(end)
            elif self._announced:
                child.restarts, status = child.restarts + 1, 0
                logger.error("%s; it is started again, time %d", end, child.restarts)
                await asyncio.sleep(0.0 if child.serves else RESTART_SECONDS)
            else:
                logger.error(end)
                self._stop()
        return status

    async def _run(self, child: ServerProcess) -> tuple[int, str]:
        """Run a process until it ends: its exit status, as in a shell, and what that means."""
        beats, child.parent = socket.socketpair()
        child.serves = False
        process = child.running = _FORK.Process(target=self._run_child, args=(child, os.getpid()), daemon=True)
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until the child has let go of our handlers
        process.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        child.parent.close()
        with beats:
            beats.setblocking(False)
            await self._watch(child, beats)
        process.join()
        code = process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return 128 - code if code < 0 else code, f"process {child.number} of the server (pid {process.pid}) {how}"

    async def _watch(self, child: ServerProcess, beats: socket.socket) -> None:
        """Until a process has ended. One that hangs is killed."""
        silent_looks = 0
        while True:
            try:
                async with asyncio.timeout(LOOK_SECONDS if child.serves else None):
                    if not await asyncio.get_running_loop().sock_recv(beats, 64):
                        return
            except TimeoutError:
                silent_looks += 1
                if silent_looks == MOST_SILENT_LOOKS and child.running is not None:
                    seconds = LOOK_SECONDS * MOST_SILENT_LOOKS
                    logger.error(
                        "process %d of the server has done nothing for %g s; it is killed", child.number, seconds
                    )
                    child.running.kill()
                continue
            silent_looks, child.serves = 0, True
            self._first_serves.set()
            if not self._announced and all(each.serves for each in self._children):
                self._announced = True
                self._on_ready(child.listener.getsockname()[1])

    def _run_child(self, process: ServerProcess, parent: int) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # where the parent is killed
        signal.set_wakeup_fd(-1)
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
