"""Normalisation of advantages: what they are divided by before a loss sees them.

The standard deviation of a set of calls counts every rollout alike, however many calls it made of the set:

    std = sqrt( sum_i sum_k w_ik (A_ik - mean)^2 ),   mean = sum_i sum_k w_ik A_ik,   w_ik = 1 / (rollouts * calls_i)

- group: the calls of a group. With `group_relative` it is GRPO (arXiv:2402.03300, section 4.1.2).
- batch: all calls of a batch. With `center` and `reinforce` it is REINFORCE++ (arXiv:2501.03262, section 3.2).
- agent: the calls of one agent in a batch, so that agents with rewards of different size learn alike.
- none: nothing, as Dr. GRPO (arXiv:2503.20783, section 3.2).
- max_rl: the mean reward of the group, as MaxRL (arXiv:2602.02710): hard tasks count as much as easy ones.
- gdpo: each named dimension of the reward is made into advantages and divided per group on its own, then they are added
  up with their weights, as GDPO (arXiv:2601.05242, section 3.1), without its last division by that of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, cast

from pydantic import Field, TypeAdapter, ValidationError, field_validator

from agentlightning.credit.base import SMALLEST_SPREAD, Credit, CreditRule, Group, plain_reward
from agentlightning.errors import ConfigError, RewardError
from agentlightning.trajectory import Trajectory
from agentlightning.util.settings import AtLeastOne, Section

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


def normalization(setting: str | Mapping[str, Any] | Normalization) -> Normalization:
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
