"""Confidence intervals of means, which keep some width when all values are equal. Pure.

The interval is Student's, after adding two imaginary tasks to those measured: one with the worst value possible and
one with the best. With n values x in [low, high], and N = n + 2:

    m = (sum(x) + low + high) / N            v = (sum(x^2) + low^2 + high^2) / N  -  m^2
    interval = m +- t(n - 1) * sqrt(v / N),  cut to [low, high]

Pseudo-observations are the correction of Agresti and Coull (The American Statistician 52, 1998) for a proportion, and
of Agresti and Caffo (54, 2000) and Agresti and Min (Statistics in Medicine 24, 2005) for differences, applied to any
bounded value. The interval of 128 equal gains then has some width, as it should: a task in a hundred that behaves
differently is easily missed. A bootstrap of those 128 would claim certainty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from agentlightning.errors import ConfigError, RewardError

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Gain:
    """The same tasks measured twice."""

    before: float
    """Mean reward."""
    after: float
    gain: float
    """Mean of the paired differences."""
    interval: Interval
    """Confidence interval of the mean paired difference, for any rewards that tasks without one could have had."""
    tasks: int
    """The number of tasks with a reward both before and after, which the means are of."""
    missing_before: int = 0
    """The number of tasks without a reward before: their rollouts failed, or gave none."""
    missing_after: int = 0


def paired_gain(
    before: Sequence[float | None],
    after: Sequence[float | None],
    confidence: float = 0.95,
    bounds: Interval | None = None,
) -> Gain:
    """The mean of after - before, task by task, with its confidence interval.

    None is a task without a reward. The means are those of the tasks with both rewards; the interval covers any rewards
    within the bounds that the others could have had. `bounds`: the lowest and highest possible reward; None as in
    `mean_interval`. Raises RewardError if there is no pair, if the numbers of tasks differ, or for a reward that is not
    finite or out of bounds.
    """
    if len(before) != len(after):
        raise RewardError(f"{len(before)} rewards before and {len(after)} after make no pairs; measure the same tasks")
    pairs = [(b, a) for b, a in zip(before, after, strict=True) if b is not None and a is not None]
    if not pairs:
        raise RewardError("no task has a reward both before and after; nothing can be compared")
    low, high = reward_bounds([value for value in (*before, *after) if value is not None], bounds)
    span = high - low
    least = [_or(a, low) - _or(b, high) for b, a in zip(before, after, strict=True)]
    most = [_or(a, high) - _or(b, low) for b, a in zip(before, after, strict=True)]
    return Gain(
        before=_mean([b for b, _ in pairs]),
        after=_mean([a for _, a in pairs]),
        gain=_mean([a - b for b, a in pairs]),
        interval=(
            bounded_interval(least, -span, span, confidence)[0],
            bounded_interval(most, -span, span, confidence)[1],
        ),
        tasks=len(pairs),
        missing_before=sum(value is None for value in before),
        missing_after=sum(value is None for value in after),
    )


def mean_interval(values: Sequence[float | None], confidence: float = 0.95, bounds: Interval | None = None) -> Interval:
    """Confidence interval of the mean, where None may be any value within the bounds.

    `bounds`: the lowest and highest possible value. None: 0 and 1 if all values lie in between, else the lowest and
    highest value seen. Raises RewardError if there is no value, or for one that is not finite or out of bounds.
    """
    low, high = reward_bounds([value for value in values if value is not None], bounds)
    least, most = [_or(value, low) for value in values], [_or(value, high) for value in values]
    return bounded_interval(least, low, high, confidence)[0], bounded_interval(most, low, high, confidence)[1]


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def reward_bounds(values: Sequence[float], bounds: Interval | None = None) -> Interval:
    """The lowest and highest reward possible: 0 and 1 if all lie in between, else the lowest and highest seen. Raises
    RewardError if there is none, or for one that is not finite or out of given bounds."""
    if not values:
        raise RewardError("no reward was measured, so there is no mean; give at least one task that has a reward")
    for value in values:
        if not math.isfinite(value):
            raise RewardError(f"a reward of {value} has no place in a mean; leave out tasks without a reward")
    low, high = min(values), max(values)
    if bounds is not None:
        if low < bounds[0] or high > bounds[1]:
            raise RewardError(f"rewards from {low} to {high} are out of the bounds {bounds}; widen the bounds")
        return bounds
    if low >= 0 and high <= 1:
        return 0.0, 1.0
    return (low, high) if low < high else (min(low, 0.0), max(high, 0.0))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def bounded_interval(values: Sequence[float], low: float, high: float, confidence: float) -> Interval:
    """The interval of the module's head, for values between low and high."""
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence={confidence} is not between 0 and 1; 0.95 is usual")
    padded = [*values, low, high]
    center = _mean(padded)
    variance = _mean([(value - center) ** 2 for value in padded])
    half = student_quantile((1 + confidence) / 2, max(1, len(values) - 1)) * math.sqrt(variance / len(padded))
    return max(low, center - half), min(high, center + half)


def student_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t (Abramowitz and Stegun 26.7.5): within 0.1% from 4 degrees of freedom on at 95%."""
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, 1))
