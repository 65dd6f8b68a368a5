"""Credit of a batch: a rule, and what is done around it, from rewards in any form to one credit for each group.

A rule sees rewards that are one number. Where agents have rewards of their own (`agent_rewards`), or each dimension of
a reward is normalised by itself (`gdpo`), it is given a *view* of the groups for each agent and dimension; what it
returns is normalised and put together again.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, cast

from pydantic import Field, TypeAdapter, ValidationError, field_validator

from agentlightning.assemble import scalar_reward
from agentlightning.credit.agent_rewards import AgentRewards, check_agents, reward_of, team_score
from agentlightning.credit.base import (
    SMALLEST_SPREAD,
    Credit,
    CreditContext,
    CreditRule,
    Group,
    credit_rule,
    credited,
    memory_key,
    plain_reward,
)
from agentlightning.credit.rejection import Rejection, rejection, without_reward
from agentlightning.errors import ConfigError, RewardError
from agentlightning.trajectory import CallId, Reward, RewardWeights, Trajectory, Transition
from agentlightning.util.settings import AtLeastOne, Section

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


def unrewarded(trajectories: Iterable[Trajectory], weights: RewardWeights, message: str) -> list[Rejection]:
    """Rejects rollouts whose reward cannot be made one finite number; for `message` where it is missing."""
    found: list[Rejection] = []
    for each in trajectories:
        try:
            refuse_not_finite(each)
            reward = team_score(each, weights)
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
