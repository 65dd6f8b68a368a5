"""The signs of trouble in the steps of a training run, judged as of the last one. Pure functions.

`LIMITS` and `OF_LAST_STEP` are tables; each other function yields the signs of one subject. Thresholds stand where they
are used, each with its reason.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from agentlightning.credit.rejection import describe_reasons
from agentlightning.training.health.step_record import LEAK_SHARE, StepRecord

WINDOW = 3
"""The number of steps that are judged together: one batch alone is noise."""
TREND = 24
"""The number of steps that a trend is judged over, if there are so many ..."""
SHORTEST_TREND = 9
"""... and the fewest: three in each third."""
CLEAR = 3.0
"""Standard errors by which the last third of a trend differs from the first: 0.3% by chance, on either side."""
MAD_TO_SIGMA = 1.4826
"""The standard deviation of normal numbers over their median absolute deviation."""
LOWER_LR = "lower algorithm.optimizer.lr"

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


# -- statistics ------------------------------------------------------------------------------------------------------


def values_of(records: Iterable[StepRecord], name: str) -> list[float]:
    """The known numbers of these steps."""
    return [number for record in records if (number := getattr(record, name)) is not None]


def mean_of(records: Iterable[StepRecord], name: str) -> float:
    """NaN where no step has the number."""
    known = values_of(records, name)
    return math.fsum(known) / len(known) if known else math.nan


def first_and_last(
    values: Sequence[float],
    first: int = WINDOW,
    last: int = WINDOW,
    average: Callable[[Sequence[float]], float] = statistics.fmean,
) -> tuple[float, float]:
    """Averages of the first and the last of these numbers; NaN where they are too few to compare."""
    if len(values) < first + last:
        return math.nan, math.nan
    return average(values[:first]), average(values[-last:])


def best_reward(records: Records) -> float:
    """The highest mean reward of `WINDOW` steps in a row; NaN where there is none."""
    means = [mean_of(records[i : i + WINDOW], "reward") for i in range(max(1, len(records) - WINDOW + 1))]
    return max((mean for mean in means if not math.isnan(mean)), default=math.nan)


def reward_limits(records: Records) -> tuple[float, float]:
    """The lowest and the highest reward seen; NaN where none is known."""
    lowest, highest = values_of(records, "reward_lowest"), values_of(records, "reward_highest")
    return min(lowest, default=math.nan), max(highest, default=math.nan)


def trend_of(numbers: Sequence[float]) -> tuple[float, float, float]:
    """How the last `TREND` numbers changed from their first third to their last: the mean of either, and the change in
    standard errors, which is 0 for fewer than `SHORTEST_TREND`."""
    numbers = numbers[-TREND:]
    if len(numbers) < SHORTEST_TREND:
        return math.nan, math.nan, 0.0
    third = len(numbers) // 3
    first, last = numbers[:third], numbers[-third:]
    before, after = statistics.fmean(first), statistics.fmean(last)
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / third)
    return before, after, (after - before) / max(error, 1e-6 * max(1.0, abs(before), abs(after)))


# -- limits ----------------------------------------------------------------------------------------------------------

LIMITS = (
    # Implementations of PPO stop an update at 0.01 to 0.05.
    (
        "large_updates",
        "fresh_kl",
        0.1,
        "an update moves the policy by {:.3g} nats a token (approx_kl); below 0.1 is safe",
        f"{LOWER_LR} or algorithm.minibatches",
    ),
    # e times less probable on average.
    (
        "far_from_reference",
        "ref_kl",
        1.0,
        "the policy is {:.3g} nats a token from its reference (ref_kl)",
        "raise the coefficient of the KL to the reference, or stop earlier",
    ),
    # Clipped tokens have no gradient; 0.05 to 0.2 is usual.
    (
        "much_clipping",
        "clip_fraction",
        0.3,
        "{:.0%} of the tokens are clipped and not learned from",
        f"{LOWER_LR} or algorithm.minibatches; with older rollouts, lower run.max_staleness",
    ),
    # 1e-4 to 1e-3 is usual between bf16 engines.
    (
        "sampler_mismatch",
        "mismatch",
        0.01,
        "sampler and trainer disagree by {:.3g} nats a token on the same weights",
        "let both use the same dtype (float32 shows whether that is it), check that the servers have the newest"
        " weights, or correct for it in the loss (truncated importance sampling)",
    ),
    # AReaL (arXiv:2505.24298, table 2) loses accuracy at 8 and more.
    (
        "stale_rollouts",
        "staleness",
        8.0,
        "the trained tokens are {:.3g} updates old on average",
        "lower run.max_staleness, or give rollouts more machines",
    ),
    (
        "answer_in_prompt",
        "answers_in_prompt",
        LEAK_SHARE,
        "the answer of the task is in the prompt of {:.0%} of the tasks, and in no other field of these: the policy may"
        " learn to copy it",
        "do not give the agent the field of the task that the reward compares with; look at the first message of a"
        " rollout, and at the prompt template",
    ),
    # The ends of such calls, and answers in them, are never rewarded.
    (
        "truncated_outputs",
        "truncated",
        0.25,
        "{:.0%} of the calls ended at the limit of tokens, in the middle of an answer",
        "raise the agent's max_tokens (or policy.max_context), or reward shorter answers",
    ),
)
"""(sign, number of `StepRecord`, limit, what is wrong, what to try): found where the mean of `WINDOW` steps reaches the
limit."""
OF_LAST_STEP = (
    (
        "updates_skipped",
        "skipped_steps",
        1,
        "{:.0f} updates were skipped: the loss or its gradient was not finite",
        f"if it happens again, {LOWER_LR}",
    ),
    # Those of the reward guard are there where [guard] says that they are violations.
    (
        "reward_out_of_range",
        "guard_out_of_range",
        0,
        "{:.0f} rollouts have a reward out of the range that [guard] allows",
        "mend the reward function, or widen guard.low and guard.high",
    ),
    (
        "rewards_missing",
        "guard_missing",
        0,
        "{:.0%} of the finished rollouts have no usable reward",
        "see the first one's reason above; a judge that times out needs more time or fewer calls at once",
    ),
    (
        "reward_drift",
        "guard_drift",
        0,
        "the rewards jumped: at some value, the share of rewards up to it differs by {:.0%} from the 5 steps before",
        "check whether the reward function, its judge or the environment has changed",
    ),
    (
        "reward_disagreement",
        "guard_disagreement",
        0,
        "the two rewards that [guard] compares order {:.0%} of the pairs of rollouts differently",
        "read rollouts that they disagree about (`agl store show ROLLOUT`): one of the two is exploited or wrong",
    ),
)
"""The same for the last step, or batch, alone."""


def beyond_limits(records: Records) -> Iterator[Sign]:
    """Numbers that are too large."""
    for limits, steps in ((OF_LAST_STEP, 1), (LIMITS, WINDOW)):
        for name, number, limit, what, advice in limits:
            if (mean := mean_of(records[-steps:], number)) >= limit:
                yield Sign(name, what.format(mean), advice)


# -- groups that teach nothing ---------------------------------------------------------------------------------------

MIN_GROUPS = 4
"""Fewer groups show no pattern."""
FLAT_SHARE = 0.9
"""The share of groups with equal rewards from which on there is a sign: the rest is too little to learn from."""
IDENTICAL_SHARE = 0.5
"""The share of groups with identical outputs from which on there is a sign: half of the rollouts are wasted."""

_UNSEEN = (
    "the reward probably does not see what differs: check that the agent's result depends on what the model answers,"
    " and call the reward function on a recorded output (`agl store show ROLLOUT`): it has to find the answer in it,"
    " whatever the case, the spaces or the words around it. If it does, each task is too hard or too easy for it"
)
_UNKNOWN = (
    "where all fail, use easier tasks, a reward with partial credit or a warm start; where all succeed, harder tasks;"
    " else a larger group_size. Check that the reward reads the agent's output"
)
_EASIER = "use easier tasks, a reward with partial credit, or a warm start (warm_start.dataset)"
_HARDER = "use harder tasks: these are solved"
_SAMPLING = (
    "the agent or its framework fixes a seed, caches answers, or replays recorded ones: switch that off for training"
)
_CAUSES = {
    "groups_repeated": ("all outputs are identical, which cannot be chance at their probability", _SAMPLING),
    "groups_certain": (
        "all outputs are identical",
        "the policy is almost certain of its answers: raise algorithm.temperature, use tasks it has not learned yet, or"
        " go back to an earlier checkpoint with a lower algorithm.optimizer.lr",
    ),
    "groups_failed": ("all rollouts failed, with the lowest reward of the batch", _EASIER),
    "groups_solved": ("all rollouts succeeded, with the highest reward of the batch", _HARDER),
    "groups_constant": ("", _UNSEEN),
}
"""By metric: what it means, and what to try."""
_DIFFERENT = ("groups_failed", "groups_solved", "groups_constant")
"""Those of outputs that differ."""


def of_groups(records: Records) -> Iterator[Sign]:
    """Nearly all groups have rollouts with equal rewards, so that there is no better and no worse to learn from; half
    of them have rollouts whose sampled tokens are the same, too improbable to be chance."""
    window = records[-WINDOW:]
    groups, flat, repeated, seeded = (
        int(sum(values_of(window, name)))
        for name in ("groups", "groups_without_spread", "groups_repeated", "calls_seeded")
    )
    if groups < MIN_GROUPS:
        return
    if flat >= FLAT_SHARE * groups:
        what = (
            f"the rewards of {flat} of the last {groups} groups taught nothing: all rollouts of a group had the same"
            f" (mean {mean_of(window, 'reward'):.3g})"
        )
        explained, advice = _cause(records)
        yield Sign("rewards_without_spread", what + explained, advice)
    if repeated >= IDENTICAL_SHARE * groups:
        seed = f", and {seeded} calls had a seed" if seeded else ""
        what = (
            f"in {repeated} of the last {groups} groups all rollouts have the same output, too improbable to be chance"
        )
        yield Sign("identical_outputs", what + seed, _SAMPLING)


def _cause(records: Records) -> tuple[str, str]:
    """The most frequent cause of equal rewards, and what to try."""
    window = records[-WINDOW:]
    causes = {name: int(sum(values_of(window, name))) for name in _CAUSES}
    cause = max(causes, key=lambda name: causes[name])
    failed, solved, constant = (causes[name] for name in _DIFFERENT)
    (low, high), (lowest, highest) = reward_limits(window), reward_limits(records)
    several = high - low > 1e-9
    explained, advice = _CAUSES[cause]
    if not causes[cause]:
        return "", _UNKNOWN
    of_tasks = several and (constant or (failed and solved))
    if of_tasks and cause in _DIFFERENT and all(each.groups == each.groups_without_spread for each in records):
        return (
            f". In {failed + solved + constant} of them outputs differ; since the first step each output of a task had"
            f" the same reward, from {low:.3g} to {high:.3g} between tasks"
        ), _UNSEEN
    if cause == "groups_constant":
        since = "of the batch" if highest - lowest > 1e-9 else "since the first step"
        explained = f"outputs differ, and every rollout {since} has the reward {low:.3g}"
        if several:
            explained = (
                f"outputs differ, and all rollouts of a step have one reward, from {low:.3g} to {high:.3g} over steps"
            )
        if highest - lowest > 1e-9:
            advice = _HARDER if mean_of(window, "reward") >= highest - 1e-9 else _EASIER
    return f". In {causes[cause]} of them {explained}", advice


# -- rewards gained in the wrong way ---------------------------------------------------------------------------------

LOST_SHARE = 0.1
"""A second reward that lost this share of the range it had is lost for good, and no drift."""
VALIDATIONS = 2
"""Validations in a row that must be below the best: one alone is noise."""
OUTLIER_FACTOR = 20.0
"""A reward so many times as large as the largest of ordinary batches is no reward of the same kind."""


def of_rewards(records: Records) -> Iterator[Sign]:
    """The training reward rises while what it stands for falls (Skalse et al. 2022, arXiv:2209.13085); one reward is
    far larger than any of ordinary batches, and decides the update alone."""
    if (what := next(_hacks(records), None)) is not None:
        yield Sign(
            "reward_hacking",
            f"the reward is probably exploited: {what}",
            "read the rollouts with the highest rewards (`agl store show ROLLOUT`); close the gap in the reward or take"
            " the exploited rule out; the checkpoint with the best validation is kept",
        )
    sizes = values_of(records, "reward_size")
    if len(sizes) > WINDOW and records[-1].reward_size is not None:
        usual = statistics.median(sizes[:-1])
        if 0 < OUTLIER_FACTOR * usual < sizes[-1]:
            yield Sign(
                "reward_outliers",
                f"a rollout has a reward of size {sizes[-1]:.3g}, where the largest of a batch is {usual:.3g} as a"
                " rule",
                "look at that rollout for an error of the reward function, and bound the reward",
            )


def _hacks(records: Records) -> Iterator[str]:
    rewards = values_of(records, "reward")
    before, after, errors = trend_of(rewards)
    measured = [record for record in records if record.validation]
    if len(measured) > VALIDATIONS:
        scores = [statistics.fmean(record.validation.values()) for record in measured]
        best = scores.index(max(scores))
        low, high = reward_limits(records)
        margin = LOST_SHARE * max(abs(scores[best]), high - low)
        since = trend_of(values_of((each for each in records if each.step >= measured[best].step), "reward"))
        fallen = best < len(scores) - VALIDATIONS and max(scores[-VALIDATIONS:]) < scores[best] - margin
        if fallen and since[2] > CLEAR:
            yield (
                f"the training reward rose from {since[0]:.3g} to {since[1]:.3g}, and the validation reward fell from"
                f" {scores[best]:.3g} (step {measured[best].step}) to {scores[-1]:.3g}"
            )
    if errors > CLEAR:
        for name in sorted({name for record in records for name in record.dimensions}):
            values = [record.dimensions[name] for record in records if name in record.dimensions]
            if fall := _fall(values):
                yield f"the reward rose from {before:.3g} to {after:.3g} while {name!r} fell {fall}"
    before, after, errors = trend_of(values_of(records, "intermediate_reward"))
    if errors > CLEAR and (fall := _fall(rewards)):
        yield (
            f"intermediate rewards rose from {before:.3g} to {after:.3g} a rollout while the final reward fell {fall}"
        )


def _fall(values: list[float]) -> str | None:
    before, after, errors = trend_of(values)
    if errors < -CLEAR and before - after >= LOST_SHARE * max(max(values) - min(values), abs(max(values))):
        return f"from {before:.3g} to {after:.3g}"
    return None


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
# `benchmarks/studies/collapse.py`, with other seeds: in ten healthy ones the first ratio stays below 2 until nearly all
# is solved, while the second falls to 0.5 and the third to 0.3; in twenty collapsing ones it passes 2 before the reward
# falls.

TRAP_LEARNED_SHARE = 0.85
FIRST = 5
"""Steps with an update that the run is compared with."""
LAST = 4
"""Steps with an update that are judged: a gradient of one of them is an odd batch."""
NORM_GROWTH = 2.0
SPREAD_LEFT = 0.75
TRAP_ENTROPY_LEFT = 0.6


ENTROPY_FACTOR = 3.0
"""A policy whose entropy has grown or shrunk by more behaves differently ..."""
REWARD_SHARE = 0.5
"""... and is broken if its reward is below this share of its best."""


def collapse(records: Records) -> Iterator[Sign]:
    """The policy begins to collapse, or looks broken."""
    updated = [record for record in records if record.grad_norm is not None]
    norms, spreads, entropies = (values_of(updated, name) for name in ("grad_norm", "reward_std", "certainty"))
    first, last = first_and_last(norms, FIRST, LAST, statistics.median)
    highest = max(values_of(records, "reward_highest"), default=math.inf)
    learned = highest > 0 and mean_of(records[-WINDOW:], "reward") >= TRAP_LEARNED_SHARE * highest
    if last >= NORM_GROWTH * first and updated[-1] is records[-1] and not learned:
        fallen: list[str] = []
        means = [statistics.fmean(spreads[i : i + LAST]) for i in range(len(spreads) - LAST + 1)]
        if len(means) > FIRST and means[-1] < SPREAD_LEFT * max(means):
            fallen.append(f"the spread of rewards in a group fell from {max(means):.3g} to {means[-1]:.3g}")
        before, after = first_and_last(entropies, FIRST, LAST)
        if after <= TRAP_ENTROPY_LEFT * before:
            fallen.append(f"the entropy from {before:.3g} to {after:.3g} nats a token")
        if fallen:
            yield Sign(
                "echo_trap",
                f"the policy begins to collapse: the norm of the gradient grew from {first:.3g} to {last:.3g}, and"
                f" {' and '.join(fallen)}",
                "lower algorithm.optimizer.lr to a third, go back to an earlier checkpoint (run.on_collapse="
                '"rollback" does both), and draw from more tasks',
                is_collapse=True,
            )
    yield from _broken(records)


def _broken(records: Records) -> Iterator[Sign]:
    """A reward that has fallen, of a policy whose entropy is far from its first value, or whose groups no longer differ
    in reward. Without the second condition, noise of a small batch would look the same."""
    entropies, window = values_of(records, "entropy"), records[-WINDOW:]
    if len(records) <= WINDOW or not entropies:
        return
    best, reward = best_reward(records), mean_of(window, "reward")
    trained = bool(values_of(window, "entropy"))
    steady = trained and entropies[0] / ENTROPY_FACTOR < entropies[-1] < entropies[0] * ENTROPY_FACTOR
    if steady or not reward < REWARD_SHARE * best:
        return
    sign = "no group has rewards that differ any more"
    if trained:
        sign = f"its entropy went from {entropies[0]:.3g} to {entropies[-1]:.3g} nats a token"
    lr = [math.nan, *values_of(records, "lr")][-1]
    yield Sign(
        "policy_broken",
        f"the policy looks broken: its reward fell from {best:.3g} to {reward:.3g}, and {sign}",
        f"the learning rate {lr:.2g} is probably too high: start again with a tenth of it (algorithm.optimizer.lr)",
        is_collapse=True,
    )


# -- updates ---------------------------------------------------------------------------------------------------------

LEARNED_SHARE = 0.9
"""A policy with this share of the highest reward may be certain: it has learned the task."""
ENTROPY_LEFT = 0.1
"""The share of its first entropy below which a policy explores next to nothing."""
SPIKE_HISTORY = 8
"""Gradient norms that the next one is compared with, at least ..."""
LONGEST_HISTORY = 50
"""... and at most: norms drift over a run."""
SPIKE_DEVIATIONS = 10.0
"""Robust standard deviations above the median: norms have heavy tails, and six occur in healthy runs ..."""
SPIKE_FACTOR = 4.0
"""... and a multiple of the median, for runs whose norms hardly vary."""
SPIKES = 2
"""Spikes within `SPIKE_RECENT` steps: one alone is one odd batch, and is clipped."""
SPIKE_RECENT = 10
LEAST_DEVIATION = 0.1
"""Gradient norms within a tenth of their median do not differ."""


def of_updates(records: Records) -> Iterator[Sign]:
    """The last update was skipped, or changed weights with numbers that are not finite; hardly any entropy is left, and
    the reward is not where it could be; norms of the gradient spike."""
    last = records[-1]
    if last.not_finite and not last.skipped_steps:
        what = f"metrics of the last update are not finite: {', '.join(last.not_finite)}"
        yield Sign("not_finite", what, f"{LOWER_LR}, and look at rewards and log-probabilities of that step")
    first, now = first_and_last(values_of(records, "certainty"))
    reward, highest = mean_of(records[-WINDOW:], "reward"), reward_limits(records)[1]
    if now < ENTROPY_LEFT * first and reward < LEARNED_SHARE * highest:
        yield Sign(
            "entropy_gone",
            f"the entropy fell from {first:.3g} to {now:.3g} nats a token, and the reward is {reward:.3g} where"
            f" {highest:.3g} was reached",
            f"{LOWER_LR}, raise algorithm.loss clip_high or algorithm.temperature, or use a loss with an entropy bonus",
        )
    norms = values_of(records, "grad_norm")
    recent = range(max(SPIKE_HISTORY, len(norms) - SPIKE_RECENT), len(norms))
    spikes: list[float] = []
    for i in recent:
        history = norms[max(0, i - LONGEST_HISTORY) : i]
        median = statistics.median(history)
        mad = statistics.median(abs(each - median) for each in history)
        deviation = max(MAD_TO_SIGMA * mad, LEAST_DEVIATION * abs(median), 1e-12)
        if norms[i] > SPIKE_FACTOR * median and norms[i] - median > SPIKE_DEVIATIONS * deviation:
            spikes.append(norms[i])
    if len(spikes) >= SPIKES and last.grad_norm is not None:
        yield Sign(
            "gradient_spikes",
            f"the norm of the gradient spiked {len(spikes)} times in {SPIKE_RECENT} steps, up to {max(spikes):.3g}"
            f" where {statistics.median(norms[-LONGEST_HISTORY:]):.3g} is usual",
            f"{LOWER_LR} or algorithm.optimizer.clip_norm, and look for odd rollouts in these steps",
        )


# -- failures --------------------------------------------------------------------------------------------------------

MIN_FAILURES = 4
"""Fewer are no pattern."""
TIMEOUT_SHARE = 0.1
"""The share of rollouts that timed out from which on there is a sign."""
LEFT_OUT_SHARE = 0.2
"""The share of rollouts that failed or were rejected from which on there is a sign: above it, those that are left may
be the easy ones."""


def of_failures(records: Records) -> Iterator[Sign]:
    """Rollouts that are not learned from: many timed out (with a `timeout_reward` they have not failed), or failed or
    were rejected for other reasons."""
    window, causes = records[-WINDOW:], Counter[str]()
    timeouts = sum(min(record.timeouts, record.failed) for record in window)
    rollouts = sum(record.rollouts_trained + record.failed for record in window)
    if timeouts >= max(MIN_FAILURES, TIMEOUT_SHARE * rollouts):
        yield Sign(
            "timeouts_left_out",
            f"{timeouts} of the last {rollouts} rollouts timed out and were left out, so that nothing teaches the"
            " policy to be quicker",
            "where its own answers take the time, give such rollouts a reward (algorithm.timeout_reward=0.0); where the"
            " agent's tools do, give them more time (runner.timeout_seconds)",
        )
    for record in window:
        causes["failed"] += max(0, record.failed - record.timeouts)
        causes.update(record.rejected)
        rollouts += sum(record.rejected.values())
    count = sum(causes.values())
    if count >= max(MIN_FAILURES, LEFT_OUT_SHARE * rollouts):
        named = describe_reasons({name: number for name, number in causes.most_common() if number})
        yield Sign(
            "rollouts_left_out",
            f"{count} of the last {rollouts} rollouts were left out: {named}",
            "the first of each kind is named in the output of the run, and `agl doctor` lists errors by kind; mend the"
            " agent and continue with --resume",
        )


# -- outputs ---------------------------------------------------------------------------------------------------------

LENGTH_FACTOR = 3.0
"""Outputs that have become so many times longer, or shorter ..."""
NO_GAIN = 1.05
"""... while the reward is not above this multiple of what it was."""
REPEATED_SHARE = 0.5
"""The share of repeated n-grams from which on an output is degenerate: text and code stay below 0.3 ..."""
REPEATED_GROWTH = 0.2
"""... unless the task is like that: it must have grown by this much."""
COMMON_SHARE = 0.75
"""The share of tasks with the same output from which on the task no longer matters ..."""
COMMON_AT_FIRST = 0.5
"""... where fewer had it at first: yes or no may be all there is to say."""
STILL_GOOD = 0.9
"""The share of its best reward that a policy without regard for the task has where the reward accepts that."""


def of_outputs(records: Records) -> Iterator[Sign]:
    """Outputs have become much longer or shorter, and no better; they consist of the same n-grams again and again; one
    is given for nearly every task, where outputs differed at first."""
    window, reward = records[-WINDOW:], mean_of(records[-WINDOW:], "reward")
    first, last = first_and_last(values_of(records, "response_tokens"))
    longer = last > LENGTH_FACTOR * first
    if (longer or last < first / LENGTH_FACTOR) and not reward > NO_GAIN * mean_of(records[:WINDOW], "reward"):
        yield Sign(
            "output_length",
            f"a rollout samples {last:.4g} tokens, {first:.4g} at first, and the reward is no higher",
            "reward brevity, or limit max_tokens; where answers are cut off, see truncated_outputs"
            if longer
            else "check that the reward does not favour giving up early; lower algorithm.optimizer.lr",
        )
    first, last = first_and_last(values_of(records, "repeated_ngrams"))
    if last >= max(first + REPEATED_GROWTH, REPEATED_SHARE):  # in this order, NaN is unknown
        yield Sign(
            "repetitive_outputs",
            f"{last:.0%} of the 4-grams of an output repeat earlier ones, {first:.0%} at first",
            "lower algorithm.optimizer.lr; read a rollout: where repetition is rewarded, the reward is exploited",
        )
    first, last = first_and_last(values_of(records, "common_output"))
    if last >= COMMON_SHARE and first <= COMMON_AT_FIRST and sum(each.groups for each in window) >= MIN_GROUPS:
        yield Sign(
            "same_output_everywhere",
            f"one and the same output occurs in {last:.0%} of the tasks, at first in {first:.0%}",
            "the reward accepts an answer that ignores the task: check it"
            if reward >= STILL_GOOD * best_reward(records)
            else "the policy no longer reads the task: go back to an earlier checkpoint with a lower"
            " algorithm.optimizer.lr",
        )


# -- diagnosis -------------------------------------------------------------------------------------------------------

DETECTORS: Final[tuple[Callable[[Records], Iterator[Sign]], ...]] = (
    of_groups,
    collapse,
    of_updates,
    of_failures,
    of_rewards,
    beyond_limits,
    of_outputs,
)
"""Each judges steps as of the last of them."""

FIRST_STEPS = 50
LAST_STEPS = 450
"""Of a longer run, these many of its first and last steps are judged: the work of a step stays the same."""


@dataclass(slots=True)
class SignHistory:
    """One kind of sign in the history of a run."""

    sign: Sign
    """As it was last seen."""
    since: int
    """The step at which it was first seen."""
    until: int = 0
    """The last such step."""
    count: int = 0
    """The number of steps at which it was seen."""


def signs_of(records: Records) -> list[Sign]:
    """What is wrong as of the last of these steps. Steps before a change of what rewards mean, of an earlier stage, or
    from before a return to an earlier checkpoint are not judged together with it."""
    present = comparable(records)
    if len(present) > FIRST_STEPS + LAST_STEPS:
        present = [*present[:FIRST_STEPS], *present[-LAST_STEPS:]]
    return [sign for detect in DETECTORS for sign in detect(present)] if present else []


def comparable(records: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """The last steps that come from one course of the weights and one meaning of the rewards."""
    start = max(0, len(records) - 1)
    while start:
        before, record = records[start - 1], records[start]
        if before.rolled_back or before.stopped or (before.revision, before.stage) != (record.revision, record.stage):
            break
        start -= 1
    return records[start:]


def sign_history(records: Sequence[StepRecord], seen: Iterable[SignHistory] = (), begin: int = 0) -> list[SignHistory]:
    """Every kind of sign that was seen, in order of its first step. `seen`: the history of the first `begin` steps."""
    found = {each.sign.name: replace(each) for each in seen}
    for end, record in enumerate(records[begin:], begin + 1):
        for sign in signs_of(records[:end]):
            known = found.setdefault(sign.name, SignHistory(sign, record.step))
            known.sign, known.until, known.count = sign, record.step, known.count + 1
    return list(found.values())
