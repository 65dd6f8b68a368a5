"""Credit assignment: how much better than expected each call of a rollout was, from rewards in any form to training
samples.

`rejections` lists the rollouts that cannot be used at all, which the rollout source excludes; `training_samples` makes
of each group a token tree with an advantage and a weight for each token, counts groups that teach nothing, and keeps or
filters those whose rewards are equal. What a rule is stands in `base`, the rules in `rules`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias, cast

from pydantic import Field, TypeAdapter, ValidationError, field_validator

from agentlightning.assemble import shared_calls, token_tree
from agentlightning.credit.base import (
    SMALLEST_SPREAD,
    Credit,
    CreditContext,
    Group,
    by_node,
    credit_rule,
    credited,
    memory_key,
    plain_reward,
)
from agentlightning.credit.base import CreditRule as CreditRule
from agentlightning.credit.rejection import Rejection, rejection, without_reward
from agentlightning.credit.rules import VALUES
from agentlightning.errors import ConfigError, RewardError, UnfaithfulSampleError
from agentlightning.trajectory import (
    CallId,
    Reward,
    RewardWeights,
    TokenTree,
    TrainingSample,
    Trajectory,
    Transition,
    add_rewards,
    scalar_reward,
)
from agentlightning.util.settings import AtLeastOne, Section

# -- rewards of several agents -----------------------------------------------------------------------------------------

# Rewards of several agents: whose reward each agent's calls are credited with.
#
# R is the reward of the rollout, and R_a what was emitted for agent a alone (`emit_reward(..., agent=a)`):
#
# - shared: every agent has R, or the sum of all R_a where there is no R: the reward of the team;
# - own: agent a has R_a, or R where there is none for it;
# - difference: agent a has R - R_a, where R_a is what the rollout would have earned without it: the difference rewards
#   of Wolpert and Tumer 2001 (Optimal payoff functions for members of collectives, equation 4).
#
# An agent is compared with the same agent of the other rollouts of the group.

AgentRewards: TypeAlias = Literal["shared", "own", "difference"]


def check_agents(trajectory: Trajectory, mode: AgentRewards) -> None:
    """Raises RewardError for a reward of an agent that made no call, and for a missing reward that `mode` needs."""
    agents = {call.agent for call in trajectory.transitions}
    unknown = sorted(set(trajectory.agent_rewards) - agents)
    if unknown:
        raise RewardError(
            f"rollout {trajectory.rollout_id} has a reward for agent {unknown[0]!r}, which made no call; there are "
            f"{names_of(agents)}. Name the agent of the reward as agl.track_agent does"
        )
    if mode == "difference" and trajectory.agent_rewards and trajectory.reward is None:
        raise RewardError(
            f"rollout {trajectory.rollout_id} has rewards of agents and none of its own, which "
            'agent_rewards="difference" needs; emit one without agent='
        )


def names_of(agents: Iterable[str | None]) -> str:
    """The agents that calls were of, in words."""
    return ", ".join(sorted({"calls without a name" if each is None else repr(each) for each in agents})) or "no calls"


def reward_of(trajectory: Trajectory, agent: str | None, mode: AgentRewards) -> Reward | None:
    """What the calls of an agent are credited with; None: nothing is known."""
    if mode == "shared":
        return trajectory.team_reward
    own = trajectory.agent_rewards.get(agent) if agent is not None else None
    if own is None:
        return trajectory.reward
    return own if mode == "own" else _difference(trajectory, own)


def _difference(trajectory: Trajectory, without: Reward) -> Reward | None:
    reward = trajectory.reward
    if isinstance(reward, dict) and isinstance(without, dict):
        return {name: value - without.get(name, 0.0) for name, value in reward.items()}
    negated = {name: -value for name, value in without.items()} if isinstance(without, dict) else -without
    return None if reward is None else add_rewards(reward, negated, f"rollout {trajectory.rollout_id}")


# -- normalization -----------------------------------------------------------------------------------------------------

# Normalisation of advantages: what they are divided by before a loss sees them.
#
# The standard deviation of a set of calls counts every rollout alike, however many calls it made of the set:
#
#     std = sqrt( sum_i sum_k w_ik (A_ik - mean)^2 ),   mean = sum_i sum_k w_ik A_ik,   w_ik = 1 / (rollouts * calls_i)
#
# - group: the calls of a group. With `group_relative` it is GRPO (arXiv:2402.03300, section 4.1.2).
# - batch: all calls of a batch. With `center` and `reinforce` it is REINFORCE++ (arXiv:2501.03262, section 3.2).
# - agent: the calls of one agent in a batch, so that agents with rewards of different size learn alike.
# - none: nothing, as Dr. GRPO (arXiv:2503.20783, section 3.2).
# - max_rl: the mean reward of the group, as MaxRL (arXiv:2602.02710): hard tasks count as much as easy ones.
# - gdpo: each named dimension of the reward is made into advantages and divided per group on its own, then they are
#   added up with their weights, as GDPO (arXiv:2601.05242, section 3.1), without its last division by that of the
#   batch.

# -- normalizer ------------------------------------------------------------------------------------------------------

# Normalization of the loss of a batch: the share of each trained token.


class ConstantNormalizer(Section):
    """Every token has the share 1 / (rollouts x length), whatever the length of its rollout: the loss of Dr. GRPO (Liu
    et al. 2025, arXiv:2503.20783, section 3.2)."""

    type: Literal["constant"] = "constant"
    """Which normalizer this is."""
    length: AtLeastOne
    """Number of tokens by which the loss of each rollout is divided, such as the longest response allowed."""


Aggregate: TypeAlias = Literal["rollout", "token"] | ConstantNormalizer
"""rollout: every rollout has the same share of the loss however many calls or tokens it made (a token's share is
1 / (rollouts x tokens of its rollout)); token: every sampled token has the same share; constant: see there."""

_adapter: TypeAdapter[Aggregate] = TypeAdapter(Annotated[Aggregate, Field()])


def normalizer(setting: Aggregate | Mapping[str, Any]) -> Aggregate:
    """The normalizer of a name or a table of settings. Raises ConfigError."""
    try:
        return _adapter.validate_python(setting)
    except ValidationError as error:
        raise ConfigError(
            f'aggregate={setting!r} cannot be used; choose "rollout", "token" or {{"type": "constant", "length": ...}}'
        ) from error


class Totals(NamedTuple):
    """What is trained in a batch, or a sample of it."""

    rollouts: int
    tokens: int


def token_share(setting: Aggregate, batch: Totals, rollout_tokens: int) -> float:
    """The share of one token of a rollout with `rollout_tokens` trained tokens."""
    match setting:
        case "rollout":
            return 1.0 / (batch.rollouts * rollout_tokens)
        case "token":
            return 1.0 / batch.tokens
        case ConstantNormalizer():
            return 1.0 / (batch.rollouts * setting.length)


def sample_share(setting: Aggregate, batch: Totals, sample: Totals) -> float:
    """The share of one sample. Those of a batch sum to 1."""
    return sample.tokens / max(1, batch.tokens) if setting == "token" else sample.rollouts / batch.rollouts


Place: TypeAlias = tuple[list[Any], int]
"""The advantages of a rollout, and the place of a call among them."""

MAX_RL, GDPO = "max_rl", "gdpo"


class Normalization(Section):
    """What advantages are divided by.

    >>> Normalization(type="batch", center=True).type
    'batch'
    """

    type: Literal["rule", "none", "group", "batch", "agent", "max_rl", "gdpo"] = "rule"
    """rule: as the formula of the rule says; group, batch or agent: the standard deviation within it; max_rl: the
    group's mean reward; gdpo: per dimension of the reward; none: nothing. role is another name of agent."""
    center: bool = False
    """Whether the mean is subtracted first (group, batch, agent). Rules with a baseline have a mean near 0 anyway."""

    @field_validator("type", mode="before")
    @classmethod
    def _alias(cls, name: Any) -> Any:
        return "agent" if name == "role" else name

    def check_rule(self, rule: CreditRule) -> CreditRule:
        """The rule without a division of its own, unless that is the normalisation. Raises ConfigError where it was
        told to have one besides."""
        if self.center and self.type not in ("group", "batch", "agent"):
            raise ConfigError(f'normalization "{self.type}" has no mean to subtract; leave out center')
        if self.type == "rule" or "normalize_std" not in type(rule).model_fields:
            return rule
        if "normalize_std" in rule.model_fields_set and bool(dict(rule)["normalize_std"]):
            raise ConfigError(
                f'credit rule "{rule.type}" divides by a standard deviation (normalize_std=true) and so does '
                f'normalization="{self.type}"; set one of them'
            )
        return rule.model_copy(update={"normalize_std": False})

    def check(self, trajectory: Trajectory) -> None:
        """Raises RewardError for a reward that it cannot use."""
        if self.type == MAX_RL and trajectory.reward is not None and plain_reward(trajectory) < 0:
            raise RewardError(
                f'rollout {trajectory.rollout_id} has reward {trajectory.reward!r}; normalization "max_rl" divides by '
                "the mean reward and needs rewards of 0 or more"
            )

    def apply(self, groups: Sequence[Group], credits: Sequence[Credit | None]) -> list[Credit | None]:
        """The credits with normalised advantages. Where all are equal they stay what they are."""
        if self.type in ("rule", "none", GDPO):
            return list(credits)
        if self.type == MAX_RL:
            return [self._by_mean_reward(group, credit) for group, credit in zip(groups, credits, strict=True)]
        found = [credit and replace(credit, advantages=[list(own) for own in credit.advantages]) for credit in credits]
        sets: dict[Any, list[Place]] = {}
        for g, (group, credit) in enumerate(zip(groups, found, strict=True)):
            for trajectory, row in zip(group, credit.advantages, strict=True) if credit else ():
                for k, call in enumerate(trajectory.transitions):
                    key = {"group": g, "batch": None, "agent": call.agent}[self.type]
                    sets.setdefault(key, []).append((cast("list[Any]", row), k))
        for places in sets.values():
            mean, scale = _moments(places)
            for row, k in places:
                row[k] = (row[k] - mean * self.center) / scale
        return found

    def _by_mean_reward(self, group: Group, credit: Credit | None) -> Credit | None:
        mean = sum(map(plain_reward, group)) / max(1, len(group))
        factor = 1 / mean if mean > 0 else 0.0
        return credit and replace(credit, advantages=[[factor * value for value in own] for own in credit.advantages])


