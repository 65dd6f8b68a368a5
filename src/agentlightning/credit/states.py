"""Which calls of a group were made in the same state.

The state of a call is what its agent had observed last (`Transition.state`). Below a similarity of 1, states whose
observations have nearly the same words are one: greedily, each joins the most frequent earlier one that is similar
enough, by the overlap of their words (Dice 1945)

    similarity(a, b) = 2 |a & b| / (|a| + |b|)                     words counted as often as they occur
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentlightning.credit.base import Group
from agentlightning.trajectory import Transition

StateKeys = list[list[str]]
"""For each rollout of a group, the state of each of its calls."""


def state_keys(group: Group, similarity: float = 1.0) -> StateKeys:
    """The states of a group's calls. Those of different agents are different."""
    keys = [[f"{call.agent or ''}/{call.state}" for call in trajectory.transitions] for trajectory in group]
    if similarity >= 1.0:
        return keys
    calls = [call for trajectory in group for call in trajectory.transitions]
    merged = _merged(
        Counter(key for own in keys for key in own), dict(zip(_flat(keys), calls, strict=True)), similarity
    )
    return [[merged[key] for key in own] for own in keys]


def history_keys(keys: Sequence[str], order: int) -> list[str]:
    """Each state of a rollout together with the `order` states before it; `^` stands for the beginning."""
    if not order:
        return list(keys)
    padded = ["^"] * order + list(keys)
    return [" ".join(padded[place : place + order + 1]) for place in range(len(keys))]


def repeated_states(keys: StateKeys, known: Container[str] = ()) -> tuple[int, int]:
    """Of the calls after the first of each rollout, those whose state two rollouts of the group or more were in, or is
    `known`; and all.

    >>> repeated_states([["start", "a", "b"], ["start", "a", "c"]])
    (2, 4)
    """
    visitors = Counter(key for own in keys for key in set(own))
    later = [key for own in keys for key in own[1:]]
    return sum(visitors[key] > 1 or key in known for key in later), len(later)


def _flat(keys: StateKeys) -> list[str]:
    return [key for own in keys for key in own]


@dataclass(frozen=True, slots=True)
class _Words:
    agent: str | None
    counts: Counter[str]
    total: int

    def similarity(self, other: _Words) -> float:
        return 2 * (self.counts & other.counts).total() / max(1, self.total + other.total)


def _merged(frequency: Counter[str], calls: Mapping[str, Transition], similarity: float) -> dict[str, str]:
    """By state, the one that stands for it. The order of rollouts makes no difference."""
    found: dict[str, str] = {}
    kept: dict[str, _Words] = {}
    for key in sorted(frequency, key=lambda key: (-frequency[key], key)):
        own = _words(calls[key])
        alike = (name for name, words in kept.items() if words.agent == own.agent and _alike(own, words, similarity))
        found[key] = next(alike, key)
        if found[key] == key:
            kept[key] = own
    return found


def _alike(left: _Words, right: _Words, similarity: float) -> bool:
    bound = 2 * min(left.total, right.total) / max(1, left.total + right.total)
    return bound >= similarity and left.similarity(right) >= similarity


def _words(call: Transition) -> _Words:
    observation = call.observation
    words = json.dumps(_texts(observation)).split() if observation else map(str, call.prompt_token_ids)
    counts = Counter(words)
    return _Words(call.agent, counts, counts.total())


def _texts(value: Any) -> Any:
    """The values of JSON tables without their names, which all observations share."""
    if isinstance(value, dict):
        return [_texts(inner) for inner in value.values()]
    return [_texts(inner) for inner in value] if isinstance(value, list) else value
