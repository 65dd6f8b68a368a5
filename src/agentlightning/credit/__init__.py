"""Credit assignment: how much better than expected each call of a rollout was."""

from agentlightning.credit.base import Credit, CreditContext, CreditRule, canonical_credit, credit_rule, register
from agentlightning.credit.memory import CreditMemory
from agentlightning.credit.normalizer import Aggregate, ConstantNormalizer
from agentlightning.credit.rules import (
    DiscountedCredit,
    GraphCredit,
    GroupRelativeCredit,
    GroupStepCredit,
    IntermediateCredit,
    LeaveOneOutCredit,
    ReinforceCredit,
    StateValueCredit,
)
from agentlightning.credit.training_samples import (
    CreditReport,
    group_trajectories,
    is_target,
    rejections,
    training_samples,
)

__all__ = [
    "Aggregate",
    "ConstantNormalizer",
    "Credit",
    "CreditContext",
    "CreditMemory",
    "CreditReport",
    "CreditRule",
    "DiscountedCredit",
    "GraphCredit",
    "GroupRelativeCredit",
    "GroupStepCredit",
    "IntermediateCredit",
    "LeaveOneOutCredit",
    "ReinforceCredit",
    "StateValueCredit",
    "canonical_credit",
    "credit_rule",
    "group_trajectories",
    "is_target",
    "register",
    "rejections",
    "training_samples",
]
