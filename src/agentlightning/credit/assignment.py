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
from typing import Any, Literal, NamedTuple, TypeAlias

from agentlightning.assemble import scalar_reward
from agentlightning.credit.agent_rewards import AgentRewards, agents_apart, check_agents, reward_of, team_score
from agentlightning.credit.base import Credit, CreditContext, CreditRule, Group, credit_rule, credited, memory_key
from agentlightning.credit.normalization import GDPO, Normalization, dimensions
from agentlightning.credit.normalization import normalization as read_normalization
from agentlightning.credit.rejection import Rejection, rejection, without_reward
from agentlightning.errors import ConfigError, RewardError
from agentlightning.trajectory import CallId, Reward, RewardWeights, Trajectory, Transition

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
        known = [set[str]() for _ in groups]
        parts = [list[tuple[View, Group, Credit]]() for _ in groups]
        for view in views:
            shown = [[self._shown(each, view) for each in group] for group in groups]
            if len(views) > 1:
                shown = _apart(shown, view)
            rewarded = [[each for each in group if each.reward is not None] for group in shown]
            credits = self._assign_view(rewarded, context)
            for g, members in enumerate(rewarded):
                known[g].update(each.rollout_id for each in members)
                if g in credits:
                    parts[g].append((view, members, credits[g]))
        found: list[GroupCredit] = []
        for group, ids, own in zip(groups, known, parts, strict=True):
            kept = [each for each in group if each.rollout_id in ids]
            found.append(GroupCredit(kept, _joined(kept, own) if own else None, len(kept) < self.rule.min_group))
        return found

    def _assign_view(self, groups: Sequence[Group], context: CreditContext) -> dict[int, Credit]:
        """The credit of the groups that have some in this view, by their place."""
        large = {g: group for g, group in enumerate(groups) if len(group) >= self.rule.min_group}
        chosen = list(large.values())
        how = Normalization(type="group") if self.normalization.type == GDPO else self.normalization
        credits = credited(self.rule, chosen, context)
        if keeps := self.equal_groups == "keep":
            credits = [_zeros(group) if own is None else own for group, own in zip(chosen, credits, strict=True)]
        return {
            g: credit
            for g, credit in zip(large, how.apply(chosen, credits), strict=True)
            if credit is not None and (keeps or not _teaches_nothing(credit))
        }

    def _views(self, groups: Sequence[Group]) -> list[View]:
        agents = agents_apart(groups, self.agent_rewards)
        views = [View()] if agents is None else [View(agent, every_agent=False) for agent in agents]
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

    advantages = [bool(np.any(each)) for own in credit.advantages for each in own]
    return credit.returns is None and bool(advantages) and not any(advantages)


def _zeros(group: Group) -> Credit:
    return Credit([(0.0,) * len(each.transitions) for each in group])


def _apart(groups: Sequence[Sequence[Trajectory]], view: View) -> list[list[Trajectory]]:
    """The same groups with a task of their own, so that what is remembered of one view is not taken for another."""
    names = [json.dumps([memory_key(group), view.agent, view.dimension]) for group in groups]
    return [[replace(each, task=name) for each in group] for group, name in zip(groups, names, strict=True)]


def _joined(group: Group, parts: Sequence[tuple[View, Group, Credit]]) -> Credit:
    """One credit of those of several views. Calls without any have weight 0."""
    calls: dict[CallId, list[Any]] = {call.call_id: [0.0, 0.0, None] for each in group for call in each.transitions}
    counts: Counter[str] = Counter()
    for view, members, credit in parts:
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
