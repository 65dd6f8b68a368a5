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
from typing import Any

from agentlightning.credit.base import Group, returns_to_go, step_reward
from agentlightning.trajectory import Transition

StateKeys = list[list[str]]
"""For each rollout of a group, the state of each of its calls."""


def state_keys(group: Group, similarity: float = 1.0) -> StateKeys:
    """The states of a group's calls. Those of different agents are different."""
    keys = [[f"{call.agent or ''}/{call.state}" for call in trajectory.transitions] for trajectory in group]
    if similarity >= 1.0:
        return keys
    every = [key for own in keys for key in own]
    calls = (call for trajectory in group for call in trajectory.transitions)
    merged = _merged(Counter(every), dict(zip(every, calls, strict=True)), similarity)
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


def _merged(frequency: Counter[str], calls: Mapping[str, Transition], similarity: float) -> dict[str, str]:
    """By state, the one that stands for it. The order of rollouts makes no difference."""
    found: dict[str, str] = {}
    kept: dict[str, tuple[str | None, Counter[str]]] = {}
    for key in sorted(frequency, key=lambda key: (-frequency[key], key)):
        agent, own = calls[key].agent, _words(calls[key])
        alike = (name for name, (other, words) in kept.items() if other == agent and _alike(own, words, similarity))
        found[key] = next(alike, key)
        if found[key] == key:
            kept[key] = agent, own
    return found


def _alike(left: Counter[str], right: Counter[str], similarity: float) -> bool:
    sizes = left.total(), right.total()
    total = max(1, sum(sizes))
    return 2 * min(sizes) / total >= similarity and 2 * (left & right).total() / total >= similarity


def _words(call: Transition) -> Counter[str]:
    observation = call.observation
    return Counter(json.dumps(_texts(observation)).split() if observation else map(str, call.prompt_token_ids))


def _texts(value: Any) -> Any:
    """The values of JSON tables without their names, which all observations share."""
    if isinstance(value, dict):
        return [_texts(inner) for inner in value.values()]
    return [_texts(inner) for inner in value] if isinstance(value, list) else value


# -- evidence --------------------------------------------------------------------------------------------------------

# Which prediction of returns is better, measured on returns that were not used to make it.
#
# For a call with return G_t, in a rollout i of a group:
#
# - `mean`: the mean return of the group's other rollouts, less the step rewards that i has had before the call;
# - `states`: the mean return of all visits of the state but that of i, earlier groups included; where there are none,
#   `mean`;
# - `critic`: the value of the policy's head, computed before anything is learned from the group.
#
# Their squared errors are added up over the calls after the first of each rollout (all rollouts share the first state),
# and over groups; an error counts `decay` as much one group later. The sums are in the credit memory, so that a
# checkpoint has them. Choosing between predictions by their error on data that neither was fit to: Stone 1974,
# "Cross-validatory choice and assessment of statistical predictions".

EVIDENCE = ("evidence_calls", "evidence_mean", "evidence_states", "evidence_critic")
"""The number of predictions, and the sum of the squared errors of each kind."""
TABLE, ROW = "hierarchical/evidence", "errors"
"""Their place in the memory. One table: a critic is one for all tasks."""
SMALLEST = 1e-6
"""Visits that count for less are none."""


def squared_errors(
    group: Group, keys: StateKeys, earlier: Mapping[str, Sequence[float]], values: Sequence[Sequence[float]]
) -> list[float]:
    """`EVIDENCE` of a group. `earlier`: by state, what the visits of earlier groups count for and their mean return;
    `values`: the critic's, of each call."""
    returns = [returns_to_go(trajectory) for trajectory in group]
    visits = first_visits(keys, returns)
    found = [0.0] * len(EVIDENCE)
    for i, trajectory in enumerate(group):
        others = [own[0] for j, own in enumerate(returns) if j != i and own]
        if not others:
            continue
        mean = sum(others) / len(others)
        for t, call in enumerate(trajectory.transitions):
            if t and call.response_token_ids:  # A call without tokens has no value.
                key, gain = keys[i][t], returns[i][t]
                by_state = _without(i, visits[key], earlier.get(key, (0.0, 0.0)))
                states = mean if by_state is None else by_state
                errors = (1.0, (gain - mean) ** 2, (gain - states) ** 2, (gain - values[i][t]) ** 2)
                found = [a + b for a, b in zip(found, errors, strict=True)]
            mean -= step_reward(call)
    return found


def first_visits(keys: StateKeys, returns: Sequence[Sequence[float]]) -> dict[str, dict[int, float]]:
    """By state, by rollout, the return from its first visit on."""
    found: dict[str, dict[int, float]] = {}
    for i, (own, gains) in enumerate(zip(keys, returns, strict=True)):
        for key, gain in zip(own, gains, strict=True):
            found.setdefault(key, {}).setdefault(i, gain)
    return found


def _without(i: int, visits: Mapping[int, float], earlier: Sequence[float]) -> float | None:
    """The mean return of the visits of a state but those of rollout i; None where there are none."""
    others = [gain for j, gain in visits.items() if j != i]
    count, mean = earlier
    total = len(others) + count
    return (sum(others) + count * mean) / total if total > SMALLEST else None
