"""Health of the replicas of a pool: checks them, takes failed ones out, and brings them back with current weights."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from agentlightning.engine.servers.adapters import PoolAdapters
from agentlightning.engine.servers.base import ModelServerError
from agentlightning.engine.servers.config import RetryPolicy
from agentlightning.engine.servers.replica import Replica, ServerProcess
from agentlightning.engine.servers.weights import PoolWeights
from agentlightning.errors import AgentLightningError, ConfigError, PolicyError

log = logging.getLogger(__name__)

MIN_PAUSE, MAX_PAUSE = 0.1, 5.0
"""Seconds between two attempts to recover a server."""
MAX_FAILED_CHECKS = 3
"""Health checks that must fail in a row before a server gets no new requests."""
STALL_SECONDS = 30.0
"""Requests of a server that shows no sign of life for this long continue elsewhere."""


class HealthMonitor:
    """Decides which replicas are up. Create it in the event loop that uses it."""

    def __init__(
        self, replicas: Sequence[Replica], weights: PoolWeights, adapters: PoolAdapters, policy: RetryPolicy
    ) -> None:
        self._replicas = replicas
        self._weights = weights
        self._adapters = adapters
        self._policy = policy
        self._any_up = asyncio.Event()
        self._any_up.set()
        self._closed = False
        self._checks = asyncio.create_task(self._health_loop(), name="model servers")

    async def wait_for_up(self) -> list[Replica]:
        """The replicas that are up, at least one. Raises PolicyError if none is in time."""
        try:
            async with asyncio.timeout(self._policy.wait_seconds):
                while not (up := [replica for replica in self._replicas if replica.up]):
                    await self._any_up.wait()
        except TimeoutError:
            reasons = "; ".join(f"{replica.server.url}: {replica.failure}" for replica in self._replicas)
            raise PolicyError(f"no model server was up for {self._policy.wait_seconds:g} s ({reasons})") from None
        return up

    def mark_unhealthy(self, replica: Replica, reason: str) -> None:
        """Send no new requests to `replica` until it has recovered; its running requests continue."""
        if replica.up and not self._closed:
            log.warning("model server %s failed: %s", replica.server.url, reason)
            replica.up, replica.failure, replica.failed_checks = False, reason, 0
            self._update_any_up()
            replica.recovery = asyncio.create_task(self._recover(replica))

    def evict(self, replica: Replica, reason: str) -> None:
        """As `mark_unhealthy`; its running requests continue on other replicas."""
        self.mark_unhealthy(replica, reason)
        if replica.channel is not None:
            replica.channel.sender.abort()
        replica.version, replica.label, replica.failure = -1, None, reason
        _cancel_requests(replica)

    async def close(self) -> None:
        """Stop all checks and recoveries."""
        self._closed = True
        tasks = [self._checks, *(replica.recovery for replica in self._replicas if replica.recovery)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _health_loop(self) -> None:
        while True:
            await asyncio.sleep(self._policy.health_seconds)
            await asyncio.gather(*(self._check(replica) for replica in self._replicas if replica.up))

    async def _check(self, replica: Replica) -> None:
        if replica.process is not None and replica.process.ended:
            return self.evict(replica, "its process ended")
        updating = self._weights.lock.locked
        try:
            await replica.server.health()
            replica.failed_checks = 0
            label = replica.label if updating() else await replica.server.weight_label()
            missing = [] if updating() else await self._adapters.missing_on(replica)
        except (ModelServerError, ConfigError) as error:
            replica.failed_checks += 1
            if replica.failed_checks >= MAX_FAILED_CHECKS:
                self.mark_unhealthy(replica, str(error))
            return
        if replica.up and label != replica.label and not updating():
            self.evict(replica, f"it has weights {label}, not {replica.label}: it was started again")
        elif replica.up and missing and not updating():
            self.evict(replica, f"it has no adapter {missing[0]!r} any more: it was started again")

    async def _recover(self, replica: Replica) -> None:
        """Retry until the replica is healthy and has the current weights and adapters."""
        pause, since = MIN_PAUSE, time.monotonic()
        while True:
            try:
                # A process that waits for the rest of a transfer may wait forever, so it is restarted.
                if replica.process is not None and (replica.process.ended or replica.transfer_interrupted):
                    await self._restart(replica, replica.process)
                await replica.server.health()
                if replica.transfer_interrupted and replica.channel is not None:
                    await replica.channel.receiver.discard_partial_update()
                async with self._weights.lock:
                    await self._weights.catch_up(replica)
                    await self._adapters.catch_up(replica)
                    replica.up = True
                break
            except Exception as error:  # noqa: BLE001 - whatever the server answers, it is asked again
                replica.failure = str(error) if isinstance(error, AgentLightningError) else repr(error)
            if time.monotonic() - since > STALL_SECONDS:
                _cancel_requests(replica)
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE)
        log.info("model server %s is back", replica.server.url)
        self._update_any_up()

    async def _restart(self, replica: Replica, process: ServerProcess) -> None:
        replica.adapters.clear()
        replica.version, replica.label = -1, None
        target = self._weights.target
        await process.restart(await target.source.directory() if target else None)
        replica.transfer_interrupted = False

    def _update_any_up(self) -> None:
        if any(replica.up for replica in self._replicas):
            self._any_up.set()
        else:
            self._any_up.clear()


def _cancel_requests(replica: Replica) -> None:
    for task in list(replica.in_flight):
        task.cancel()
