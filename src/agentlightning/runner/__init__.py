"""Executes agents: the runner claims rollouts and reports their results; `hosts` are the processes that run agents."""

from importlib import import_module
from typing import Any

_NAMES = {
    "runner.agents.agent": "AgentLike JobTemplate load_agent",
    "runner.agents.litagent": "LitAgent llm_rollout prompt_rollout rollout",
    "runner.runner": "Runner RunnerStatistics",
}
"""Module -> the names here that it defines. `__init__.pyi` has them with their signatures."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]

_MODULES["LitAgentRunner"] = "compat.runner"  # where 0.x has it


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'agentlightning.runner' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"agentlightning.{_MODULES[name]}"), name)
    return value
