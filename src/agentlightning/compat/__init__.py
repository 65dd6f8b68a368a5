"""Names of the 0.x API whose work other parts do here: adapters, hooks, a store server, a runner, algorithms.

`agl.NAME` finds them, too, and names that were at the top of the package before.
"""

from __future__ import annotations

import warnings
from importlib import import_module

from agentlightning.util.stubs import stub_names

NAMES = stub_names(__name__)
"""Each name of 0.x beside those at the top -> the module that defines it."""
MOVED = {
    "algorithms.sft": "SFTResult",
    "algorithms.training": "Collected RolloutReport RolloutRequest RolloutSource Stage",
    "chat.base": "ChatFormat",
    "config": (
        "APOConfig AlgorithmConfig BeamSearchConfig Branching CurriculumConfig DPOConfig DataConfig EvaluationConfig "
        "GateConfig GatewayConfig GepaSearchConfig LightningRLConfig OptimizerConfig PolicyConfig PromptModel "
        "RejectionSamplingConfig RewardGuard RunConfig RunnerConfig SFTConfig SearchBudget SequentialConfig "
        "TinkerConfig TrackingConfig TurnLimit WarmStartConfig WeightsConfig"
    ),
    "credit.rejection": "Rejection",
    "errors": (
        "AgentError AgentLightningError AgentTimeoutError ConfigError ConflictError ContextLengthError DatasetError "
        "ExtensionError MissingExtraError MissingRewardError ModelNotFoundError NotFoundError PolicyError RankError "
        "ResumeError RewardError RewardServiceError RolloutRejectedError ServerError StoreAuthError StoreClosedError "
        "StoreError StoreFullError StoreLostError StoreServerError StoreVersionError TrainingStopped "
        "UnfaithfulSampleError UnknownTokensError"
    ),
    "evaluation.intervals": "Comparison Gain",
    "evaluation.sequential": "NullTest PairedSequentialTest",
    "hierarchy": "LevelStep",
    "policy.base": "Capabilities Policy UpdateOptions",
    "policy.learner": "Learner",
    "policy.losses": "NLLLoss PPOLoss",
    "recording.instrumentors": "Instrumentation",
    "recording.session": "CriticalPath Session",
    "rescorer": "Rescoring",
    "rewards.judges": "JudgedRollout",
    "runner": "JobTemplate RunnerStatistics",
    "store.trajectory_query": "TrajectoryQuery",
    "store.types": "Pruned Queue RolloutRecord UNSET Unset",
    "task": "DatasetKind",
    "tracing.air": "air_rule",
    "tracing.outbox": "RecordingStatus",
    "training.callbacks": "FinishedStep",
    "training.dry_run": "DryRun DryRunCheck DryRunRollout",
    "training.governance": "AuditRecord read_audit",
    "training.report.result": "Cost RecordedResult StageResult",
    "trajectory": "Node Step TokenTree TrainingSample",
    "util.kept_sets": "KeptSets",
    "util.progress": "Progress RolloutCounts",
}
"""Module -> the names of it that were at the top."""


def __getattr__(name: str) -> object:
    if name not in NAMES:
        raise AttributeError(f"module 'agentlightning.compat' has no attribute {name!r}")
    return getattr(import_module(NAMES[name]), name)


def find(name: str) -> object:
    """What `agl.NAME` was. Raises AttributeError for what it never was."""
    module = next((module for module, names in MOVED.items() if name in names.split()), None)
    if module is None:
        raise AttributeError(f"module 'agentlightning' has no attribute {name!r}")
    warnings.warn(f"agl.{name} is agentlightning.{module}.{name} now", DeprecationWarning, stacklevel=3)
    return getattr(import_module(f"agentlightning.{module}"), name)
