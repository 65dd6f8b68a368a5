"""A paired test that may look at every result as it arrives and stop early: a sequential sign-flip test. Pure.

Where two agents are equal, the difference d_i of their rewards on a task is as likely negative as positive, so that the
sum of n differences is one of 2^n equally likely sums of +-|d_i| (Fisher, The Design of Experiments, 1935, section 21).
The test looks after each pair, at S_n = d_1 + .. + d_n, and may reject at look n with what is left of the probability

    spend(n) = alpha * t^2,    t = n / max_pairs,  or  n / (n + 100) without a maximum

(Lan and DeMets, Biometrika 70, 1983; the power family of Kim and DeMets, Biometrika 74, 1987). The boundary of look n
is the smallest b for which the sign flips that have crossed no boundary before, and have |S_n| >= b, have at most the
probability spend(n) together with those that have crossed. It is computed exactly, from the distribution of the sums,
so that the probability of ever deciding between two equal agents is at most alpha, however many pairs are ties. Where
the sums take more than 256 values, they are rounded, the observed one like all others, which does not raise it.

The p-value orders outcomes by the look at which they crossed, then by |S_n| (Tsiatis, Rosner and Mehta, Biometrics 40,
1984). The interval holds the gains g for which the test of d_i - g has not crossed at this look, a repeated confidence
interval (Jennison and Turnbull, JRSS B 51, 1989): it excludes 0 exactly where the test has decided.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from agentlightning.errors import ConfigError, RewardError
from agentlightning.evaluation.intervals import (
    DIGITS,
    FailedAs,
    Rewards,
    add_flipped,
    compare_tasks,
    task_mean,
    usable_pairs,
)

Decision = Literal["better", "worse", "continue", "exhausted"]
"""`better` or `worse`: the differences are above or below 0. `exhausted`: all pairs are seen, and neither is shown."""

MOST_SUMS = 256
OPEN_ENDED_PAIRS = 100
"""Without a maximum, a quarter of alpha is spent on the first so many pairs."""
BISECTIONS = 10


class PairedSequentialTest:
    """Tells after each pair whether the second of two agents is better than the first. Give each task once.

    `alpha`: the probability of a decision between agents that are equal. `bounds`: the least and largest difference
    possible. `max_pairs`: after so many the test ends; the more there may be, the more an early decision needs. Raises
    ConfigError for a maximum that can show nothing.

        >>> from agentlightning.evaluation.sequential import PairedSequentialTest
        >>> test = PairedSequentialTest(max_pairs=60)
        >>> while test.update(1.0) == "continue":
        ...     pass
        >>> test.decision, test.pairs
        ('better', 11)
    """

    def __init__(
        self, alpha: float = 0.05, bounds: tuple[float, float] = (-1.0, 1.0), max_pairs: int | None = None
    ) -> None:
        if not 0 < alpha < 1:
            raise ConfigError(f"alpha={alpha} is not between 0 and 1; 0.05 is usual")
        if not (math.isfinite(bounds[0]) and math.isfinite(bounds[1]) and bounds[0] < 0 < bounds[1]):
            raise ConfigError(f"bounds={bounds} are not a negative and a positive difference, such as (-1.0, 1.0)")
        if max_pairs is not None and max_pairs < fewest_pairs(alpha):
            raise ConfigError(
                f"max_pairs={max_pairs} can show no difference at alpha={alpha}, however large;"
                f" use at least {fewest_pairs(alpha)}"
            )
        self.alpha = alpha
        self.bounds = bounds
        self.max_pairs = max_pairs
        self.decision: Decision = "continue"
        self._differences: list[float] = []
        self._sums = _SignFlips(alpha, max_pairs)
        self._unit = max(-bounds[0], bounds[1])

    @property
    def pairs(self) -> int:
        """The number of pairs seen."""
        return len(self._differences)

    @property
    def mean(self) -> float:
        """The mean difference so far; 0 before the first pair."""
        return math.fsum(self._differences) / self.pairs if self._differences else 0.0

    def update(self, difference: float) -> Decision:
        """Add a pair: the second reward minus the first. Raises RewardError for a difference that is not finite or out
        of bounds, and ConfigError once the test has ended."""
        if self.decision != "continue":
            raise ConfigError(f"the test ended as {self.decision!r} after {self.pairs} pairs; start another one")
        low, high = self.bounds
        if not low <= difference <= high:
            raise RewardError(f"a difference of {difference} is out of the bounds {self.bounds}; widen the bounds")
        self._differences.append(difference)
        if self._sums.add(difference / self._unit):
            self.decision = "better" if self._sums.observed > 0 else "worse"
        elif self.pairs == self.max_pairs:
            self.decision = "exhausted"
        return self.decision

    @property
    def p_value(self) -> float:
        """Two-sided. At least alpha until there is a decision, however far apart the agents seem."""
        found = self._sums.p_value
        return max(self.alpha, found) if self.decision == "continue" else found

    @property
    def interval(self) -> tuple[float, float]:
        """Confidence interval of the mean difference, at 1 - alpha, wherever the test stops. Takes a second or two
        for a hundred pairs."""
        mean, (low, high) = self.mean, self.bounds
        if self.decision == "better":
            return self._limit(mean, max(low, 0.0)), self._limit(mean, high)
        if self.decision == "worse":
            return self._limit(mean, low), self._limit(mean, min(high, 0.0))
        return min(0.0, self._limit(mean, low)), max(0.0, self._limit(mean, high))

    def _limit(self, inside: float, outside: float) -> float:
        """Where between a gain that the data allow and another the test begins to reject."""
        if inside == outside or not (outside == 0.0 or self._rejects(outside)):
            return outside
        for _ in range(BISECTIONS):
            middle = (inside + outside) / 2
            inside, outside = (inside, middle) if self._rejects(middle) else (middle, outside)
        return (inside + outside) / 2

    def _rejects(self, gain: float) -> bool:
        sums, crossed = _SignFlips(self.alpha, self.max_pairs), False
        for difference in self._differences:
            crossed = sums.add((difference - gain) / self._unit)
        return crossed


def fewest_pairs(alpha: float) -> int:
    """Fewer pairs show nothing at this alpha: even if all differences have one sign, their p-value is 2^(1 - n)."""
    return math.ceil(1 - math.log2(alpha))


class _SignFlips:
    """The distribution of |sum of +-d_i| over the sign flips that have crossed no boundary, and the observed sum."""

    def __init__(self, alpha: float, max_pairs: int | None) -> None:
        self.alpha, self.max_pairs = alpha, max_pairs
        self.observed = 0.0
        self.p_value = 1.0
        self._pairs = 0
        self._crossed = 0.0
        """Probability of the flips that have crossed a boundary."""
        self._sizes: dict[float, float] = {0.0: 1.0}
        """Probability of each |sum|."""

    def add(self, difference: float) -> bool:
        """Whether the observed sum is beyond the boundary of this look."""
        self._pairs += 1
        if difference:
            self.observed = round(self.observed + difference, DIGITS)
            self._sizes = add_flipped(self._sizes, abs(difference))
            if len(self._sizes) > MOST_SUMS:
                self._round_sums()
        observed = abs(self.observed)
        larger = math.fsum(probability for size, probability in self._sizes.items() if size >= observed)
        self.p_value = min(1.0, self._crossed + larger)
        return observed > self._cross()

    def _cross(self) -> float:
        """Move the largest sums beyond the boundary, as far as spend(n) allows; returns the largest one within."""
        share = self._pairs / (self.max_pairs or self._pairs + OPEN_ENDED_PAIRS)
        allowed = self.alpha * share**2
        for size in sorted(self._sizes, reverse=True):
            if self._crossed + self._sizes[size] > allowed:
                return size
            self._crossed += self._sizes.pop(size)
        return -1.0  # unreachable: alpha is below 1

    def _round_sums(self) -> None:
        step = 2 * max(self._sizes) / MOST_SUMS
        rounded: dict[float, float] = defaultdict(float)
        for size, probability in self._sizes.items():
            rounded[_to_step(size, step)] += probability
        self._sizes = rounded
        self.observed = math.copysign(_to_step(abs(self.observed), step), self.observed)


def _to_step(value: float, step: float) -> float:
    return round(round(value / step) * step, DIGITS)


# -- null test -------------------------------------------------------------------------------------------------------

# The A/A test: what differences an agent shows against itself, and which gain would stand out from them. Pure.
#
# Between two measurements of one agent every difference d_i of a task is noise. With n tasks and s^2 = mean(d_i^2), the
# mean difference has the standard error s / sqrt(n), and
#
#     noise = z(1 - alpha / 2) s / sqrt(n)                        exceeded by chance with probability alpha
#     smallest gain = (z(1 - alpha / 2) + z(power)) s / sqrt(n)   shown with probability `power`
#
# (Cohen, Statistical Power Analysis, 1988, chapter 2, for paired samples; Miller 2024, arXiv:2411.00640, section 5). A
# gain of whole tasks is no smaller than that of the fewest tasks whose sign flips can be significant.

POWER = 0.8


@dataclass(frozen=True, slots=True)
class NullTest:
    """An agent compared with itself.

    >>> agl.Evaluation.of_rollouts([(0.0, 1.0), (1.0, 0.0)] * 50).null_test().difference
    0.0
    """

    tasks: int
    rollouts: int
    """Of each task, in each of the two measurements."""
    difference: float
    """Mean reward of the second measurement minus that of the first."""
    p_value: float
    """Of that difference: below alpha in a share of alpha of such tests."""
    noise: float
    """The difference that chance exceeds with probability alpha."""
    smallest_gain: float
    """The smallest gain that as many tasks and rollouts show with probability 0.8; infinite: they can show none."""
    alpha: float = 0.05

    def __str__(self) -> str:
        head = (
            f"the agent against itself: {self.difference:+.3f} (p = {self.p_value:.2g}) on {self.tasks} tasks,"
            f" {self.rollouts} rollouts each; chance alone makes up to {self.noise:.3f}"
        )
        if math.isinf(self.smallest_gain):
            return f"{head}. So few tasks can show no gain at all; use at least {fewest_pairs(self.alpha)}"
        repeatable = "" if self.noise else ". Every task had the same reward twice: its rewards have no noise to see"
        return f"{head}; the smallest gain that shows ({POWER:.0%} power) is about {self.smallest_gain:.3f}{repeatable}"


def null_test(
    first: Sequence[Rewards], second: Sequence[Rewards], failed_as: FailedAs = "lowest", alpha: float = 0.05
) -> NullTest:
    """Compare two measurements of one agent. Raises RewardError where no task can be compared."""
    found = compare_tasks(first, second, failed_as, alpha)
    pairs, (low, high), filler = usable_pairs(first, second, failed_as)
    variance = math.fsum((task_mean(b, filler) - task_mean(a, filler)) ** 2 for a, b in pairs) / len(pairs)
    error = math.sqrt(variance / len(pairs))
    z, fewest = NormalDist().inv_cdf(1 - alpha / 2), fewest_pairs(alpha)
    whole_tasks = fewest * (high - low) / len(pairs) if len(pairs) >= fewest else math.inf
    return NullTest(
        tasks=len(pairs),
        rollouts=max(map(len, first)),
        difference=found.gain,
        p_value=found.p_value,
        noise=z * error,
        smallest_gain=max(whole_tasks, (z + NormalDist().inv_cdf(POWER)) * error),
        alpha=alpha,
    )
