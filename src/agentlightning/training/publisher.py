"""Publishes to the store the resources that rollouts are given: the policy's address, and what an algorithm tunes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from agentlightning.engine.adapter_view import AgentEngines
from agentlightning.engine.base import Engine
from agentlightning.resources import NamedResources, ProxyLLM, named_resources
from agentlightning.store.base import LightningStoreBase


class ResourcePublisher:
    """Publishes the present weights and resources under a name for each purpose."""

    def __init__(
        self,
        store: LightningStoreBase,
        server_url: str,
        policy: Engine | None,
        resources: NamedResources,
        max_calls: int | None = None,
    ) -> None:
        """No rollout is given more than `max_calls` answers of the policy; None: any number."""
        self._max_calls = max_calls
        self._store = store
        self._server_url = server_url
        self._policy = policy
        self.resources: NamedResources = dict(resources)
        """What rollouts are given beside the policy."""
        self.published = False
        """Whether an algorithm has replaced a resource."""

    def publish(self, resources: NamedResources) -> None:
        """Replace resources by name."""
        self.resources = {**self.resources, **resources}
        self.published = self.published or bool(resources)

    def _llm(self, engine: Engine, sampling: Mapping[str, float], max_calls: int | None) -> ProxyLLM:
        return ProxyLLM(
            endpoint=self._server_url,
            model=engine.model,
            sampling_parameters=dict(sampling),
            policy_version=engine.policy_version,
            max_calls=max_calls,
        )

    def _policy_resources(self, sampling: Mapping[str, float], max_calls: int | None) -> NamedResources:
        """The policy as `llm`, and each of its adapters; empty where the run trains none."""
        if self._policy is None:
            return {}
        max_calls = min((limit for limit in (max_calls, self._max_calls) if limit is not None), default=None)
        found: NamedResources = {"llm": self._llm(self._policy, sampling, max_calls)}
        for model, view in self._policy.views.items() if isinstance(self._policy, AgentEngines) else ():
            found[f"llm:{model.removeprefix(f'{self._policy.model}:')}"] = self._llm(view, sampling, max_calls)
        return found

    async def write_trial(self, label: str, resources: NamedResources, sampling: Mapping[str, float]) -> str:
        """Write the present resources with some replaced, and the policy. Returns their id, which begins with `label`
        and is the same for the same resources, wherever the policy is served."""
        given = {**self.resources, **resources}
        digest = hashlib.blake2b(named_resources.dump_json(given), digest_size=8).hexdigest()
        resources_id = f"{label}-{digest}"
        given |= self._policy_resources(sampling, None)
        if await self._store.get_resources_by_id(resources_id) is None:
            await self._store.add_resources(given, resources_id)
        elif self._policy is not None:
            await self._store.update_resources(resources_id, given)
        return resources_id

    async def write(self, resources_id: str, sampling: Mapping[str, float], max_calls: int | None = None) -> str:
        """Write the present resources to the store; again under the same id after a crash, at the new address. A
        rollout is given at most `max_calls` answers of the policy."""
        resources = {**self.resources, **self._policy_resources(sampling, max_calls)}
        if await self._store.get_resources_by_id(resources_id) is None:
            await self._store.add_resources(resources, resources_id)
        else:
            await self._store.update_resources(resources_id, resources)
        return resources_id