def read_normalization(setting: str | Mapping[str, Any] | Normalization) -> Normalization:
    """The normalisation of a name or a table. Raises ConfigError."""
    if isinstance(setting, Normalization):
        return setting
    try:
        return Normalization.model_validate({"type": setting} if isinstance(setting, str) else setting)
    except ValidationError as error:
        raise ConfigError(
            f"normalization={setting!r} cannot be used; choose rule, none, group, batch, agent, max_rl or gdpo, or a "
            "table with type and center"
        ) from error


def dimensions(groups: Iterable[Group]) -> list[str]:
    """The named dimensions of all rewards. Raises RewardError where a final reward has none."""
    found: set[str] = set()
    for trajectory in (each for group in groups for each in group):
        if isinstance(trajectory.reward, dict):
            found |= set(trajectory.reward)
        elif trajectory.reward is not None:
            raise RewardError(
                f'rollout {trajectory.rollout_id} has reward {trajectory.reward!r}; normalization "gdpo" needs named '
                "dimensions: emit a dict"
            )
    return sorted(found)


def _moments(places: Sequence[Place]) -> tuple[float, float]:
    """(mean, standard deviation) of advantages; rollouts count alike. The second is 1.0 where all are equal."""
    import numpy as np

    values = [np.atleast_1d(np.asarray(row[k], np.float64)) for row, k in places]
    owners = np.repeat([id(row) for row, _ in places], list(map(len, values)))
    flat = np.concatenate(values)
    _, index, counts = np.unique(owners, return_inverse=True, return_counts=True)
    weights = 1.0 / (len(counts) * counts[index])
    mean = float(weights @ flat)
    scale = float(np.sqrt(weights @ (flat - mean) ** 2))
    rounding = SMALLEST_SPREAD * max(float(np.abs(flat).max(initial=0.0)), 1e-300)
    return mean if abs(mean) > rounding else 0.0, scale if scale > rounding else 1.0


