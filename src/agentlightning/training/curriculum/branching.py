"""Where further rollouts of a group branch off: at answers that the policy is unsure of, after the result of a tool.

With u(call) the mean of -log p over the first tokens of an answer, each an estimate of the entropy it was drawn with, a
rollout may branch at a call if

    u(call) - u(first call) > threshold

(entropy-based adaptive rollouts of ARPO, Dong et al. 2025, arXiv:2507.19849; the paper measures the entropy itself).
The rollouts that a group has left branch at the points where it rises most, in turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentlightning.config import Branching
from agentlightning.trajectory import Trajectory, Transition


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """A call of a finished rollout at which others may branch off."""

    rollout_id: str
    span_ids: tuple[str, ...]
    """The calls before it, whose answers are given again."""
    rise: float
    """Of the uncertainty over that of the first call, in nats a token."""

    def metadata(self) -> dict[str, object]:
        """What the gateway reads of it in the rollout's metadata."""
        return {"rollout_id": self.rollout_id, "span_ids": list(self.span_ids)}


def branch_points(trajectories: Iterable[Trajectory], config: Branching) -> list[BranchPoint]:
    """The points of all rollouts, those with the largest rise first."""
    found = [point for each in trajectories for point in _points(each, config)]
    return sorted(found, key=lambda point: -point.rise)


def choose_points(points: Sequence[BranchPoint], count: int) -> list[BranchPoint | None]:
    """A point for each of `count` rollouts; None, an independent rollout, where there is none."""
    return [points[i % len(points)] if points else None for i in range(count)]


def first_rollouts(group_size: int, config: Branching | None) -> int:
    """How many rollouts of a group run before any branches."""
    return group_size if config is None else max(1, group_size - round(config.share * group_size))


def _points(trajectory: Trajectory, config: Branching) -> Iterable[BranchPoint]:
    calls = trajectory.transitions
    if not calls:
        return
    start = _uncertainty(calls[0], config.tokens)
    for number, call in enumerate(calls):
        rise = _uncertainty(call, config.tokens) - start
        if number and rise > config.threshold and (config.after == "any" or _follows_tool(call)):
            yield BranchPoint(trajectory.rollout_id, tuple(each.span_id for each in calls[:number]), rise)


def _uncertainty(call: Transition, tokens: int) -> float:
    return -statistics.fmean(call.logprobs[:tokens]) if call.logprobs else 0.0


def _follows_tool(call: Transition) -> bool:
    return any(message.get("role") == "tool" for message in call.observation)
