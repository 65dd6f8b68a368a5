"""A vLLM server as a child process: started, awaited until it listens, and ended with us even if we are killed.

It listens on loopback, because its administrative endpoints need no token. Its output goes to a log file; errors quote
the end of it.
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

from agentlightning.engine.servers.clients.http import JsonClient
from agentlightning.errors import PolicyError, ServerError
from agentlightning.transport import Transport
from agentlightning.util import guard_process

POLL_SECONDS = 0.25
GRACE_SECONDS = 10.0
"""Between SIGTERM and SIGKILL."""
LOG_TAIL = 2000
"""Characters of the log that an error quotes."""


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How to start a server."""

    model: Path
    name: str
    """The model name it serves."""
    log: Path
    command: Sequence[str] = ("vllm",)
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    dtype: str = "auto"
    max_context: int | None = None
    seconds: float = 600.0
    """Time limit until it listens."""

    def command_line(self, model: Path, port: int) -> list[str]:
        words = [*self.command, "serve", str(model), "--served-model-name", self.name, "--dtype", self.dtype]
        words += ["--host", "127.0.0.1", "--port", str(port), "--enable-scale-out"]
        words += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "21", "--generation-config", "vllm"]
        words += ["--max-model-len", str(self.max_context)] if self.max_context else []
        return [*words, *self.args]

    def environment(self) -> dict[str, str]:
        required = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1"}
        return {**os.environ, **required, **self.env}


class VllmProcess:
    """One server process. Create it with `VllmProcess.start`."""

    def __init__(self, options: LaunchOptions, transport: Transport) -> None:
        self._options = options
        self._port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._http = JsonClient(transport, self.url, None, seconds=5.0, connect_seconds=2.0)

    @classmethod
    async def start(cls, options: LaunchOptions, transport: Transport) -> VllmProcess:
        """Returns when the server listens. Raises ServerError with the end of its log."""
        process = cls(options, transport)
        await process.restart(None)
        return process

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int | None:
        """Of the process that guards the server."""
        return self._process.pid if self._process else None

    @property
    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    async def restart(self, directory: Path | None) -> None:
        """End the server and start it with the weights in `directory` (None: its original model)."""
        await self.close()
        self._options.log.parent.mkdir(parents=True, exist_ok=True)
        with self._options.log.open("ab") as log:
            self._process = self._spawn(directory or self._options.model, log)
        try:
            await self._wait_until_listening(self._process)
        except BaseException:
            await self.close()
            raise

    def _spawn(self, model: Path, log: IO[bytes]) -> subprocess.Popen[bytes]:
        words = self._options.command_line(model, self._port)
        try:
            return subprocess.Popen(
                [sys.executable, "-I", guard_process.__file__, str(GRACE_SECONDS), *words],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._options.environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise ServerError(f"{shlex.join(words)} cannot be started: {error}") from error

    async def _wait_until_listening(self, process: subprocess.Popen[bytes]) -> None:
        end = asyncio.get_running_loop().time() + self._options.seconds
        while asyncio.get_running_loop().time() < end:
            if process.poll() is not None:
                raise ServerError(
                    f"the vLLM server ended while it started (exit status {process.returncode}){self._log_tail()}"
                )
            with contextlib.suppress(PolicyError):
                return await self._http.get("/health", seconds=2.0)
            await asyncio.sleep(POLL_SECONDS)
        raise ServerError(f"the vLLM server did not listen within {self._options.seconds:g} s{self._log_tail()}")

    def _log_tail(self) -> str:
        text = self._options.log.read_bytes()[-LOG_TAIL:].decode("utf-8", errors="replace")
        return f"; its log {self._options.log} ends:\n{text}"

    async def close(self) -> None:
        """End the server and everything it started. Idempotent."""
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
