"""From groups of trajectories to training samples: a token tree, and an advantage and a weight for each token.

`rejections` lists the rollouts that cannot be used at all, which the rollout source excludes; `training_samples` counts
groups that teach nothing, and keeps or filters those whose rewards are equal.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple, TypeAlias

from agentlightning.assemble import shared_calls, token_tree
from agentlightning.credit.assignment import Aggregate, Assignment, Totals, normalizer, sample_share, token_share
from agentlightning.credit.base import Credit, CreditContext, CreditRule, by_node
from agentlightning.credit.rejection import Rejection, rejection, without_reward
from agentlightning.errors import RewardError, UnfaithfulSampleError
from agentlightning.trajectory import CallId, TokenTree, TrainingSample, Trajectory, Transition

UNRECORDED: Final = (
    ". With top_p and top_k a call can be trained if the tokens kept at each position were recorded: the policy's own "
    "engine records them (vLLM and SGLang do not), up to policy.max_kept_tokens of them; raise that or lower top_k"
)
OWN: Final = ""
"""Stands for the policy itself where the name of an adapter may stand."""
Trains: TypeAlias = Callable[[Transition], str | None]
"""What a call trains: the name of an adapter, `OWN`, or None for nothing."""
VALUES, RETURNS = "values", "returns"


@dataclass(frozen=True, slots=True)
class CreditReport:
    """Counts of groups and rollouts by what became of them."""

    groups: int = 0
    rollouts: int = 0
    groups_trained: int = 0
    groups_without_spread: int = 0
    """All advantages are 0, because all rewards are equal."""
    groups_too_small: int = 0
    """Fewer rollouts with a reward than the rule needs."""
    groups_without_tokens: int = 0
    """No call of the agent being trained has known tokens."""
    rewards_missing: int = 0
    """Rollouts without a reward, excluded from their group."""
    rollouts_trained: int = 0
    tokens_trained: int = 0
    rule: Mapping[str, float] = field(default_factory=dict[str, float])
    """What the credit rule counted, by name."""

    def metrics(self) -> dict[str, float]:
        """The counts by name, for a log; those of the rule begin with `credit_`."""
        own = {each.name: float(getattr(self, each.name)) for each in fields(self) if each.name != "rule"}
        return own | {f"credit_{name}": float(count) for name, count in self.rule.items()}


class CreditedCall(NamedTuple):
    """The credit of one call: numbers, or arrays with one for each token."""

    advantage: Any
    weight: Any
    returns: Any
    """What a value head learns; None: nothing."""
    tokens: int


@dataclass(frozen=True, slots=True)
class CreditedGroup:
    """A group that teaches something."""

    tree: TokenTree
    calls: dict[CallId, CreditedCall] = field(default_factory=dict[CallId, CreditedCall])
    """By (rollout_id, span_id), those that are trained."""
    tokens: Counter[str] = field(default_factory=Counter[str])
    """Trained tokens by rollout_id."""

    @property
    def totals(self) -> Totals:
        return Totals(len(self.tokens), self.tokens.total())


def group_trajectories(trajectories: Iterable[Trajectory]) -> list[list[Trajectory]]:
    """Trajectories by their `group`, groups in order of first appearance."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group, []).append(trajectory)
    return list(groups.values())


def rejections(
    trajectories: Iterable[Trajectory],
    rule: str | Mapping[str, Any] | CreditRule | Assignment = "group_relative",
    *,
    target_agent: str | None = None,
    **settings: Any,
) -> list[Rejection]:
    """The rollouts that `training_samples` would exclude or raise for, whatever their group: without a reward, with one
    that the rule cannot use, that is not finite or has no weight, or sampled from a distribution that no loss corrects
    for. `settings` are those of `Assignment.of`."""
    assignment = Assignment.of(rule, **settings)
    found: list[Rejection] = []
    for trajectory in trajectories:
        try:
            rewarded = assignment.check(trajectory)
            for call in trajectory.transitions:
                if is_target(call.agent, target_agent):
                    _refuse_unfaithful(call)
        except (RewardError, UnfaithfulSampleError) as error:
            found.append(rejection(trajectory.rollout_id, error))
        else:
            if not rewarded:
                found.append(without_reward(trajectory, _without_reward(trajectory)))
    return found


