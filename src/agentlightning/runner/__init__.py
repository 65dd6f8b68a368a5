"""Where agents run. `worker.Runner` claims rollouts and reports; `agent` says what an agent is; `host` runs it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentlightning.runner.agent import load_agent
    from agentlightning.runner.litagent import LitAgent, llm_rollout, prompt_rollout, rollout
    from agentlightning.runner.spec import AgentLike
    from agentlightning.runner.tally import RunnerStatistics
    from agentlightning.runner.worker import Runner

_HOMES = {
    "AgentLike": "spec",
    "LitAgent": "litagent",
    "Runner": "worker",
    "RunnerStatistics": "tally",
    "llm_rollout": "litagent",
    "load_agent": "agent",
    "prompt_rollout": "litagent",
    "rollout": "litagent",
}

__all__ = [
    "AgentLike",
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
    if home is None:
        raise AttributeError(f"module 'agentlightning.runner' has no attribute {name!r}")
    value = getattr(import_module(f"agentlightning.runner.{home}"), name)
    globals()[name] = value
    return value
