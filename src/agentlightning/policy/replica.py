"""What `policy.replicas` knows of each of its servers, and what it wants them to have."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from agentlightning.policy.backend import Backend, End


class Child(Protocol):
    """A server's process, where it is ours."""

    @property
    def ended(self) -> bool: ...

    async def restart(self, directory: Path | None) -> None:
        """Start it again, with the weights in `directory`; returns when it listens. Raises ServerError."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Weights:
    """What all servers are to have."""

    directory: Path
    version: int
    label: str


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
