"""What a pool knows of each of its servers: process, weights, adapters and health."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from agentlightning.engine.servers.base import Completion, ModelServer, ModelServerError, WeightReceiver
from agentlightning.errors import ConfigError, PolicyError
from agentlightning.weight_sync.base import LendWeights, WeightSender

MAX_TRANSFER_FAILURES = 1
"""A server whose transfers failed more often gets its weights from the disk for the rest of the run."""


class ServerProcess(Protocol):
    """The process of a server that we started."""

    @property
    def ended(self) -> bool: ...

    async def restart(self, directory: Path | None) -> None:
        """Start it again with the weights in `directory`; returns when it listens. Raises ServerError."""
        ...

    async def close(self) -> None: ...


class WeightSource(Protocol):
    """One version of the weights, as servers can get it."""

    @property
    def lend(self) -> LendWeights | None:
        """Access to the weights in memory, for servers that receive them without the disk; None: only on disk."""
        ...

    async def directory(self) -> Path:
        """The weights on disk, written now unless they are there. Raises PolicyError if they no longer exist."""
        ...


@dataclass(frozen=True, slots=True)
class DiskWeights:
    """A checkpoint directory."""

    path: Path
    lend: LendWeights | None = None

    async def directory(self) -> Path:
        return self.path


@dataclass(frozen=True, slots=True)
class LabeledWeights:
    """One version of the weights, with the label under which servers report it."""

    source: WeightSource
    version: int
    label: str


@dataclass(slots=True)
class WeightChannel:
    """How a server gets weights without the disk."""

    receiver: WeightReceiver
    sender: WeightSender
    failures: int = 0

    @property
    def usable(self) -> bool:
        return self.failures <= MAX_TRANSFER_FAILURES

    async def send(self, weights: LabeledWeights, lend: LendWeights, on_loaded: Callable[[], None]) -> None:
        """Raises ModelServerError or ConfigError; the server may then hold a mix of old and new weights."""
        try:
            if not self.sender.connected:
                await self.receiver.connect(self.sender)
            await self.receiver.receive_weights(self.sender, lend, weights.label, on_loaded)
        except (PolicyError, ConfigError) as error:
            self.failures += 1
            self.sender.abort()
            if isinstance(error, (ModelServerError, ConfigError)):
                raise
            raise ModelServerError(f"{self.receiver.url}: {error}", retryable=True) from error


@dataclass(slots=True, eq=False)
class Replica:
    """One of the servers of a pool."""

    server: ModelServer
    process: ServerProcess | None = None
    version: int = 0
    """Version of its weights."""
    label: str | None = None
    up: bool = True
    failure: str = ""
    """Why it was last marked unhealthy."""
    in_flight: set[asyncio.Future[Completion]] = field(default_factory=set[asyncio.Future[Completion]])
    """Its running requests."""
    recovery: asyncio.Task[None] | None = None
    failed_checks: int = 0
    """Health checks that failed in a row."""
    adapters: dict[str, int] = field(default_factory=dict[str, int])
    """Name -> version it has loaded."""
    channel: WeightChannel | None = None
    """How it gets weights without the disk; None: it does not."""
    transfer_interrupted: bool = False
    """Whether a transfer to it was interrupted since it last got complete weights."""
