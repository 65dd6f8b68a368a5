"""What a reward guard measures in a batch, and the signs of its violations (settings: `[guard]`). Pure functions.

    drift          sup_x |F_now(x) - F_before(x)|, the distance of Kolmogorov and Smirnov between the rewards of a batch
                   and those of the batches before
    disagreement   discordant / (discordant + concordant) over the pairs of one group's rollouts: (1 - gamma) / 2 of
                   Goodman and Kruskal (Journal of the American Statistical Association 49, 1954)

Learning moves rewards slowly; a change of half of all rewards from one step to the next is that of a reward function, a
judge or an environment. Pairs are of one group, because only differences within a group are learned from.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import combinations
from typing import Final

from agentlightning.training.health.sign import Records, Sign

STEPS_BEFORE: Final = 5
"""The number of earlier steps that a batch is compared with ..."""
LEAST_REWARDS: Final = 8
"""... and the fewest rewards on either side: fewer show no distribution."""
LEAST_PAIRS: Final = 10
"""Fewer pairs show no disagreement."""


def distance(now: Sequence[float], before: Sequence[float]) -> float | None:
    """The Kolmogorov-Smirnov distance; None for too few rewards."""
    if min(len(now), len(before)) < LEAST_REWARDS:
        return None
    first, second = sorted(now), sorted(before)
    return max(
        abs(bisect_right(first, value) / len(first) - bisect_right(second, value) / len(second))
        for value in {*first, *second}
    )


def discordance(groups: Sequence[Sequence[tuple[float, float]]]) -> float | None:
    """The share of pairs that two scores order differently, ties left out; None for too few pairs.

    >>> discordance([[(0.0, 1.0), (0.1, 0.9), (0.2, 0.8), (0.3, 0.7), (0.4, 0.6)]])
    1.0
    """
    products = [(a[0] - b[0]) * (a[1] - b[1]) for group in groups for a, b in combinations(group, 2)]
    ordered = [product for product in products if product != 0]
    return sum(product < 0 for product in ordered) / len(ordered) if len(ordered) >= LEAST_PAIRS else None


def out_of_range(records: Records) -> Sign | None:
    """Rewards beyond `guard.low` and `guard.high`."""
    count = records[-1].violations.get("out_of_range")
    return (
        None
        if not count
        else Sign(
            "reward_out_of_range",
            f"{count:.0f} rollouts have a reward out of the range that [guard] allows",
            "mend the reward function, or widen guard.low and guard.high",
        )
    )


def missing(records: Records) -> Sign | None:
    """More rollouts without a usable reward than `guard.max_missing`."""
    share = records[-1].violations.get("missing")
    return (
        None
        if not share
        else Sign(
            "rewards_missing",
            f"{share:.0%} of the finished rollouts have no usable reward",
            "see the first one's reason above; a judge that times out needs more time or fewer calls at once",
        )
    )


def drift(records: Records) -> Sign | None:
    """Rewards of another distribution than those before, by more than `guard.max_drift`."""
    found = records[-1].violations.get("drift")
    return (
        None
        if not found
        else Sign(
            "reward_drift",
            f"the rewards jumped: at some value, the share of rewards up to it differs by {found:.0%} from the"
            f" {STEPS_BEFORE} steps before",
            "check whether the reward function, its judge or the environment has changed",
        )
    )


def disagreement(records: Records) -> Sign | None:
    """Two rewards that prefer different rollouts, by more than `guard.max_disagreement`."""
    share = records[-1].violations.get("disagreement")
    return (
        None
        if not share
        else Sign(
            "reward_disagreement",
            f"the two rewards that [guard] compares order {share:.0%} of the pairs of rollouts differently",
            "read rollouts that they disagree about (`agl store show ROLLOUT`): one of the two is exploited or wrong",
        )
    )
