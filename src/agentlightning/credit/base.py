"""What a credit rule is: from the rewards of a group of rollouts to one advantage for each of their calls.

Rules are pure and know no tokens; `agentlightning.credit.training_samples` spreads their advantages over token trees.
A rule is a frozen configuration with a `type`; adding one means a file with a class and a line in
`agentlightning.credit`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from agentlightning.errors import ConfigError, RewardError
from agentlightning.trajectory import Trajectory

Advantages = list[tuple[float, ...]]
"""For each trajectory of a group: one number for each of its transitions."""


class CreditRule(BaseModel, ABC):
    """A way to say how much better than expected each call was."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: str
    min_group: ClassVar[int] = 2
    """Smaller groups have no baseline under this rule."""

    @abstractmethod
    def advantages(self, group: Sequence[Trajectory]) -> Advantages | None:
        """The advantages of a group whose rewards are all plain numbers; None where it teaches nothing.

        Raises RewardError for a kind of reward the rule cannot use.
        """

    def check(self, trajectory: Trajectory) -> None:
        """Raises RewardError where the rule cannot use the rewards of this rollout. By default it can."""

    def check_group_size(self, group_size: int) -> None:
        """Raises ConfigError where groups of this size can never be trained on."""
        if group_size < self.min_group:
            raise ConfigError(
                f'group_size={group_size} leaves no baseline; use at least {self.min_group} or credit="reinforce"'
            )


_RULES: dict[str, type[CreditRule]] = {}


def register(rule: type[CreditRule]) -> type[CreditRule]:
    """Make a rule known by the default of its `type`; a class decorator."""
    _RULES[str(rule.model_fields["type"].default)] = rule
    return rule


def credit_rule(rule: str | Mapping[str, Any] | CreditRule) -> CreditRule:
    """The rule of a name, or of a configuration with `type`. Raises ConfigError for an unknown name or setting."""
    if isinstance(rule, CreditRule):
        return rule
    settings: Mapping[str, Any] = {"type": rule} if isinstance(rule, str) else rule
    name = settings.get("type")
    if name not in _RULES:
        raise ConfigError(f"unknown credit rule {name!r}; known: {', '.join(sorted(_RULES))}")
    try:
        return _RULES[name].model_validate(settings)
    except ValidationError as error:
        raise ConfigError(f"credit rule {name!r} cannot be used as {dict(settings)}: {error}") from error


def final_rewards(group: Sequence[Trajectory]) -> list[float]:
    """The final rewards of a group. Raises RewardError where one is missing or has named dimensions."""
    return [_plain(trajectory) for trajectory in group]


def refuse_intermediate(group: Sequence[Trajectory], rule: str) -> None:
    """Raises RewardError where a call has an intermediate reward, which `rule` would not see."""
    for trajectory in group:
        for call in trajectory.transitions:
            if call.reward is not None:
                raise RewardError(
                    f"call {call.span_id} of rollout {trajectory.rollout_id} has an intermediate reward, which credit "
                    f'rule "{rule}" cannot use; emit one reward per rollout or set intermediate="ignore"'
                )


def _plain(trajectory: Trajectory) -> float:
    if isinstance(trajectory.reward, int | float):
        return float(trajectory.reward)
    raise RewardError(f"rollout {trajectory.rollout_id} has reward {trajectory.reward!r}; credit needs one number")
