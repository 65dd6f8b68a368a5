"""Credit assignment: how much better than expected each call of a rollout was."""

from agentlightning.credit.base import CreditRule, credit_rule, register
from agentlightning.credit.group_relative import UniformCredit
from agentlightning.credit.reinforce import ReinforceCredit
from agentlightning.credit.training_samples import (
    Aggregate,
    CreditReport,
    group_trajectories,
    is_target,
    rejections,
    training_samples,
)

__all__ = [
    "Aggregate",
    "CreditReport",
    "CreditRule",
    "ReinforceCredit",
    "UniformCredit",
    "credit_rule",
    "group_trajectories",
    "is_target",
    "register",
    "rejections",
    "training_samples",
]
