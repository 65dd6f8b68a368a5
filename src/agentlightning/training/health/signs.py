"""The signs of trouble in the steps of a training run: each is a pure function of the steps, judged as of the last
one."""

from __future__ import annotations

import math
import re
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final, TypeAlias, cast

from agentlightning.credit.rejection import describe_reasons
from agentlightning.training.health.step_record import StepRecord
from agentlightning.trajectory import Trajectory
from agentlightning.util.json_values import dumps

# -- sign ------------------------------------------------------------------------------------------------------------

# A sign of trouble in a training run, and the statistics of steps that signs are found with. Pure functions.

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


# -- rewards ---------------------------------------------------------------------------------------------------------

# Signs in the rewards: groups that teach nothing and why, rewards that are gained in the wrong way, outliers.

MIN_GROUPS: Final = 4
"""Fewer groups show no pattern."""
FLAT_SHARE: Final = 0.9
"""The share of groups with equal rewards from which on there is a sign: the rest is too little to learn from."""
IDENTICAL_SHARE: Final = 0.5
"""The share of groups with identical outputs from which on there is a sign: half of the rollouts are wasted."""
LOST_SHARE: Final = 0.1
"""A second reward that lost this share of the range it had is lost for good, and no drift."""
VALIDATIONS: Final = 2
"""Validations in a row that must be below the best: one alone is noise."""
OUTLIER_FACTOR: Final = 20.0
"""A reward so many times as large as the largest of ordinary batches is no reward of the same kind."""


def without_spread(records: Records) -> Sign | None:
    """Nearly all groups have rollouts with equal rewards: there is no better and no worse to learn from."""
    window = records[-WINDOW:]
    groups = sum(record.groups for record in window)
    flat = sum(record.groups_without_spread for record in window)
    if groups < MIN_GROUPS or flat < FLAT_SHARE * groups:
        return None
    what = (
        f"the rewards of {flat} of the last {groups} groups taught nothing: all rollouts of a group had the same (mean"
        f" {mean_reward(window):.3g})"
    )
    causes = {name: sum(getattr(record, name) for record in window) for name in _CAUSES}
    cause = max(causes, key=lambda name: causes[name])
    if not causes[cause]:
        return Sign("rewards_without_spread", what, _OF_ANY_CAUSE)
    if cause in _OUTPUTS_DIFFER and _depends_on_task_alone(records, causes):
        differing = sum(causes[name] for name in _OUTPUTS_DIFFER)
        low, high = reward_limits(window)
        alone = (
            f"{what}. In {differing} of them outputs differ; since the first step each output of a task had the same"
            f" reward, from {low:.3g} to {high:.3g} between tasks"
        )
        return Sign("rewards_without_spread", alone, _UNSEEN)
    explain, advice = _CAUSES[cause]
    return Sign("rewards_without_spread", f"{what}. In {causes[cause]} of them {explain(records)}", advice(records))


def _always_same(records: Records) -> str:
    low, high = reward_limits(records[-WINDOW:])
    if high - low > 1e-9:
        return f"outputs differ, and all rollouts of a step have one reward, from {low:.3g} to {high:.3g} over steps"
    since = "of the batch" if _seen_otherwise(records) else "since the first step"
    return f"outputs differ, and every rollout {since} has the reward {low:.3g}"


def _fix_constant(records: Records) -> str:
    if not _seen_otherwise(records):
        return _UNSEEN
    return _HARDER if mean_reward(records[-WINDOW:]) >= reward_limits(records)[1] - 1e-9 else _EASIER


def _seen_otherwise(records: Records) -> bool:
    return reward_range(records) > 1e-9


def _depends_on_task_alone(records: Records, causes: Mapping[str, int]) -> bool:
    """Whether tasks differ in reward, and no group of the run ever had rewards that differ."""
    differ = causes["groups_constant"] or (causes["groups_failed"] and causes["groups_solved"])
    if not differ or not _seen_otherwise(records[-WINDOW:]):
        return False
    return all(record.groups == record.groups_without_spread for record in records)


