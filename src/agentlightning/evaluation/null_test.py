"""The A/A test: what differences an agent shows against itself, and which gain would stand out from them. Pure.

Between two measurements of one agent every difference d_i of a task is noise. With n tasks and s^2 = mean(d_i^2), the
mean difference has the standard error s / sqrt(n), and

    noise = z(1 - alpha / 2) s / sqrt(n)                        exceeded by chance with probability alpha
    smallest gain = (z(1 - alpha / 2) + z(power)) s / sqrt(n)   shown with probability `power`

(Cohen, Statistical Power Analysis, 1988, chapter 2, for paired samples; Miller 2024, arXiv:2411.00640, section 5). A
gain of whole tasks is no smaller than that of the fewest tasks whose sign flips can be significant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from agentlightning.evaluation.comparison import FailedAs, Rewards, compare_tasks, task_mean, usable_pairs
from agentlightning.evaluation.sequential import fewest_pairs

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
