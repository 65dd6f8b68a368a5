"""Confidence intervals of means, which keep some width when all values are equal. Pure.

The interval is Student's, after adding two imaginary tasks to those measured: one with the worst value possible and
one with the best. With n values x in [low, high], and N = n + 2:

    m = (sum(x) + low + high) / N            v = (sum(x^2) + low^2 + high^2) / N  -  m^2
    interval = m +- t(n - 1) * sqrt(v / N),  cut to [low, high]

Pseudo-observations are the correction of Agresti and Coull (The American Statistician 52, 1998) for a proportion, and
of Agresti and Caffo (54, 2000) and Agresti and Min (Statistics in Medicine 24, 2005) for differences, applied to any
bounded value. The interval of 128 equal gains then has some width, as it should: a task in a hundred that behaves
differently is easily missed. A bootstrap of those 128 would claim certainty.

Paired differences are judged by the sign-flip test. Their interval is the test's inversion where they
take many values. Where they take few, so that most are ties, it is the one above, with a task as bad and one as good as
the largest difference seen. Either way 0 (or a tolerated loss) is outside the interval exactly where the test rejects
it.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import compress, product
from typing import Literal

from agentlightning.errors import ConfigError, RewardError

# -- permutation -----------------------------------------------------------------------------------------------------

# The sign-flip test of a mean paired difference, and its inversion: which means it does not reject. Pure.
#
# Where two agents are equal, each difference is as likely negative as positive: the 2^n sums of +-d_i are equally
# likely, and the two-sided p-value is the share of them that is at least as far from 0 as the one observed (Fisher, The
# Design of Experiments, 1935, section 21; Dror et al., ACL 2018, section 3.2). All are counted where their sums take
# few values, as those of rewards of 0 and 1 do. Else 9,999 flips are drawn, with the same seed always, and the observed
# one counts as one more (Phipson and Smyth 2010, equation 2), so that the p-value is never 0.
#
# The flips of the set S reject a mean g below the observed one where |sum of +-(d_i - g)| is at least |sum of d_i - g|:
# where g is at least the mean of S or that of the others. So the limits are quantiles of the means of subsets
# (Hartigan, JASA 64, 1969, typical values).

MOST_SUMS = 4096
"""Above so many different values, sign flips are drawn."""
DRAWS = 9999
DIGITS = 10
"""To which sums are rounded, in units of the largest difference, so that 0.1 + 0.2 is 0.3."""
TOLERANCE = 1e-6
"""Sums that differ by less are equal."""
MOST_ENUMERATED = 10
"""Of so many differences all subsets are counted for the limits; of more, 1,999 are drawn."""
LIMIT_DRAWS = 1999
LAST_BIT = bytes((0, 1)) * 128


def sign_flip_p_value(differences: Sequence[float]) -> float:
    """Two-sided p-value of the mean of the differences; 1 where all are 0, or there is none."""
    largest = max(map(abs, differences), default=0.0)
    if largest == 0:
        return 1.0
    scaled = [each / largest for each in differences if each]
    observed = abs(math.fsum(scaled)) - TOLERANCE
    sizes: Mapping[float, float] = {0.0: 1.0}
    for each in sorted(scaled, key=abs):
        sizes = add_flipped(sizes, abs(each))
        if len(sizes) > MOST_SUMS:
            break
    else:
        return min(1.0, math.fsum(share for size, share in sizes.items() if size >= observed))
    total = math.fsum(scaled)
    extreme = sum(abs(2 * sum(compress(scaled, chosen)) - total) >= observed for chosen in _drawn(len(scaled), DRAWS))
    return (extreme + 1) / (DRAWS + 1)


def add_flipped(sizes: Mapping[float, float], difference: float) -> dict[float, float]:
    """The distribution of |sum| once a difference with a random sign is added: size -> probability."""
    added: dict[float, float] = defaultdict(float)
    for size, probability in sizes.items():
        added[round(size + difference, DIGITS)] += probability / 2
        added[abs(round(size - difference, DIGITS))] += probability / 2
    return added


def sign_flip_limits(differences: Sequence[float], alpha: float) -> tuple[float, float]:
    """The lowest and the highest mean whose two-sided p-value is at least alpha; infinite where none is rejected."""
    count, total, lows, highs = len(differences), math.fsum(differences), list[float](), list[float]()
    exact = count <= MOST_ENUMERATED
    for chosen in product((0, 1), repeat=count) if exact else _drawn(count, LIMIT_DRAWS):
        size, part = sum(chosen), sum(compress(differences, chosen))
        means = [part / size, (total - part) / (count - size)] if 0 < size < count else [-math.inf, math.inf]
        lows.append(min(means))
        highs.append(max(means))
    place = math.ceil(alpha * len(lows) - TOLERANCE) if exact else math.ceil(alpha * (LIMIT_DRAWS + 1)) - 1
    return sorted(lows)[max(place, 1) - 1], sorted(highs, reverse=True)[max(place, 1) - 1]


def _drawn(count: int, draws: int) -> Iterator[bytes]:
    """Random subsets of `count` differences: 1 for each that is in it, else 0. The same ones always."""
    rng = random.Random(0)
    return (rng.randbytes(count).translate(LAST_BIT) for _ in range(draws))


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
    first, second = ([[value] for value in rewards] for rewards in (before, after))
    found = compare_tasks(first, second, alpha=round(1 - confidence, DIGITS), bounds=bounds, null=null)
    return Gain(
        before=mean([b for b, _ in pairs]),
        after=mean([a for _, a in pairs]),
        gain=mean([a - b for b, a in pairs]),
        interval=found.interval,
        tasks=len(pairs),
        missing_before=found.missing_before,
        missing_after=found.missing_after,
    )


def paired_test(differences: Sequence[float], span: float, alpha: float, null: float) -> tuple[Interval, float, bool]:
    """The interval of the mean of differences that lie within -span and span, the two-sided p-value of a mean of
    `null`, and whether the mean is above it. The interval excludes `null` exactly where the p-value is below alpha."""
    largest = max(map(abs, differences)) or span
    if len({round(value / largest, DIGITS) for value in differences}) <= len(differences) / 2:
        center, half = _center_and_half([*differences, -largest, largest], len(differences), 1 - alpha)
        low, high = center - half, center + half
    else:
        low, high = sign_flip_limits(differences, alpha)
    shifted = [value - null for value in differences]
    p_value, above = sign_flip_p_value(shifted), math.fsum(shifted) > 0
    if p_value >= alpha:
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
    known = [value for value in values if value is not None]
    low, high = reward_bounds(known, bounds)
    missing = len(values) - len(known)
    least, most = ([*known, *[extreme] * missing] for extreme in (low, high))
    center, half = _center_and_half([*least, low, high], len(values), confidence)
    highest, above = _center_and_half([*most, low, high], len(values), confidence)
    return max(low, center - half), min(high, highest + above)


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


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _center_and_half(padded: Sequence[float], count: int, confidence: float) -> tuple[float, float]:
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence={confidence} is not between 0 and 1; 0.95 is usual")
    center = mean(padded)
    variance = mean([(value - center) ** 2 for value in padded])
    half = student_quantile((1 + confidence) / 2, max(1, count - 1)) * math.sqrt(variance / len(padded))
    return center, half


@cache
def student_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t, from the distribution itself (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_share(middle, degrees) < abs(2 * probability - 1) else (low, middle)
    return math.copysign(math.tan(low) * math.sqrt(degrees), probability - 0.5)


def _student_share(angle: float, degrees: int) -> float:
    """The probability that |t| is at most sqrt(degrees) tan(angle)."""
    odd = degrees % 2
    term, total = (math.cos(angle), 0.0) if odd else (1.0, 0.0)
    for step in range(1 + odd, degrees, 2):
        total += term
        term *= step / (step + 1) * math.cos(angle) ** 2
    return (angle + math.sin(angle) * total) * 2 / math.pi if odd else math.sin(angle) * total


# -- comparison --------------------------------------------------------------------------------------------------------

# Compares the rewards of the same tasks measured twice: the paired gain, its interval and its p-value.
#
# The task is the unit: rollouts of one task are averaged first, since they are not independent of each other. A rollout
# without a reward counts as the caller chooses: as the lowest reward, as a given one, or not at all. The lowest decides
# who is ahead, and interval and p-value still cover every reward that the rollout could have had: a crash is no
# measurement.

FailedAs = Literal["lowest", "exclude"] | float
"""How a rollout without a reward counts where one number must decide."""
Rewards = Sequence[float | None]
"""Of the rollouts of one task."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same tasks measured before and after.

    >>> before, after = agl.Evaluation((0.0,) * 8), agl.Evaluation((1.0,) * 8)
    >>> after.compare(before).p_value
    0.0078125
    """

    before: float
    """Mean reward, over tasks."""
    after: float
    gain: float
    """Mean of the paired differences."""
    interval: tuple[float, float]
    """Confidence interval of the gain, at 1 - alpha."""
    p_value: float
    """Two-sided, by sign flips of the differences; the largest that rewards which are missing could have made it."""
    tasks: int
    """Tasks that were compared."""
    better: int
    """Tasks whose reward rose."""
    worse: int
    alpha: float = 0.05
    missing_before: int = 0
    """Rollouts without a reward."""
    missing_after: int = 0
    unpaired: int = 0
    """Tasks measured only once, which are left out."""

    @property
    def significant(self) -> bool:
        """Whether a difference is shown: the p-value is below alpha, which is where the interval excludes 0."""
        return self.p_value < self.alpha

    def __str__(self) -> str:
        low, high = self.interval
        missing = self.missing_before, self.missing_after
        left_out = f"; {self.unpaired} tasks were measured only once" if self.unpaired else ""
        without = f"; without a reward: {missing[0]} rollouts before, {missing[1]} after" if any(missing) else ""
        return (
            f"{self.gain:+.3f} ({1 - self.alpha:.0%} interval {low:+.3f} to {high:+.3f}, p = {self.p_value:.2g}):"
            f" {self.before:.3f} -> {self.after:.3f} on {self.tasks} tasks, {self.better} better, {self.worse} worse"
            f"{without}{left_out}"
        )


def compare_tasks(
    before: Sequence[Rewards],
    after: Sequence[Rewards],
    failed_as: FailedAs = "lowest",
    alpha: float = 0.05,
    unpaired: int = 0,
    bounds: Interval | None = None,
    null: float = 0.0,
) -> Comparison:
    """Compare the rollouts of tasks, in the same order; the test is of a mean difference of `null`. Raises RewardError
    where no task can be compared."""
    if not 0 < alpha < 1:
        raise ConfigError(f"alpha={alpha} is not between 0 and 1; 0.05 is usual")
    pairs, (low, high), filler = usable_pairs(before, after, failed_as, bounds)
    scored = [(task_mean(b, filler), task_mean(a, filler)) for b, a in pairs]
    differences = [a - b for b, a in scored]
    least = most = differences
    if failed_as == "lowest":
        least = [task_mean(a, low) - task_mean(b, high) for b, a in pairs]
        most = [task_mean(a, high) - task_mean(b, low) for b, a in pairs]
    interval, p_value, above = paired_test(least, high - low, alpha, null)
    if most != least:  # The p-value is the largest that differences between them can have.
        (_, highest), other, rises = paired_test(most, high - low, alpha, null)
        interval, p_value = (interval[0], highest), p_value if above else 1.0 if rises else other
    return Comparison(
        before=mean([b for b, _ in scored]),
        after=mean([a for _, a in scored]),
        gain=mean(differences),
        interval=interval,
        p_value=p_value,
        tasks=len(pairs),
        better=sum(each > 0 for each in differences),
        worse=sum(each < 0 for each in differences),
        alpha=alpha,
        missing_before=sum(len(each) - len(known(each)) for each in before),
        missing_after=sum(len(each) - len(known(each)) for each in after),
        unpaired=unpaired,
    )


def usable_pairs(
    before: Sequence[Rewards], after: Sequence[Rewards], failed_as: FailedAs, bounds: Interval | None = None
) -> tuple[list[tuple[Rewards, Rewards]], Interval, float]:
    """The tasks that can be compared, the bounds of rewards, and what counts for a reward that is missing."""
    pairs: list[tuple[Rewards, Rewards]] = list(zip(before, after, strict=True))
    if failed_as == "exclude":
        pairs = [(known(b), known(a)) for b, a in pairs if known(b) and known(a)]
    given = [] if isinstance(failed_as, str) else [failed_as]
    rewards = [reward for pair in pairs for each in pair for reward in known(each)]
    if not rewards:
        raise RewardError("no task has a reward both before and after; nothing can be compared")
    low, high = widened(bounds, [*rewards, *given])
    return pairs, (low, high), given[0] if given else low


def check_failed_as(failed_as: FailedAs) -> None:
    """Raises ConfigError for what is neither `lowest`, nor `exclude`, nor a finite number."""
    number = isinstance(failed_as, float | int) and not isinstance(failed_as, bool) and math.isfinite(failed_as)
    if not number and failed_as not in ("lowest", "exclude"):
        raise ConfigError(f"failed={failed_as!r} is not 'lowest', 'exclude' or a reward, such as 0.0")


def known(rewards: Rewards) -> list[float]:
    """The rewards that there are."""
    return [reward for reward in rewards if reward is not None]


def task_mean(rewards: Rewards, filler: float) -> float:
    """The mean reward of a task's rollouts, those without one at `filler`."""
    return mean([filler if reward is None else reward for reward in rewards])


