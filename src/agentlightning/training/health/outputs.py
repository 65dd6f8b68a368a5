"""Signs in what the policy writes: truncation, length, repetition, one output for every task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from agentlightning.training.health.sign import WINDOW, Records, Sign, best_reward, mean_of, mean_reward
from agentlightning.training.health.step_record import StepRecord

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
MIN_GROUPS: Final = 4
"""Fewer groups show no pattern."""

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
