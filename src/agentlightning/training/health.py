"""What a run says about itself: how old the data is that it learns from, and warnings where it learns nothing.

Pure functions over what is trained and the figures of each step; the training run calls them, shows the warnings and
keeps them for its result. They change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from agentlightning.evaluation.intervals import Gain
from agentlightning.trajectory import TrainingSample

Record = Mapping[str, Any]
"""The figures of one step, as `metrics.jsonl` has them."""

WINDOW: Final = 3
"""Steps that are looked at together."""
MIN_GROUPS: Final = 4
"""Fewer groups than this show no pattern."""
OFTEN: Final = 0.1
"""The share of rollouts without time that is warned of."""
MOSTLY: Final = 0.9
"""The share of groups without spread that is warned of."""
ENTROPY_FACTOR: Final = 3.0
"""A policy whose entropy has grown or shrunk by more has changed its character ..."""
REWARD_SHARE: Final = 0.5
"""... and is broken where its reward has fallen below this share of its best."""


def staleness(samples: Sequence[TrainingSample], version: int) -> Mapping[str, float]:
    """How many updates lie between the weights that drew a token and `version`, which is about to learn from it.

    `staleness` is the mean over trained tokens, `staleness_max` the most; an answer drawn across an update counts
    token by token. Empty where no token says which weights drew it.
    """
    ages = [(version - age, count) for sample in samples for age, count in _trained(sample)]
    tokens = sum(count for _, count in ages)
    if not tokens:
        return {}
    mean = sum(age * count for age, count in ages) / tokens
    return {"staleness": mean, "staleness_max": float(max(age for age, _ in ages))}


def _trained(sample: TrainingSample) -> Iterator[tuple[int, int]]:
    """(version, how many of its tokens are trained) for each node."""
    for node, weights in zip(sample.tree.nodes, sample.weights, strict=True):
        count = int((weights != 0).sum())
        if node.policy_version is not None and count:
            yield node.policy_version, count


def warnings_of(records: Sequence[Record]) -> dict[str, str]:
    """What is wrong as of the last of these steps: kind -> sentence with the way out. A run shows each kind once."""
    found = {
        "rewards_without_spread": _without_spread(records[-WINDOW:]),
        "policy_broken": _broken(records),
        "updates_skipped": _skipped(records[-1:]),
        "timeouts_left_out": _timed_out(records[-WINDOW:]),
    }
    return {kind: text for kind, text in found.items() if text is not None}


def _without_spread(window: Sequence[Record]) -> str | None:
    groups, flat = (int(_total(window, name)) for name in ("groups", "groups_without_spread"))
    if groups < MIN_GROUPS or flat < MOSTLY * groups:
        return None
    reward = _mean(window, "reward")
    return (
        f"{flat} of the last {groups} groups taught nothing: all rollouts of a group had the same reward (mean"
        f" {reward:.3g}). Where all fail, use easier tasks, a reward with partial credit or a warm start; where all"
        " succeed, harder tasks; else a larger group_size, or see whether the reward reads the agent's output at all"
    )


def _broken(records: Sequence[Record]) -> str | None:
    """A reward that has fallen, of a policy whose entropy is far from what it was before the first update, or that
    gives its groups nothing to prefer any more. Without the second half, noise of a small batch would look the same."""
    entropies = [float(record["entropy"]) for record in records if "entropy" in record]
    if len(records) <= WINDOW or not entropies:
        return None
    means = [_mean(records[i : i + WINDOW], "reward") for i in range(len(records) - WINDOW + 1)]
    best = max((mean for mean in means if math.isfinite(mean)), default=math.nan)
    reward = _mean(records[-WINDOW:], "reward")
    trained = any("entropy" in record for record in records[-WINDOW:])
    steady = trained and entropies[0] / ENTROPY_FACTOR < entropies[-1] < entropies[0] * ENTROPY_FACTOR
    if steady or not reward < REWARD_SHARE * best:
        return None
    sign = "no group has rewards that differ any more"
    if trained:
        sign = f"its entropy went from {entropies[0]:.3g} to {entropies[-1]:.3g} nats a token"
    lr = next((record["lr"] for record in reversed(records) if "lr" in record), math.nan)
    return (
        f"the policy looks broken: its reward fell from {best:.3g} to {reward:.3g}, and {sign}. The learning rate"
        f" {lr:.2g} is probably too high: start again with a tenth of it (algorithm.optimizer.lr)"
    )


def _timed_out(window: Sequence[Record]) -> str | None:
    """Only those that failed for it: with a `timeout_reward` they are learned from."""
    late = sum(min(int(record.get("timeouts", 0)), int(record.get("failed", 0))) for record in window)
    rollouts = _total(window, "rollouts_trained") + _total(window, "failed")
    if late < MIN_GROUPS or late < OFTEN * rollouts:
        return None
    return (
        f"{late} of the last {rollouts:.0f} rollouts ran out of time and were left out, so that nothing teaches the"
        " policy to be quicker. Where its own answers take the time, give such rollouts a reward"
        " (algorithm.timeout_reward=0.0); where the agent's tools do, give them more time (runner.timeout_seconds)"
    )


def _skipped(window: Sequence[Record]) -> str | None:
    skipped = int(_total(window, "skipped_steps"))
    if not skipped:
        return None
    return (
        f"{skipped} updates were skipped: the loss or its gradient was not finite. Where it happens again, lower"
        " algorithm.optimizer.lr"
    )


def starting_warnings(*, random_weights: bool) -> dict[str, str]:
    """What can be said before the first rollout: kind -> sentence."""
    if not random_weights:
        return {}
    return {
        "random_weights": (
            'policy.model is "tiny", a small model with random weights made on the spot: it can show that everything'
            " works, and learns next to nothing from rewards alone. Give a model (--model DIRECTORY), or demonstrations"
            " to begin with (warm_start.dataset)"
        )
    }


def closing_warnings(records: Sequence[Record], gains: Mapping[str, Gain]) -> dict[str, str]:
    """What a finished run did not achieve: kind -> sentence."""
    found: dict[str, str] = {}
    trained = _total(records, "groups_trained")
    if records and _total(records, "groups") and not trained:
        found["nothing_learned"] = "nothing was learned: no group of rollouts had rewards that differ"
    for mode, gain in gains.items():
        low, high = gain.interval
        if high < 0:
            found[f"worse_{mode}"] = (
                f"the trained policy is worse than the one it started from ({mode}: {gain.gain:+.3f}); lower"
                " algorithm.optimizer.lr, and look at curve.png for where it turned"
            )
        elif low <= 0:
            found[f"no_gain_{mode}"] = (
                f"no gain is shown ({mode}): the interval {low:+.3f} to {high:+.3f} of {gain.tasks} held-out tasks"
                " includes 0; train for more steps, or measure on more tasks (data.held_out)"
            )
    return found


def _total(records: Sequence[Record], name: str) -> float:
    return math.fsum(float(record.get(name, 0.0)) for record in records)


def _mean(records: Sequence[Record], name: str) -> float:
    """NaN where no record has the figure."""
    values = [float(value) for record in records if (value := record.get(name)) is not None]
    known = [value for value in values if math.isfinite(value)]
    return math.fsum(known) / len(known) if known else math.nan
