"""Agent Lightning: train any AI agent, with almost no change to its code.

Agents: rollout (makes a function an agent), llm_rollout (of (task, llm)), prompt_rollout (of (task,
    prompt_template)), LitAgent (an agent as a class), FunctionAgent (what the decorators make), Runner (runs an agent
    on the rollouts of a store), RunnerStatistics (what it did), JobTemplate (a Kubernetes Job for each attempt), Level
    (an agent as the environment of the agent above it), LevelStep (what it did for one goal).
Training: Trainer (trains an agent), TrainConfig (its settings), TrainingResult (what came of it), Gain (how much
    better, with its interval), DryRun (what a check without training saw), DryRunCheck (one thing that training needs),
    DryRunRollout (a rollout of it), Progress (what is shown meanwhile), RolloutCounts (of what became of rollouts),
    Dataset (tasks), DatasetKind (makes them from an address), LightningRL (reinforcement learning),
    LightningRLConfig (its settings), Sequential (several algorithms in one run), SequentialConfig (its
    settings), Stage (one of them), StageResult (what it gained), Cost (tokens and money), APO (prompt optimisation),
    APOConfig (its settings), PromptModel (of
    critic and editor), SearchBudget, BeamSearchConfig, GepaSearchConfig, SFTAlgorithm (supervised learning), SFTConfig
    (its settings), SFTResult (what it did), RejectionSampling (imitates rollouts that succeeded),
    RejectionSamplingConfig (its settings), DPO (learning from preferences), DPOConfig (its settings), RecordedResult
    (what was learned from recorded sessions), TrajectoryQuery (which of them are demonstrations), Algorithm (the base
    of your own), AlgorithmConfig (of its settings), Training (the run, as an algorithm sees it),
    Callback (code of your own at its points), FinishedStep (what it is given there), RolloutSource (where
    its rollouts come from),
    RolloutRequest (a batch of them), Want (some of one task), BranchPoint (or off another rollout), Collected (what
    came back), Learner (the weights), RolloutReport (a rollout as
    text), Rejection (a rollout that is left out), evaluate (scores an agent), Evaluation (the scores, with an
    interval), Comparison (of two), NullTest (of an agent with itself), PairedSequentialTest (may stop early), rescore
    (a new reward for stored rollouts), Rescoring (what it did), read_audit (what each version was learned from),
    AuditRecord (one of them).
Rewards: RemoteReward (a reward function behind an HTTP endpoint), LLMJudge (a model that scores), RankingJudge (a model
    that ranks a group of rollouts), JudgedRollout (one of them).
Settings: CurriculumConfig, DataConfig, EvaluationConfig, PolicyConfig, RunConfig, RunnerConfig, WarmStartConfig,
    TrackingConfig (experiment trackers), RewardGuard (what rewards must be like), GateConfig (which versions are
    promoted), TurnLimit, Branching, GatewayConfig, OptimizerConfig, Lora (an adapter in place of all weights),
    TinkerConfig (a server that trains), WeightsConfig (where weights are published), PPOLoss, NLLLoss.
What an agent says: emit_reward, emit_prompt, emit_response, emit_completion (its model calls), emit_tool_call,
    emit_step, emit_message, emit_object, emit_exception, emit_annotation, operation (a recorded step), track_agent
    (who is speaking), find_final_reward, find_reward_spans, get_reward_value, air_rule (a rule that rewards steps).
Recording: track_session (a rollout made by your own code), Session (one), carry_session (into a bare thread),
    track_critical_path (records only what is marked), CriticalPath (a marked block), track_all (also what other
    packages instrument), Instrumentation (what it switched on), configure_recording (sampling, redaction, retention),
    flush_recording (writes now), recording_status (what was recorded and lost), RecordingStatus (its counters),
    feedback_link (for people).
The store: LightningStore (opens one, and is what all of them are), InMemoryLightningStore (gone with the process),
    LightningStoreClient (one behind a server), Worker, Queue, Retention, Pruned, RolloutRecord, UNSET (an argument
    not given), Unset (its type).
Names of 0.x: algo (a function as an algorithm), FunctionalAlgorithm (what it makes), Hook (code around each attempt),
    LitAgentRunner (runs an agent), LightningStoreServer (a store over HTTP), OtelTracer, AgentOpsTracer (the spans of
    a block), setup_logging (shows the log), TracerTraceToTriplet, TraceToMessages (spans for algorithms of your own),
    Triplet (one model call).
Data: Rollout, RolloutConfig, EnqueueRolloutRequest, Attempt, AttemptedRollout, Span, SpanEvent, LLM, ProxyLLM,
    PromptTemplate, NamedResources, ResourcesUpdate, Trajectory, Transition, Step, TokenTree, Node, TrainingSample,
    KeptSets (of top-k and top-p), Policy, Capabilities (what it can do), UpdateOptions (how it learns from samples),
    ChatFormat.
Errors, all of them AgentLightningError: AgentLightningError, ConfigError, MissingExtraError, ExtensionError,
    DatasetError, AgentError, AgentTimeoutError, RewardError, MissingRewardError, RewardServiceError,
    RolloutRejectedError, StoreError, NotFoundError, ConflictError, StoreFullError, StoreLostError, StoreClosedError,
    StoreServerError, StoreAuthError, PolicyError, ModelNotFoundError, ContextLengthError, RankError,
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
    from agentlightning.algorithms.apo.algorithm import APO
    from agentlightning.algorithms.apo.config import (
        APOConfig,
        BeamSearchConfig,
        GepaSearchConfig,
        PromptModel,
        SearchBudget,
    )
    from agentlightning.algorithms.base import Algorithm, AlgorithmConfig
    from agentlightning.algorithms.lightning_rl import LightningRL, LightningRLConfig
    from agentlightning.algorithms.preference import DPO, DPOConfig
    from agentlightning.algorithms.sequential import Sequential, SequentialConfig
    from agentlightning.algorithms.sft import (
        RejectionSampling,
        RejectionSamplingConfig,
        SFTAlgorithm,
        SFTConfig,
        SFTResult,
    )
    from agentlightning.algorithms.training import (
        BranchPoint,
        Collected,
        Learner,
        RolloutReport,
        RolloutRequest,
        RolloutSource,
        Stage,
        Training,
        Want,
    )
    from agentlightning.chat.base import ChatFormat
    from agentlightning.compat.adapters import TracerTraceToTriplet, TraceToMessages, Triplet
    from agentlightning.compat.algorithm import FunctionalAlgorithm, algo
    from agentlightning.compat.logging import setup_logging
    from agentlightning.compat.runner import AgentOpsTracer, Hook, LitAgentRunner, OtelTracer
    from agentlightning.compat.store_server import LightningStoreServer
    from agentlightning.config import (
        Branching,
        CurriculumConfig,
        DataConfig,
        EvaluationConfig,
        GateConfig,
        RewardGuard,
        RunConfig,
        RunnerConfig,
        TrackingConfig,
        TrainConfig,
        TurnLimit,
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
        ExtensionError,
        MissingExtraError,
        MissingRewardError,
        ModelNotFoundError,
        NotFoundError,
        PolicyError,
        RankError,
        ResumeError,
        RewardError,
        RewardServiceError,
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
    from agentlightning.evaluation.comparison import Comparison
    from agentlightning.evaluation.evaluation import Evaluation
    from agentlightning.evaluation.intervals import Gain
    from agentlightning.evaluation.sequential import NullTest, PairedSequentialTest
    from agentlightning.evaluator import evaluate
    from agentlightning.gateway.config import GatewayConfig
    from agentlightning.hierarchy import Level, LevelStep
    from agentlightning.policy.base import Capabilities, Policy, UpdateOptions
    from agentlightning.policy.config import Lora, OptimizerConfig, PolicyConfig, TinkerConfig, WeightsConfig
    from agentlightning.policy.losses import NLLLoss, PPOLoss
    from agentlightning.recording.feedback import feedback_link
    from agentlightning.recording.instrumentors import Instrumentation, track_all
    from agentlightning.recording.recorder import flush_recording, recording_status
    from agentlightning.recording.session import (
        CriticalPath,
        Session,
        carry_session,
        track_critical_path,
        track_session,
    )
    from agentlightning.recording.settings import configure_recording
    from agentlightning.rescorer import Rescoring, rescore
    from agentlightning.resources import LLM, NamedResources, PromptTemplate, ProxyLLM, ResourcesUpdate
    from agentlightning.rewards.judges import JudgedRollout, LLMJudge, RankingJudge
    from agentlightning.rewards.remote import RemoteReward
    from agentlightning.rollouts import Attempt, AttemptedRollout, EnqueueRolloutRequest, Rollout, RolloutConfig
    from agentlightning.runner import (
        JobTemplate,
        LitAgent,
        Runner,
        RunnerStatistics,
        llm_rollout,
        prompt_rollout,
        rollout,
    )
    from agentlightning.runner.agents.litagent import FunctionAgent
    from agentlightning.span import Span, SpanEvent
    from agentlightning.store import InMemoryLightningStore, LightningStore
    from agentlightning.store.http.client import LightningStoreClient
    from agentlightning.store.trajectory_query import TrajectoryQuery
    from agentlightning.store.types import UNSET, Pruned, Queue, Retention, RolloutRecord, Unset, Worker
    from agentlightning.task import Dataset, DatasetKind
    from agentlightning.tracing import (
        emit_annotation,
        emit_completion,
        emit_exception,
        emit_message,
        emit_object,
        emit_prompt,
        emit_response,
        emit_reward,
        emit_step,
        emit_tool_call,
        find_final_reward,
        find_reward_spans,
        get_reward_value,
        operation,
        track_agent,
    )
    from agentlightning.tracing.air import air_rule
    from agentlightning.tracing.outbox import RecordingStatus
    from agentlightning.trainer import Trainer
    from agentlightning.training.callbacks import Callback, FinishedStep
    from agentlightning.training.dry_run import DryRun, DryRunCheck, DryRunRollout
    from agentlightning.training.governance import AuditRecord, read_audit
    from agentlightning.training.report.result import Cost, RecordedResult, StageResult, TrainingResult
    from agentlightning.trajectory import Node, Step, TokenTree, TrainingSample, Trajectory, Transition
    from agentlightning.util.kept_sets import KeptSets
    from agentlightning.util.progress import Progress, RolloutCounts

_NAMES = {
    "algorithms.base": "Algorithm AlgorithmConfig",
    "algorithms.apo.algorithm": "APO",
    "algorithms.apo.config": "APOConfig BeamSearchConfig GepaSearchConfig PromptModel SearchBudget",
    "algorithms.lightning_rl": "LightningRL LightningRLConfig",
    "algorithms.sequential": "Sequential SequentialConfig",
    "algorithms.preference": "DPO DPOConfig",
    "algorithms.sft": "RejectionSampling RejectionSamplingConfig SFTAlgorithm SFTConfig SFTResult",
    "algorithms.training": "BranchPoint Collected Learner RolloutReport RolloutRequest RolloutSource Stage Training "
    "Want",
    "chat.base": "ChatFormat",
    "compat.adapters": "TraceToMessages TracerTraceToTriplet Triplet",
    "compat.algorithm": "FunctionalAlgorithm algo",
    "compat.logging": "setup_logging",
    "compat.runner": "AgentOpsTracer Hook LitAgentRunner OtelTracer",
    "compat.store_server": "LightningStoreServer",
    "config": (
        "Branching CurriculumConfig DataConfig EvaluationConfig GateConfig RewardGuard RunConfig RunnerConfig "
        "TrackingConfig TrainConfig TurnLimit WarmStartConfig"
    ),
    "credit.rejection": "Rejection",
    "errors": (
        "AgentError AgentLightningError AgentTimeoutError ConfigError ConflictError ContextLengthError "
        "DatasetError ExtensionError MissingExtraError MissingRewardError ModelNotFoundError NotFoundError PolicyError "
        "ResumeError RewardError RankError RewardServiceError RolloutRejectedError ServerError StoreAuthError "
        "StoreClosedError StoreError StoreFullError StoreLostError StoreServerError TrainingStopped "
        "UnfaithfulSampleError UnknownTokensError"
    ),
    "evaluation.comparison": "Comparison",
    "evaluation.evaluation": "Evaluation",
    "evaluation.intervals": "Gain",
    "evaluation.sequential": "NullTest PairedSequentialTest",
    "evaluator": "evaluate",
    "gateway.config": "GatewayConfig",
    "hierarchy": "Level LevelStep",
    "policy.base": "Capabilities Policy UpdateOptions",
    "policy.config": "Lora OptimizerConfig PolicyConfig TinkerConfig WeightsConfig",
    "policy.losses": "NLLLoss PPOLoss",
    "rescorer": "Rescoring rescore",
    "recording.instrumentors": "Instrumentation track_all",
    "recording.feedback": "feedback_link",
    "recording.recorder": "flush_recording recording_status",
    "recording.settings": "configure_recording",
    "recording.session": "CriticalPath Session carry_session track_critical_path track_session",
    "resources": "LLM NamedResources PromptTemplate ProxyLLM ResourcesUpdate",
    "rewards.judges": "LLMJudge JudgedRollout RankingJudge",
    "rewards.remote": "RemoteReward",
    "rollouts": "Attempt AttemptedRollout EnqueueRolloutRequest Rollout RolloutConfig",
    "runner": "JobTemplate LitAgent Runner RunnerStatistics llm_rollout prompt_rollout rollout",
    "runner.agents.litagent": "FunctionAgent",
    "span": "Span SpanEvent",
    "store.trajectory_query": "TrajectoryQuery",
    "store": "InMemoryLightningStore LightningStore",
    "store.base": "Pruned Queue Retention RolloutRecord UNSET Unset Worker",
    "store.http.client": "LightningStoreClient",
    "task": "Dataset DatasetKind",
    "tracing": (
        "emit_annotation emit_completion emit_exception emit_message emit_object emit_prompt emit_response "
        "emit_reward emit_step emit_tool_call find_final_reward find_reward_spans get_reward_value operation "
        "track_agent"
    ),
    "tracing.air": "air_rule",
    "tracing.outbox": "RecordingStatus",
    "trainer": "Trainer",
    "training.callbacks": "Callback FinishedStep",
    "training.governance": "AuditRecord read_audit",
    "training.dry_run": "DryRun DryRunCheck DryRunRollout",
    "training.report.result": "Cost RecordedResult TrainingResult StageResult",
    "trajectory": "Node Step TokenTree TrainingSample Trajectory Transition",
    "util.kept_sets": "KeptSets",
    "util.progress": "Progress RolloutCounts",
}
"""Module -> the public names it defines."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "APO",
    "DPO",
    "LLM",
    "UNSET",
    "APOConfig",
    "AgentError",
    "AgentLightningError",
    "AgentOpsTracer",
    "AgentTimeoutError",
    "Algorithm",
    "AlgorithmConfig",
    "Attempt",
    "AttemptedRollout",
    "AuditRecord",
    "BeamSearchConfig",
    "BranchPoint",
    "Branching",
    "Callback",
    "Capabilities",
    "ChatFormat",
    "Collected",
    "Comparison",
    "ConfigError",
    "ConflictError",
    "ContextLengthError",
    "Cost",
    "CriticalPath",
    "CurriculumConfig",
    "DPOConfig",
    "DataConfig",
    "Dataset",
    "DatasetError",
    "DatasetKind",
    "DryRun",
    "DryRunCheck",
    "DryRunRollout",
    "EnqueueRolloutRequest",
    "Evaluation",
    "EvaluationConfig",
    "ExtensionError",
    "FinishedStep",
    "FunctionAgent",
    "FunctionalAlgorithm",
    "Gain",
    "GateConfig",
    "GatewayConfig",
    "GepaSearchConfig",
    "Hook",
    "InMemoryLightningStore",
    "Instrumentation",
    "JobTemplate",
    "JudgedRollout",
    "KeptSets",
    "LLMJudge",
    "Learner",
    "Level",
    "LevelStep",
    "LightningRL",
    "LightningRLConfig",
    "LightningStore",
    "LightningStoreClient",
    "LightningStoreServer",
    "LitAgent",
    "LitAgentRunner",
    "Lora",
    "MissingExtraError",
    "MissingRewardError",
    "ModelNotFoundError",
    "NLLLoss",
    "NamedResources",
    "Node",
    "NotFoundError",
    "NullTest",
    "OptimizerConfig",
    "OtelTracer",
    "PPOLoss",
    "PairedSequentialTest",
    "Policy",
    "PolicyConfig",
    "PolicyError",
    "Progress",
    "PromptModel",
    "PromptTemplate",
    "ProxyLLM",
    "Pruned",
    "Queue",
    "RankError",
    "RankingJudge",
    "RecordedResult",
    "RecordingStatus",
    "Rejection",
    "RejectionSampling",
    "RejectionSamplingConfig",
    "RemoteReward",
    "Rescoring",
    "ResourcesUpdate",
    "ResumeError",
    "Retention",
    "RewardError",
    "RewardGuard",
    "RewardServiceError",
    "Rollout",
    "RolloutConfig",
    "RolloutCounts",
    "RolloutRecord",
    "RolloutRejectedError",
    "RolloutReport",
    "RolloutRequest",
    "RolloutSource",
    "RunConfig",
    "Runner",
    "RunnerConfig",
    "RunnerStatistics",
    "SFTAlgorithm",
    "SFTConfig",
    "SFTResult",
    "SearchBudget",
    "Sequential",
    "SequentialConfig",
    "ServerError",
    "Session",
    "Span",
    "SpanEvent",
    "Stage",
    "StageResult",
    "Step",
    "StoreAuthError",
    "StoreClosedError",
    "StoreError",
    "StoreFullError",
    "StoreLostError",
    "StoreServerError",
    "TinkerConfig",
    "TokenTree",
    "TraceToMessages",
    "TracerTraceToTriplet",
    "TrackingConfig",
    "TrainConfig",
    "Trainer",
    "Training",
    "TrainingResult",
    "TrainingSample",
    "TrainingStopped",
    "Trajectory",
    "TrajectoryQuery",
    "Transition",
    "Triplet",
    "TurnLimit",
    "UnfaithfulSampleError",
    "UnknownTokensError",
    "Unset",
    "UpdateOptions",
    "Want",
    "WarmStartConfig",
    "WeightsConfig",
    "Worker",
    "air_rule",
    "algo",
    "carry_session",
    "configure_recording",
    "emit_annotation",
    "emit_completion",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_prompt",
    "emit_response",
    "emit_reward",
    "emit_step",
    "emit_tool_call",
    "evaluate",
    "feedback_link",
    "find_final_reward",
    "find_reward_spans",
    "flush_recording",
    "get_reward_value",
    "llm_rollout",
    "operation",
    "prompt_rollout",
    "read_audit",
    "recording_status",
    "rescore",
    "rollout",
    "setup_logging",
    "track_agent",
    "track_all",
    "track_critical_path",
    "track_session",
]


import_module("agentlightning.compat.modules").install()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("agentlightning")
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'agentlightning' has no attribute {name!r}")
    value = getattr(import_module(f"agentlightning.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
