"""Credit rules, one file each."""

from agentlightning.credit.rules.discounted import DiscountedCredit
from agentlightning.credit.rules.graph import GraphCredit
from agentlightning.credit.rules.group_relative import GroupRelativeCredit
from agentlightning.credit.rules.group_step import GroupStepCredit
from agentlightning.credit.rules.hierarchical import HierarchicalCredit
from agentlightning.credit.rules.information_gain import InformationGainCredit
from agentlightning.credit.rules.intermediate import IntermediateCredit
from agentlightning.credit.rules.judge import JudgeCredit
from agentlightning.credit.rules.leave_one_out import LeaveOneOutCredit
from agentlightning.credit.rules.reinforce import ReinforceCredit
from agentlightning.credit.rules.state_value import StateValueCredit
from agentlightning.credit.rules.value import ValueCredit

__all__ = [
    "DiscountedCredit",
    "GraphCredit",
    "GroupRelativeCredit",
    "GroupStepCredit",
    "HierarchicalCredit",
    "InformationGainCredit",
    "IntermediateCredit",
    "JudgeCredit",
    "LeaveOneOutCredit",
    "ReinforceCredit",
    "StateValueCredit",
    "ValueCredit",
]
