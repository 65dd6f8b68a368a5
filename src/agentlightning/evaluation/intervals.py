"""Confidence intervals of means, which keep some width when all values are equal. Pure.

The interval is Student's, after adding two imaginary tasks to those measured: one with the worst value possible and
one with the best. With n values x in [low, high], and N = n + 2:

    m = (sum(x) + low + high) / N            v = (sum(x^2) + low^2 + high^2) / N  -  m^2
    interval = m +- t(n - 1) * sqrt(v / N),  cut to [low, high]

Pseudo-observations are the correction of Agresti and Coull (The American Statistician 52, 1998) for a proportion, and
of Agresti and Caffo (54, 2000) and Agresti and Min (Statistics in Medicine 24, 2005) for differences, applied to any
bounded value. The interval of 128 equal gains then has some width, as it should: a task in a hundred that behaves
differently is easily missed. A bootstrap of those 128 would claim certainty.

Paired differences are judged by the sign-flip test (permutation.py). Their interval is the test's inversion where they
take many values. Where they take few, so that most are ties, it is the one above, with a task as bad and one as good as
the largest difference seen. Either way 0 (or a tolerated loss) is outside the interval exactly where the test rejects
it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from agentlightning.errors import ConfigError, RewardError
from agentlightning.evaluation.permutation import DIGITS, sign_flip_limits, sign_flip_p_value

Interval = tuple[float, float]
EDGE = 1e-6
"""By how much of the largest difference an interval excludes a mean that is rejected only just."""


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
    null: float = 0.0,
) -> Gain:
    """The mean of after - before, task by task, with its confidence interval.

    None is a task without a reward. The means are those of the tasks with both rewards; the interval covers any rewards
    within the bounds that the others could have had, and excludes `null` exactly where the test rejects it. `bounds`:
    the lowest and highest possible reward; None as in `mean_interval`. Raises RewardError if there is no pair, if the
    numbers of tasks differ, or for a reward that is not finite or out of bounds.
    """
    if len(before) != len(after):
        raise RewardError(f"{len(before)} rewards before and {len(after)} after make no pairs; measure the same tasks")
    pairs = [(b, a) for b, a in zip(before, after, strict=True) if b is not None and a is not None]
    if not pairs:
        raise RewardError("no task has a reward both before and after; nothing can be compared")
    low, high = reward_bounds([value for value in (*before, *after) if value is not None], bounds)
    least = [_or(a, low) - _or(b, high) for b, a in zip(before, after, strict=True)]
    most = [_or(a, high) - _or(b, low) for b, a in zip(before, after, strict=True)]
    return Gain(
        before=_mean([b for b, _ in pairs]),
        after=_mean([a for _, a in pairs]),
        gain=_mean([a - b for b, a in pairs]),
        interval=paired_test(least, most, high - low, confidence, null)[0],
        tasks=len(pairs),
        missing_before=sum(value is None for value in before),
        missing_after=sum(value is None for value in after),
    )


def paired_test(
    least: Sequence[float], most: Sequence[float], span: float, confidence: float, null: float = 0.0
) -> tuple[Interval, float]:
    """The interval of the mean of differences that lie between `least` and `most`, and within -span and span; and the
    two-sided p-value of a mean of `null`, the largest that such differences can have.

    The interval excludes `null` exactly where the p-value is below 1 - confidence.
    """
    (low, high), p_value, above = _paired_test(least, span, confidence, null)
    if most != least:
        (_, high), other, rises = _paired_test(most, span, confidence, null)
        p_value = p_value if above else 1.0 if rises else other
    return (low, high), p_value


def _paired_test(
    differences: Sequence[float], span: float, confidence: float, null: float
) -> tuple[Interval, float, bool]:
    """The interval, the p-value, and whether the mean is above `null`."""
    largest = max(map(abs, differences)) or span
    if len({round(value / largest, DIGITS) for value in differences}) <= len(differences) / 2:
        center, half = _center_and_half([*differences, -largest, largest], len(differences), confidence)
        low, high = center - half, center + half
    else:
        low, high = sign_flip_limits(differences, 1 - confidence)
    shifted = [value - null for value in differences]
    p_value, above = sign_flip_p_value(shifted), math.fsum(shifted) > 0
    if p_value >= 1 - confidence:
        low, high = min(low, null), max(high, null)
    elif above:
        low = max(low, null + EDGE * largest)
    else:
        high = min(high, null - EDGE * largest)
    return (max(-span, low), min(span, high)), p_value, above


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


def widened(bounds: Interval | None, values: Sequence[float], failed_as: object = None) -> Interval:
    """The bounds, or those of `reward_bounds`, with every value seen within; `failed_as` is one if it is a number."""
    if isinstance(failed_as, int | float):
        values = [*values, failed_as]
    if bounds is None or not values:
        return reward_bounds(values)
    return min(bounds[0], *values), max(bounds[1], *values)


def check_bounds(bounds: Interval | None) -> None:
    """Raises ConfigError unless the bounds are two finite numbers, the lower one first."""
    if bounds is not None and not -math.inf < bounds[0] < bounds[1] < math.inf:
        raise ConfigError(f"bounds={bounds} are not the lowest and the highest reward possible; give such as (0, 100)")


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def bounded_interval(values: Sequence[float], low: float, high: float, confidence: float) -> Interval:
    """The interval of the module's head, for values between low and high."""
    center, half = _center_and_half([*values, low, high], len(values), confidence)
    return max(low, center - half), min(high, center + half)


def _center_and_half(padded: Sequence[float], count: int, confidence: float) -> tuple[float, float]:
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence={confidence} is not between 0 and 1; 0.95 is usual")
    center = _mean(padded)
    variance = _mean([(value - center) ** 2 for value in padded])
    half = student_quantile((1 + confidence) / 2, max(1, count - 1)) * math.sqrt(variance / len(padded))
    return center, half


def student_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t. Up to 30 degrees of freedom from the distribution itself (Abramowitz and Stegun 26.7.3
    and 26.7.4), above by their expansion 26.7.5, which is then exact to seven digits."""
    if degrees <= 30:
        low, high = 0.0, math.pi / 2
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if _student_share(middle, degrees) < abs(2 * probability - 1) else (low, middle)
        return math.copysign(math.tan(low) * math.sqrt(degrees), probability - 0.5)
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, 1))


def _student_share(angle: float, degrees: int) -> float:
    """The probability that |t| is at most sqrt(degrees) tan(angle)."""
    odd = degrees % 2
    term, total = (math.cos(angle), 0.0) if odd else (1.0, 0.0)
    for step in range(1 + odd, degrees, 2):
        total += term
        term *= step / (step + 1) * math.cos(angle) ** 2
    return (angle + math.sin(angle) * total) * 2 / math.pi if odd else math.sin(angle) * total
