"""Tasksets of the package `verifiers`, run in a process of their own, as tasks and as an agent.

    agl train --env "verifiers:NAME?python=/path/to/venv/bin/python" --model path/to/model

The packages that verifiers requires conflict with those of this one. So it lives in a Python environment that you make:
its Python is named in the address or in AGL_VERIFIERS_PYTHON, and nothing is ever installed. For each process of agents
one process of it is started (`verifiers_worker.py`): it gets tasks and the base URL of attempts, and returns rewards.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from socket import send_fds, socket, socketpair
from subprocess import DEVNULL, PIPE, STDOUT, Popen, TimeoutExpired
from threading import Lock, Thread
from typing import Any, Final

from agentlightning.errors import AgentError, ConfigError, DatasetError
from agentlightning.integrations.base import Address
from agentlightning.tracing.emit import emit_annotation, emit_reward
from agentlightning.util.event_loop import run_sync

PYTHON: Final = "AGL_VERIFIERS_PYTHON"
"""Environment variable with the path of the Python that has verifiers."""
WORKER: Final = Path(__file__).with_name("verifiers_worker.py")
DEATH_SECONDS: Final = 5.0
"""How long after its connections a process may end."""
CANDIDATES: Final = 10
"""Tasks that are looked at for each one wanted, where `part` leaves some out."""


def load(address: Address) -> list[Any]:
    """Up to `size` tasks of a taskset. Raises ConfigError without a Python for it, DatasetError where it has no tasks.

    Options: `python`; `harness` (null, a chat with the tools of the task; another one of verifiers, or `default` for
    the taskset's own); `runtime` (subprocess, docker ...); others are settings of the taskset."""
    options = dict(address.options)
    python = find_python(options.pop("python", None))
    env = {
        "name": address.name,
        "harness": options.pop("harness", "null") or "null",
        "runtime": options.pop("runtime", "subprocess"),
        "options": options,
    }
    limit = address.size * (CANDIDATES if address.part else 1)
    request = {"method": "tasks", "env": env, "limit": limit, "seed": address.seed}
    worker = Worker(python)
    try:
        tasks = run_sync(worker.request(request))
    except AgentError as error:
        raise DatasetError(f"verifiers:{address.name} cannot be loaded by {python}: {error}") from error
    except BaseException:  # an interrupt ends the load too
        worker.kill()
        raise
    finally:
        worker.close()
    kept = [task for task in tasks if address.keeps(str(task["index"]))][: address.size]
    if not kept:
        raise DatasetError(f"verifiers:{address.name} has no task{f' in part={address.part}' if address.part else ''}")
    return [
        {"prompt": task["prompt"], "verifiers": {"env": env, "index": task["index"], "python": python}} for task in kept
    ]


def find_python(given: str | None) -> str:
    """The Python that has verifiers. Raises ConfigError if none is named, or none is there."""
    named = given or os.environ.get(PYTHON)
    found = shutil.which(named) if named else None
    if found is None:
        problem = f"there is no Python at {named!r}" if named else "no Python with verifiers is named"
        raise ConfigError(
            f"{problem}; make one: python -m venv DIR && DIR/bin/pip install verifiers. Then name it:"
            f" verifiers:NAME?python=DIR/bin/python, or {PYTHON}=DIR/bin/python"
        )
    return os.path.abspath(found)


async def play(task: Mapping[str, Any], base_url: str, api_key: str, model: str) -> str | None:
    """An agent that has verifiers run a task of `verifiers:NAME`, with model calls that go to this attempt."""
    source = task["verifiers"]
    python = source["python"] if shutil.which(source["python"]) else find_python(None)
    request = {"method": "rollout", "env": source["env"], "index": source["index"]}
    result = await Worker.of(python).request({**request, "base_url": base_url, "api_key": api_key, "model": model})
    if result.get("rewards"):
        emit_annotation({"verifiers": {"rewards": result["rewards"]}})
    emit_reward(result["reward"])
    return result.get("output")


class Worker:
    """A process of verifiers, which runs any number of requests at the same time: each has a connection of its own, and
    is cancelled when that is closed."""

    running: Final[dict[str, Worker]] = {}
    """By Python."""
    _starting: Final = Lock()

    def __init__(self, python: str) -> None:
        """Start a process of this Python."""
        self._control, theirs = socketpair()
        self._control.setblocking(False)
        with theirs:
            command = [python, str(WORKER), str(theirs.fileno())]
            self._process = Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, pass_fds=[theirs.fileno()])
        self._printed: deque[bytes] = deque(maxlen=20)
        self._reading = Thread(target=self._read, daemon=True)
        self._reading.start()

    @classmethod
    def of(cls, python: str) -> Worker:
        """The process of a Python; started if there is none, or if it has died."""
        with cls._starting:
            found = cls.running.get(python)
            if found is not None and found._process.poll() is not None:
                found.close()
                found = None
            cls.running[python] = found or cls(python)
            return cls.running[python]

    async def request(self, request: Mapping[str, Any]) -> Any:
        """The result of a request. Raises AgentError for an error, or if the process dies."""
        reply, (connection, theirs) = b"", socketpair()
        with theirs, suppress(OSError):
            reader, writer = await asyncio.open_unix_connection(sock=connection)
            try:
                await self._connect(theirs)
                theirs.close()
                writer.write(json.dumps(request).encode() + b"\n")
                reply = await reader.read()
            finally:
                writer.close()
        if not reply:  # it has died
            await asyncio.to_thread(self._end, DEATH_SECONDS)
            printed = b"".join(self._printed).decode(errors="replace")
            raise AgentError(f"the process of verifiers has ended ({self._process.returncode}):\n{printed}")
        found = json.loads(reply)
        if "error" in found:
            raise AgentError(f"verifiers: {found['error']}")
        return found["result"]

    async def _connect(self, theirs: socket) -> None:
        while True:
            try:
                send_fds(self._control, [b"."], [theirs.fileno()])
                return
            except BlockingIOError:  # many are on their way
                await asyncio.sleep(0.1)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            self._printed.extend(lines)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """End the process, and what it runs."""
        self._control.close()
        self._end(None)

    def _end(self, seconds: float | None) -> None:
        with suppress(TimeoutExpired):
            self._process.wait(seconds)
        self._reading.join(1)  # a program that it started may still write there