_OUTPUTS_DIFFER: Final = ("groups_failed", "groups_solved", "groups_constant")
_UNSEEN: Final = (
    "the reward probably does not see what differs: check that the agent's result depends on what the model answers,"
    " and call the reward function on a recorded output (`agl store show ROLLOUT`): it has to find the answer in it,"
    " whatever the case, the spaces or the words around it. If it does, each task is too hard or too easy for it"
)
_EASIER: Final = "use easier tasks, a reward with partial credit, or a warm start (warm_start.dataset)"
_HARDER: Final = "use harder tasks: these are solved"
_SAMPLING: Final = (
    "the agent or its framework fixes a seed, caches answers, or replays recorded ones: switch that off for training"
)
_CERTAIN: Final = (
    "the policy is almost certain of its answers: raise algorithm.temperature, use tasks it has not learned yet, or go"
    " back to an earlier checkpoint with a lower algorithm.optimizer.lr"
)
_OF_ANY_CAUSE: Final = (
    "where all fail, use easier tasks, a reward with partial credit or a warm start; where all succeed, harder tasks;"
    " else a larger group_size. Check that the reward reads the agent's output"
)

_Text = Callable[[Records], str]
_CAUSES: Final[dict[str, tuple[_Text, _Text]]] = {
    "groups_repeated": (
        lambda _: "all outputs are identical, which cannot be chance at their probability",
        lambda _: _SAMPLING,
    ),
    "groups_certain": (lambda _: "all outputs are identical", lambda _: _CERTAIN),
    "groups_failed": (lambda _: "all rollouts failed, with the lowest reward of the batch", lambda _: _EASIER),
    "groups_solved": (lambda _: "all rollouts succeeded, with the highest reward of the batch", lambda _: _HARDER),
    "groups_constant": (_always_same, _fix_constant),
}
"""By metric: what it means, and what to try."""


def identical_outputs(records: Records) -> Sign | None:
    """Half of the groups have rollouts whose sampled tokens are the same, too improbable to be chance."""
    window = records[-WINDOW:]
    groups = sum(record.groups for record in window)
    repeated = sum(record.groups_repeated for record in window)
    if groups < MIN_GROUPS or repeated < IDENTICAL_SHARE * groups:
        return None
    seeded = sum(record.calls_seeded for record in window)
    seed = f", and {seeded} calls had a seed" if seeded else ""
    return Sign(
        "identical_outputs",
        f"in {repeated} of the last {groups} groups all rollouts have the same output, too improbable to be chance"
        f"{seed}",
        _SAMPLING,
    )


# -- rewards gained in the wrong way -----------------------------------------------------------------------------------


def reward_hacking(records: Records) -> Sign | None:
    """The training reward rises while what it stands for falls (Skalse et al. 2022, arXiv:2209.13085)."""
    return next(_hacks(records), None)


def _hacks(records: Records) -> Iterator[Sign]:
    yield from _against_validation(records)
    yield from _against_other_rewards(records)


def _against_validation(records: Records) -> Iterator[Sign]:
    measured = [record for record in records if record.validation]
    if len(measured) <= VALIDATIONS:
        return
    scores = [statistics.fmean(record.validation.values()) for record in measured]
    best = max(range(len(scores)), key=scores.__getitem__)
    last = scores[-VALIDATIONS:]
    margin = LOST_SHARE * max(reward_range(records), abs(scores[best]))
    trend = trend_of(rewards(record for record in records if record.step >= measured[best].step))
    if best < len(scores) - VALIDATIONS and max(last) < scores[best] - margin and trend and trend.rises:
        yield _hack(
            f"the training reward rose from {trend.before:.3g} to {trend.after:.3g}, and the validation reward fell"
            f" from {scores[best]:.3g} (step {measured[best].step}) to {scores[-1]:.3g}"
        )


def _against_other_rewards(records: Records) -> Iterator[Sign]:
    reward = trend_of(rewards(records))
    if reward is None:
        return
    for name in sorted({name for record in records for name in record.dimensions}):
        values = values_of(records, lambda record, name=name: record.dimensions.get(name))
        if reward.rises and (fall := _fall(values)):
            yield _hack(f"the reward rose from {reward.before:.3g} to {reward.after:.3g} while {name!r} fell {fall}")
    steps = values_of(records, lambda record: record.intermediate_reward)
    rise = trend_of(steps)
    if rise and rise.rises and (fall := _fall(rewards(records))):
        yield _hack(
            f"intermediate rewards rose from {rise.before:.3g} to {rise.after:.3g} a rollout while the final reward"
            f" fell {fall}"
        )


def _fall(values: list[float]) -> str | None:
    trend = trend_of(values)
    if (
        trend is None
        or not trend.falls
        or -trend.change < LOST_SHARE * max(max(values) - min(values), abs(max(values)))
    ):
        return None
    return f"from {trend.before:.3g} to {trend.after:.3g}"


