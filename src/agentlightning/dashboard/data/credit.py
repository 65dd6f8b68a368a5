"""The advantage and the weight of each sampled token, computed for display.

A run does not store them: they follow from the rewards of a step's rollouts by its credit rule. They are computed again
with the run's own settings over the rollouts that the step was given, in the order in which `LightningRL` does so. What
cannot be repeated without the policy (its values, a divergence from the reference) is named in `notes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agentlightning.algorithms.agents import AgentRoles
from agentlightning.algorithms.lightning_rl import LightningRLConfig, assignment_of, shape_rewards
from agentlightning.algorithms.step import (
    most_uncertain,
    truncated_rollouts,
    without_weight,
)
from agentlightning.credit import Assignment, group_trajectories, training_samples
from agentlightning.errors import AgentLightningError
from agentlightning.trajectory import CallId, TrainingSample, Trajectory

REMEMBERING: Final = frozenset({"state_value", "hierarchical"})
"""Rules that also use what they remember of earlier steps."""


@dataclass(frozen=True, slots=True)
class CallCredit:
    """The credit of one call: a number for each of its sampled tokens."""

    advantages: tuple[float, ...]
    weights: tuple[float, ...]
    """The factor of each token's loss: 0 carries none."""


@dataclass(frozen=True, slots=True)
class BatchCredit:
    """The credit of the calls of a batch."""

    rule: str | None = None
    calls: Mapping[CallId, CallCredit] = field(default_factory=dict[CallId, CallCredit])
    """By (rollout_id, span_id). A call that is missing carries no loss."""
    notes: tuple[str, ...] = ()
    """What differs from the numbers of the run, and why there are none."""


def credit_of(trajectories: Sequence[Trajectory], config: LightningRLConfig) -> BatchCredit:
    """The credit of the rollouts of a step."""
    try:
        assignment = assignment_of(config)
    except AgentLightningError as error:
        return BatchCredit(notes=(f"the credit rule cannot be made from the settings: {error}",))
    rule = assignment.rule
    if rule.needs:
        needed = ", ".join(sorted(rule.needs))
        note = f'credit rule "{rule.type}" reads {needed} of the policy, which are not kept: no advantages are shown'
        return BatchCredit(rule.type, notes=(note,))
    try:
        samples = _samples(trajectories, config, assignment)
    except ModuleNotFoundError as error:
        return BatchCredit(rule.type, notes=(f"{error.name} is not installed: pip install 'agentlightning[train]'",))
    except AgentLightningError as error:
        return BatchCredit(rule.type, notes=(f"the credit of this step cannot be computed: {error}",))
    return BatchCredit(rule.type, _by_call(samples), tuple(_notes(config, rule.type)))


def _samples(
    trajectories: Sequence[Trajectory], config: LightningRLConfig, assignment: Assignment
) -> list[TrainingSample]:
    target = config.target_agent
    shaped, _ = shape_rewards(trajectories, config, target)
    groups = most_uncertain(group_trajectories(shaped), config.keep_groups, config.reward_weights)
    trains = AgentRoles(config.agents).trains
    samples, _ = training_samples(groups, assignment, aggregate=config.aggregate, target_agent=target, trains=trains)
    return without_weight(samples, truncated_rollouts(trajectories, target)) if config.mask_truncated else samples


def _notes(config: LightningRLConfig, rule: str) -> list[str]:
    found: list[str] = []
    if rule in REMEMBERING:
        found.append(f'credit rule "{rule}" also uses what it remembers of earlier steps; this is of the step alone')
    if config.kl_in_reward:
        found.append("kl_in_reward takes a divergence from the reference off the rewards, which is not kept")
    if config.replay is not None:
        found.append("replay adds rollouts of earlier steps to groups; they are left out here")
    if any(loss.type in ("sdpo", "distill") for loss in config.losses):
        found.append('losses "sdpo" and "distill" also learn from the distribution of a teacher, which is not kept')
    return found


def _by_call(samples: Sequence[TrainingSample]) -> dict[CallId, CallCredit]:
    advantages: dict[CallId, list[float]] = {}
    weights: dict[CallId, list[float]] = {}
    for sample in samples:
        columns: Any = zip(sample.tree.nodes, sample.advantages, sample.weights, strict=True)
        for node, own, factor in columns:
            if node.sampled and node.call is not None and node.rollout_id is not None:
                key = (node.rollout_id, node.call)
                advantages.setdefault(key, []).extend(own.tolist())
                weights.setdefault(key, []).extend(factor.tolist())
    return {key: CallCredit(tuple(own), tuple(weights[key])) for key, own in advantages.items()}