# -- seeds -----------------------------------------------------------------------------------------------------------

# Training differs from seed to seed by more than tasks do: a configuration is its runs, and the run is the unit.


@dataclass(frozen=True, slots=True)
class SeedMean:
    """A mean over runs of different seeds."""

    mean: float | None
    """None: there is no run."""
    interval: tuple[float, float] | None
    """Student's interval of the mean, at 95%. None for fewer than two runs."""
    seeds: int
    paired: bool = False
    """Whether it is a difference within pairs of one seed."""


UNBOUNDED: Interval = (-math.inf, math.inf)


def mean_of_seeds(values: Mapping[int, float], bounds: Interval = UNBOUNDED, *, paired: bool = False) -> SeedMean:
    """The mean of numbers by seed, its interval cut to `bounds`: the lowest and highest mean possible.

    >>> mean_of_seeds({0: 0.5, 1: 0.5, 2: 0.8}).mean
    0.6
    """
    numbers = list(values.values())
    if not numbers:
        return SeedMean(None, None, 0, paired)
    center = math.fsum(numbers) / len(numbers)
    return SeedMean(center, _interval(center, [numbers], bounds), len(numbers), paired)


def seed_difference(first: Mapping[int, float], other: Mapping[int, float], bounds: Interval = UNBOUNDED) -> SeedMean:
    """other - first: within pairs where both have the same seeds, else of the two means (Welch's interval, with the
    degrees of freedom of the smaller one, which makes it no shorter). `bounds` are those of the difference."""
    if first.keys() == other.keys():
        return mean_of_seeds({seed: other[seed] - first[seed] for seed in first}, bounds, paired=True)
    before, after = mean_of_seeds(first), mean_of_seeds(other)
    if before.mean is None or after.mean is None:
        return SeedMean(None, None, 0)
    center = after.mean - before.mean
    interval = _interval(center, [[*first.values()], [*other.values()]], bounds)
    return SeedMean(center, interval, min(before.seeds, after.seeds))


def _interval(center: float, samples: Sequence[Sequence[float]], bounds: Interval) -> Interval | None:
    least = min(map(len, samples))
    if least < 2:
        return None
    error = math.sqrt(sum(statistics.variance(each) / len(each) for each in samples))
    half = student_quantile(0.975, least - 1) * error
    return max(bounds[0], center - half), min(bounds[1], center + half)
