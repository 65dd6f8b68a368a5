"""A sign of trouble in a training run, and the statistics of steps that signs are found with. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from agentlightning.training.health.step_record import StepRecord

WINDOW: Final = 3
"""The number of steps that are judged together: one batch alone is noise."""
TREND: Final = 24
"""The number of steps that a trend is judged over, if there are so many ..."""
SHORTEST_TREND: Final = 9
"""... and the fewest: three in each third."""
CLEAR: Final = 3.0
"""Standard errors by which the last third of a trend differs from the first: 0.3% by chance, on either side."""
MAD_TO_SIGMA: Final = 1.4826
"""The standard deviation of normal numbers over their median absolute deviation."""

Records: TypeAlias = Sequence[StepRecord]
"""Steps in order, judged as of the last one. At least one."""


@dataclass(frozen=True, slots=True)
class Sign:
    """One thing that looks wrong as of a step.

    >>> str(Sign("truncated", "half of the answers end at the limit of tokens", "raise max_tokens"))
    'half of the answers end at the limit of tokens. Raise max_tokens'
    """

    name: str
    """Names the kind of sign: each is shown once."""
    what: str
    """What is wrong, with its numbers."""
    advice: str
    """What to try."""
    is_collapse: bool = False
    """Whether the policy itself is breaking, so that going on makes it worse: what `run.on_collapse` acts on."""

    def __str__(self) -> str:
        return f"{self.what}. {self.advice[:1].upper()}{self.advice[1:]}"


Detector: TypeAlias = Callable[[Records], Sign | None]


def values_of(records: Iterable[StepRecord], value: Callable[[StepRecord], float | None]) -> list[float]:
    """The known numbers of these steps."""
    return [number for record in records if (number := value(record)) is not None and math.isfinite(number)]


def mean_of(records: Iterable[StepRecord], value: Callable[[StepRecord], float | None]) -> float:
    """NaN where no step has the number."""
    known = values_of(records, value)
    return math.fsum(known) / len(known) if known else math.nan


def rewards(records: Iterable[StepRecord]) -> list[float]:
    return values_of(records, lambda record: record.reward)


def mean_reward(records: Iterable[StepRecord]) -> float:
    return mean_of(records, lambda record: record.reward)


def best_reward(records: Records) -> float:
    """The highest mean reward of `WINDOW` steps in a row; NaN where there is none."""
    means = (mean_reward(records[i : i + WINDOW]) for i in range(max(1, len(records) - WINDOW + 1)))
    return max((mean for mean in means if math.isfinite(mean)), default=math.nan)


def reward_range(records: Records) -> float:
    """The distance between the lowest and the highest reward seen; 0 if unknown."""
    low, high = reward_limits(records)
    return max(0.0, high - low)


def reward_limits(records: Records) -> tuple[float, float]:
    """The lowest and the highest reward seen; NaN where none is known."""
    lowest = values_of(records, lambda record: record.reward_lowest)
    highest = values_of(records, lambda record: record.reward_highest)
    return min(lowest, default=math.nan), max(highest, default=math.nan)


@dataclass(frozen=True, slots=True)
class Trend:
    """How a series of numbers changed from its first third to its last."""

    before: float
    after: float
    errors: float
    """The change in standard errors."""

    @property
    def change(self) -> float:
        return self.after - self.before

    @property
    def rises(self) -> bool:
        return self.errors > CLEAR

    @property
    def falls(self) -> bool:
        return self.errors < -CLEAR


def trend_of(numbers: Sequence[float]) -> Trend | None:
    """The trend of the last `TREND` numbers; None for fewer than `SHORTEST_TREND`."""
    numbers = numbers[-TREND:]
    if len(numbers) < SHORTEST_TREND:
        return None
    third = len(numbers) // 3
    first, last = numbers[:third], numbers[-third:]
    before, after = statistics.fmean(first), statistics.fmean(last)
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / third)
    rounding = 1e-6 * max(1.0, abs(before), abs(after))
    return Trend(before, after, (after - before) / max(error, rounding))


def deviations(number: float, history: Sequence[float], least: float) -> float:
    """How many robust standard deviations `number` is above the median of `history`. `least`: the smallest deviation,
    relative to the median, that is not taken for noise."""
    median = statistics.median(history)
    mad = statistics.median(abs(each - median) for each in history)
    return (number - median) / max(MAD_TO_SIGMA * mad, least * abs(median), 1e-12)
