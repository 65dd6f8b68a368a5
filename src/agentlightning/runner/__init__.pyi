"""The names of this package, as editors and type checkers see them; `__init__.py` loads them when they are used."""

from agentlightning.runner.agents.agent import AgentLike as AgentLike
from agentlightning.runner.agents.agent import JobTemplate as JobTemplate
from agentlightning.runner.agents.agent import load_agent as load_agent
from agentlightning.runner.agents.litagent import LitAgent as LitAgent
from agentlightning.runner.agents.litagent import llm_rollout as llm_rollout
from agentlightning.runner.agents.litagent import prompt_rollout as prompt_rollout
from agentlightning.runner.agents.litagent import rollout as rollout
from agentlightning.runner.runner import Runner as Runner
from agentlightning.runner.runner import RunnerStatistics as RunnerStatistics
