"""The LoRA adapters of a pool, loaded on all of its servers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentlightning.engine.servers.base import ModelServerError
from agentlightning.engine.servers.replica import Replica
from agentlightning.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Adapter:
    directory: Path | None
    """None: another process loads it on the servers."""
    version: int


class PoolAdapters:
    """The adapters that every replica is to have."""

    def __init__(self) -> None:
        self._adapters: dict[str, Adapter] = {}

    def version(self, name: str) -> int:
        """0 for an adapter as first loaded. Raises ConfigError if none of the name is loaded."""
        if (adapter := self._adapters.get(name)) is None:
            raise ConfigError(f"no adapter {name!r} is loaded; loaded are {sorted(self._adapters) or 'none'}")
        return adapter.version

    async def load(
        self, name: str, directory: Path, replicas: Sequence[Replica], *, can_fail: bool = False
    ) -> dict[Replica, Exception]:
        """Load the adapter, or its next version, on `replicas`; returns the errors of those that failed. Raises the
        first error if all fail, unless all `can_fail` and load it when they recover."""
        version = self._adapters[name].version + 1 if name in self._adapters else 0
        adapter = Adapter(Path(directory), version)
        results = await asyncio.gather(*(_load(replica, name, adapter) for replica in replicas))
        errors = {replica: error for replica, error in zip(replicas, results, strict=True) if error is not None}
        if errors and len(errors) == len(replicas) and not can_fail:
            raise next(iter(errors.values()))
        self._adapters[name] = adapter
        return errors

    def expect(self, name: str, version: int, replicas: Sequence[Replica]) -> None:
        """Sample from an adapter that another process loads. A server that lacks it samples nothing until it has it."""
        self._adapters[name] = Adapter(None, version)
        for replica in replicas:
            replica.adapters[name] = version

    def forget(self, name: str, replicas: Sequence[Replica]) -> None:
        """Undo `expect`."""
        self._adapters.pop(name, None)
        for replica in replicas:
            replica.adapters.pop(name, None)

    async def missing_on(self, replica: Replica) -> list[str]:
        """The adapters that a server no longer has although it loaded them. Raises as `ModelServer.model_info`."""
        expected = set(replica.adapters) & self._adapters.keys()
        if not expected:
            return []
        present = (await replica.server.model_info()).adapters
        return sorted((expected & self._adapters.keys()) - present)

    async def unload(self, name: str, replicas: Sequence[Replica]) -> None:
        """Unload the adapter. Raises ConfigError if none of the name is loaded."""
        self.version(name)
        del self._adapters[name]
        # A server that is down keeps its note of the adapter, and unloads it when it recovers.
        holders = [replica for replica in replicas if replica.up and replica.adapters.pop(name, None) is not None]
        await asyncio.gather(*(replica.server.unload_adapter(name) for replica in holders))

    async def catch_up(self, replica: Replica) -> None:
        """Load on a recovered replica the adapters it lacks, and unload those that are no longer wanted."""
        if not (self._adapters or replica.adapters):
            return
        present = (await replica.server.model_info()).adapters
        for name in replica.adapters.keys() - self._adapters.keys():
            if name in present:
                await replica.server.unload_adapter(name)
            del replica.adapters[name]
        for name, adapter in self._adapters.items():
            if adapter.directory is None and name not in present:
                message = f"{replica.server.url} has no adapter {name!r}: its trainer has not loaded it yet"
                raise ModelServerError(message, retryable=True)
            if adapter.directory is not None and (replica.adapters.get(name) != adapter.version or name not in present):
                await replica.server.load_adapter(name, adapter.directory)
            replica.adapters[name] = adapter.version


async def _load(replica: Replica, name: str, adapter: Adapter) -> Exception | None:
    assert adapter.directory is not None
    try:
        await replica.server.load_adapter(name, adapter.directory)
    except (ModelServerError, ConfigError) as error:
        return error
    replica.adapters[name] = adapter.version
    return None
