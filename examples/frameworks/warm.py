"""Runs a Python agent in a process that has imported its framework already; uses nothing but the standard library.

    ENV/bin/python examples/frameworks/warm.py examples/frameworks/crewai/agent.py

Importing a framework takes seconds, which each run of a command pays. This program starts a server in the background.
Of the first run that succeeds the server learns which modules the agent imports, imports them, and from then on forks
itself for each run; runs that begin meanwhile wait for the first. A run has the environment, the directory, the
arguments and the streams of its command, and ends with it. The server ends after ten minutes without a run, or once its
socket is removed. Needs a system that forks: Linux, macOS.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IDLE_SECONDS = 600
LOOK_SECONDS = 2
"""How often the idle server looks for its socket."""
START_SECONDS = 60
OF_ONE_RUN = ("_BASE_URL", "_API_BASE", "_API_KEY", "_CUSTOM_HEADERS", "_ENDPOINT", "_HEADERS", "_ATTRIBUTES")
"""Endings of variables that say where one run sends its calls: the server does not import with them."""


@dataclass(frozen=True)
class Files:
    """What the server of a script and an interpreter keeps."""

    base: str

    @classmethod
    def of(cls, script: Path) -> Files:
        folder = Path(tempfile.gettempdir()) / f"warm-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise SystemExit(f"warm.py: {folder} belongs to another user")
        known = json.dumps([sys.executable, str(script), script.stat().st_mtime_ns])
        return cls(str(folder / hashlib.sha256(known.encode()).hexdigest()[:16]))

    @property
    def socket(self) -> str:
        return f"{self.base}.sock"

    @property
    def lock(self) -> str:
        return f"{self.base}.lock"

    @property
    def modules(self) -> Path:
        return Path(f"{self.base}.json")


# -- the command -------------------------------------------------------------------------------------------------------


def command(script: Path, arguments: list[str]) -> int:
    """Have the server run the agent; returns its exit code."""
    connection = connect(script)
    request = {"arguments": [str(script), *arguments], "environment": dict(os.environ), "directory": os.getcwd()}
    data = json.dumps(request).encode()
    socket.send_fds(connection, [len(data).to_bytes(8, "big")], [0, 1, 2])
    connection.sendall(data)
    answer = connection.recv(8)
    if not answer:
        print("warm.py: the server ended", file=sys.stderr)
        return 70
    code = int.from_bytes(answer, "big", signed=True)
    return code if code >= 0 else 128 - code


def connect(script: Path) -> socket.socket:
    files, until = Files.of(script), time.monotonic() + START_SECONDS
    connection, started = socket.socket(socket.AF_UNIX), False
    while True:
        try:
            connection.connect(files.socket)
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > until:
                raise SystemExit(f"warm.py: no server answers at {files.socket}") from None
        if not started:
            started, none = True, subprocess.DEVNULL
            server = [sys.executable, __file__, "--serve", str(script)]
            environment = {name: value for name, value in os.environ.items() if not of_one_run(name)}
            subprocess.Popen(server, env=environment, stdin=none, stdout=none, stderr=none, start_new_session=True)
        time.sleep(0.05)


def of_one_run(name: str) -> bool:
    return name.startswith("AGL_") or name.endswith(OF_ONE_RUN) or name == "TRACEPARENT"


# -- the server --------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One run of the agent, in the process that is to be it."""

    arguments: list[str]
    environment: dict[str, str]
    directory: str
    streams: list[int]
    notice: str


def serve(script: Path) -> Run | None:
    """Fork a process for each command. Returns in each of these its run, and None in the server once it was idle."""
    files = Files.of(script)
    lock = os.open(files.lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None  # another command has started one
    for path in (files.socket, files.modules):
        Path(path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(files.socket)
    listener.listen(128)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    warm, notice, first, used = False, "", True, time.monotonic()
    while time.monotonic() - used < IDLE_SECONDS and os.path.exists(files.socket):
        if not select.select([listener], [], [], LOOK_SECONDS)[0]:
            continue
        connection, _ = listener.accept()
        used = time.monotonic()
        if not warm and files.modules.exists():
            warm, notice = True, import_all(json.loads(files.modules.read_text()))
        if (child := os.fork()) == 0:
            listener.close()
            os.close(lock)
            return supervise(connection, notice)
        connection.close()
        if first:  # the others wait, and have what it imports
            first = False
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)
    Path(files.socket).unlink(missing_ok=True)
    return None


def import_all(names: list[str]) -> str:
    """Import these modules; returns what the agents should know of it."""
    for name in names:
        with contextlib.suppress(BaseException):  # the agent imports it again, and has the error
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the pages stay shared
    threads = ", ".join(each.name for each in threading.enumerate() if each is not threading.main_thread())
    return f"warm.py: importing started threads ({threads}), which this run does not have\n" if threads else ""


def supervise(connection: socket.socket, notice: str) -> Run:
    """Fork the process of a run, and end it where its command ends first. Returns in that process only."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, streams, _, _ = socket.recv_fds(connection, 8, 3)
    if len(head) < 8:
        os._exit(1)
    request = json.loads(receive(connection, int.from_bytes(head, "big")))
    ended, ends = os.pipe()
    agent = os.fork()
    if agent == 0:
        os.setsid()
        os.close(ended)
        connection.close()
        os.set_inheritable(ends, False)  # closes when this process does
        return Run(**request, streams=streams, notice=notice)
    os.close(ends)
    for stream in streams:
        os.close(stream)
    if connection in select.select([ended, connection], [], [])[0]:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(agent, signal.SIGKILL)
    _, status = os.waitpid(agent, 0)
    with contextlib.suppress(OSError):
        connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "big", signed=True))
    os._exit(0)


def receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (more := connection.recv(size - len(data))):
            os._exit(1)
        data += more
    return data


# -- the agent ---------------------------------------------------------------------------------------------------------


def run(files: Files, given: Run) -> None:
    """Be the agent."""
    for place, stream in enumerate(given.streams):
        os.dup2(stream, place)
        os.close(stream)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    os.environ.clear()
    os.environ.update(given.environment)
    os.chdir(given.directory)
    sys.argv[:] = given.arguments
    sys.path[0] = str(Path(given.arguments[0]).parent)
    sys.stderr.write(given.notice)
    runpy.run_path(given.arguments[0], run_name="__main__")
    if not files.modules.exists():
        remember(files)


def remember(files: Files) -> None:
    """Tell the server what the agent has imported, but for what lies beside it, which may be edited."""
    own = str(Path(sys.argv[0]).parent)
    found = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
    names = [name for name, file in found.items() if name != "__main__" and not file.startswith(own)]
    partly = files.modules.with_suffix(f".{os.getpid()}")
    partly.write_text(json.dumps(names))
    partly.replace(files.modules)


def main(words: list[str]) -> Any:
    if not words:
        raise SystemExit("usage: python warm.py AGENT.py [ARGUMENT...]")
    if words[0] != "--serve":
        return command(Path(words[0]).resolve(), words[1:])
    script = Path(words[1])
    if (given := serve(script)) is not None:
        run(Files.of(script), given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
