"""Credit rules, one file each."""

from agentlightning.credit.rules.discounted import DiscountedCredit
from agentlightning.credit.rules.graph import GraphCredit
from agentlightning.credit.rules.group_relative import GroupRelativeCredit
from agentlightning.credit.rules.group_step import GroupStepCredit
from agentlightning.credit.rules.intermediate import IntermediateCredit
from agentlightning.credit.rules.leave_one_out import LeaveOneOutCredit
from agentlightning.credit.rules.reinforce import ReinforceCredit
from agentlightning.credit.rules.state_value import StateValueCredit

__all__ = [
    "DiscountedCredit",
    "GraphCredit",
    "GroupRelativeCredit",
    "GroupStepCredit",
    "IntermediateCredit",
    "LeaveOneOutCredit",
    "ReinforceCredit",
    "StateValueCredit",
]
