"""Which weights of a policy answer which agent."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from agentlightning.engine.adapter_view import AdapterSampler, AdapterView
from agentlightning.engine.base import Engine
from agentlightning.policy.lora_config import BASE, SHARED, AgentSetting, Lora


class AgentViews:
    """The views of a policy: `NAME:AGENT` for an agent with an adapter of its own, and `NAME:base` for the weights
    below a common adapter."""

    def __init__(self, policy: AdapterSampler, agents: Mapping[str, AgentSetting], adapters: Collection[str]) -> None:
        self._policy, self._agents = policy, dict(agents)
        own = [name for name in adapters if name != SHARED]
        self._own = {name: AdapterView(policy, f"{policy.model}:{name}", name) for name in own}
        has_base = bool(agents) and SHARED in adapters
        self._base = AdapterView(policy, f"{policy.model}:{BASE}", None) if has_base else None
        every = [*self._own.values(), *([self._base] if self._base else [])]
        self.by_model: dict[str, AdapterView] = {view.model: view for view in every}

    def for_agent(self, agent: str | None) -> Engine:
        """An agent that is not listed is answered as a frozen one is."""
        setting = self._agents.get(agent or "")
        if isinstance(setting, Lora):
            return self._own[agent or ""]
        return self._policy if setting == "shared" or self._base is None else self._base
