"""Agent Lightning: train any AI agent, with almost no change to its code.

The names below are the public face. They are loaded when first used, so that importing the package stays fast and
never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentlightning.algorithms.base import Algorithm, Training
    from agentlightning.algorithms.lightning_rl import LightningRL, LightningRLConfig
    from agentlightning.algorithms.sft import SFTAlgorithm
    from agentlightning.config import TrainConfig
    from agentlightning.errors import AgentLightningError
    from agentlightning.evaluation import Evaluation
    from agentlightning.evaluator import evaluate
    from agentlightning.resources import LLM, NamedResources, PromptTemplate, ResourcesUpdate
    from agentlightning.result import TrainingResult
    from agentlightning.rollouts import Attempt, AttemptedRollout, Rollout, RolloutConfig
    from agentlightning.runner import LitAgent, Runner, llm_rollout, prompt_rollout, rollout
    from agentlightning.span import Span
    from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreClient
    from agentlightning.task import Dataset
    from agentlightning.tracing import (
        emit_annotation,
        emit_exception,
        emit_message,
        emit_object,
        emit_reward,
        find_final_reward,
        operation,
        track_agent,
    )
    from agentlightning.trainer import Trainer
    from agentlightning.trajectory import TokenTree, TrainingSample, Trajectory, Transition

_HOMES = {
    "Algorithm": "algorithms.base",
    "AgentLightningError": "errors",
    "Attempt": "rollouts",
    "AttemptedRollout": "rollouts",
    "Dataset": "task",
    "Evaluation": "evaluation",
    "InMemoryLightningStore": "store",
    "LLM": "resources",
    "LightningRL": "algorithms.lightning_rl",
    "LightningRLConfig": "algorithms.lightning_rl",
    "LightningStore": "store",
    "LightningStoreClient": "store.http.client",
    "LitAgent": "runner",
    "NamedResources": "resources",
    "PromptTemplate": "resources",
    "ResourcesUpdate": "resources",
    "Rollout": "rollouts",
    "RolloutConfig": "rollouts",
    "Runner": "runner",
    "SFTAlgorithm": "algorithms.sft",
    "Span": "span",
    "TokenTree": "trajectory",
    "TrainConfig": "config",
    "Trainer": "trainer",
    "Training": "algorithms.base",
    "TrainingResult": "result",
    "TrainingSample": "trajectory",
    "Trajectory": "trajectory",
    "Transition": "trajectory",
    "emit_annotation": "tracing",
    "emit_exception": "tracing",
    "emit_message": "tracing",
    "emit_object": "tracing",
    "emit_reward": "tracing",
    "evaluate": "evaluator",
    "find_final_reward": "tracing",
    "llm_rollout": "runner",
    "operation": "tracing",
    "prompt_rollout": "runner",
    "rollout": "runner",
    "track_agent": "tracing",
}

__all__ = [
    "LLM",
    "AgentLightningError",
    "Algorithm",
    "Attempt",
    "AttemptedRollout",
    "Dataset",
    "Evaluation",
    "InMemoryLightningStore",
    "LightningRL",
    "LightningRLConfig",
    "LightningStore",
    "LightningStoreClient",
    "LitAgent",
    "NamedResources",
    "PromptTemplate",
    "ResourcesUpdate",
    "Rollout",
    "RolloutConfig",
    "Runner",
    "SFTAlgorithm",
    "Span",
    "TokenTree",
    "TrainConfig",
    "Trainer",
    "Training",
    "TrainingResult",
    "TrainingSample",
    "Trajectory",
    "Transition",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "evaluate",
    "find_final_reward",
    "llm_rollout",
    "operation",
    "prompt_rollout",
    "rollout",
    "track_agent",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("agentlightning")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'agentlightning' has no attribute {name!r}")
    value = getattr(import_module(f"agentlightning.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
