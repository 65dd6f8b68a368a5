"""The settings of a sequence of algorithms."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from agentlightning.algorithms.apo.config import APOConfig
from agentlightning.algorithms.lightning_rl import LightningRLConfig
from agentlightning.util.settings import Section

StageConfig = Annotated[LightningRLConfig | APOConfig, Field(discriminator="type")]


class SequentialConfig(Section):
    """The settings of Sequential.

    >>> agl.SequentialConfig(stages=[agl.APOConfig(), agl.LightningRLConfig(steps=50)]).rounds
    1
    """

    type: Literal["sequential"] = "sequential"
    """Which algorithm this is."""
    stages: tuple[StageConfig, ...]
    """The settings of the algorithms, in the order in which they run: a list of tables, each with its `type`, "apo" or
    "lightning_rl"."""
    rounds: int = Field(default=1, ge=1)
    """How often the whole list runs. In each round a stage begins anew, from the prompts and weights so far."""

    @field_validator("stages")
    @classmethod
    def _check_stages(cls, stages: tuple[StageConfig, ...]) -> tuple[StageConfig, ...]:
        if not stages:
            raise ValueError(
                "there is no stage; list at least one, for example one of type apo and one of lightning_rl"
            )
        return stages
