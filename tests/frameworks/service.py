"""A gateway with a scripted engine and one attempt, and commands that know nothing but its environment variables."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from agentlightning import span as names
from agentlightning.attempt_variables import attempt_environment, telemetry_opt_outs
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.config import GatewayConfig
from agentlightning.rollouts import AttemptedRollout
from agentlightning.server.app import Server
from agentlightning.span import Span
from agentlightning.store import InMemoryLightningStore
from agentlightning.store.base import LightningStoreBase
from agentlightning.testing import ScriptedEngine

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "frameworks"
ENVIRONMENTS = ROOT / ".peers" / "frameworks"
SECRET = "a-secret-nobody-prints"
PATIENCE_SECONDS = 120


def starting_models() -> ModuleType:
    """`examples/frameworks/start.py`."""
    if "frameworks_start" not in sys.modules:
        spec = importlib.util.spec_from_file_location("frameworks_start", EXAMPLES / "start.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules["frameworks_start"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["frameworks_start"]


class StreamWatcher(ScriptedEngine):
    """Remembers which calls were streamed."""

    streamed: tuple[bool, ...] = ()

    async def sample(self, prompt_token_ids: Any, params: Any, on_tokens: Any = None, **more: Any) -> Any:
        self.streamed = (*self.streamed, on_tokens is not None)
        return await super().sample(prompt_token_ids, params, on_tokens, **more)


@dataclass
class Ended:
    """What became of a command."""

    code: int | None
    stdout: str
    stderr: str


@dataclass
class Service:
    store: LightningStoreBase
    engine: StreamWatcher
    gateway: Gateway
    server: Server
    attempted: AttemptedRollout

    @property
    def environment(self) -> dict[str, str]:
        ids = self.attempted.rollout_id, self.attempted.attempt.attempt_id
        return telemetry_opt_outs({}) | attempt_environment(self.server.url, SECRET, *ids, inherited={})

    async def run(
        self, command: Sequence[str | Path], folder: Path, more: Mapping[str, str] | None = None, given: str = ""
    ) -> Ended:
        """Run a command in an empty home, with the variables of its attempt, and `given` as its input."""
        home = folder / "home"
        home.mkdir(exist_ok=True)
        path = f"{Path(command[0]).parent}:{os.environ['PATH']}"
        environment = {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8", **self.environment, **(more or {})}
        process = await asyncio.create_subprocess_exec(
            *map(str, command),
            env=environment,
            cwd=folder,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            stdout, stderr = await asyncio.wait_for(process.communicate(given.encode()), PATIENCE_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return Ended(process.returncode, stdout.decode(), stderr.decode())

    async def spans(self) -> list[Span]:
        """Everything recorded under the attempt."""
        return await self.store.query_spans(self.attempted.rollout_id, self.attempted.attempt.attempt_id)

    async def calls(self) -> list[Span]:
        """The model calls recorded under the attempt."""
        return [span for span in await self.spans() if names.OPERATION_NAME in span.attributes]


@contextlib.asynccontextmanager
async def serving(script: Any, config: GatewayConfig | None = None) -> AsyncIterator[Service]:
    """A gateway whose engine, of any name, follows the script, and one attempt. `config` says what goes elsewhere."""
    store = InMemoryLightningStore()
    engine = StreamWatcher(script, context_length=1_000_000, tokens_per_step=16)
    options: dict[str, Any] = {"default_model": "policy", "accept_any_model": True, "config": config}
    gateway = Gateway(store, {"policy": engine}, secret=SECRET, **options)
    async with Server(store, gateway, secret=SECRET) as server:
        yield Service(store, engine, gateway, server, await store.start_rollout({"question": "6*7"}))
    await store.close()