def _hack(what: str) -> Sign:
    return Sign(
        "reward_hacking",
        f"the reward is probably exploited: {what}",
        "read the rollouts with the highest rewards (`agl store show ROLLOUT`); close the gap in the reward or take the"
        " exploited rule out; the checkpoint with the best validation is kept",
    )


def outliers(records: Records) -> Sign | None:
    """One reward is far larger than any of ordinary batches: it decides the update alone."""
    sizes = values_of(records, _largest)
    if len(sizes) <= WINDOW:
        return None
    usual = statistics.median(sizes[:-1])
    if usual <= 0 or sizes[-1] <= OUTLIER_FACTOR * usual or _largest(records[-1]) is None:
        return None
    return Sign(
        "reward_outliers",
        f"a rollout has a reward of size {sizes[-1]:.3g}, where the largest of a batch is {usual:.3g} as a rule",
        "look at that rollout for an error of the reward function, and bound the reward",
    )


def _largest(record: StepRecord) -> float | None:
    if record.reward_lowest is None or record.reward_highest is None:
        return None
    return max(abs(record.reward_lowest), abs(record.reward_highest))


# -- collapse --------------------------------------------------------------------------------------------------------

# The echo trap: a policy that collapses, found before its reward falls (RAGEN, Wang et al. 2025, arXiv:2504.20073).
#
# RAGEN found three changes before the reward of collapsing agents fell: rewards within a group vary less, outputs lose
# entropy, and the gradient grows. A policy that learns its task shows the first two as well, but the gradient of what
# is left to learn stays or shrinks. So all of it is judged together, against the run's own first steps:
#
#     norm of the gradient      median of the last steps >= NORM_GROWTH x median of the first steps
#     reward spread in a group  mean of the last steps   <= SPREAD_LEFT x highest mean of as many steps
#     entropy                   mean of the last steps   <= TRAP_ENTROPY_LEFT x mean of the first steps
#
# The gradient must have grown, and one of the others fallen, while the reward is below TRAP_LEARNED_SHARE of the
# highest: where nearly all is solved, a few odd rollouts make the gradient. The limits are from runs like those of
# `benchmarks/collapse.py`, with other seeds: in ten healthy ones the first ratio stays below 2 until nearly all is
# solved, while the second falls to 0.5 and the third to 0.3; in twenty collapsing ones it passes 2 before the reward
# falls.

TRAP_LEARNED_SHARE: Final = 0.85
FIRST: Final = 5
"""Steps with an update that the run is compared with."""
LAST: Final = 4
"""Steps with an update that are judged: a gradient of one of them is an odd batch."""
NORM_GROWTH: Final = 2.0
SPREAD_LEFT: Final = 0.75
TRAP_ENTROPY_LEFT: Final = 0.6


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
    return highest > 0 and mean_reward(records[-WINDOW:]) >= TRAP_LEARNED_SHARE * highest


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
    return f"the entropy from {first:.3g} to {last:.3g} nats a token" if last <= TRAP_ENTROPY_LEFT * first else None


# -- failures --------------------------------------------------------------------------------------------------------

# Signs in the rollouts that are not learned from: timeouts, failures, rejections by reason.

MIN_FAILURES: Final = 4
"""Fewer are no pattern."""
TIMEOUT_SHARE: Final = 0.1
"""The share of rollouts that timed out from which on there is a sign."""
LEFT_OUT_SHARE: Final = 0.2
"""The share of rollouts that failed or were rejected from which on there is a sign: above it, those that are left may
be the easy ones."""


def timed_out(records: Records) -> Sign | None:
    """Counts those that failed for it: with a `timeout_reward` they are learned from."""
    window = records[-WINDOW:]
    timeouts = sum(min(record.timeouts, record.failed) for record in window)
    rollouts = sum(record.rollouts_trained + record.failed for record in window)
    if timeouts < MIN_FAILURES or timeouts < TIMEOUT_SHARE * rollouts:
        return None
    return Sign(
        "timeouts_left_out",
        f"{timeouts} of the last {rollouts} rollouts timed out and were left out, so that nothing teaches the policy to"
        " be quicker",
        "where its own answers take the time, give such rollouts a reward (algorithm.timeout_reward=0.0); where the"
        " agent's tools do, give them more time (runner.timeout_seconds)",
    )


