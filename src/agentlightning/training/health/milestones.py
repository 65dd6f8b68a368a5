"""Warnings at the start and the end of a run: what is known before its first rollout, and what it did not achieve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from agentlightning.evaluation.intervals import Gain
from agentlightning.task import Overlap
from agentlightning.training.health.step_record import StepRecord

LEAST_MOVED: Final = 1e-5
"""Learning rates of a run that add up to less leave the policy what it was: adaptive optimizers move a weight by about
the rate at each update, and weights have a size of about 0.01."""


def starting_warnings(*, random_weights: bool, shared: Sequence[Overlap] = ()) -> dict[str, str]:
    """What is known before the first rollout: kind -> sentence. `shared`: tasks that are in several of the run's
    datasets."""
    found = {
        f"overlap_{each.first}_{each.second}": (
            f"{each}. A measurement on tasks that were learned from, or that chose the checkpoint, promises too much:"
            f" leave them out of {each.first}"
        )
        for each in shared
    }
    if not random_weights:
        return found
    return found | {
        "random_weights": (
            'policy.model is "tiny", a small model with random weights: it shows that everything works, and learns next'
            " to nothing from rewards alone. Give a model (--model smollm2-135m, or a directory), or demonstrations to"
            " begin with (warm_start.dataset)"
        )
    }


def closing_warnings(records: Sequence[StepRecord], gains: Mapping[str, Gain]) -> dict[str, str]:
    """What a finished run did not achieve: kind -> sentence."""
    found: dict[str, str] = {}
    if any(record.groups for record in records) and not any(record.groups_trained for record in records):
        found["nothing_learned"] = "nothing was learned: no group of rollouts had rewards that differ"
    moved = sum(each.optimizer_steps * (each.lr or 0.0) for each in records)
    updates = sum(each.optimizer_steps for each in records)
    more = "train for more steps, or"
    if updates and moved < LEAST_MOVED:
        more = (
            f"the weights hardly moved: {updates} updates, whose learning rates add up to {moved:.2g}, change no weight"
            " by more than about that. Raise algorithm.optimizer.lr (1e-6 to 1e-4 is usual, ten times that with LoRA);"
        )
    for mode, gain in gains.items():
        low, high = gain.interval
        if not gain.tasks:
            found[f"not_compared_{mode}"] = (
                f"no held-out task has a reward both before and after ({mode}: {gain.missing_before} have none before,"
                f" {gain.missing_after} none after), so nothing is known of a gain; the failures are counted in"
                " report.json (reasons_before, reasons_after), and `agl dashboard` shows them"
            )
        elif high < 0:
            found[f"worse_{mode}"] = (
                f"the trained policy is worse than the one it started from ({mode}: {gain.gain:+.3f}); lower"
                " algorithm.optimizer.lr, and see in curve.png where it turned"
            )
        elif low <= 0:
            found[f"no_gain_{mode}"] = (
                f"no gain is shown ({mode}): the interval {low:+.3f} to {high:+.3f} of {gain.tasks} held-out tasks"
                f" includes 0; {more} measure on more tasks (a file as data.held_out, or a larger data.held_out_share)"
            )
    return found
