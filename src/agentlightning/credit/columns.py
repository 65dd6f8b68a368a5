"""Columns of token trees, call by call: what a policy computed, as credit rules read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentlightning.credit.base import Group
from agentlightning.trajectory import FloatArray, TokenTree, Trajectory


def by_call(
    trees: Sequence[TokenTree], column: Sequence[tuple[FloatArray, ...]]
) -> Mapping[tuple[str, str], FloatArray]:
    """By (rollout_id, span_id), the column's numbers for all tokens of the call, in their order."""
    import numpy as np

    parts: dict[tuple[str, str], list[FloatArray]] = {}
    for tree, arrays in zip(trees, column, strict=True):
        for node, array in zip(tree.nodes, arrays, strict=True):
            if node.sampled:
                parts.setdefault((node.rollout_id or "", node.call or ""), []).append(array)
    return {call: np.concatenate(own) for call, own in parts.items()}


def by_node(tree: TokenTree, calls: Mapping[tuple[str, str], FloatArray]) -> list[FloatArray]:
    """The inverse of `by_call`: the numbers of each node's tokens, 0 for calls that have none."""
    import numpy as np

    found: list[FloatArray] = []
    done: dict[tuple[str, str], int] = {}
    for node in tree.nodes:
        length = len(node.token_ids) if node.sampled else 0
        call = node.rollout_id or "", node.call or ""
        start = done.get(call, 0)
        done[call] = start + length
        found.append(calls[call][start : start + length] if length and call in calls else np.zeros(length, np.float32))
    return found


def answering(group: Group, answers: Mapping[str, Sequence[int]]) -> list[Trajectory]:
    """The same calls, each with the answer of its rollout (by rollout_id, token ids) in place of what was sampled."""
    return [
        replace(
            each,
            transitions=tuple(
                replace(
                    call,
                    response_token_ids=tuple(answers[each.rollout_id]),
                    logprobs=(0.0,) * len(answers[each.rollout_id]),
                    versions=(),
                    replays=None,
                    temperature=1.0,
                    kept_sets=None,
                )
                for call in each.transitions
            ),
        )
        for each in group
    ]


def monte_carlo_returns(returns: Sequence[Sequence[float]], group: Group) -> list[list[Any]]:
    """For a value head: every token of a call learns the return from the call on."""
    import numpy as np

    return [
        [np.full(len(call.response_token_ids), gain) for call, gain in zip(each.transitions, own, strict=True)]
        for each, own in zip(group, returns, strict=True)
    ]