# -- assignment --------------------------------------------------------------------------------------------------------

# A rule sees rewards that are one number. Where agents have rewards of their own (`agent_rewards`), or each dimension
# of a reward is normalised by itself (`gdpo`), it is given a *view* of the groups for each agent and dimension; what it
# returns is normalised and put together again.

EqualGroups: TypeAlias = Literal["keep", "filter"]
"""What becomes of groups whose rewards are all equal: keep, with advantages of 0, so that they count in what the loss
is divided by and in losses that read no advantages; or filter, as if they were not in the batch."""


class View(NamedTuple):
    """What a rule is shown: the rewards of one agent, in one dimension."""

    agent: str | None = None
    every_agent: bool = True
    dimension: str | None = None
    """None: all dimensions, weighed."""
    factor: float = 1.0
    """Of its advantages."""

    def holds(self, call: Transition) -> bool:
        return self.every_agent or call.agent == self.agent


class GroupCredit(NamedTuple):
    """What became of one group."""

    group: list[Trajectory]
    """Its rollouts with a reward."""
    credit: Credit | None
    """None: it is left out."""
    too_small: bool = False

    @property
    def without_spread(self) -> bool:
        """Whether no call was better or worse than expected, and there is nothing for a critic either."""
        return not self.too_small and (self.credit is None or _teaches_nothing(self.credit))


