"""The settings of a policy's value head. Imports no torch, so that configuration can be read without it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from agentlightning.util.settings import Section, by_type

STEP = 0.1
"""The default learning rate times the size of the hidden states: about how far one step moves a value."""


class ValueHeadConfig(Section):
    """A critic on the hidden states of the policy."""

    type: Literal["linear", "mlp"] = "linear"
    """linear: one weight for each number of a hidden state; mlp: one hidden layer between."""
    hidden_size: int = Field(default=128, ge=1)
    """Units of the hidden layer of an mlp."""
    lr: float | None = Field(default=None, gt=0)
    """Its learning rate, on the schedule of the policy's. None: 0.1 divided by the size of a hidden state, so that one
    step moves a value by about 0.1."""
    trains_body: bool = False
    """Whether the value loss also changes the policy's own weights. false: it trains the head alone, and the policy
    learns exactly what it would learn without it."""


ValueHeadSetting = Annotated[ValueHeadConfig | None, BeforeValidator(by_type)]
"""A table of settings, or the name of a type."""
