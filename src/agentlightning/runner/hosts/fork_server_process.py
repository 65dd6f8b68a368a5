"""The runner's handle on the fork server: starts the process, sends it requests and receives its messages."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from msgspec.structs import replace

from agentlightning.attempt_variables import agent_process_environment
from agentlightning.errors import AgentError
from agentlightning.runner.hosts.agent_log import AgentLog
from agentlightning.runner.hosts.messages import (
    Fork,
    FrameDecoder,
    FromForkServer,
    Kill,
    Load,
    MessageError,
    encode,
)

CLOSE_SECONDS = 5.0
HOME = str(Path(__file__).resolve().parents[2])
"""Directory of this package; a relative entry of the Python path would not find it from another directory."""
BOOT = "import sys; sys.path.insert(0, sys.argv[2]); from agentlightning.runner.hosts.fork_server import main; main()"


class ForkServerProcess:
    """`spawn` starts the process, `attach` starts receiving its messages, `close` ends it. `on_lost` is called when it
    has disconnected."""

    def __init__(
        self,
        load: Load,
        cwd: str | Path | None,
        log: str | Path | None,
        on_message: Callable[[FromForkServer], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._load = load
        self._cwd = Path.cwd() if cwd is None else Path(cwd)
        self.log = None if log is None else AgentLog(log)
        self._frames: FrameDecoder[FromForkServer] = FrameDecoder(FromForkServer)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._on_message, self._on_lost = on_message, on_lost
        self._attached = False
        self._trimming: asyncio.Task[None] | None = None

    @property
    def spawned(self) -> bool:
        return self._process is not None

    def spawn(self, variables: Mapping[str, str] | None = None) -> None:
        """Start the process and send it what to import; `variables` override this process's environment. Needs no event
        loop. Raises AgentError."""
        if not self._cwd.is_dir():
            raise AgentError(f"the agent's directory cwd={str(self._cwd)!r} does not exist")
        self._control, theirs = socket.socketpair()
        command = [sys.executable, "-c", BOOT, str(theirs.fileno()), HOME]
        with theirs, _output(self.log) as output:
            # A new session, so that Ctrl-C reaches only the runner, which decides what happens to the attempts.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._cwd,
                env=agent_process_environment(os.environ),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._send(replace(self._load, sys_path=_python_path(self._cwd), variables=dict(variables or {})))

    def attach(self) -> None:
        """Receive messages in the running event loop."""
        self._attached = True
        asyncio.get_running_loop().add_reader(self._socket, self._receive)
        if self.log is not None:
            self._trimming = asyncio.create_task(self.log.trim_periodically())

    @property
    def _socket(self) -> socket.socket:
        if self._control is None:
            raise AgentError("the agent's processes are not running; call start() first")
        return self._control

    def _receive(self) -> None:
        try:
            data = self._socket.recv(65536, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        try:
            for message in self._frames.feed(data):
                self._on_message(message)
        except MessageError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._on_lost()

    def fork(self, host_id: int, alone: bool) -> socket.socket:
        """Request a host and return our end of its socket. The host takes jobs once it has sent `Ready`."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._send(Fork(host_id, alone), theirs)
        ours.setblocking(False)
        return ours

    def kill(self, host_id: int) -> None:
        """Kill a host with SIGKILL."""
        self._send(Kill(host_id))

    def _send(self, message: Load | Fork | Kill, *passed: socket.socket) -> None:
        data = encode(message)
        with suppress(BrokenPipeError, ConnectionResetError):  # `on_lost` follows
            sent = socket.send_fds(self._socket, [data], [each.fileno() for each in passed]) if passed else 0
            self._socket.sendall(data[sent:])

    @property
    def output(self) -> str:
        """Where its output can be read, for error messages."""
        return "on stderr" if self.log is None else f"in {self.log.path}"

    def returncode(self) -> int | None:
        """Its exit code, after it has disconnected; None if it still runs after a second."""
        if self._process is None:
            return None
        try:
            return self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return None

    async def close(self) -> None:
        """End the process and all of its hosts. Idempotent."""
        if self._control is None or self._process is None:
            return
        if self._attached:
            asyncio.get_running_loop().remove_reader(self._control)
        if self._trimming is not None:
            self._trimming.cancel()
        self._control.close()
        self._control = None
        await asyncio.to_thread(_wait_or_kill, self._process)


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(CLOSE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _output(log: AgentLog | None) -> IO[Any]:
    """The file agents print to: the log, or our stderr. Never our stdout, which carries the results of a command."""
    return open(os.dup(2), "wb") if log is None else open(log.path, "ab")


def _python_path(cwd: Path) -> tuple[str, ...]:
    path = [os.path.abspath(entry) for entry in sys.path]
    here = str(cwd.resolve())
    return tuple(path if here in path else [here, *path])
