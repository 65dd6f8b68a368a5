"""Which rank computes which trees of a batch: each is whole on one rank, so that no call or rollout is divided."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from agentlightning.policy.update.forward import Forward
from agentlightning.policy.update.packing import Sharing
from agentlightning.trajectory import TrainingSample


def divide(prices: Sequence[float], ranks: int) -> list[list[int]]:
    """For each rank the indices of its items, ascending: the dearest first, each to the rank with the least so far
    (Graham 1969; the dearest rank has at most 4/3 of what the best division gives it). Free items go to nobody."""
    loads = [(0.0, rank) for rank in range(ranks)]
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(prices)), key=lambda i: (-prices[i], i)):
        if prices[index] > 0:
            load, rank = heapq.heappop(loads)
            parts[rank].append(index)
            heapq.heappush(loads, (load + prices[index], rank))
    return [sorted(part) for part in parts]


def prices_of(
    forward: Forward,
    samples: Sequence[TrainingSample],
    *,
    token_budget: int,
    sharing: Sharing = "auto",
    trains_zero_advantage: bool = False,
) -> list[float]:
    """The predicted cost of each tree alone; 0 for one that nothing is learned from."""
    return [
        sum(
            map(
                forward.cost.price,
                forward.plan(
                    [sample],
                    token_budget=token_budget,
                    sharing=sharing,
                    trains_zero_advantage=trains_zero_advantage,
                ),
            )
        )
        for sample in samples
    ]
