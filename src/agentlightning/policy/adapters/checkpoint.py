"""Opening a directory of adapters as a policy: the model below them, and what each agent uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from agentlightning.errors import PolicyError
from agentlightning.models.lora.files import CONFIG, has_adapters, read_adapter_config, read_agents, saved_targets
from agentlightning.policy.local_config import LocalPolicyConfig
from agentlightning.policy.lora_config import AgentSetting, Lora

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