def left_out(records: Records) -> Sign | None:
    """Many rollouts failed or were rejected, timeouts aside."""
    window = records[-WINDOW:]
    causes = Counter[str]()
    for record in window:
        causes["failed"] += max(0, record.failed - record.timeouts)
        causes.update(record.rejected)
    count = sum(causes.values())
    rollouts = sum(record.rollouts_trained + record.failed + sum(record.rejected.values()) for record in window)
    if count < MIN_FAILURES or count < LEFT_OUT_SHARE * rollouts:
        return None
    named = describe_reasons({name: number for name, number in causes.most_common() if number})
    return Sign(
        "rollouts_left_out",
        f"{count} of the last {rollouts} rollouts were left out: {named}",
        "the first of each kind is named in the output of the run, and `agl doctor` lists errors by kind; mend the"
        " agent and continue with --resume",
    )


# -- guard -----------------------------------------------------------------------------------------------------------

# What a reward guard measures in a batch, and the signs of its violations (settings: `[guard]`). Pure functions.
#
#     drift          sup_x |F_now(x) - F_before(x)|, the distance of Kolmogorov and Smirnov between the rewards of a
#                    batch and those of the batches before
#     disagreement   discordant / (discordant + concordant) over the pairs of one group's rollouts: (1 - gamma) / 2 of
#                    Goodman and Kruskal (Journal of the American Statistical Association 49, 1954)
#
# Learning moves rewards slowly; a change of half of all rewards from one step to the next is that of a reward function,
# a judge or an environment. Pairs are of one group, because only differences within a group are learned from.

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


def _violation(kind: str, name: str, what: str, advice: str) -> Detector:
    """The sign of a violated setting of [guard]; `what` has a place for the number."""

    def detect(records: Records) -> Sign | None:
        """The last step violates the setting."""
        found = records[-1].violations.get(kind)
        return Sign(name, what.format(found), advice) if found else None

    return detect


GUARDED: Final = (
    _violation(
        "out_of_range",
        "reward_out_of_range",
        "{:.0f} rollouts have a reward out of the range that [guard] allows",
        "mend the reward function, or widen guard.low and guard.high",
    ),
    _violation(
        "missing",
        "rewards_missing",
        "{:.0%} of the finished rollouts have no usable reward",
        "see the first one's reason above; a judge that times out needs more time or fewer calls at once",
    ),
    _violation(
        "drift",
        "reward_drift",
        "the rewards jumped: at some value, the share of rewards up to it differs by {:.0%} from the"
        f" {STEPS_BEFORE} steps before",
        "check whether the reward function, its judge or the environment has changed",
    ),
    _violation(
        "disagreement",
        "reward_disagreement",
        "the two rewards that [guard] compares order {:.0%} of the pairs of rollouts differently",
        "read rollouts that they disagree about (`agl store show ROLLOUT`): one of the two is exploited or wrong",
    ),
)


# -- updates ---------------------------------------------------------------------------------------------------------

# Signs in the updates: gradients, entropy, divergences, clipping, age, and numbers that are not finite.

ENTROPY_FACTOR: Final = 3.0
"""A policy whose entropy has grown or shrunk by more behaves differently ..."""
REWARD_SHARE: Final = 0.5
"""... and is broken if its reward is below this share of its best."""
LEARNED_SHARE: Final = 0.9
"""A policy with this share of the highest reward may be certain: it has learned the task."""
ENTROPY_LEFT: Final = 0.1
"""The share of its first entropy below which a policy explores next to nothing."""
SPIKE_HISTORY: Final = 8
"""Gradient norms that the next one is compared with, at least ..."""
LONGEST_HISTORY: Final = 50
"""... and at most: norms drift over a run."""
SPIKE_DEVIATIONS: Final = 10.0
"""Robust standard deviations above the median: norms have heavy tails, and six occur in healthy runs ..."""
SPIKE_FACTOR: Final = 4.0
"""... and a multiple of the median, for runs whose norms hardly vary."""
SPIKES: Final = 2
"""Spikes within `SPIKE_RECENT` steps: one alone is one odd batch, and is clipped."""
SPIKE_RECENT: Final = 10
LEAST_DEVIATION: Final = 0.1
"""Gradient norms within a tenth of their median do not differ."""
KL_LIMIT: Final = 0.1
"""Nats a token that one update may move: implementations of PPO stop at 0.01 to 0.05."""
REF_KL_LIMIT: Final = 1.0
"""Nats a token from the reference model: e times less probable on average."""
CLIP_LIMIT: Final = 0.3
"""Share of clipped tokens: those have no gradient; 0.05 to 0.2 is usual."""
MISMATCH_LIMIT: Final = 0.01
"""Nats a token between sampler and trainer with the same weights: 1e-4 to 1e-3 is usual between bf16 engines."""
STALE_LIMIT: Final = 8.0
"""Updates: AReaL (arXiv:2505.24298, table 2) loses accuracy at 8 and more."""

