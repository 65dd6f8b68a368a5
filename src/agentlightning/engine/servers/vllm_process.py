"""A vLLM server as a process of ours: started, watched until it listens, ended with us even if we are killed.

It listens on loopback, for its administrative paths ask for no token. What it prints goes to a log file; an error
quotes the end of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from agentlightning.engine.servers.base import Http
from agentlightning.errors import PolicyError, ServerError
from agentlightning.transport import Transport
from agentlightning.util import guard_process

POLL_SECONDS = 0.25
GRACE_SECONDS = 10.0
"""Between SIGTERM and SIGKILL."""
TAIL = 2000
"""Characters of the log that an error quotes."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started."""

    model: Path
    name: str
    """What it calls the model."""
    log: Path
    command: Sequence[str] = ("vllm",)
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    dtype: str = "auto"
    max_context: int | None = None
    seconds: float = 600.0
    """How long it may take until it listens."""

    def words(self, model: Path, port: int) -> list[str]:
        given = [*self.command, "serve", str(model), "--served-model-name", self.name, "--dtype", self.dtype]
        given += ["--host", "127.0.0.1", "--port", str(port), "--enable-scale-out"]
        given += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "21", "--generation-config", "vllm"]
        given += ["--max-model-len", str(self.max_context)] if self.max_context else []
        return [*given, *self.args]

    def environment(self) -> dict[str, str]:
        ours = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1"}
        return {**os.environ, **ours, **self.env}


class VllmChild:
    """One server process. Make it with `VllmChild.start`."""

    def __init__(self, launch: Launch, transport: Transport) -> None:
        self._launch = launch
        self._port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._http = Http(transport, self.url, None, seconds=5.0, connect_seconds=2.0)

    @classmethod
    async def start(cls, launch: Launch, transport: Transport) -> VllmChild:
        """Returns when it listens. Raises ServerError, with the end of its log."""
        child = cls(launch, transport)
        await child.restart(None)
        return child

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int | None:
        """Of the process that guards it."""
        return self._process.pid if self._process else None

    @property
    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    async def restart(self, directory: Path | None) -> None:
        """End it, start it again with the weights in `directory` (None: those it was made with)."""
        await self.close()
        self._launch.log.parent.mkdir(parents=True, exist_ok=True)
        with self._launch.log.open("ab") as log:
            self._process = self._spawn(directory or self._launch.model, log)
        try:
            await self._until_it_listens(self._process)
        except BaseException:
            await self.close()
            raise

    def _spawn(self, model: Path, log: IO[bytes]) -> subprocess.Popen[bytes]:
        words = self._launch.words(model, self._port)
        try:
            return subprocess.Popen(
                [sys.executable, "-I", guard_process.__file__, str(GRACE_SECONDS), *words],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._launch.environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise ServerError(f"{shlex.join(words)} cannot be started: {error}") from error

    async def _until_it_listens(self, process: subprocess.Popen[bytes]) -> None:
        end = asyncio.get_running_loop().time() + self._launch.seconds
        while asyncio.get_running_loop().time() < end:
            if process.poll() is not None:
                raise ServerError(
                    f"the vLLM server ended while it started (exit status {process.returncode}){self._tail()}"
                )
            with contextlib.suppress(PolicyError):
                return await self._http.get("/health", seconds=2.0)
            await asyncio.sleep(POLL_SECONDS)
        raise ServerError(f"the vLLM server did not listen within {self._launch.seconds:g} s{self._tail()}")

    def _tail(self) -> str:
        text = self._launch.log.read_bytes()[-TAIL:].decode("utf-8", errors="replace")
        return f"; its log {self._launch.log} ends:\n{text}"

    async def close(self) -> None:
        """End it and all it started. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        await asyncio.to_thread(process.wait)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
