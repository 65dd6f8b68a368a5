"""The fork server: a process that imports the agent once and forks agent hosts on request.

It reads a `Load` message, imports the agent, then serves the runner's requests over the same socket. It stays
single-threaded, so that a fork is safe and takes milliseconds, and imports nothing heavy that the agent does not
import. When the runner disconnects, the hosts get SHUTDOWN_SECONDS to exit; then they are killed.

What an agent starts, such as the workers of a pool, ends with its host: a host is the leader of a process group, which
is ended after it. On Linux, processes that have left the group become children of the fork server and end with it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import math
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper
from typing import IO, Any, NoReturn, cast

from agentlightning.errors import AgentError
from agentlightning.runner import attempt_environ
from agentlightning.runner.agents.agent import load_agent, load_object
from agentlightning.runner.agents.command import signal_group
from agentlightning.runner.agents.reward import RewardFunction
from agentlightning.runner.hosts import context_propagation
from agentlightning.runner.hosts.host import LoneHost, Setup, SharedHost
from agentlightning.runner.hosts.messages import (
    Exited,
    Fork,
    FrameDecoder,
    Load,
    Loaded,
    ToForkServer,
    encode,
)
from agentlightning.tracing import client_headers
from agentlightning.tracing.tracer import install_globally

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 1.0
"""Time that hosts get to exit after the runner has disconnected."""
KILL_SECONDS = 1.0
"""Time between SIGTERM and SIGKILL for what a host has left behind."""
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class _Child:
    """A forked host process."""

    host_id: int
    report: IO[bytes]
    """File that `faulthandler` writes to when the host crashes."""


def main() -> None:
    """Serve one runner until it disconnects."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for stream in (sys.stdout, sys.stderr):
        cast(TextIOWrapper, stream).reconfigure(line_buffering=True)  # many agents write lines to one log
    frames, load = FrameDecoder[Load](Load), None
    while load is None:
        load = next(frames.feed(control.recv(1 << 18) or sys.exit()), None)
    sys.path[:] = load.sys_path
    client_headers.install()
    context_propagation.install()
    attempt_environ.process_state.install()
    _adopt_orphans()
    try:
        setup = prepare(load)
    except AgentError as error:
        _send(control, Loaded(str(error)))
        return
    attempt_environ.install()
    install_globally()
    if not _send(control, Loaded()):
        return
    gc.collect()
    gc.freeze()  # keeps loaded pages shared between the hosts: the collector does not touch them
    ForkServer(control, setup).serve()


def _send(control: socket.socket, message: Loaded | Exited) -> bool:
    """Send a message to the runner; False if it has disconnected."""
    try:
        control.sendall(encode(message))
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def prepare(load: Load) -> Setup:
    """Import the agent and the reward function. Raises AgentError."""
    with attempt_environ.process_variables(load.variables):
        agent = load_agent(load.agent, grace=load.grace)
    reward = None if load.reward is None else RewardFunction.of(load_object(load.reward, "reward"))
    if threading.active_count() > 1:
        names = ", ".join(t.name for t in threading.enumerate() if t is not threading.main_thread())
        logger.warning("importing %s started threads (%s), which its processes will not have", load.agent, names)
    return Setup(agent, reward, load)


class ForkServer:
    """Forks, kills and reaps agent hosts."""

    def __init__(self, control: socket.socket, setup: Setup) -> None:
        self._control = control
        self._setup = setup
        self._children: dict[int, _Child] = {}
        self._ended_groups: dict[int, float] = {}
        """Groups of hosts that have exited -> when what is left of them is killed."""
        self._fds: deque[int] = deque()
        self._frames: FrameDecoder[ToForkServer] = FrameDecoder(ToForkServer)
        self._wake, self._waker = socket.socketpair()
        for end in (self._wake, self._waker):
            end.setblocking(False)

    def serve(self) -> None:
        signal.signal(signal.SIGCHLD, _on_sigchld)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        connected = True
        while connected:
            seconds = KILL_SECONDS if self._ended_groups else None
            readable, _, _ = select.select([self._control, self._wake], [], [], seconds)
            if self._wake in readable:
                self._reap()
            if self._control in readable:
                connected = self._receive()
            self._kill_groups(time.monotonic())
        self._shut_down()

    def _receive(self) -> bool:
        """Read and execute the runner's requests; False when it has disconnected."""
        try:
            data, fds, *_ = socket.recv_fds(self._control, 65536, 16)
        except ConnectionResetError:
            return False
        self._fds.extend(fds)
        for message in self._frames.feed(data):
            self._handle(message)
        return bool(data)

    def _handle(self, message: ToForkServer) -> None:
        if isinstance(message, Fork):
            self._fork(message.host_id, self._fds.popleft(), message.alone)
            return
        for pid, child in self._children.items():
            if child.host_id == message.host_id:
                os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid cannot belong to another process

    def _fork(self, host_id: int, fd: int, alone: bool) -> None:
        report = tempfile.TemporaryFile()  # noqa: SIM115  closed when the host is reaped
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._become_host(socket.socket(fileno=fd), report, alone)
        with suppress(OSError):  # both do it, so that neither has to wait for the other
            os.setpgid(pid, pid)
        os.close(fd)
        self._children[pid] = _Child(host_id, report)

    def _become_host(self, sock: socket.socket, report: IO[bytes], alone: bool) -> NoReturn:
        code = 1
        try:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (self._control, self._wake, self._waker):
                end.close()
            faulthandler.enable(report, all_threads=False)
            _reseed()
            (LoneHost if alone else SharedHost)(sock, self._setup).serve()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:  # noqa: BLE001  a forked child must not return into the fork server's frames
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        """Collect the exit status of hosts that have exited, and report them."""
        with suppress(BlockingIOError):
            self._wake.recv(4096)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                child = self._children.pop(ended[0], None)  # or an orphan
                if child is not None:
                    self._ended_groups[ended[0]] = time.monotonic() + KILL_SECONDS
                    signal_group(ended[0], signal.SIGTERM)  # which multiprocessing's trackers of resources survive
                    self._report(child, os.waitstatus_to_exitcode(ended[1]))

    def _kill_groups(self, now: float) -> None:
        """Kill what is left of groups whose time is over."""
        for group in [group for group, until in self._ended_groups.items() if until <= now]:
            del self._ended_groups[group]
            signal_group(group, signal.SIGKILL)

    def _report(self, child: _Child, status: int) -> None:
        text = os.pread(child.report.fileno(), 64_000, 0).decode(errors="replace")
        child.report.close()
        _send(self._control, Exited(child.host_id, status, text))

    def _shut_down(self) -> None:
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        while self._children and time.monotonic() < deadline:
            time.sleep(0.01)
            self._reap()
        for pid in self._children:
            signal_group(pid, signal.SIGKILL)
        self._kill_groups(math.inf)
        while (orphans := _child_pids()) and time.monotonic() < deadline + SHUTDOWN_SECONDS:
            for pid in orphans:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._reap()
            time.sleep(0.01)


def _adopt_orphans() -> None:
    """On Linux, have the descendants whose parents have exited as children."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _child_pids() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _on_sigchld(*_: object) -> None:
    """Empty: with a handler installed, SIGCHLD writes to the wake-up socket."""


def _reseed() -> None:
    """Python reseeds `random` in a forked child by itself; NumPy's global generator would repeat in every host."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
