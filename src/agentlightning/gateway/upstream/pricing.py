"""What calls to providers cost and may cost: prices, and the configured budget."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from agentlightning.gateway.dialects.provider_events import Usage

_CONFIG: Final = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, hide_input_in_errors=True)


class Price(BaseModel):
    """US dollars for a million tokens."""

    model_config = _CONFIG

    input: float = Field(default=0.0, ge=0)
    """Of the prompt."""
    output: float = Field(default=0.0, ge=0)
    """Of the answer, thoughts included."""
    cached_input: float | None = Field(default=None, ge=0)
    """Of input tokens the provider had in its cache; None: as all input."""
    cache_write: float | None = Field(default=None, ge=0)
    """Of input tokens that Anthropic put into its cache for five minutes; None: 1.25 times `input`, as it charges."""
    cache_write_hour: float | None = Field(default=None, ge=0)
    """Of input tokens that Anthropic put into its cache for an hour; None: twice `input`, as it charges."""

    def dollars(self, usage: Usage) -> float:
        """What a call cost."""
        cached = self.input if self.cached_input is None else self.cached_input
        written = self.input * 1.25 if self.cache_write is None else self.cache_write
        hour = self.input * 2 if self.cache_write_hour is None else self.cache_write_hour
        kept = usage.cached_tokens * cached + usage.written_tokens * written + usage.written_hour_tokens * hour
        fresh = usage.input_tokens - usage.cached_tokens - usage.written_tokens - usage.written_hour_tokens
        return (max(0, fresh) * self.input + kept + usage.output_tokens * self.output) / 1e6


class BudgetConfig(BaseModel):
    """What calls to providers may cost. Calls to our own engines are not counted."""

    model_config = _CONFIG

    dollars: float | None = Field(default=None, gt=0)
    """US dollars of all rollouts together; None: no limit."""
    tokens: int | None = Field(default=None, ge=1)
    """Tokens of all rollouts together, prompts and answers; None: no limit."""
    rollout_dollars: float | None = Field(default=None, gt=0)
    """US dollars of each rollout, over all its attempts; None: no limit."""
    rollout_tokens: int | None = Field(default=None, ge=1)
    """Tokens of each rollout, over all its attempts; None: no limit."""
    file: str | None = None
    """Where the total is kept from one start of the server to the next; remove it to start at zero. None: beside the
    store's file, or in memory where there is none."""

    def __bool__(self) -> bool:
        return any((self.dollars, self.tokens, self.rollout_dollars, self.rollout_tokens))
