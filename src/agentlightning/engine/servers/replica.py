"""What a pool knows of each of its servers: process, weights, adapters and health."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
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


# -- weights ---------------------------------------------------------------------------------------------------------

# The weights that all replicas of a pool are to have, and the labels under which servers report them.


class PoolWeights:
    """The current version of a pool's weights."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.target: LabeledWeights | None = None
        """What every replica is to have; None: what it was started with."""
        self.version = 0
        """The version that all healthy replicas have."""
        self.labels = {replica.label: 0 for replica in replicas if replica.label is not None}
        """Label -> version, of the weights that may sample."""
        self.lock = asyncio.Lock()
        """Held while weights or adapters change."""
        self._label_prefix = secrets.token_hex(4)
        self._updates = 0

    def set_target(self, source: WeightSource, version: int) -> None:
        # A new label for each update: an earlier version that is restored must not share one with what followed it.
        self._updates += 1
        self.target = LabeledWeights(source, version, f"{self._label_prefix}-{self._updates}")
        # From now on, weights that we did not set are those of a restarted server.
        self.labels = {label: known for label, known in self.labels.items() if label.startswith(self._label_prefix)}
        self.labels[self.target.label] = version

    async def load(self, replica: Replica, channel: WeightChannel | None = None) -> None:
        """Give `replica` the target weights, through `channel` or from the disk. Raises PolicyError or ConfigError."""
        if (target := self.target) is None:
            return

        def on_loaded() -> None:
            replica.version = target.version

        if channel is not None and target.source.lend is not None:
            replica.transfer_interrupted = True
            await channel.send(target, target.source.lend, on_loaded)
        else:
            await replica.server.load_weights(await target.source.directory(), target.label, on_loaded)
        replica.transfer_interrupted = False
        replica.label = await replica.server.weight_label()
        if replica.label not in (None, target.label):
            message = f"{replica.server.url} has weights {replica.label}, not {target.label}"
            raise ModelServerError(message, retryable=True)

    async def catch_up(self, replica: Replica) -> None:
        """Give a recovered `replica` the target weights unless it has them."""
        label = await replica.server.weight_label()
        if self.target is None:
            replica.version, replica.label = 0, label
            if label is not None:
                self.labels.setdefault(label, 0)
        elif replica.version != self.target.version or label not in (None, self.target.label):
            await self.load(replica)


MAX_LABELS = 64
"""Labels that a pool remembers of weights that a trainer elsewhere has replaced: answers may still be under way."""


class _WeightsElsewhere:
    """The source of weights that only another process has."""

    lend = None

    async def directory(self) -> Path:
        raise PolicyError("these weights are given to the servers by their trainer, and are not here")


class FollowedWeights(PoolWeights):
    """Weights that a trainer in another process gives to the servers. It announces the label of new ones before any
    server has them; a replica has them once its server reports that label."""

    def announce(self, label: str, version: int) -> None:
        """Accept tokens that are sampled by weights of this label, as those of `version`."""
        self.target = LabeledWeights(_WeightsElsewhere(), version, label)
        self.labels[label] = version
        for old in list(self.labels)[:-MAX_LABELS]:
            del self.labels[old]

    async def load(self, replica: Replica, channel: WeightChannel | None = None) -> None:
        if (target := self.target) is None:
            return
        replica.label = await replica.server.weight_label()
        if replica.label != target.label:
            message = f"{replica.server.url} has weights {replica.label}, and its trainer has not given it version"
            raise ModelServerError(f"{message} {target.version} ({target.label}) yet", retryable=True)
        replica.version = target.version
