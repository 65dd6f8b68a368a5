"""Executes agents: the runner claims rollouts and reports their results; `hosts` are the processes that run agents."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentlightning.runner.agents.agent import load_agent
    from agentlightning.runner.agents.litagent import LitAgent, llm_rollout, prompt_rollout, rollout
    from agentlightning.runner.agents.spec import AgentLike, JobTemplate
    from agentlightning.runner.runner import Runner, RunnerStatistics

_NAMES = {
    "compat.runner": "LitAgentRunner",  # where 0.x has it
    "runner.agents.agent": "load_agent",
    "runner.agents.litagent": "LitAgent llm_rollout prompt_rollout rollout",
    "runner.agents.spec": "AgentLike JobTemplate",
    "runner.runner": "Runner RunnerStatistics",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "AgentLike",
    "JobTemplate",
    "LitAgent",
    "Runner",
    "RunnerStatistics",
    "llm_rollout",
    "load_agent",
    "prompt_rollout",
    "rollout",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'agentlightning.runner' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"agentlightning.{_MODULES[name]}"), name)
    return value
