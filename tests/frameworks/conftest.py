"""A gateway, and agents that run in environments of their own and know nothing but their environment variables."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentlightning import span as names
from agentlightning.attempt_variables import attempt_environment
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.config import GatewayConfig
from agentlightning.rollouts import AttemptedRollout
from agentlightning.server.app import Server
from agentlightning.span import Span
from agentlightning.store import InMemoryLightningStore
from agentlightning.store.base import LightningStoreBase
from agentlightning.testing import ScriptedEngine

ENVIRONMENTS = Path(__file__).resolve().parents[2] / ".peers" / "frameworks"
SECRET = "a-secret-nobody-prints"
PATIENCE_SECONDS = 120


@dataclass
class Ended:
    """What became of a command."""

    code: int | None
    stdout: str
    stderr: str


@dataclass
class Service:
    store: LightningStoreBase
    engine: ScriptedEngine
    gateway: Gateway
    server: Server
    attempted: AttemptedRollout

    @property
    def environment(self) -> dict[str, str]:
        return attempt_environment(
            self.server.url, SECRET, self.attempted.rollout_id, self.attempted.attempt.attempt_id, inherited={}
        )

    async def run(self, command: Sequence[str | Path], folder: Path, more: Mapping[str, str] | None = None) -> Ended:
        """Run a command in an empty home, with the variables of its attempt."""
        home = folder / "home"
        home.mkdir(exist_ok=True)
        path = f"{Path(command[0]).parent}:{os.environ['PATH']}"
        environment = {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8", **self.environment, **(more or {})}
        process = await asyncio.create_subprocess_exec(
            *map(str, command),
            env=environment,
            cwd=folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            stdout, stderr = await asyncio.wait_for(process.communicate(), PATIENCE_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return Ended(process.returncode, stdout.decode(), stderr.decode())

    async def calls(self) -> list[Span]:
        """The model calls recorded under the attempt."""
        spans = await self.store.query_spans(self.attempted.rollout_id, self.attempted.attempt.attempt_id)
        return [span for span in spans if names.OPERATION_NAME in span.attributes]


Start = Callable[[Any], Any]


@pytest.fixture
def programs() -> Callable[[str], Path]:
    """programs(name) is the folder of an environment's programs; without it the test is skipped."""

    def find(name: str) -> Path:
        home = ENVIRONMENTS / name
        folder = home / ("node_modules/.bin" if name == "commands" else "bin")
        if not (home / ".installed").exists() or not folder.exists():
            pytest.skip(f"{home} is not there; run: tests/frameworks/setup.sh {name}")
        return folder

    return find


@pytest.fixture
async def serve() -> AsyncIterator[Start]:
    """serve(script) starts a gateway whose engine, of any name, follows the script, and one attempt. `config` says
    what goes elsewhere."""
    async with contextlib.AsyncExitStack() as exits:

        async def start(script: Any, config: GatewayConfig | None = None) -> Service:
            store = InMemoryLightningStore()
            exits.push_async_callback(store.close)
            engine = ScriptedEngine(script, context_length=1_000_000, tokens_per_step=16)
            options = {"default_model": "policy", "accept_any_model": True, "config": config}
            gateway = Gateway(store, {"policy": engine}, secret=SECRET, **options)
            server = await exits.enter_async_context(Server(store, gateway, secret=SECRET))
            return Service(store, engine, gateway, server, await store.start_rollout({"question": "6*7"}))

        yield start