@dataclass(frozen=True, slots=True)
class Assignment:
    """A credit rule with its settings."""

    rule: CreditRule
    normalization: Normalization = field(default_factory=Normalization)
    agent_rewards: AgentRewards = "shared"
    reward_weights: RewardWeights = None
    equal_groups: EqualGroups = "keep"
    uses_rewards: bool = True
    """False: the losses do not read advantages, and learn from groups with equal rewards as from others."""

    @classmethod
    def of(
        cls,
        rule: str | Mapping[str, Any] | CreditRule | Assignment,
        normalization: str | Mapping[str, Any] | Normalization = "rule",
        agent_rewards: AgentRewards = "shared",
        reward_weights: RewardWeights = None,
        equal_groups: EqualGroups = "keep",
    ) -> Assignment:
        """From settings; one that is made already stays as it is. Raises ConfigError for those that cannot work, or not
        together."""
        if isinstance(rule, Assignment):
            return rule
        own = read_normalization(normalization)
        found = own.check_rule(credit_rule(rule))
        if own.type == GDPO and not reward_weights:
            raise ConfigError('normalization "gdpo" adds up dimensions of the reward; name them in reward_weights')
        if own.type == GDPO and found.needs:
            raise ConfigError(
                f'credit rule "{found.type}" reads {sorted(found.needs)}, which are not per dimension; use another '
                'normalization than "gdpo"'
            )
        return cls(found, own, agent_rewards, reward_weights, equal_groups)

    def check(self, trajectory: Trajectory) -> bool:
        """Whether a rollout has a reward. Raises RewardError where it has one that cannot be used."""
        check_agents(trajectory, self.agent_rewards)
        refuse_not_finite(trajectory)
        known = False
        for view in self._views([[trajectory]]):
            shown = self._shown(trajectory, view)
            self.rule.check(shown)
            self.normalization.check(shown)
            known = known or shown.reward is not None
        return known

    def assign(self, groups: Sequence[Group], context: CreditContext) -> list[GroupCredit]:
        """The credit of each group of a batch. Raises RewardError as `check` does."""
        for trajectory in (each for group in groups for each in group):
            refuse_not_finite(trajectory)
        views = self._views(groups)
        parts = [list[tuple[View, Group, Credit | None]]() for _ in groups]
        for view in views:
            shown = [[self._shown(each, view) for each in group] for group in groups]
            if len(views) > 1:
                shown = _apart(shown, view)
            rewarded = [[each for each in group if each.reward is not None] for group in shown]
            for own, members, credit in zip(parts, rewarded, self._assign_view(rewarded, context), strict=True):
                own.append((view, members, credit))
        found: list[GroupCredit] = []
        for group, own in zip(groups, parts, strict=True):
            rewarded = {each.rollout_id for _, members, _ in own for each in members}
            kept = [each for each in group if each.rollout_id in rewarded]
            credit = _joined(kept, own) if any(credit for *_, credit in own) else None
            found.append(GroupCredit(kept, credit, len(kept) < self.rule.min_group))
        return found

    def _assign_view(self, groups: Sequence[Group], context: CreditContext) -> list[Credit | None]:
        """The credit of each group in this view; None where it is too small, or left out."""
        large = [group for group in groups if len(group) >= self.rule.min_group]
        how = Normalization(type="group") if self.normalization.type == GDPO else self.normalization
        credits = credited(self.rule, large, context)
        if self.equal_groups == "keep":
            credits = [_zeros(group) if own is None else own for group, own in zip(large, credits, strict=True)]
        credits = how.apply(large, credits)
        if self.equal_groups == "filter":
            credits = [None if own is None or _teaches_nothing(own) else own for own in credits]
        following = iter(credits)
        return [next(following) if len(group) >= self.rule.min_group else None for group in groups]

    def _views(self, groups: Sequence[Group]) -> list[View]:
        every = [each for group in groups for each in group]
        if self.agent_rewards == "shared" or not any(each.agent_rewards for each in every):
            views = [View()]
        else:
            agents = {call.agent for each in every for call in each.transitions}
            ordered = sorted(agents, key=lambda agent: (agent is not None, agent or ""))
            views = [View(agent, every_agent=False) for agent in ordered]
        if self.normalization.type != GDPO:
            return views
        weights = self.reward_weights or {}
        named = [name for name in dimensions(groups) if weights.get(name, 1.0)]
        return [
            view._replace(dimension=name, factor=weights.get(name, 1.0)) for view in views for name in named
        ] or views

    def _shown(self, trajectory: Trajectory, view: View) -> Trajectory:
        agent = "shared" if view.every_agent else self.agent_rewards
        reward = reward_of(trajectory, view.agent, agent)
        if not isinstance(reward, dict) and all(call.reward is None for call in trajectory.transitions):
            return trajectory if reward is trajectory.reward else replace(trajectory, reward=reward)
        calls = tuple(
            call if call.reward is None else replace(call, reward=self._number(call.reward, view))
            for call in trajectory.transitions
        )
        return replace(trajectory, reward=self._number(reward, view), transitions=calls)

    def _number(self, reward: Reward | None, view: View) -> float | None:
        number = scalar_reward(reward, self.reward_weights)  # Refuses dimensions without a weight.
        if view.dimension is None or number is None:
            return number
        if not isinstance(reward, dict):
            raise RewardError(f'reward {reward!r} has no dimension {view.dimension!r}, as normalization "gdpo" needs')
        return reward[view.dimension]


