"""From spans to what an algorithm learns from: transitions, trajectories, token trees.

Pure functions over spans that were already read; they do no I/O and know no store. Trajectory readers call `trajectory`
for every rollout and hand groups of them to `agentlightning.credit`, which calls `token_tree`.
"""

from agentlightning.assemble.model_calls import calls
from agentlightning.assemble.trajectories import (
    AUTOMATIC_REWARDS,
    OTHER_MODELS,
    OVERRIDDEN_CALLS,
    REPLAY_MISMATCHES,
    REPLAYED_CALLS,
    SEEDED_CALLS,
    TURN_LIMIT,
    TURN_LIMIT_REACHED,
    UNTRAINABLE_CALLS,
    VOID_CALLS,
    VOID_REASON,
    link_rewards,
    scalar_reward,
    steps,
    trajectory,
)
from agentlightning.assemble.tree import shared_calls, token_tree

__all__ = [
    "AUTOMATIC_REWARDS",
    "OTHER_MODELS",
    "OVERRIDDEN_CALLS",
    "REPLAYED_CALLS",
    "REPLAY_MISMATCHES",
    "SEEDED_CALLS",
    "TURN_LIMIT",
    "TURN_LIMIT_REACHED",
    "UNTRAINABLE_CALLS",
    "VOID_CALLS",
    "VOID_REASON",
    "calls",
    "link_rewards",
    "scalar_reward",
    "shared_calls",
    "steps",
    "token_tree",
    "trajectory",
]
