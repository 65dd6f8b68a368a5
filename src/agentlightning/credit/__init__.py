"""Credit assignment: how much better than expected each call of a rollout was."""

from agentlightning.credit.agent_rewards import AgentRewards
from agentlightning.credit.assignment import Aggregate, Assignment, ConstantNormalizer, Normalization
from agentlightning.credit.assignment import read_normalization as normalization
from agentlightning.credit.base import (
    Credit,
    CreditContext,
    CreditMemory,
    CreditRule,
    canonical_credit,
    credit_rule,
    register,
)
from agentlightning.credit.rules import (
    DiscountedCredit,
    GroupRelativeCredit,
    HierarchicalCredit,
    InformationGainCredit,
    JudgeCredit,
    ReinforceCredit,
    StateValueCredit,
    ValueCredit,
)
from agentlightning.credit.training_samples import (
    CreditReport,
    group_trajectories,
    is_target,
    rejections,
    training_samples,
)

__all__ = [
    "AgentRewards",
    "Aggregate",
    "Assignment",
    "ConstantNormalizer",
    "Credit",
    "CreditContext",
    "CreditMemory",
    "CreditReport",
    "CreditRule",
    "DiscountedCredit",
    "GroupRelativeCredit",
    "HierarchicalCredit",
    "InformationGainCredit",
    "JudgeCredit",
    "Normalization",
    "ReinforceCredit",
    "StateValueCredit",
    "ValueCredit",
    "canonical_credit",
    "credit_rule",
    "group_trajectories",
    "is_target",
    "normalization",
    "register",
    "rejections",
    "training_samples",
]