LOWER_LR: Final = "lower algorithm.optimizer.lr"


def broken(records: Records) -> Sign | None:
    """A reward that has fallen, of a policy whose entropy is far from its first value, or whose groups no longer differ
    in reward. Without the second condition, noise of a small batch would look the same."""
    entropies = [record.entropy for record in records if record.entropy is not None]
    if len(records) <= WINDOW or not entropies:
        return None
    best, reward = best_reward(records), mean_reward(records[-WINDOW:])
    trained = any(record.entropy is not None for record in records[-WINDOW:])
    steady = trained and entropies[0] / ENTROPY_FACTOR < entropies[-1] < entropies[0] * ENTROPY_FACTOR
    if steady or not reward < REWARD_SHARE * best:
        return None
    sign = "no group has rewards that differ any more"
    if trained:
        sign = f"its entropy went from {entropies[0]:.3g} to {entropies[-1]:.3g} nats a token"
    return Sign(
        "policy_broken",
        f"the policy looks broken: its reward fell from {best:.3g} to {reward:.3g}, and {sign}",
        f"the learning rate {learning_rate(records):.2g} is probably too high: start again with a tenth of it"
        " (algorithm.optimizer.lr)",
        is_collapse=True,
    )


def learning_rate(records: Records) -> float:
    """The newest; NaN where none is known."""
    return next((record.lr for record in reversed(records) if record.lr is not None), math.nan)


def entropy_gone(records: Records) -> Sign | None:
    """Hardly any entropy is left, and the reward is not where it could be: nothing new will be tried."""
    known = values_of(records, lambda record: record.certainty)
    if len(known) < 2 * WINDOW:
        return None
    first, last = statistics.fmean(known[:WINDOW]), statistics.fmean(known[-WINDOW:])
    highest = max(values_of(records, lambda record: record.reward_highest), default=math.nan)
    if last >= ENTROPY_LEFT * first or not mean_reward(records[-WINDOW:]) < LEARNED_SHARE * highest:
        return None
    return Sign(
        "entropy_gone",
        f"the entropy fell from {first:.3g} to {last:.3g} nats a token, and the reward is"
        f" {mean_reward(records[-WINDOW:]):.3g} where {highest:.3g} was reached",
        f"{LOWER_LR}, raise algorithm.loss clip_high or algorithm.temperature, or use a loss with an entropy bonus",
    )


def gradient_spikes(records: Records) -> Sign | None:
    """Norms of the gradient far above those of the run so far, more than once."""
    norms = values_of(records, lambda record: record.grad_norm)
    recent = range(max(SPIKE_HISTORY, len(norms) - SPIKE_RECENT), len(norms))
    spikes = [norms[i] for i in recent if _is_spike(norms[i], norms[max(0, i - LONGEST_HISTORY) : i])]
    if len(spikes) < SPIKES or records[-1].grad_norm is None:
        return None
    usual = statistics.median(norms[-LONGEST_HISTORY:])
    return Sign(
        "gradient_spikes",
        f"the norm of the gradient spiked {len(spikes)} times in {SPIKE_RECENT} steps, up to {max(spikes):.3g} where"
        f" {usual:.3g} is usual",
        f"{LOWER_LR} or algorithm.optimizer.clip_norm, and look for odd rollouts in these steps",
    )


def _is_spike(norm: float, history: Sequence[float]) -> bool:
    above = norm > SPIKE_FACTOR * statistics.median(history)
    return above and deviations(norm, history, LEAST_DEVIATION) > SPIKE_DEVIATIONS


def divergence(records: Records) -> Sign | None:
    """Updates that move the policy far at once, or have moved it far from its reference."""
    window = records[-WINDOW:]
    kl = mean_of(window, lambda record: record.approx_kl)
    reference = mean_of(window, lambda record: record.ref_kl)
    if kl > KL_LIMIT and not _is_old(window):
        return Sign(
            "large_updates",
            f"an update moves the policy by {kl:.3g} nats a token (approx_kl); below {KL_LIMIT:g} is safe",
            f"{LOWER_LR} or algorithm.minibatches",
        )
    if reference > REF_KL_LIMIT:
        return Sign(
            "far_from_reference",
            f"the policy is {reference:.3g} nats a token from its reference (ref_kl)",
            "raise the coefficient of the KL to the reference, or stop earlier",
        )
    return None


