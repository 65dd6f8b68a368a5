"""The adapters of a policy whose base model is sampled by servers: which version they have, and what they get next.

The servers hold the model below the adapters from the start, and it never changes. After an update each adapter that
changed is written as the peft library writes it, and the servers load it as a new version
(`engine.servers.adapter_versions`).
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from agentlightning.engine.adapter_view import AdapterSampler, AdapterView
from agentlightning.engine.base import OnTokens, Sample, SamplingParams
from agentlightning.engine.servers.joining import AdapterRoutes, AdapterVersions
from agentlightning.engine.servers.pool import ReplicaPool
from agentlightning.policy.adapters.views import AgentViews
from agentlightning.policy.local_config import LocalPolicyConfig
from agentlightning.policy.lora_config import SHARED, Lora


@runtime_checkable
class AdapterLearner(AdapterSampler, Protocol):
    """A policy that may train adapters."""

    config: LocalPolicyConfig

    @property
    def adapters(self) -> Mapping[str, Lora]:
        """The adapters that are trained, by name; empty: all weights are."""
        ...

    async def save_adapter(self, name: str, directory: Path) -> None:
        """Write an adapter as a directory in peft's format."""
        ...


class ServedAdapters:
    """The adapters that `learner` trains, on the servers of a pool. `folder` gets their files."""

    def __init__(self, policy: AdapterSampler, learner: AdapterLearner, pool: ReplicaPool, folder: Path) -> None:
        self._learner, self._pool, self._folder = learner, pool, folder.absolute()
        self.versions = AdapterVersions(pool)
        self.own: str | None = SHARED if SHARED in learner.adapters else None
        """The name of the policy itself; None: the model below the adapters."""
        self.views = AgentViews(policy, learner.config.agents, learner.adapters)

    def version_of(self, name: str | None) -> int:
        """The version that the servers have; see `AdapterSampler.version_of`."""
        return 0 if name is None else self.versions.current[name].version

    @property
    def newest(self) -> int:
        """The largest version that the servers have."""
        return max(each.version for each in self.versions.current.values())

    async def sample(
        self,
        name: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: OnTokens | None,
        affinity: str,
    ) -> Sample:
        """See `AdapterSampler.sample_adapter`."""
        if name is None:
            return await self._pool.sample(prompt_token_ids, params, on_tokens, affinity=affinity)
        return await self.versions.sample(name, prompt_token_ids, params, on_tokens, affinity)

    async def publish(self, *, strict: bool = False) -> tuple[list[str], dict[str, float]]:
        """Give the servers the adapters that have changed; returns their names and the metrics. Raises as
        `AdapterVersions.publish`."""
        started, size, changed = time.monotonic(), 0, self._changed()
        for name, version in changed.items():
            # Agents' names may hold any character; a number cannot collide or leave the folder.
            number = sorted(self._learner.adapters).index(name)
            folder = self._folder / f"adapter-{number}"
            if name not in self.versions.current:  # What a run that was killed has left.
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            directory = folder / f"version-{version:06d}"
            await self._learner.save_adapter(name, directory)
            size += await asyncio.to_thread(_size_of, directory)
            await self.versions.publish(name, version, directory, strict=strict)
        seconds = time.monotonic() - started
        return list(changed), {"adapters_published": len(changed), "publish_bytes": size, "publish_seconds": seconds}

    def _changed(self) -> dict[str, int]:
        current = self.versions.current
        versions = {name: self._learner.version_of(name) for name in self._learner.adapters}
        return {
            name: version
            for name, version in versions.items()
            if name not in current or current[name].version != version
        }

    async def probe(
        self, name: str | None, prompt: Sequence[int], params: SamplingParams
    ) -> tuple[Sample, list[tuple[str, Sample]]]:
        """An answer of the learner, and those of each server by its address."""
        served_name = None if name is None else self.versions.current[name].served_name
        own = await self._learner.sample_adapter(name, prompt, params)
        up = [replica for replica in self._pool.replicas if replica.up]
        samples = await asyncio.gather(*(self._pool.sample_from(each, prompt, params, served_name) for each in up))
        return own, [(each.server.url, sample) for each, sample in zip(up, samples, strict=True)]

    def routes(self) -> AdapterRoutes:
        """Which adapters answer which agents, for gateways in other processes."""
        agents = self._learner.config.agents
        return AdapterRoutes(
            own=self.own,
            views={model: view.adapter for model, view in self.views.by_model.items()},
            agents={agent: self.views.for_agent(agent).model for agent in agents},
            others=self.views.for_agent(None).model,
        )

    @property
    def by_model(self) -> Mapping[str, AdapterView]:
        return self.views.by_model

    async def close(self) -> None:
        """See `AdapterVersions.close`."""
        await self.versions.close()


def _size_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())
