"""From groups of trajectories to training samples: a token tree, and an advantage and a weight for each token.

`rejections` names the rollouts that cannot be used at all, for the rollout source to leave out; `training_samples`
leaves out what teaches nothing, and counts it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from agentlightning.assemble import scalar_reward, token_tree
from agentlightning.credit.base import CreditRule, credit_rule
from agentlightning.credit.rejection import MISSING_REWARD, Rejection, rejection
from agentlightning.errors import RewardError, UnfaithfulSampleError
from agentlightning.trajectory import Node, TokenTree, TrainingSample, Trajectory, Transition

Aggregate = Literal["rollout", "token"]
"""rollout: every rollout has the same share of the loss however many calls or tokens it made (a token's share is
1 / (rollouts x tokens of its rollout)); token: every sampled token has the same share."""


@dataclass(frozen=True, slots=True)
class CreditReport:
    """What became of the rollouts that were handed in."""

    groups: int = 0
    rollouts: int = 0
    groups_trained: int = 0
    groups_without_spread: int = 0
    """All rewards equal: nothing to prefer."""
    groups_too_small: int = 0
    """Fewer rollouts with a reward than the rule needs."""
    groups_without_tokens: int = 0
    """No call of the agent being trained has known tokens."""
    rewards_missing: int = 0
    """Rollouts without a reward, left out of their group."""
    rollouts_trained: int = 0
    tokens_trained: int = 0

    def metrics(self) -> dict[str, float]:
        """The counts by name, for a log."""
        return {name: float(count) for name, count in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class _Credited:
    """A group that teaches something."""

    tree: TokenTree
    advantages: dict[tuple[str, str], float]
    """By (rollout_id, span_id) of the calls that are trained."""
    tokens: dict[str, int]
    """Trained tokens by rollout_id."""


def group_trajectories(trajectories: Iterable[Trajectory]) -> list[list[Trajectory]]:
    """Trajectories by their `group`, groups in order of first appearance."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group, []).append(trajectory)
    return list(groups.values())


def rejections(
    trajectories: Iterable[Trajectory],
    rule: str | Mapping[str, Any] | CreditRule = "uniform",
    *,
    target_agent: str | None = None,
    reward_weights: Mapping[str, float] | None = None,
) -> list[Rejection]:
    """The rollouts `training_samples` would leave out or raise for, whatever their group: without a reward, with one
    that the rule cannot use or that has no weight, or sampled from a distribution that no loss corrects for."""
    rule = credit_rule(rule)
    found: list[Rejection] = []
    for trajectory in trajectories:
        try:
            scored = _scalar(trajectory, reward_weights)
            rule.check(scored)
            for call in scored.transitions:
                if is_target(call.agent, target_agent):
                    _refuse_unfaithful(call)
        except (RewardError, UnfaithfulSampleError) as error:
            found.append(rejection(trajectory.rollout_id, error))
        else:
            if scored.reward is None:
                found.append(Rejection(trajectory.rollout_id, MISSING_REWARD, _without_reward(trajectory)))
    return found


def is_target(agent: str | None, target: str | None) -> bool:
    """Whether an agent of this name learns: `target` is a regular expression for the whole name; None: every agent."""
    return target is None or re.fullmatch(target, agent or "") is not None


def _without_reward(trajectory: Trajectory) -> str:
    if trajectory.reward is not None:
        return f"the reward {trajectory.reward!r} lacks a dimension that reward_weights names; give all of them"
    return (
        "it has no reward: return a number from the agent, call agl.emit_reward, post a reward event to AGL_EVENT_URL,"
        " or give a reward function (--reward)"
    )


