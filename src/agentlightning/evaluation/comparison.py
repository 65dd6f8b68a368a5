"""Compares the rewards of the same tasks measured twice: the paired gain, its interval and its p-value. Pure.

The task is the unit: rollouts of one task are averaged first, since they are not independent of each other. A rollout
without a reward counts as the caller chooses: as the lowest reward, as a given one, or not at all. The lowest decides
who is ahead, and interval and p-value still cover every reward that the rollout could have had: a crash is no
measurement.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from agentlightning.errors import ConfigError, RewardError
from agentlightning.evaluation.intervals import Interval, mean, paired_test, student_quantile, widened

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
) -> Comparison:
    """Compare the rollouts of tasks, in the same order. Raises RewardError where no task can be compared."""
    if not 0 < alpha < 1:
        raise ConfigError(f"alpha={alpha} is not between 0 and 1; 0.05 is usual")
    pairs, (low, high), filler = usable_pairs(before, after, failed_as, bounds)
    scored = [(task_mean(b, filler), task_mean(a, filler)) for b, a in pairs]
    differences = [a - b for b, a in scored]
    least = most = differences
    if failed_as == "lowest":
        least = [task_mean(a, low) - task_mean(b, high) for b, a in pairs]
        most = [task_mean(a, high) - task_mean(b, low) for b, a in pairs]
    interval, p_value = paired_test(least, most, high - low, 1 - alpha)
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


def mean_of_seeds(values: Mapping[int, float], *, paired: bool = False) -> SeedMean:
    """The mean of numbers by seed.

    >>> mean_of_seeds({0: 0.5, 1: 0.5, 2: 0.8}).mean
    0.6
    """
    numbers = list(values.values())
    if not numbers:
        return SeedMean(None, None, 0, paired)
    center = math.fsum(numbers) / len(numbers)
    return SeedMean(center, _interval(center, [numbers]), len(numbers), paired)


def seed_difference(first: Mapping[int, float], other: Mapping[int, float]) -> SeedMean:
    """other - first: within pairs where both have the same seeds, else of the two means (Welch's interval, with the
    degrees of freedom of the smaller one, which makes it no shorter)."""
    if first.keys() == other.keys():
        return mean_of_seeds({seed: other[seed] - first[seed] for seed in first}, paired=True)
    before, after = mean_of_seeds(first), mean_of_seeds(other)
    if before.mean is None or after.mean is None:
        return SeedMean(None, None, 0)
    center = after.mean - before.mean
    return SeedMean(center, _interval(center, [[*first.values()], [*other.values()]]), min(before.seeds, after.seeds))


def _interval(center: float, samples: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    least = min(map(len, samples))
    if least < 2:
        return None
    error = math.sqrt(sum(statistics.variance(each) / len(each) for each in samples))
    half = student_quantile(0.975, least - 1) * error
    return center - half, center + half
