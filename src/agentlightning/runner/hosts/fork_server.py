"""The zygote: a process that imports the agent once and forks agent hosts on demand.

It reads a `Load` message from stdin, imports, then answers the runner over the socket it was given. It stays single
threaded, so that a fork is safe and takes milliseconds, and it imports nothing heavy that the agent does not import.
When the runner goes away its hosts get a moment to end by themselves, then they are killed.
"""

from __future__ import annotations

import array
import faulthandler
import gc
import logging
import os
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass
from io import TextIOWrapper
from types import FrameType
from typing import IO, Any, NoReturn, cast

from agentlightning.errors import AgentError
from agentlightning.runner import attempt_environ
from agentlightning.runner.agents.agent import load_agent, load_object
from agentlightning.runner.agents.reward import RewardFunction
from agentlightning.runner.hosts import context_propagation
from agentlightning.runner.hosts.agent_host import Setup, serve
from agentlightning.runner.hosts.messages import Exited, Fork, Frames, Load, Loaded, LoadFailed, ToZygote, encode
from agentlightning.tracing import client_headers
from agentlightning.tracing.tracer import install_globally

logger = logging.getLogger(__name__)

PARTING_SECONDS = 1.0
"""How long hosts have to end by themselves once the runner is gone."""


@dataclass(frozen=True, slots=True)
class _Child:
    """A host, seen from here."""

    host_id: int
    report: IO[bytes]
    """Where `faulthandler` writes when the host crashes."""


def main() -> None:
    """Serve one runner, to its end."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for stream in (sys.stdout, sys.stderr):
        cast(TextIOWrapper, stream).reconfigure(line_buffering=True)  # lines of many agents meet in one log
    (load,) = Frames(Load).feed(sys.stdin.buffer.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path[:] = load.sys_path
    client_headers.install()
    context_propagation.install()
    try:
        setup = prepare(load)
    except AgentError as error:
        _say(control, LoadFailed(str(error)))
        return
    attempt_environ.install()
    install_globally()
    if not _say(control, Loaded()):
        return
    gc.collect()
    gc.freeze()  # what is loaded stays shared between the hosts: the collector does not touch it
    Zygote(control, setup).serve()


def _say(control: socket.socket, message: Loaded | LoadFailed | Exited) -> bool:
    """False where nobody is left to be told."""
    try:
        control.sendall(encode(message))
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def prepare(load: Load) -> Setup:
    """Import what is to run. Raises AgentError."""
    with attempt_environ.borrowed(load.variables):
        agent = load_agent(load.agent, grace=load.grace)
    reward = None if load.reward is None else RewardFunction.of(load_object(load.reward, "reward"))
    if threading.active_count() > 1:
        names = ", ".join(t.name for t in threading.enumerate() if t is not threading.main_thread())
        logger.warning("importing %s started threads (%s), which its processes will not have", load.agent, names)
    return Setup(agent, reward, load.slots, load.fields, load.hidden)


class Zygote:
    """Forks, kills and buries hosts."""

    def __init__(self, control: socket.socket, setup: Setup) -> None:
        self._control = control
        self._setup = setup
        self._children: dict[int, _Child] = {}
        self._fds: deque[int] = deque()
        self._frames: Frames[ToZygote] = Frames(ToZygote)
        self._wake, self._waker = socket.socketpair()
        for end in (self._wake, self._waker):
            end.setblocking(False)

    def serve(self) -> None:
        signal.signal(signal.SIGCHLD, _noticed)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ, self._obey)
            selector.register(self._wake, selectors.EVENT_READ, self._bury)
            going = True
            while going:
                for key, _ in selector.select():
                    going = key.data() and going
        self._part()

    def _obey(self) -> bool:
        """Do what the runner asks for; False when it is gone."""
        try:
            data, ancillary, *_ = self._control.recvmsg(65536, socket.CMSG_SPACE(16 * 4))
        except ConnectionResetError:
            return False
        for _, _, payload in ancillary:
            fds = array.array("i")
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
            self._fds.extend(fds)
        for message in self._frames.feed(data):
            self._do(message)
        return bool(data)

    def _do(self, message: ToZygote) -> None:
        if isinstance(message, Fork):
            self._fork(message.host_id, self._fds.popleft())
            return
        for pid, child in self._children.items():
            if child.host_id == message.host_id:
                os.kill(pid, signal.SIGKILL)  # not buried yet, so the pid is still its own

    def _fork(self, host_id: int, fd: int) -> None:
        report = tempfile.TemporaryFile()  # noqa: SIM115  closed when the host is buried
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._become_host(socket.socket(fileno=fd), report)
        os.close(fd)
        self._children[pid] = _Child(host_id, report)

    def _become_host(self, sock: socket.socket, report: IO[bytes]) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (self._control, self._wake, self._waker):
                end.close()
            faulthandler.enable(report, all_threads=False)
            _reseed()
            serve(sock, self._setup)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:  # noqa: BLE001  a forked child must not return into the zygote's frames
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _bury(self) -> bool:
        """Report the hosts that have ended."""
        try:
            while self._wake.recv(4096):
                pass
        except BlockingIOError:
            pass
        for pid in list(self._children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self._report(self._children.pop(pid), os.waitstatus_to_exitcode(status))
        return True

    def _report(self, child: _Child, status: int) -> None:
        text = os.pread(child.report.fileno(), 64_000, 0).decode(errors="replace")
        child.report.close()
        _say(self._control, Exited(child.host_id, status, text))

    def _part(self) -> None:
        deadline = time.monotonic() + PARTING_SECONDS
        while self._children and time.monotonic() < deadline:
            time.sleep(0.01)
            self._bury()
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)


def _noticed(number: int, frame: FrameType | None) -> None:
    """The signal itself says nothing; that there is a handler makes it write to the wake-up socket."""


def _reseed() -> None:
    """Python reseeds `random` in a forked child by itself; NumPy's global generator would repeat in every host."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
