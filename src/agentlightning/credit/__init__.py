"""Credit assignment: how much better than expected each call of a rollout was."""

from agentlightning.credit.base import CreditRule, credit_rule, register
from agentlightning.credit.reinforce import ReinforceCredit
from agentlightning.credit.samples import (
    Aggregate,
    CreditReport,
    group_trajectories,
    is_target,
    rejections,
    training_samples,
)
from agentlightning.credit.uniform import UniformCredit

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
