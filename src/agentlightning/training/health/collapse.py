"""The echo trap: a policy that collapses, found before its reward falls (RAGEN, Wang et al. 2025, arXiv:2504.20073).

RAGEN found three changes before the reward of collapsing agents fell: rewards within a group vary less, outputs lose
entropy, and the gradient grows. A policy that learns its task shows the first two as well, but the gradient of what is
left to learn stays or shrinks. So all of it is judged together, against the run's own first steps:

    norm of the gradient      median of the last steps >= NORM_GROWTH x median of the first steps
    reward spread in a group  mean of the last steps   <= SPREAD_LEFT x highest mean of as many steps
    entropy                   mean of the last steps   <= ENTROPY_LEFT x mean of the first steps

The gradient must have grown, and one of the others fallen, while the reward is below LEARNED_SHARE of the highest:
where nearly all is solved, a few odd rollouts make the gradient.
The limits are from runs like those of `benchmarks/collapse.py`, with other seeds: in ten healthy ones the first ratio
stays below 2 until nearly all is solved, while the second falls to 0.5 and the third to 0.3; in twenty collapsing ones
it passes 2 before the reward falls.
"""

from __future__ import annotations

import math
import statistics
from typing import Final

from agentlightning.training.health.sign import WINDOW, Records, Sign, mean_reward, values_of

LEARNED_SHARE: Final = 0.85
FIRST: Final = 5
"""Steps with an update that the run is compared with."""
LAST: Final = 4
"""Steps with an update that are judged: a gradient of one of them is an odd batch."""
NORM_GROWTH: Final = 2.0
SPREAD_LEFT: Final = 0.75
ENTROPY_LEFT: Final = 0.6


def echo_trap(records: Records) -> Sign | None:
    """The gradient has grown while rewards within groups, or outputs, vary less."""
    updated = [record for record in records if record.grad_norm is not None]
    if len(updated) < FIRST + LAST or records[-1].grad_norm is None:
        return None
    norms = values_of(updated, lambda record: record.grad_norm)
    first, last = statistics.median(norms[:FIRST]), statistics.median(norms[-LAST:])
    if last < NORM_GROWTH * first or _is_learned(records):
        return None
    fallen = [each for each in (_fallen_spread(updated), _fallen_entropy(updated)) if each is not None]
    if not fallen:
        return None
    return Sign(
        "echo_trap",
        f"the policy begins to collapse: the norm of the gradient grew from {first:.3g} to {last:.3g}, and"
        f" {' and '.join(fallen)}",
        "lower algorithm.optimizer.lr to a third, go back to an earlier checkpoint (run.on_collapse="
        '"rollback" does both), and draw from more tasks',
        is_collapse=True,
    )


def _is_learned(records: Records) -> bool:
    highest = max(values_of(records, lambda record: record.reward_highest), default=math.inf)
    return highest > 0 and mean_reward(records[-WINDOW:]) >= LEARNED_SHARE * highest


def _fallen_spread(records: Records) -> str | None:
    spreads = values_of(records, lambda record: record.reward_std)
    if len(spreads) < FIRST + LAST:
        return None
    means = [statistics.fmean(spreads[i : i + LAST]) for i in range(len(spreads) - LAST + 1)]
    if not means[-1] < SPREAD_LEFT * max(means):
        return None
    return f"the spread of rewards in a group fell from {max(means):.3g} to {means[-1]:.3g}"


def _fallen_entropy(records: Records) -> str | None:
    entropies = values_of(records, lambda record: record.certainty)
    if len(entropies) < FIRST + LAST:
        return None
    first, last = statistics.fmean(entropies[:FIRST]), statistics.fmean(entropies[-LAST:])
    return f"the entropy from {first:.3g} to {last:.3g} nats a token" if last <= ENTROPY_LEFT * first else None
