"""The servers of a pool: which are up, and what weights and adapters each is to have.

A server that fails samples nothing until it is healthy and has what it has missed. When weights change is decided
elsewhere: by `policy.served`, or by a trainer in another process, which says what it has given the servers.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentlightning.engine.servers.clients.http import HttpModelServer, ModelServerError
from agentlightning.engine.servers.clients.vllm import VllmProcess, VllmServer
from agentlightning.engine.servers.config import RetryPolicy
from agentlightning.errors import AgentLightningError, ConfigError, PolicyError
from agentlightning.transport import Transport
from agentlightning.transport.servers import Server, ServerSet
from agentlightning.weight_sync.transfer import LendWeights, WeightSender

log = logging.getLogger(__name__)

MAX_TRANSFER_FAILURES = 1
"""A server whose transfers failed more often gets its weights from the disk for the rest of the run."""
STALL_SECONDS = 30.0
"""Requests of a server that shows no sign of life for this long continue elsewhere."""
MAX_LABELS = 64
"""Labels that are remembered of weights that a trainer elsewhere has replaced: answers may still be under way."""


class WeightSource:
    """One version of the weights, as servers can get it."""

    def __init__(self, place: Path | Callable[[], Awaitable[Path]], lend: LendWeights | None = None) -> None:
        """`place`: where they are on disk, or what writes them there. `lend`: access to them in memory, for servers
        that receive them without the disk."""
        self.place, self.lend = place, lend
        self._writing = asyncio.Lock()

    async def directory(self) -> Path:
        """The weights on disk, written now unless they are there. Raises PolicyError if they no longer exist."""
        async with self._writing:
            if not isinstance(self.place, Path):
                self.place = await self.place()
            return self.place


@dataclass(frozen=True, slots=True)
class LabeledWeights:
    """One version of the weights, with the label under which servers report it."""

    source: WeightSource | None
    """None: another process gives them to the servers."""
    version: int
    label: str


@dataclass(slots=True, eq=False)
class Adapter:
    """One version of a LoRA adapter."""

    name: str
    served_name: str
    """What the servers call this version."""
    version: int
    directory: Path | None = None
    """None: another process loads it on the servers."""
    calls: int = 0
    """Number of calls that use it."""


@dataclass(slots=True)
class WeightChannel:
    """How a server gets weights without the disk."""

    receiver: VllmServer
    sender: WeightSender
    failures: int = 0

    @property
    def usable(self) -> bool:
        return self.failures <= MAX_TRANSFER_FAILURES

    async def send(self, weights: LabeledWeights, lend: LendWeights, on_loaded: Callable[[], None]) -> None:
        """Raises PolicyError or ConfigError; the server may then hold a mix of old and new weights."""
        try:
            if not self.sender.connected:
                await self.receiver.connect(self.sender)
            await self.receiver.receive_weights(self.sender, lend, weights.label, on_loaded)
        except BaseException as error:
            self.failures += isinstance(error, PolicyError | ConfigError)
            self.sender.abort()  # Nobody waits for it any more.
            raise


class Replica(Server):
    """One of the servers of a pool."""

    pauses = 0.1, 5.0

    def __init__(self, server: HttpModelServer, process: VllmProcess | None = None) -> None:
        super().__init__(server.url)
        self.server, self.process = server, process
        self.version = 0
        """Version of its weights."""
        self.label: str | None = None
        self.failure = ""
        """Why it is not up, or its last check failed."""
        self.healthy_at = time.monotonic()
        self.adapters: dict[str, Adapter] = {}
        """Those that we have loaded, by served name."""
        self.channel: WeightChannel | None = None
        """How it gets weights without the disk; None: it does not."""
        self.transfer_interrupted = False
        """Whether a transfer to it was interrupted since it last got complete weights."""

    def cancel_requests(self) -> None:
        """Let its running requests continue elsewhere."""
        for task in list(self.requests):
            task.cancel()

    async def load(self, adapter: Adapter) -> None:
        """Raises ModelServerError, or ConfigError if it takes no such adapter."""
        assert adapter.directory is not None
        await self.server.load_adapter(adapter.served_name, adapter.directory)
        self.adapters[adapter.served_name] = adapter


class ReplicaSet(ServerSet[Replica]):
    """Servers that are to have the same weights and adapters. Create it in the event loop that uses it. `transport` is
    closed with it."""

    def __init__(self, replicas: Sequence[Replica], transport: Transport, policy: RetryPolicy) -> None:
        super().__init__(replicas, policy.health_seconds, watches_all=True)
        self.lock = asyncio.Lock()
        """Held while weights or adapters change."""
        self.weights: LabeledWeights | None = None
        """What every server is to have; None: what it was started with."""
        self.weight_version = 0
        """The version that all healthy servers have."""
        self.labels = {replica.label: 0 for replica in replicas if replica.label is not None}
        """Label -> version, of the weights that may sample."""
        self.served: dict[str, Adapter] = {}
        """The adapters that every server is to have, by served name: the newest version of each, and older ones that
        calls may still use."""
        self._transport = transport
        self._policy = policy
        self._label_prefix = secrets.token_hex(4)
        self._updates = 0
        self._closed = False
        self._recovered = asyncio.Event()
        for replica in replicas:
            self.watch(replica)

    # -- weights ---------------------------------------------------------------------------------------------------

    def set_target(self, source: WeightSource, version: int) -> None:
        """Let every server have these weights from now on."""
        # A new label for each update: an earlier version that is restored must not share one with what followed it.
        self._updates += 1
        self.weights = LabeledWeights(source, version, f"{self._label_prefix}-{self._updates}")
        # From now on, weights that we did not set are those of a restarted server.
        self.labels = {label: known for label, known in self.labels.items() if label.startswith(self._label_prefix)}
        self.labels[self.weights.label] = version

    def announce_weights(self, label: str, version: int) -> None:
        """Let every server have the weights of this label, which a trainer in another process gives them. Tokens that
        they sample are those of `version`."""
        if self.weights is None:
            self.labels.clear()  # What the servers had before is no version of the trainer's.
        self.weights = LabeledWeights(None, version, label)
        self.labels[label] = version
        for old in list(self.labels)[:-MAX_LABELS]:
            del self.labels[old]

    async def update_replicas(self) -> None:
        """Give the servers that are up the target weights, while `lock` is held. One that does not take them samples
        nothing until it has them."""
        await asyncio.gather(*map(self._update, self.up))
        if self.weights is not None:
            self.weight_version = self.weights.version

    async def _update(self, replica: Replica) -> None:
        channel = replica.channel if replica.channel is not None and replica.channel.usable else None
        try:
            await self._load_weights(replica, channel)
        except Exception as error:  # noqa: BLE001 - whatever one server answers, the others go on
            # It may hold a mix of old and new weights, so nobody samples there until it has the new ones.
            self.evict(replica, _reason(error))
            if channel is not None and not channel.usable:
                log.warning("model server %s gets its weights from the disk from now on", replica.url)

    async def _load_weights(self, replica: Replica, channel: WeightChannel | None = None) -> None:
        """Give `replica` the target weights, through `channel` or from the disk. Raises PolicyError or ConfigError."""
        if (target := self.weights) is None:
            return
        server, source, missing = replica.server, target.source, f"not {target.label}"

        def on_loaded() -> None:
            replica.version = target.version

        if source is None:
            missing = f"and its trainer has not given it version {target.version} ({target.label}) yet"
        elif channel is not None and source.lend is not None:
            replica.transfer_interrupted = True
            await channel.send(target, source.lend, on_loaded)
        else:
            await server.load_weights(await source.directory(), target.label, on_loaded)
        replica.transfer_interrupted = False
        replica.label = await server.weight_label()
        if replica.label != target.label and (source is None or replica.label is not None):
            raise ModelServerError(f"{server.url} has weights {replica.label}, {missing}", retryable=True)
        on_loaded()

    async def catch_up(self, replica: Replica) -> None:
        """Give a recovered server the weights and adapters it lacks, and unload adapters that are no longer wanted."""
        label = await replica.server.weight_label()
        if self.weights is None:
            replica.version, replica.label = 0, label
            if label is not None:
                self.labels.setdefault(label, 0)
        elif replica.version != self.weights.version or label not in (None, self.weights.label):
            await self._load_weights(replica)
        if not (self.served or replica.adapters):
            return
        present = (await replica.server.model_info()).adapters
        for name in replica.adapters.keys() - self.served.keys():
            if name in present:
                await replica.server.unload_adapter(name)
            del replica.adapters[name]
        for name, adapter in [*self.served.items()]:
            if adapter.directory is None:
                if name not in present:
                    message = f"{replica.url} has no adapter {name!r}: its trainer has not loaded it yet"
                    raise ModelServerError(message, retryable=True)
            elif replica.adapters.get(name) is not adapter or name not in present:
                await replica.load(adapter)

    async def missing_adapters(self, replica: Replica) -> list[str]:
        """The adapters that a healthy server should have and has not. Raises as `HttpModelServer.model_info`."""
        return sorted(self.served.keys() - (await replica.server.model_info()).adapters) if self.served else []

    # -- health ----------------------------------------------------------------------------------------------------

    @property
    def up(self) -> list[Replica]:
        """The servers that may sample."""
        return [replica for replica in self.replicas if replica.up]

    async def wait_for_up(self) -> None:
        """Wait for a server that is up. Raises PolicyError if none is in time, or the pool is closed."""
        try:
            async with asyncio.timeout(self._policy.wait_seconds):
                while not self.up:
                    if self._closed:
                        raise PolicyError("the pool of model servers was closed")
                    self._recovered.clear()
                    await self._recovered.wait()
        except TimeoutError:
            reasons = "; ".join(f"{replica.url}: {replica.failure}" for replica in self.replicas)
            raise PolicyError(f"no model server was up for {self._policy.wait_seconds:g} s ({reasons})") from None

    def mark_unhealthy(self, replica: Replica, reason: str, *, at_once: bool = True) -> None:
        """Send no new requests to `replica` until it has recovered; its running requests continue. Unless `at_once`, it
        takes several failures in a row."""
        was_up = replica.up
        if self._closed or (at_once and not was_up):
            return
        replica.failure = reason
        replica.record_failure(at_once)
        if was_up and not replica.up:
            log.warning("model server %s failed: %s", replica.url, reason)

    def evict(self, replica: Replica, reason: str) -> None:
        """As `mark_unhealthy`; its running requests continue on other servers."""
        self.mark_unhealthy(replica, reason)
        if replica.channel is not None:
            replica.channel.sender.abort()
        replica.version, replica.label, replica.failure = -1, None, reason
        replica.cancel_requests()

    async def check(self, replica: Replica) -> None:
        """See `ServerSet.check`. A server that is down is up again once it has the current weights and adapters."""
        try:
            await (self._verify(replica) if replica.up else self._recover(replica))
        except Exception as error:  # noqa: BLE001 - whatever the server answers, it is asked again
            self.mark_unhealthy(replica, _reason(error), at_once=False)
            if not replica.up and time.monotonic() - replica.healthy_at > STALL_SECONDS:
                replica.cancel_requests()

    async def _verify(self, replica: Replica) -> None:
        """Evict a server that was started again. Raises the error of one that does not answer."""
        if replica.process is not None and replica.process.ended:
            return self.evict(replica, "its process ended")
        updating = self.lock.locked
        await self._ask_health(replica)
        label = replica.label if updating() else await replica.server.weight_label()
        missing = [] if updating() else await self.missing_adapters(replica)
        if not replica.up or updating():
            return
        replica.record_success()
        if label != replica.label:
            self.evict(replica, f"it has weights {label}, not {replica.label}: it was started again")
        elif missing:
            self.evict(replica, f"it has no adapter {missing[0]!r} any more: it was started again")

    async def _recover(self, replica: Replica) -> None:
        """Raises the error of a server that is not healthy, or does not take the current weights and adapters."""
        process = replica.process
        # A process that waits for the rest of a transfer may wait forever, so it is restarted.
        if process is not None and (process.ended or replica.transfer_interrupted):
            replica.adapters.clear()
            replica.version, replica.label = -1, None
            source = self.weights.source if self.weights else None
            await process.restart(await source.directory() if source else None)
            replica.transfer_interrupted = False
        await self._ask_health(replica)
        if replica.transfer_interrupted and replica.channel is not None:
            await replica.channel.receiver.discard_partial_update()
        async with self.lock:
            await self.catch_up(replica)
            replica.record_success()
        log.info("model server %s is back", replica.url)
        self._recovered.set()

    async def _ask_health(self, replica: Replica) -> None:
        await replica.server.health()
        replica.healthy_at = time.monotonic()

    async def close(self) -> None:
        """End the health checks and the servers we started, and close the connections. Idempotent."""
        self._closed = True
        self._recovered.set()
        await self.end_watches()
        for replica in self.replicas:
            if replica.channel is not None:
                replica.channel.sender.abort()
        await asyncio.gather(*(replica.process.close() for replica in self.replicas if replica.process))
        await self._transport.close()


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, AgentLightningError) else repr(error)
