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
import subprocess
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, Final

from agentlightning.errors import AgentError, ConfigError, DatasetError
from agentlightning.integrations.base import Address
from agentlightning.tracing.emit import emit_annotation, emit_reward

PYTHON: Final = "AGL_VERIFIERS_PYTHON"
"""Environment variable with the path of the Python that has verifiers."""
WORKER: Final = Path(__file__).with_name("verifiers_worker.py")
LINE_LIMIT: Final = 1 << 26
"""Maximum length of a reply in bytes."""
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
    tasks = _request_once(python, {"method": "tasks", "env": env, "limit": limit, "seed": address.seed})
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
    worker = await Worker.of(python)
    request = {"method": "rollout", "env": source["env"], "index": source["index"]}
    result = await worker.request({**request, "base_url": base_url, "api_key": api_key, "model": model})
    if result.get("rewards"):
        emit_annotation({"verifiers": {"rewards": result["rewards"]}})
    emit_reward(result["reward"])
    return result.get("output")


class Worker:
    """A process of verifiers, which runs any number of requests at the same time."""

    _running: Final[dict[tuple[int, str], Worker]] = {}
    """By event loop and Python."""
    _starting: Final[dict[tuple[int, str], asyncio.Lock]] = {}

    def __init__(self, process: Process) -> None:
        self._process = process
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._ids = count(1)
        self._errors: deque[str] = deque(maxlen=20)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._read_errors())]

    @classmethod
    async def of(cls, python: str) -> Worker:
        """The process of a Python; started if there is none, or if it has died."""
        key = id(asyncio.get_running_loop()), python
        async with cls._starting.setdefault(key, asyncio.Lock()):
            if key not in cls._running or cls._running[key]._process.returncode is not None:
                pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
                started = await asyncio.create_subprocess_exec(python, str(WORKER), limit=LINE_LIMIT, **pipes)
                cls._running[key] = cls(started)
        return cls._running[key]

    async def request(self, request: Mapping[str, Any]) -> Any:
        """The result of a request. Raises AgentError for an error, or if the process dies."""
        number = next(self._ids)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send({"id": number, **request})
            return await future
        except asyncio.CancelledError:
            await asyncio.shield(self._send({"id": number, "method": "cancel"}))
            raise
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        """End the process, and what it runs."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        await asyncio.gather(*self._tasks)
        await self._process.wait()

    async def _send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise AgentError(self._death()) from error

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            reply = json.loads(line)
            future = self._waiting.get(reply["id"])
            if future is not None and not future.done():
                if "error" in reply:
                    future.set_exception(AgentError(f"verifiers: {reply['error']}"))
                else:
                    future.set_result(reply["result"])
        await self._process.wait()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(AgentError(self._death()))

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            self._errors.append(line.decode(errors="replace").rstrip())

    def _death(self) -> str:
        return f"the process of verifiers has ended ({self._process.returncode}):\n" + "\n".join(self._errors)


def _request_once(python: str, request: Mapping[str, Any]) -> Any:
    """The result of one request, by a process that then ends. Raises DatasetError."""
    text = json.dumps({"id": 1, **request}) + "\n"
    done = subprocess.run([python, str(WORKER), "finish"], input=text, capture_output=True, text=True, check=False)
    try:
        reply = json.loads(done.stdout)
    except ValueError:
        raise DatasetError(f"{python} could not run verifiers ({done.returncode}):\n{done.stderr[-2000:]}") from None
    if "error" in reply:
        raise DatasetError(f"verifiers:{request['env']['name']} cannot be loaded: {reply['error']}")
    return reply["result"]
