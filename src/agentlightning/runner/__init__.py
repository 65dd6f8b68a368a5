"""Executes agents: the runner claims rollouts and reports their results; `hosts` are the processes that run agents."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentlightning.runner.agents.agent import load_agent
    from agentlightning.runner.agents.litagent import LitAgent, llm_rollout, prompt_rollout, rollout
    from agentlightning.runner.agents.spec import AgentLike, JobTemplate
    from agentlightning.runner.runner import Runner, RunnerStatistics

_HOMES = {
    "AgentLike": "agents.spec",
    "JobTemplate": "agents.spec",
    "LitAgent": "agents.litagent",
    "Runner": "runner",
    "RunnerStatistics": "runner",
    "llm_rollout": "agents.litagent",
    "load_agent": "agents.agent",
    "prompt_rollout": "agents.litagent",
    "rollout": "agents.litagent",
}

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
    home = _HOMES.get(name)
    if name == "LitAgentRunner":  # where 0.x has it
        return getattr(import_module("agentlightning"), name)
    if home is None:
        raise AttributeError(f"module 'agentlightning.runner' has no attribute {name!r}")
    value = getattr(import_module(f"agentlightning.runner.{home}"), name)
    globals()[name] = value
    return value
