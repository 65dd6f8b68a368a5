"""Which weights of a policy answer which agent."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from agentlightning.engine.adapter_view import AdapterSampler, AdapterView
from agentlightning.engine.base import Engine
from agentlightning.errors import PolicyError
from agentlightning.models.lora.files import CONFIG, has_adapters, read_adapter_config, read_agents, saved_targets
from agentlightning.policy.local_config import LocalPolicyConfig
from agentlightning.policy.lora_config import BASE, SHARED, AgentSetting, Lora

# -- checkpoint ------------------------------------------------------------------------------------------------------

# Opening a directory of adapters as a policy: the model below them, and what each agent uses.

_AGENTS: TypeAdapter[dict[str, AgentSetting]] = TypeAdapter(dict[str, AgentSetting])


def with_adapters_of(config: LocalPolicyConfig) -> tuple[LocalPolicyConfig, Path | None]:
    """The configuration of the model below, with the adapters that `config.model` holds unless it names its own, and
    the directory to read them from; `config` itself if its model is no directory of adapters. Raises PolicyError for
    files that cannot be read."""
    directory = Path(config.model)
    if not (directory.is_dir() and has_adapters(directory)):
        return config, None
    saved = read_agents(directory)
    base, lora = saved.get("base_model_name_or_path"), config.lora
    if (directory / CONFIG).is_file():
        own = read_adapter_config(directory)
        base, lora = own.get("base_model_name_or_path") or base, lora or _lora(own, directory)
    if not isinstance(base, str):
        raise PolicyError(f"{directory} does not name the model below its adapters (base_model_name_or_path)")
    agents = config.agents or _agents(saved.get("agents", {}), directory)
    return config.model_copy(update={"model": base, "lora": lora, "agents": agents}), directory


def _lora(saved: dict[str, Any], directory: Path) -> Lora:
    try:
        return Lora(r=saved["r"], alpha=saved["lora_alpha"], targets=saved_targets(saved))
    except (KeyError, TypeError, ValidationError) as error:
        raise PolicyError(f"{directory / CONFIG} describes no adapter: {error}; choose another checkpoint") from error


def _agents(saved: Any, directory: Path) -> dict[str, AgentSetting]:
    try:
        return _AGENTS.validate_python(saved)
    except ValidationError as error:
        raise PolicyError(f"the agents of {directory} cannot be read: {error}; choose another checkpoint") from error


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
