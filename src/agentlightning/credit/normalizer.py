"""Normalization of the loss of a batch: the share of each trained token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from agentlightning.errors import ConfigError


class ConstantNormalizer(BaseModel):
    """Every token has the share 1 / (rollouts x length), whatever the length of its rollout: the loss of Dr. GRPO (Liu
    et al. 2025, arXiv:2503.20783, section 3.2)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    type: Literal["constant"] = "constant"
    """Which normalizer this is."""
    length: int = Field(ge=1)
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


@dataclass(frozen=True, slots=True)
class Totals:
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