def is_target(agent: str | None, target: str | None) -> bool:
    """Whether an agent of this name learns. `target` is a regular expression for the whole name; None: every agent."""
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
    rule: str | Mapping[str, Any] | CreditRule | Assignment = "group_relative",
    *,
    aggregate: Aggregate | Mapping[str, Any] = "rollout",
    target_agent: str | None = None,
    trains: Trains | None = None,
    context: CreditContext | None = None,
    **settings: Any,
) -> tuple[list[TrainingSample], CreditReport]:
    """One training sample for each group, and a count of what became of them. With `trains`, one for each adapter that
    the calls of a group train, each normalised as a batch of its own.

    `aggregate` decides the share of each token in the loss. Rollouts with a missing reward are excluded from their
    group; groups too small for the rule are skipped. Groups whose rewards are all equal have advantages of 0 and their
    share of the loss, or are skipped with `equal_groups="filter"`. With `target_agent`, a regular expression for
    the whole name of an agent, tokens of other agents have weight 0. `context` is what the rule remembers of earlier
    batches, and the columns it needs. `settings` are those of `Assignment.of`: `reward_weights`, `normalization`,
    `agent_rewards` and `equal_groups`.

    Raises RewardError where a reward cannot be used and UnfaithfulSampleError where calls were sampled with top_p or
    top_k and no record of what these kept, temperature 0 or anything else that reshapes the distribution.
    """
    assignment = Assignment.of(rule, **settings)
    aggregate, context = normalizer(aggregate), context or CreditContext()
    counts: Counter[str] = Counter()
    by_rule: Counter[str] = Counter()
    credited: list[dict[str, CreditedGroup]] = []
    for found in assignment.assign(groups, context):
        counts["rewards"] += len(found.group)
        outcome: dict[str, CreditedGroup] = {}
        if found.credit is not None:
            by_rule.update(found.credit.counts)
            outcome = _credit_group(found.group, found.credit, target_agent, trains)
            credited += [outcome] * bool(outcome)
        if found.too_small or (found.without_spread and assignment.uses_rewards):
            counts["groups_too_small" if found.too_small else "groups_without_spread"] += 1
            continue
        counts["groups_trained" if outcome else "groups_without_tokens"] += 1
        counts["rollouts_trained"] += len({rollout for each in outcome.values() for rollout in each.tokens})
        counts["tokens_trained"] += sum(each.totals.tokens for each in outcome.values())
    names = dict.fromkeys(name for each in credited for name in each)
    batches = {name: _totals([each[name] for each in credited if name in each]) for name in names}
    counts |= {
        "groups": len(groups),
        "rollouts": sum(map(len, groups)),
        "rewards_missing": sum(map(len, groups)) - counts.pop("rewards", 0),
    }
    values = context.columns.get(VALUES)
    samples = [
        _sample(each, aggregate, batches[name], name, values) for group in credited for name, each in group.items()
    ]
    return samples, CreditReport(**counts, rule=dict(by_rule))


def _totals(groups: Sequence[CreditedGroup]) -> Totals:
    return Totals(sum(each.totals.rollouts for each in groups), sum(each.totals.tokens for each in groups))


def _credit_group(
    group: Sequence[Trajectory], credit: Credit, target_agent: str | None, trains: Trains | None
) -> dict[str, CreditedGroup]:
    """What a group teaches, by what is trained; empty where it teaches nothing."""
    found: dict[str, CreditedGroup] = {}
    shared = shared_calls(group)
    repeated: dict[CallId, list[CreditedCall]] = {}
    for call, *numbers in credit.of_calls(group):
        name = OWN if trains is None else trains(call)
        if name is None or not is_target(call.agent, target_agent):
            continue
        _refuse_unfaithful(call)
        key, own = call.call_id, CreditedCall(*numbers, tokens=len(call.response_token_ids))
        if key in shared:
            repeated.setdefault(shared[key], []).append(own)
            continue
        if name not in found:
            found[name] = CreditedGroup(next(iter(found.values())).tree if found else token_tree(group))
        found[name].calls[key] = own
        found[name].tokens[call.rollout_id] += own.tokens
    for each in found.values():
        each.calls.update({first: _mean(each.calls[first], repeated[first]) for first in repeated.keys() & each.calls})
    return found


def _mean(first: CreditedCall, others: Sequence[CreditedCall]) -> CreditedCall:
    """The credit of a call that several rollouts went through: the mean of theirs (ARPO, arXiv:2507.19849, advantage
    attribution)."""
    number = len(others) + 1
    advantage = sum((each.advantage for each in others), first.advantage) / number
    returns = None if first.returns is None else sum((each.returns for each in others), first.returns) / number
    return first._replace(advantage=advantage, returns=returns)


def _refuse_unfaithful(call: Transition) -> None:
    unrecorded = call.kept_sets is None
    cut = {"top_p": (call.top_p, call.top_p < 1 and unrecorded), "top_k": (call.top_k, call.top_k > 0 and unrecorded)}
    truncated = [f"{name}={value:g}" for name, (value, wrong) in cut.items() if wrong]
    greedy = [f"temperature={call.temperature:g}"] if call.temperature <= 0 else []
    if named := ", ".join([*greedy, *truncated, *call.reshaped]):
        raise UnfaithfulSampleError(
            f"call {call.span_id} of rollout {call.rollout_id} was sampled with {named}; no loss can correct for that: "
            "sample training rollouts with temperature above 0, top_p=1.0, top_k=0 and nothing else that reshapes the "
            f"distribution{UNRECORDED if truncated else ''}"
        )


def _sample(
    group: CreditedGroup, aggregate: Aggregate, batch: Totals, name: str, values: Mapping[CallId, Any] | None
) -> TrainingSample:
    import numpy as np  # Here, because a machine that only serves or runs agents need not have it.

    def column(number: Callable[[CallId, CreditedCall], Any]) -> list[Any]:
        calls = {key: call for key, call in group.calls.items() if call.tokens}
        own = {key: np.full(call.tokens, number(key, call), np.float32) for key, call in calls.items()}
        return by_node(group.tree, own)

    def weight(key: CallId, call: CreditedCall) -> Any:
        return np.asarray(call.weight, np.float32) * token_share(aggregate, batch, group.tokens[key[0]])

    columns = {"advantages": column(lambda _, call: call.advantage), "weights": column(weight)}
    if values is not None and all(call.returns is not None for call in group.calls.values()):
        columns[VALUES] = column(lambda key, _: values[key])
        columns[RETURNS] = column(lambda _, call: call.returns)
    share = sample_share(aggregate, batch, group.totals)
    return TrainingSample(group.tree, columns=columns, adapter=name or None, share=share)
