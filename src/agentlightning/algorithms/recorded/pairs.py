"""Preference pairs from rewards: of whole sessions of one task, or of branches of one token tree. Pure.

Sessions: one with a higher reward is preferred to one with a lower reward. Branches: calls of a task with the same
prompt tokens lead on to different rewards; an answer is worth the mean reward of the sessions that it belongs to, and
only the tokens of the two answers are compared, so that what both sessions have in common teaches nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal, TypeAlias

from agentlightning.credit import is_target
from agentlightning.trajectory import Trajectory, Transition

PairsOf: TypeAlias = Literal["sessions", "branches"]


@dataclass(frozen=True, slots=True)
class Preference:
    """What is preferred, and what it is preferred to. Their calls are those that are compared."""

    chosen: Trajectory
    rejected: Trajectory
    difference: float
    """By how much the rewards differ."""


def preference_pairs(
    group: Sequence[tuple[Trajectory, float]],
    *,
    of: PairsOf,
    most: int,
    min_difference: float,
    target: str | None,
    rng: random.Random,
) -> list[Preference]:
    """At most `most` pairs of one task's sessions, given with their rewards, the largest differences first; each
    session is used about equally often."""
    candidates = [(_of_target(each, target), reward) for each, reward in group]
    candidates = [(each, reward) for each, reward in candidates if each.transitions]
    found = _pairs(candidates, min_difference) if of == "sessions" else _branches(candidates, min_difference)
    rng.shuffle(found)
    found.sort(key=lambda pair: -pair.difference)
    return _balanced(found, most)


def _pairs(candidates: Sequence[tuple[Trajectory, float]], least: float) -> list[Preference]:
    return [
        Preference(good, bad, high - low)
        for good, high in candidates
        for bad, low in candidates
        if high - low >= least and high > low and _tokens(good) != _tokens(bad)
    ]


def _branches(candidates: Sequence[tuple[Trajectory, float]], least: float) -> list[Preference]:
    """Pairs of answers to the same prompt tokens."""
    worth: dict[tuple[int, ...], dict[tuple[int, ...], list[tuple[Trajectory, Transition, float]]]] = {}
    for trajectory, reward in candidates:
        for call in trajectory.transitions:
            answers = worth.setdefault(call.prompt_token_ids, {})
            answers.setdefault(call.response_token_ids, []).append((trajectory, call, reward))
    found: list[Preference] = []
    for answers in worth.values():
        means = [(*own[0][:2], fmean(reward for *_, reward in own)) for own in answers.values()]
        for good, chosen, high in means:
            for bad, rejected, low in means:
                if high - low >= least and high > low:
                    found.append(Preference(_only(good, chosen), _only(bad, rejected), high - low))
    return found


def _balanced(pairs: Sequence[Preference], most: int) -> list[Preference]:
    """The first pairs, those of sessions that were used least before the others."""
    used: dict[str, int] = {}
    chosen: list[Preference] = []
    left = list(pairs)
    while left and len(chosen) < most:
        best = min(left, key=lambda pair: _uses(pair, used))
        left.remove(best)
        chosen.append(best)
        for each in (best.chosen, best.rejected):
            used[each.rollout_id] = used.get(each.rollout_id, 0) + 1
    return chosen


def _uses(pair: Preference, used: dict[str, int]) -> int:
    return used.get(pair.chosen.rollout_id, 0) + used.get(pair.rejected.rollout_id, 0)


def _tokens(trajectory: Trajectory) -> list[tuple[int, ...]]:
    return [call.response_token_ids for call in trajectory.transitions]


def _only(trajectory: Trajectory, call: Transition) -> Trajectory:
    return replace(trajectory, transitions=(call,))


def _of_target(trajectory: Trajectory, target: str | None) -> Trajectory:
    return replace(trajectory, transitions=tuple(t for t in trajectory.transitions if is_target(t.agent, target)))