def training_samples(
    groups: Sequence[Sequence[Trajectory]],
    rule: str | Mapping[str, Any] | CreditRule = "uniform",
    *,
    aggregate: Aggregate = "rollout",
    target_agent: str | None = None,
    reward_weights: Mapping[str, float] | None = None,
) -> tuple[list[TrainingSample], CreditReport]:
    """One training sample for each group that teaches something, and the account of all of them.

    The weights of all samples sum to 1. Rollouts with a missing reward are left out of their group; groups too small
    for the rule or without spread are skipped. With `target_agent`, a regular expression for the whole name of an
    agent, tokens of other agents have weight 0.

    Raises RewardError where a reward cannot be used and UnfaithfulSampleError where calls were sampled with top_p,
    top_k, temperature 0 or anything else that reshapes the distribution and that no loss corrects for.
    """
    rule = credit_rule(rule)
    counts = dict.fromkeys(CreditReport.__dataclass_fields__, 0)
    credited: list[_Credited] = []
    for group in groups:
        counts["groups"] += 1
        counts["rollouts"] += len(group)
        outcome = _credit(group, rule, target_agent, reward_weights, counts)
        if isinstance(outcome, str):
            counts[outcome] += 1
        else:
            credited.append(outcome)
    counts["groups_trained"] = len(credited)
    counts["rollouts_trained"] = sum(len(group.tokens) for group in credited)
    counts["tokens_trained"] = sum(sum(group.tokens.values()) for group in credited)
    samples = [_sample(group, aggregate, counts["rollouts_trained"], counts["tokens_trained"]) for group in credited]
    return samples, CreditReport(**counts)


def _credit(
    group: Sequence[Trajectory],
    rule: CreditRule,
    target_agent: str | None,
    reward_weights: Mapping[str, float] | None,
    counts: dict[str, int],
) -> _Credited | str:
    """The group with its advantages, or the name of the count that says why not."""
    scored = [_scalar(trajectory, reward_weights) for trajectory in group]
    known = [trajectory for trajectory in scored if trajectory.reward is not None]
    counts["rewards_missing"] += len(group) - len(known)
    if len(known) < rule.min_group:
        return "groups_too_small"
    advantages = rule.advantages(known)
    if advantages is None:
        return "groups_without_spread"
    calls: dict[tuple[str, str], float] = {}
    tokens: dict[str, int] = {}
    for trajectory, values in zip(known, advantages, strict=True):
        for call, value in zip(trajectory.transitions, values, strict=True):
            if is_target(call.agent, target_agent):
                _refuse_unfaithful(call)
                calls[call.rollout_id, call.span_id] = value
                tokens[call.rollout_id] = tokens.get(call.rollout_id, 0) + len(call.response_token_ids)
    return _Credited(token_tree(known), calls, tokens) if tokens else "groups_without_tokens"


def _scalar(trajectory: Trajectory, weights: Mapping[str, float] | None) -> Trajectory:
    transitions = tuple(
        call if call.reward is None else replace(call, reward=scalar_reward(call.reward, weights))
        for call in trajectory.transitions
    )
    return replace(trajectory, reward=scalar_reward(trajectory.reward, weights), transitions=transitions)


def _refuse_unfaithful(call: Transition) -> None:
    cut = {"temperature": (call.temperature, call.temperature <= 0), "top_p": (call.top_p, call.top_p < 1)}
    cut["top_k"] = (call.top_k, call.top_k > 0)
    named = ", ".join([*(f"{name}={value:g}" for name, (value, wrong) in cut.items() if wrong), *call.reshaped])
    if named:
        raise UnfaithfulSampleError(
            f"call {call.span_id} of rollout {call.rollout_id} was sampled with {named}; no loss can correct for that: "
            "sample training rollouts with temperature above 0, top_p=1.0, top_k=0 and nothing else that reshapes the "
            "distribution"
        )


def _sample(group: _Credited, aggregate: Aggregate, rollouts: int, tokens: int) -> TrainingSample:
    advantages: list[tuple[float, ...]] = []
    weights: list[tuple[float, ...]] = []
    for node in group.tree.nodes:
        advantage = group.advantages.get(_call(node))
        if advantage is None:
            share = advantage = 0.0
        elif aggregate == "token":
            share = 1.0 / tokens
        else:
            share = 1.0 / (rollouts * group.tokens[str(node.rollout_id)])
        length = len(node.token_ids) if node.sampled else 0
        advantages.append((advantage,) * length)
        weights.append((share,) * length)
    return TrainingSample(group.tree, tuple(advantages), tuple(weights))


def _call(node: Node) -> tuple[str, str]:
    return node.rollout_id or "", node.call or ""
