"""Credit assignment: how much better than expected each call of a rollout was."""

from agentlightning.credit.base import Credit, CreditRule, canonical_credit, credit_rule, register
from agentlightning.credit.discounted import DiscountedCredit
from agentlightning.credit.group_relative import GroupRelativeCredit
from agentlightning.credit.normalizer import Aggregate, ConstantNormalizer
from agentlightning.credit.reinforce import ReinforceCredit
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
    "CreditReport",
    "CreditRule",
    "DiscountedCredit",
    "GroupRelativeCredit",
    "ReinforceCredit",
    "canonical_credit",
    "credit_rule",
    "group_trajectories",
    "is_target",
    "register",
    "rejections",
    "training_samples",
]
