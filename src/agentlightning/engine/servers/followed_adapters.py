"""The adapters of a training run elsewhere, on servers that its trainer loads them on.

A call keeps the version it began with. The trainer unloads a version that it has replaced once no gateway uses it any
more (`in_use`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from agentlightning.engine.base import OnTokens, Sample, SamplingParams
from agentlightning.engine.servers.joining import ServedAdapter
from agentlightning.engine.servers.pool import ReplicaPool


class FollowedAdapters:
    """The newest version of each adapter, and the older ones that calls still use."""

    def __init__(self, pool: ReplicaPool, adapters: Iterable[ServedAdapter]) -> None:
        self._pool = pool
        self._current: dict[str, ServedAdapter] = {}
        self._calls = Counter[str]()
        """By served name."""
        self.announce(adapters)

    def announce(self, adapters: Iterable[ServedAdapter]) -> None:
        """Let calls that begin from now on use these versions, which the servers have."""
        for new in adapters:
            old = self._current.get(new.name)
            if old == new:
                continue
            self._pool.expect_adapter(new.served_name, new.version)
            self._current[new.name] = new
            if old is not None:
                self._forget_if_unused(old)

    def version_of(self, name: str) -> int:
        return self._current[name].version

    @property
    def newest(self) -> int:
        """The largest version of any adapter."""
        return max((each.version for each in self._current.values()), default=0)

    @property
    def in_use(self) -> tuple[str, ...]:
        """The served names of the adapters that calls in progress use."""
        return tuple(sorted(self._calls))

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
        self._calls[used.served_name] += 1
        try:
            return await self._pool.sample_adapter(used.served_name, prompt_token_ids, params, on_tokens, affinity)
        finally:
            self._calls[used.served_name] -= 1
            if not self._calls[used.served_name]:
                del self._calls[used.served_name]
            self._forget_if_unused(used)

    def _forget_if_unused(self, adapter: ServedAdapter) -> None:
        if self._current[adapter.name] != adapter and adapter.served_name not in self._calls:
            self._pool.forget_adapter(adapter.served_name)
