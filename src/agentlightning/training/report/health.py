"""Warnings of a training run: signs in the records of its steps that it learns nothing, each with the way out.

Pure functions. The training run calls them, shows each kind of warning once and keeps it for its result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from agentlightning.evaluation.intervals import Gain
from agentlightning.training.report.step_record import StepRecord

WINDOW: Final = 3
"""The number of steps that are judged together."""
MIN_GROUPS: Final = 4
"""Fewer groups show no pattern."""
TIMEOUT_SHARE: Final = 0.1
"""The share of rollouts that timed out from which on there is a warning."""
FLAT_SHARE: Final = 0.9
"""The share of groups with equal rewards from which on there is a warning."""
ENTROPY_FACTOR: Final = 3.0
"""A policy whose entropy has grown or shrunk by more behaves differently ..."""
REWARD_SHARE: Final = 0.5
"""... and is broken if its reward is below this share of its best."""


def warnings_of(records: Sequence[StepRecord]) -> dict[str, str]:
    """What is wrong as of the last of these steps: kind -> sentence. A run shows each kind once."""
    found = {
        "rewards_without_spread": _without_spread(records[-WINDOW:]),
        "policy_broken": _broken(records),
        "updates_skipped": _skipped(records[-1:]),
        "timeouts_left_out": _timed_out(records[-WINDOW:]),
    }
    return {kind: text for kind, text in found.items() if text is not None}


def _without_spread(window: Sequence[StepRecord]) -> str | None:
    groups = sum(record.groups for record in window)
    flat = sum(record.groups_without_spread for record in window)
    if groups < MIN_GROUPS or flat < FLAT_SHARE * groups:
        return None
    return (
        f"{flat} of the last {groups} groups taught nothing: all rollouts of a group had the same reward (mean"
        f" {_mean_reward(window):.3g}). Where all fail, use easier tasks, a reward with partial credit or a warm start;"
        " where all succeed, harder tasks; else a larger group_size. Check that the reward reads the agent's output"
    )


def _broken(records: Sequence[StepRecord]) -> str | None:
    """A reward that has fallen, of a policy whose entropy is far from its first value, or whose groups no longer differ
    in reward. Without the second condition, noise of a small batch would look the same."""
    entropies = [record.entropy for record in records if record.entropy is not None]
    if len(records) <= WINDOW or not entropies:
        return None
    means = [_mean_reward(records[i : i + WINDOW]) for i in range(len(records) - WINDOW + 1)]
    best = max((mean for mean in means if math.isfinite(mean)), default=math.nan)
    reward = _mean_reward(records[-WINDOW:])
    trained = any(record.entropy is not None for record in records[-WINDOW:])
    steady = trained and entropies[0] / ENTROPY_FACTOR < entropies[-1] < entropies[0] * ENTROPY_FACTOR
    if steady or not reward < REWARD_SHARE * best:
        return None
    sign = "no group has rewards that differ any more"
    if trained:
        sign = f"its entropy went from {entropies[0]:.3g} to {entropies[-1]:.3g} nats a token"
    lr = next((record.lr for record in reversed(records) if record.lr is not None), math.nan)
    return (
        f"the policy looks broken: its reward fell from {best:.3g} to {reward:.3g}, and {sign}. The learning rate"
        f" {lr:.2g} is probably too high: start again with a tenth of it (algorithm.optimizer.lr)"
    )


def _timed_out(window: Sequence[StepRecord]) -> str | None:
    """Counts those that failed for it: with a `timeout_reward` they are learned from."""
    timeouts = sum(min(record.timeouts, record.failed) for record in window)
    rollouts = sum(record.rollouts_trained + record.failed for record in window)
    if timeouts < MIN_GROUPS or timeouts < TIMEOUT_SHARE * rollouts:
        return None
    return (
        f"{timeouts} of the last {rollouts} rollouts timed out and were left out, so that nothing teaches the"
        " policy to be quicker. Where its own answers take the time, give such rollouts a reward"
        " (algorithm.timeout_reward=0.0); where the agent's tools do, give them more time (runner.timeout_seconds)"
    )


def _skipped(window: Sequence[StepRecord]) -> str | None:
    skipped = sum(record.skipped_steps for record in window)
    if not skipped:
        return None
    return (
        f"{skipped} updates were skipped: the loss or its gradient was not finite. If it happens again, lower"
        " algorithm.optimizer.lr"
    )


def starting_warnings(*, random_weights: bool) -> dict[str, str]:
    """What is known before the first rollout: kind -> sentence."""
    if not random_weights:
        return {}
    return {
        "random_weights": (
            'policy.model is "tiny", a small model with random weights: it shows that everything works, and learns next'
            " to nothing from rewards alone. Give a model (--model DIRECTORY), or demonstrations to begin with"
            " (warm_start.dataset)"
        )
    }


def closing_warnings(records: Sequence[StepRecord], gains: Mapping[str, Gain]) -> dict[str, str]:
    """What a finished run did not achieve: kind -> sentence."""
    found: dict[str, str] = {}
    if any(record.groups for record in records) and not any(record.groups_trained for record in records):
        found["nothing_learned"] = "nothing was learned: no group of rollouts had rewards that differ"
    for mode, gain in gains.items():
        low, high = gain.interval
        if high < 0:
            found[f"worse_{mode}"] = (
                f"the trained policy is worse than the one it started from ({mode}: {gain.gain:+.3f}); lower"
                " algorithm.optimizer.lr, and see in curve.png where it turned"
            )
        elif low <= 0:
            found[f"no_gain_{mode}"] = (
                f"no gain is shown ({mode}): the interval {low:+.3f} to {high:+.3f} of {gain.tasks} held-out tasks"
                " includes 0; train for more steps, or measure on more tasks (data.held_out)"
            )
    return found


def _mean_reward(records: Iterable[StepRecord]) -> float:
    """NaN where no record has a reward."""
    known = [record.reward for record in records if record.reward is not None and math.isfinite(record.reward)]
    return math.fsum(known) / len(known) if known else math.nan
