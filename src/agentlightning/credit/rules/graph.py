"""Graph credit: whether a call brought its rollout nearer to a success of the group (GraphGPO).

All rollouts of a group are merged into one graph: a node for each state, an edge for each call, and the goal behind the
last call of each success. With d(s) the number of edges on the shortest path from s to the goal,

    G_t = scale * gamma^d(s_{t+1}),  0 where no path leads to the goal
    A_t = (G_t - mean(G)) / std(G)                          over all calls of the group in state s_t

"Beyond Trajectory-Level Attribution", 2026 (arXiv:2605.26684). It gives credit to steps of failed rollouts that lead
where others succeeded, and takes a group without a success, or without a failure or detour, as one that teaches
nothing.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import ClassVar, Literal

from pydantic import Field

from agentlightning.credit.base import (
    SMALLEST_SPREAD,
    Advantages,
    Group,
    OutcomeRule,
    final_rewards,
    register,
    spread,
)
from agentlightning.credit.rules.group_step import within_states
from agentlightning.credit.states import StateKeys, state_keys

GOAL, FAILURE = "goal", "failure"
"""Nodes of the graph that are no state of an agent: those contain a slash."""


@register
class GraphCredit(OutcomeRule):
    """The distance to success after a call, against the other calls in the same state."""

    type: Literal["graph"] = "graph"  # pyright: ignore[reportIncompatibleVariableOverride]
    aliases: ClassVar[tuple[str, ...]] = ("graphgpo",)
    gamma: float = Field(default=0.1, gt=0, lt=1)
    """What a state is worth that is one call further from the goal."""
    scale: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """The worth of the goal."""
    success: float | None = Field(default=None, allow_inf_nan=False)
    """Rollouts with this reward or more succeeded. None: those with the highest reward of their group."""
    similarity: float = Field(default=1.0, gt=0, le=1)
    """States are the same from this similarity of their observations on; 1: only equal ones."""
    normalize_std: bool = True
    """Divide by the standard deviation within a state."""

    def advantages(self, group: Group) -> Advantages | None:
        for trajectory in group:
            self.check(trajectory)
        keys = state_keys(group, self.similarity)
        ends = [GOAL if success else FAILURE for success in self._successes(group)]
        after = [[*own[1:], end] for own, end in zip(keys, ends, strict=True)]
        distance = distances(keys, after)
        if len(group) < self.min_group or GOAL not in ends:
            return None
        worth = [[self._worth(distance.get(state)) for state in own] for own in after]
        found = within_states(keys, worth, divide=self.normalize_std)
        return [tuple(own) for own in found] if any(map(any, found)) else None

    def _successes(self, group: Group) -> list[bool]:
        rewards = final_rewards(group)
        if self.success is None and (not rewards or spread(rewards) <= SMALLEST_SPREAD):
            return [False] * len(rewards)
        threshold = max(rewards, default=0.0) if self.success is None else self.success
        return [reward >= threshold for reward in rewards]

    def _worth(self, distance: int | None) -> float:
        return 0.0 if distance is None else self.scale * self.gamma**distance


def distances(keys: StateKeys, after: StateKeys) -> dict[str, int]:
    """By state, the number of calls on the shortest way to the goal; states without a way are left out."""
    before: dict[str, set[str]] = defaultdict(set)
    for own, following in zip(keys, after, strict=True):
        for source, target in zip(own, following, strict=False):
            before[target].add(source)
    found, waiting = {GOAL: 0}, deque([GOAL])
    while waiting:
        state = waiting.popleft()
        for source in before[state]:
            if source not in found:
                found[source] = found[state] + 1
                waiting.append(source)
    return found