def unrewarded(trajectories: Iterable[Trajectory], message: str) -> list[Rejection]:
    """Rejects rollouts whose reward cannot be made one finite number; for `message` where it is missing."""
    found: list[Rejection] = []
    for each in trajectories:
        try:
            refuse_not_finite(each)
            reward = each.score
        except RewardError as error:
            found.append(rejection(each.rollout_id, error))
        else:
            if reward is None:
                found.append(without_reward(each, message))
    return found


def refuse_not_finite(trajectory: Trajectory) -> None:
    """Raises RewardError for a reward that is no finite number."""
    steps = (call.reward for call in trajectory.transitions)
    for reward in (trajectory.reward, *trajectory.agent_rewards.values(), *steps):
        numbers = reward.values() if isinstance(reward, dict) else (reward,)
        if not all(number is None or math.isfinite(number) for number in numbers):
            raise RewardError(
                f"rollout {trajectory.rollout_id} has reward {reward!r}, which is not finite; emit a number, or none "
                "to mark it missing"
            )


def _teaches_nothing(credit: Credit) -> bool:
    import numpy as np

    advantages = [each for own in credit.advantages for each in own]
    return credit.returns is None and bool(advantages) and not any(np.any(each) for each in advantages)


def _zeros(group: Group) -> Credit:
    return Credit([(0.0,) * len(each.transitions) for each in group])


def _apart(groups: Sequence[Sequence[Trajectory]], view: View) -> list[list[Trajectory]]:
    """The same groups with a task of their own, so that what is remembered of one view is not taken for another."""
    names = [json.dumps([memory_key(group), view.agent, view.dimension]) for group in groups]
    return [[replace(each, task=name) for each in group] for group, name in zip(groups, names, strict=True)]


def _joined(group: Group, parts: Sequence[tuple[View, Group, Credit | None]]) -> Credit:
    """One credit of those of several views. Calls without any have weight 0."""
    calls: dict[CallId, list[Any]] = {call.call_id: [0.0, 0.0, None] for each in group for call in each.transitions}
    counts: Counter[str] = Counter()
    for view, members, credit in parts:
        if credit is None:
            continue
        counts.update(credit.counts)
        for call, advantage, weight, returns in credit.of_calls(members):
            if view.holds(call):
                own = calls[call.call_id]
                own[:] = [own[0] + view.factor * advantage, weight, returns]
    advantages, weights, returns = (
        [[calls[call.call_id][column] for call in each.transitions] for each in group] for column in range(3)
    )
    complete = all(each is not None for own in returns for each in own)
    return Credit(advantages, weights, returns if complete else None, counts)


# -- training samples --------------------------------------------------------------------------------------------------

UNRECORDED: Final = (
    ". With top_p and top_k a call can be trained if the tokens kept at each position were recorded: the policy's own "
    "engine records them (vLLM and SGLang do not), up to policy.max_kept_tokens of them; raise that or lower top_k"
)
OWN: Final = ""
"""Stands for the policy itself where the name of an adapter may stand."""
Trains: TypeAlias = Callable[[Transition], str | None]
"""What a call trains: the name of an adapter, `OWN`, or None for nothing."""
RETURNS = "returns"


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


def of_target(trajectory: Trajectory, target: str | None) -> Trajectory:
    """The trajectory with the calls of the target agent alone."""
    return replace(trajectory, transitions=tuple(t for t in trajectory.transitions if is_target(t.agent, target)))


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
