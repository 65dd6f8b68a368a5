"""Rejections: rollouts that ran but cannot be used, each with the reason it is counted under.

Reading a rollout's spans raises one of `REJECTING` for data that cannot be used, which the rollout source turns into a
`Rejection`. A rejected rollout is excluded, reported once and counted. It never counts as reward 0.0, and a resumed run
runs it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from agentlightning.assemble import TURN_LIMIT, TURN_LIMIT_REACHED
from agentlightning.errors import RewardError, RolloutRejectedError, UnfaithfulSampleError
from agentlightning.trajectory import Trajectory

REJECTING: Final = (RolloutRejectedError, RewardError, UnfaithfulSampleError)
"""Errors for one rollout that cannot be used, each with its `reason`."""
UNREADABLE: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors from spans of an unexpected shape, which agents may have written."""

FAILED: Final = "failed"
"""Not rejected: a rollout that ended without success."""
MISSING_REWARD: Final = "missing_reward"
CALL_LIMIT: Final = "call_limit"
"""It has no reward, because it ended at the limit on its calls."""
MALFORMED_SPANS: Final = "malformed_spans"
NO_POLICY_CALLS: Final = "no_policy_calls"
UNKNOWN_TOKENS: Final = "unknown_tokens"
NO_TARGET_CALLS: Final = "no_target_calls"


@dataclass(frozen=True, slots=True)
class Rejection:
    """One rollout that was excluded.

    >>> from agentlightning.credit.rejection import Rejection
    >>> Rejection("ro-1", reason="missing_reward", message="it emitted none").reason
    'missing_reward'
    """

    rollout_id: str
    reason: str
    """What it is counted under: a short identifier."""
    message: str
    """What is wrong with it, and the way out."""


Check = Callable[[Sequence[Trajectory]], Iterable[Rejection]]
"""Says which trajectories an algorithm cannot learn from."""


def without_reward(trajectory: Trajectory, message: str) -> Rejection:
    """Rejects a rollout without a reward: for `message`, unless it is known to have ended too early to have one."""
    if TURN_LIMIT_REACHED not in trajectory.metadata:
        return Rejection(trajectory.rollout_id, MISSING_REWARD, message)
    limit = trajectory.metadata.get(TURN_LIMIT, "some")
    message = (
        f"it was refused a call after {limit} answers (runner.max_calls, or curriculum.turns), and ended without a"
        " reward: end the loop of the agent earlier, raise the limit, or give such rollouts a reward (curriculum.turns)"
    )
    return Rejection(trajectory.rollout_id, CALL_LIMIT, message)


def rejection(rollout_id: str, error: Exception) -> Rejection:
    """What an error of `REJECTING` or `UNREADABLE` makes of a rollout."""
    if isinstance(error, REJECTING):
        return Rejection(rollout_id, error.reason, str(error))
    message = f"the spans of rollout {rollout_id} cannot be read: {type(error).__name__}: {error}"
    return Rejection(rollout_id, MALFORMED_SPANS, message)


def count_reasons(rejections: Iterable[Rejection]) -> dict[str, int]:
    """How many were rejected for each reason, the most frequent first."""
    return dict(Counter(each.reason for each in rejections).most_common())


def describe_reasons(counts: Mapping[str, int]) -> str:
    """`3 missing reward, 1 bad reward`."""
    return ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in counts.items())
