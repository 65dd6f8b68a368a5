"""What `policy.replicas` knows of each of its servers, and what it wants them to have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from agentlightning.engine.servers.base import Backend, BackendError, End, Receiver
from agentlightning.errors import ConfigError, PolicyError
from agentlightning.weight_sync.base import Courier, Lend

FORGIVEN = 1
"""A server whose transfers failed more often gets its weights from the disk for the rest of the run."""


class Child(Protocol):
    """A server's process, where it is ours."""

    @property
    def ended(self) -> bool: ...

    async def restart(self, directory: Path | None) -> None:
        """Start it again, with the weights in `directory`; returns when it listens. Raises ServerError."""
        ...

    async def close(self) -> None: ...


class Source(Protocol):
    """Where servers get one version of the weights from."""

    @property
    def lend(self) -> Lend | None:
        """Shows them where they lie, for servers that take them without the disk; None: they are on disk alone."""
        ...

    async def directory(self) -> Path:
        """Where they are on disk; written now, unless they are there. Raises PolicyError where they are gone."""
        ...


@dataclass(frozen=True, slots=True)
class OnDisk:
    """Weights that were written."""

    path: Path
    lend: Lend | None = None

    async def directory(self) -> Path:
        return self.path


@dataclass(frozen=True, slots=True)
class Weights:
    """What all servers are to have."""

    source: Source
    version: int
    label: str


@dataclass(slots=True)
class Transfer:
    """How a server takes weights without the disk."""

    receiver: Receiver
    courier: Courier
    failures: int = 0

    @property
    def usable(self) -> bool:
        return self.failures <= FORGIVEN

    async def give(self, weights: Weights, lend: Lend, ready: Callable[[], None]) -> None:
        """Raises BackendError or ConfigError; the server may then hold half of each."""
        try:
            if not self.courier.joined:
                await self.receiver.join(self.courier)
            await self.receiver.receive(self.courier, lend, weights.label, ready)
        except (PolicyError, ConfigError) as error:
            self.failures += 1
            self.courier.abort()
            if isinstance(error, (BackendError, ConfigError)):
                raise
            raise BackendError(f"{self.receiver.url}: {error}", again=True) from error


@dataclass(slots=True, eq=False)
class Replica:
    """One of the servers."""

    backend: Backend
    child: Child | None = None
    version: int = 0
    """Of the weights it has."""
    label: str | None = None
    up: bool = True
    why: str = ""
    """What was wrong with it when it was last taken out."""
    draws: set[asyncio.Future[End]] = field(default_factory=set[asyncio.Future[End]])
    recovery: asyncio.Task[None] | None = None
    missed: int = 0
    """Looks in a row that found it ailing."""
    adapters: dict[str, int] = field(default_factory=dict[str, int])
    """Name -> the version it has of it."""
    transfer: Transfer | None = None
    """How it takes weights without the disk; None: it does not."""
    torn: bool = False
    """Whether a transfer to it broke off since it was last given weights."""


@dataclass(frozen=True, slots=True)
class Adapter:
    directory: Path
    version: int


@dataclass(frozen=True, slots=True)
class Patience:
    """How much is put up with."""

    retries: int = 2
    """How often a call is drawn again."""
    wait_seconds: float = 120.0
    """How long a call waits for a server where none is up."""
    health_seconds: float = 5.0
    """Between two looks at each server."""