def clipping(records: Records) -> Sign | None:
    """So many tokens are clipped that much of the data is not learned from."""
    share = mean_of(records[-WINDOW:], lambda record: record.clip_fraction)
    if not share > CLIP_LIMIT:
        return None
    return Sign(
        "much_clipping",
        f"{share:.0%} of the tokens are clipped and not learned from",
        f"{LOWER_LR} or algorithm.minibatches; with older rollouts, lower run.max_staleness",
    )


def mismatch(records: Records) -> Sign | None:
    """With the very weights that sampled them, the trainer gives tokens other probabilities than the sampler did."""
    kl = mean_of(records[-WINDOW:], _mismatch)
    if not kl > MISMATCH_LIMIT:
        return None
    return Sign(
        "sampler_mismatch",
        f"sampler and trainer disagree by {kl:.3g} nats a token on the same weights",
        "let both use the same dtype (float32 shows whether that is it), check that the servers have the newest"
        " weights, or correct for it in the loss (truncated importance sampling)",
    )


def _mismatch(record: StepRecord) -> float | None:
    """None where the weights have changed since the tokens were sampled."""
    if record.staleness:
        return None
    if record.mismatch_kl is not None:
        return record.mismatch_kl
    return record.approx_kl if record.optimizer_steps == 1 else None


def _is_old(window: Records) -> bool:
    return any(record.staleness for record in window)


def staleness(records: Records) -> Sign | None:
    """Rollouts were sampled by weights of many updates ago."""
    age = mean_of(records[-WINDOW:], lambda record: record.staleness)
    if not age > STALE_LIMIT:
        return None
    return Sign(
        "stale_rollouts",
        f"the trained tokens are {age:.3g} updates old on average",
        "lower run.max_staleness, or give rollouts more machines",
    )


def skipped(records: Records) -> Sign | None:
    """The last update was skipped, or changed weights with numbers that are not finite."""
    record = records[-1]
    if record.skipped_steps:
        what = f"{record.skipped_steps} updates were skipped: the loss or its gradient was not finite"
        return Sign("updates_skipped", what, f"if it happens again, {LOWER_LR}")
    if record.not_finite:
        what = f"metrics of the last update are not finite: {', '.join(record.not_finite)}"
        return Sign("not_finite", what, f"{LOWER_LR}, and look at rewards and log-probabilities of that step")
    return None


# -- leak ------------------------------------------------------------------------------------------------------------

# Whether the agent is shown the answer that its reward compares with. Pure.
#
# An answer is the text in a field of the task that says so (`ANSWER_FIELDS`). It is given away where it stands as a
# word in the prompt of the first call of a rollout and in no other field of the task: a passage or choices that hold it
# are what the task is about. Answers of other tasks that stand in the same prompt are chance, or labels that the prompt
# lists, and count against it.

ANSWER_FIELDS: Final = frozenset(
    {"answer", "answers", "expected", "expected_answer", "expected_output", "final_answer", "gold", "gold_answer"}
    | {"ground_truth", "label", "solution", "target", "correct_answer"}
)
LEAST_ANSWERS: Final = 3
"""Different answers in a batch: with fewer, one cannot be told from a label that every prompt lists."""
MOST_PROMPTS: Final = 16
"""Prompts that are read, of as many tasks."""
MOST_TEXT: Final = 8_000
"""Characters of a prompt that are read."""
LEAK_SHARE: Final = 0.5
"""The share of tasks from which on there is a sign."""


