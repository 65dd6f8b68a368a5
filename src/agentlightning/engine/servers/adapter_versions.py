"""The versions of adapters that are trained: what servers call each of them, and when a version leaves the servers.

Each version is an adapter of its own to the servers, named `AGENT@VERSION.RUN`, where RUN tells runs on one server
apart. A call keeps the version it began with, on whichever server it continues, so no token is sampled from keys and
values of other weights. A replaced version is unloaded, and its files removed, when the last call that uses it ends.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentlightning.engine.base import OnTokens, Sample, SamplingParams
from agentlightning.engine.servers.pool import ReplicaPool
from agentlightning.errors import AgentLightningError

log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
"""How long servers that we joined have to unload the adapters at the end."""


@dataclass(slots=True, eq=False)
class AdapterVersion:
    """One version of an adapter, on the servers."""

    served_name: str
    version: int
    directory: Path
    calls: int = 0
    """Number of calls that use it."""


OnNewAdapter = Callable[[str, AdapterVersion], Awaitable[None]]


class AdapterVersions:
    """The adapters of a policy on the servers of a pool."""

    def __init__(self, pool: ReplicaPool) -> None:
        self._pool = pool
        self._run = secrets.token_hex(3)
        self._current: dict[str, AdapterVersion] = {}
        self._removals: set[asyncio.Task[None]] = set()
        self._replaced: dict[str, AdapterVersion] = {}
        """Versions that calls may still use, by served name."""
        self.on_new: OnNewAdapter | None = None
        """Called with a new version once servers have it, before calls use it."""
        self.used_elsewhere: Callable[[], Collection[str]] = tuple
        """The served names that calls of other processes use."""

    @property
    def current(self) -> Mapping[str, AdapterVersion]:
        """The newest version of each adapter, by name."""
        return self._current

    async def publish(self, name: str, version: int, directory: Path, *, strict: bool = False) -> None:
        """Let calls that begin from now on use this version, which is in `directory`. Servers that are down load it
        before they sample again. Raises as `ReplicaPool.set_adapter`."""
        new = AdapterVersion(f"{name}@{version}.{self._run}", version, directory)
        await self._pool.set_adapter(new.served_name, directory, strict=strict)
        if self.on_new is not None:
            await self.on_new(name, new)
        old, self._current[name] = self._current.get(name), new
        if old is not None:
            self._replaced[old.served_name] = old
            self.remove_unused()

    async def sample(
        self,
        name: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: OnTokens | None = None,
        affinity: str = "",
    ) -> Sample:
        """`ReplicaPool.sample_adapter` from the newest version."""
        used = self._current[name]
        used.calls += 1
        try:
            sample = await self._pool.sample_adapter(used.served_name, prompt_token_ids, params, on_tokens, affinity)
        finally:
            used.calls -= 1
            self.remove_unused()
        return replace(sample, policy_version=used.version, versions=())

    def remove_unused(self) -> None:
        """Unload the replaced versions that no call uses."""
        elsewhere = self.used_elsewhere() if self._replaced else ()
        for name in [name for name, old in self._replaced.items() if not old.calls and name not in elsewhere]:
            task = asyncio.create_task(self._remove(self._replaced.pop(name)))
            self._removals.add(task)
            task.add_done_callback(self._removals.discard)

    async def _remove(self, old: AdapterVersion) -> None:
        try:
            await self._pool.unload_adapter(old.served_name)
        except AgentLightningError as error:  # It takes memory until the server ends, and answers no call.
            log.warning("the adapter %s could not be unloaded: %s", old.served_name, error)
        await asyncio.to_thread(shutil.rmtree, old.directory, ignore_errors=True)

    async def close(self) -> None:
        """Unload all adapters from servers that go on without us. The pool must still be open."""
        await asyncio.gather(*self._removals, return_exceptions=True)
        current, self._current = [*self._current.values(), *self._replaced.values()], {}
        if all(replica.process is not None for replica in self._pool.replicas):
            return
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                for each in current:
                    await self._pool.unload_adapter(each.served_name)
        except (TimeoutError, AgentLightningError) as error:
            log.warning("the adapters of this run could not be unloaded: %s", error)
