"""Signs in the rewards: groups that teach nothing and why, rewards that are gained in the wrong way, outliers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from agentlightning.training.health.sign import (
    WINDOW,
    Records,
    Sign,
    mean_reward,
    reward_limits,
    reward_range,
    rewards,
    trend_of,
    values_of,
)
from agentlightning.training.health.step_record import StepRecord

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