def answer_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`answers_in_prompt` of a batch, one rollout of each task; empty where tasks have no such field."""
    first = {each.group: each for each in reversed(trajectories) if each.transitions}
    pairs = [(each.task, each.transitions[0].input_messages or "") for each in list(first.values())[:MOST_PROMPTS]]
    share = answers_in_prompts(pairs)
    return {} if share is None else {"answers_in_prompt": share}


def answers_in_prompts(prompts: Sequence[tuple[Any, str]]) -> float | None:
    """The share of (task, prompt) whose answer the prompt gives away, less the share in which it holds the answer of
    another task. None: unknown, for tasks without an answer or with too few different ones.

    >>> tasks = [{"question": f"{number} squared", "answer": number**2} for number in (11, 12, 13)]
    >>> answers_in_prompts([(task, f"What is {task['question']}, {task['answer']}?") for task in tasks])
    1.0
    """
    known = [(answer, text[:MOST_TEXT]) for task, text in prompts if (answer := _answer(task)) is not None]
    different = {answer for answer, _ in known}
    if len(different) < LEAST_ANSWERS:
        return None
    own = sum(_holds(text, answer) for answer, text in known) / len(known)
    others = [_holds(text, other) for answer, text in known for other in different if other != answer]
    return max(0.0, own - sum(others) / len(others))


def _answer(task: Any) -> str | None:
    """The answer of a task; None where it has none, or another of its fields holds it, too."""
    if not isinstance(task, Mapping):
        return None
    fields = cast("Mapping[str, Any]", task)
    for name, value in fields.items():
        if str(name).lower() in ANSWER_FIELDS and isinstance(value, str | int | float) and str(value).strip():
            answer = str(value).strip()
            rest = {key: each for key, each in fields.items() if str(key).lower() not in ANSWER_FIELDS}
            return None if _holds(dumps(rest, default=repr).decode(), answer) else answer
    return None


def _holds(text: str, answer: str) -> bool:
    """Whether a text holds an answer as a word of its own, in any case."""
    written = re.escape(dumps(answer).decode()[1:-1])  # as it stands in JSON
    return re.search(rf"(?<![\w.]){written}(?![\w]|\.\d)", text, re.IGNORECASE) is not None


def answer_given_away(records: Records) -> Sign | None:
    """The prompts hold the answers."""
    share = mean_of(records[-WINDOW:], lambda record: record.answers_in_prompt)
    if not share >= LEAK_SHARE:  # NaN: unknown
        return None
    return Sign(
        "answer_in_prompt",
        f"the answer of the task is in the prompt of {share:.0%} of the tasks, and in no other field of these: the"
        " policy may learn to copy it",
        "do not give the agent the field of the task that the reward compares with; look at the first message of a"
        " rollout, and at the prompt template",
    )


# -- outputs ---------------------------------------------------------------------------------------------------------

# Signs in what the policy writes: truncation, length, repetition, one output for every task.

TRUNCATED_SHARE: Final = 0.25
"""The share of calls cut off from which on there is a sign: their ends, and answers in them, are never rewarded."""
LENGTH_FACTOR: Final = 3.0
"""Outputs that have become so many times longer, or shorter ..."""
NO_GAIN: Final = 1.05
"""... while the reward is not above this multiple of what it was."""
REPEATED_SHARE: Final = 0.5
"""The share of repeated n-grams from which on an output is degenerate: text and code stay below 0.3 ..."""
REPEATED_GROWTH: Final = 0.2
"""... unless the task is like that: it must have grown by this much."""
COMMON_SHARE: Final = 0.75
"""The share of tasks with the same output from which on the task no longer matters ..."""
COMMON_AT_FIRST: Final = 0.5
"""... where fewer had it at first: yes or no may be all there is to say."""
STILL_GOOD: Final = 0.9
"""The share of its best reward that a policy without regard for the task has where the reward accepts that."""

Value = Callable[[StepRecord], float | None]


def truncation(records: Records) -> Sign | None:
    """Many calls ended at the limit of tokens."""
    share = mean_of(records[-WINDOW:], lambda record: record.truncated)
    if not share > TRUNCATED_SHARE:
        return None
    return Sign(
        "truncated_outputs",
        f"{share:.0%} of the calls ended at the limit of tokens, in the middle of an answer",
        "raise the agent's max_tokens (or policy.max_context), or reward shorter answers",
    )


def length(records: Records) -> Sign | None:
    """Outputs have become much longer or shorter, and no better."""
    first, last = _first_and_last(records, lambda record: record.response_tokens)
    if first is None or last is None or mean_reward(records[-WINDOW:]) > NO_GAIN * mean_reward(records[:WINDOW]):
        return None
    if last > LENGTH_FACTOR * first:
        advice = "reward brevity, or limit max_tokens; where answers are cut off, see truncated_outputs"
    elif last < first / LENGTH_FACTOR:
        advice = "check that the reward does not favour giving up early; lower algorithm.optimizer.lr"
    else:
        return None
    return Sign(
        "output_length",
        f"a rollout samples {last:.4g} tokens, {first:.4g} at first, and the reward is no higher",
        advice,
    )


def repetition(records: Records) -> Sign | None:
    """Outputs consist of the same n-grams again and again."""
    first, last = _first_and_last(records, lambda record: record.repeated_ngrams)
    if first is None or last is None or last < REPEATED_SHARE or last - first < REPEATED_GROWTH:
        return None
    return Sign(
        "repetitive_outputs",
        f"{last:.0%} of the 4-grams of an output repeat earlier ones, {first:.0%} at first",
        "lower algorithm.optimizer.lr; read a rollout: where repetition is rewarded, the reward is exploited",
    )


def common_output(records: Records) -> Sign | None:
    """The same output for nearly every task, where outputs differed at first."""
    first, last = _first_and_last(records, lambda record: record.common_output)
    if sum(record.groups for record in records[-WINDOW:]) < MIN_GROUPS or first is None or last is None:
        return None
    if last < COMMON_SHARE or first > COMMON_AT_FIRST:
        return None
    gained = mean_reward(records[-WINDOW:]) >= STILL_GOOD * best_reward(records)
    return Sign(
        "same_output_everywhere",
        f"one and the same output occurs in {last:.0%} of the tasks, at first in {first:.0%}",
        "the reward accepts an answer that ignores the task: check it"
        if gained
        else "the policy no longer reads the task: go back to an earlier checkpoint with a lower"
        " algorithm.optimizer.lr",
    )


def _first_and_last(records: Records, value: Value) -> tuple[float | None, float | None]:
    """Means of the first and the last `WINDOW` steps; None in runs too short to compare, or without the number."""
    if len(records) < 2 * WINDOW:
        return None, None
    first, last = mean_of(records[:WINDOW], value), mean_of(records[-WINDOW:], value)
    return (first, last) if first == first and last == last else (None, None)


# -- diagnosis -------------------------------------------------------------------------------------------------------

# All signs of a run: those of its present state, and since which step each of its history was seen.

DETECTORS: Final[tuple[Detector, ...]] = (
    without_spread,
    echo_trap,
    broken,
    skipped,
    timed_out,
    left_out,
    identical_outputs,
    reward_hacking,
    outliers,
    *GUARDED,
    entropy_gone,
    gradient_spikes,
    divergence,
    clipping,
    mismatch,
    staleness,
    answer_given_away,
    truncation,
    length,
    repetition,
    common_output,
)
"""Each judges steps as of the last of them."""

FIRST_STEPS: Final = 50
LAST_STEPS: Final = 450
"""Of a longer run, these many of its first and last steps are judged: the work of a step stays the same."""


@dataclass(frozen=True, slots=True)
class SignHistory:
    """One kind of sign in the history of a run."""

    sign: Sign
    """As it was last seen."""
    since: int
    """The step at which it was first seen."""
    until: int
    """The last such step."""
    count: int
    """The number of steps at which it was seen."""


def signs_of(records: Records) -> list[Sign]:
    """What is wrong as of the last of these steps. Steps before a change of what rewards mean, of an earlier stage, or
    from before a return to an earlier checkpoint are not judged together with it."""
    present = comparable(records)
    if len(present) > FIRST_STEPS + LAST_STEPS:
        present = [*present[:FIRST_STEPS], *present[-LAST_STEPS:]]
    return [sign for detector in DETECTORS if (sign := detector(present)) is not None] if present else []


def comparable(records: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """The last steps that come from one course of the weights and one meaning of the rewards."""
    start = len(records) - 1
    while start > 0 and _continues(records[start - 1], records[start]):
        start -= 1
    return records[max(0, start) :]


def _continues(before: StepRecord, record: StepRecord) -> bool:
    same = (before.revision, before.stage) == (record.revision, record.stage)
    return same and not before.is_last_of_history


def sign_history(records: Sequence[StepRecord]) -> list[SignHistory]:
    """Every kind of sign that was seen, in order of its first step."""
    found: dict[str, SignHistory] = {}
    for part in _parts(records):
        for end in range(1, len(part) + 1):
            step = part[end - 1].step
            for sign in signs_of(part[:end]):
                known = found.get(sign.name)
                since, count = (step, 0) if known is None else (known.since, known.count)
                found[sign.name] = SignHistory(sign, since, step, count + 1)
    return sorted(found.values(), key=lambda each: each.since)


def _parts(records: Sequence[StepRecord]) -> Iterator[Sequence[StepRecord]]:
    """The steps, divided where they cannot be judged together."""
    rest = records
    parts: list[Sequence[StepRecord]] = []
    while rest:
        parts.append(comparable(rest))
        rest = rest[: len(rest) - len(parts[-1])]
    return reversed(parts)


def collapses(signs: Iterable[Sign]) -> list[Sign]:
    """Those of a policy that is breaking."""
    return [sign for sign in signs if sign.is_collapse]
