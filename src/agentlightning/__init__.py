"""Agent Lightning: train any AI agent, with almost no change to its code.

Agents: rollout (makes a function an agent), llm_rollout (of (task, llm)), prompt_rollout (of (task,
    prompt_template)), LitAgent (an agent as a class), FunctionAgent (what the decorators make), Runner (runs an agent
    on the rollouts of a store), RunnerStatistics (what it did).
Training: Trainer (trains an agent), TrainConfig (its settings), TrainingResult (what came of it), Gain (how much
    better, with its interval), Progress (what is shown meanwhile), Dataset (tasks), LightningRL (reinforcement
    learning), LightningRLConfig (its settings), SFTAlgorithm (supervised learning), SFTConfig (its settings),
    SFTResult (what it did), Algorithm (the base of your own), Training (the run, as an algorithm sees it), Collected
    (the rollouts of a step), Rejection (a rollout that is left out), evaluate (scores an agent), Evaluation (the
    scores, with an interval).
Settings: DataConfig, EvaluationConfig, PolicyConfig, RunConfig, RunnerConfig, WarmStartConfig, GatewayConfig,
    OptimizerConfig, PPOLoss, NLLLoss.
What an agent says: emit_reward, emit_message, emit_object, emit_exception, emit_annotation, operation (a recorded
    step), track_agent (who is speaking), find_final_reward, find_reward_spans, get_reward_value.
The store: LightningStore (opens one, and is what all of them are), InMemoryLightningStore (gone with the process),
    LightningStoreClient (one behind a server), Worker, Queue, Retention, Pruned, RolloutRecord, UNSET (an argument
    not given), Unset (its type).
Data: Rollout, RolloutConfig, EnqueueRolloutRequest, Attempt, AttemptedRollout, Span, SpanEvent, LLM, ProxyLLM,
    PromptTemplate, NamedResources, ResourcesUpdate, Trajectory, Transition, TokenTree, Node, TrainingSample, Policy,
    ChatFormat.
Errors, all of them AgentLightningError: AgentLightningError, ConfigError, MissingExtraError, DatasetError,
    AgentError, AgentTimeoutError, RewardError, RolloutRejectedError, StoreError, NotFoundError, ConflictError,
    StoreFullError, StoreLostError, StoreClosedError, StoreServerError, StoreAuthError, PolicyError, ContextLengthError,
    UnfaithfulSampleError, ServerError, TrainingStopped, UnknownTokensError, ResumeError.

A first agent, and its score:

    >>> import agentlightning as agl
    >>> @agl.rollout
    ... def agent(task):
    ...     return 1.0 if task["question"].endswith("?") else 0.0
    >>> agl.evaluate(agent, [{"question": "Why?"}, {"question": "So."}]).mean
    0.5

`help(agl.NAME)` says more of each. Names are loaded when first used, so that importing the package is fast and imports
no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentlightning.algorithms.base import Algorithm, Training
    from agentlightning.algorithms.lightning_rl import LightningRL, LightningRLConfig
    from agentlightning.algorithms.sft import SFTAlgorithm, SFTConfig, SFTResult
    from agentlightning.config import (
        DataConfig,
        EvaluationConfig,
        PolicyConfig,
        RunConfig,
        RunnerConfig,
        TrainConfig,
        WarmStartConfig,
    )
    from agentlightning.credit.rejection import Rejection
    from agentlightning.errors import (
        AgentError,
        AgentLightningError,
        AgentTimeoutError,
        ConfigError,
        ConflictError,
        ContextLengthError,
        DatasetError,
        MissingExtraError,
        NotFoundError,
        PolicyError,
        ResumeError,
        RewardError,
        RolloutRejectedError,
        ServerError,
        StoreAuthError,
        StoreClosedError,
        StoreError,
        StoreFullError,
        StoreLostError,
        StoreServerError,
        TrainingStopped,
        UnfaithfulSampleError,
        UnknownTokensError,
    )
    from agentlightning.evaluation.evaluation import Evaluation
    from agentlightning.evaluation.intervals import Gain
    from agentlightning.evaluator import evaluate
    from agentlightning.gateway.config import GatewayConfig
    from agentlightning.policy.base import ChatFormat, Policy
    from agentlightning.policy.losses.base import NLLLoss, PPOLoss
    from agentlightning.policy.optimizer_config import OptimizerConfig
    from agentlightning.resources import LLM, NamedResources, PromptTemplate, ProxyLLM, ResourcesUpdate
    from agentlightning.rollouts import Attempt, AttemptedRollout, EnqueueRolloutRequest, Rollout, RolloutConfig
    from agentlightning.runner import LitAgent, Runner, llm_rollout, prompt_rollout, rollout
    from agentlightning.runner.agents.litagent import FunctionAgent
    from agentlightning.runner.tally import RunnerStatistics
    from agentlightning.span import Span, SpanEvent
    from agentlightning.store import InMemoryLightningStore, LightningStore
    from agentlightning.store.base import UNSET, Pruned, Queue, Retention, RolloutRecord, Unset, Worker
    from agentlightning.store.http.client import LightningStoreClient
    from agentlightning.task import Dataset
    from agentlightning.tracing import (
        emit_annotation,
        emit_exception,
        emit_message,
        emit_object,
        emit_reward,
        find_final_reward,
        find_reward_spans,
        get_reward_value,
        operation,
        track_agent,
    )
    from agentlightning.trainer import Trainer
    from agentlightning.training.result import TrainingResult
    from agentlightning.training.rollout_source import Collected
    from agentlightning.trajectory import Node, TokenTree, TrainingSample, Trajectory, Transition
    from agentlightning.util.progress import Progress

_HOMES = {
    "LLM": "resources",
    "UNSET": "store.base",
    "AgentError": "errors",
    "AgentLightningError": "errors",
    "AgentTimeoutError": "errors",
    "Algorithm": "algorithms.base",
    "Attempt": "rollouts",
    "AttemptedRollout": "rollouts",
    "ChatFormat": "policy.base",
    "Collected": "training.rollout_source",
    "ConfigError": "errors",
    "ConflictError": "errors",
    "ContextLengthError": "errors",
    "DataConfig": "config",
    "Dataset": "task",
    "DatasetError": "errors",
    "EnqueueRolloutRequest": "rollouts",
    "Evaluation": "evaluation.evaluation",
    "EvaluationConfig": "config",
    "FunctionAgent": "runner.agents.litagent",
    "Gain": "evaluation.intervals",
    "GatewayConfig": "gateway.config",
    "InMemoryLightningStore": "store",
    "LightningRL": "algorithms.lightning_rl",
    "LightningRLConfig": "algorithms.lightning_rl",
    "LightningStore": "store",
    "LightningStoreClient": "store.http.client",
    "LitAgent": "runner",
    "MissingExtraError": "errors",
    "NLLLoss": "policy.losses.base",
    "NamedResources": "resources",
    "Node": "trajectory",
    "NotFoundError": "errors",
    "OptimizerConfig": "policy.optimizer_config",
    "PPOLoss": "policy.losses.base",
    "Policy": "policy.base",
    "PolicyConfig": "config",
    "PolicyError": "errors",
    "Progress": "util.progress",
    "PromptTemplate": "resources",
    "ProxyLLM": "resources",
    "Pruned": "store.base",
    "Queue": "store.base",
    "Rejection": "training.rejection",
    "ResourcesUpdate": "resources",
    "ResumeError": "errors",
    "Retention": "store.base",
    "RewardError": "errors",
    "Rollout": "rollouts",
    "RolloutConfig": "rollouts",
    "RolloutRecord": "store.base",
    "RolloutRejectedError": "errors",
    "RunConfig": "config",
    "Runner": "runner",
    "RunnerConfig": "config",
    "RunnerStatistics": "runner.tally",
    "SFTAlgorithm": "algorithms.sft",
    "SFTConfig": "algorithms.sft",
    "SFTResult": "algorithms.sft",
    "ServerError": "errors",
    "Span": "span",
    "SpanEvent": "span",
    "StoreAuthError": "errors",
    "StoreClosedError": "errors",
    "StoreError": "errors",
    "StoreFullError": "errors",
    "StoreLostError": "errors",
    "StoreServerError": "errors",
    "TokenTree": "trajectory",
    "TrainConfig": "config",
    "Trainer": "trainer",
    "Training": "algorithms.base",
    "TrainingResult": "training.result",
    "TrainingSample": "trajectory",
    "TrainingStopped": "errors",
    "Trajectory": "trajectory",
    "Transition": "trajectory",
    "UnfaithfulSampleError": "errors",
    "UnknownTokensError": "errors",
    "Unset": "store.base",
    "WarmStartConfig": "config",
    "Worker": "store.base",
    "emit_annotation": "tracing",
    "emit_exception": "tracing",
    "emit_message": "tracing",
    "emit_object": "tracing",
    "emit_reward": "tracing",
    "evaluate": "evaluator",
    "find_final_reward": "tracing",
    "find_reward_spans": "tracing",
    "get_reward_value": "tracing",
    "llm_rollout": "runner",
    "operation": "tracing",
    "prompt_rollout": "runner",
    "rollout": "runner",
    "track_agent": "tracing",
}

__all__ = [
    "LLM",
    "UNSET",
    "AgentError",
    "AgentLightningError",
    "AgentTimeoutError",
    "Algorithm",
    "Attempt",
    "AttemptedRollout",
    "ChatFormat",
    "Collected",
    "ConfigError",
    "ConflictError",
    "ContextLengthError",
    "DataConfig",
    "Dataset",
    "DatasetError",
    "EnqueueRolloutRequest",
    "Evaluation",
    "EvaluationConfig",
    "FunctionAgent",
    "Gain",
    "GatewayConfig",
    "InMemoryLightningStore",
    "LightningRL",
    "LightningRLConfig",
    "LightningStore",
    "LightningStoreClient",
    "LitAgent",
    "MissingExtraError",
    "NLLLoss",
    "NamedResources",
    "Node",
    "NotFoundError",
    "OptimizerConfig",
    "PPOLoss",
    "Policy",
    "PolicyConfig",
    "PolicyError",
    "Progress",
    "PromptTemplate",
    "ProxyLLM",
    "Pruned",
    "Queue",
    "Rejection",
    "ResourcesUpdate",
    "ResumeError",
    "Retention",
    "RewardError",
    "Rollout",
    "RolloutConfig",
    "RolloutRecord",
    "RolloutRejectedError",
    "RunConfig",
    "Runner",
    "RunnerConfig",
    "RunnerStatistics",
    "SFTAlgorithm",
    "SFTConfig",
    "SFTResult",
    "ServerError",
    "Span",
    "SpanEvent",
    "StoreAuthError",
    "StoreClosedError",
    "StoreError",
    "StoreFullError",
    "StoreLostError",
    "StoreServerError",
    "TokenTree",
    "TrainConfig",
    "Trainer",
    "Training",
    "TrainingResult",
    "TrainingSample",
    "TrainingStopped",
    "Trajectory",
    "Transition",
    "UnfaithfulSampleError",
    "UnknownTokensError",
    "Unset",
    "WarmStartConfig",
    "Worker",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "evaluate",
    "find_final_reward",
    "find_reward_spans",
    "get_reward_value",
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
