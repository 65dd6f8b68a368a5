"""Configuration of prices and budgets for calls to providers."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from agentlightning.gateway.dialects.provider_events import Usage

_CONFIG: Final = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, hide_input_in_errors=True)


class Price(BaseModel):
    """US dollars per million tokens."""

    model_config = _CONFIG

    input: float = Field(default=0.0, ge=0)
    """For input tokens."""
    output: float = Field(default=0.0, ge=0)
    """For output tokens, including reasoning."""
    cached_input: float | None = Field(default=None, ge=0)
    """For input tokens read from the provider's cache; None: the same as `input`."""
    cache_write: float | None = Field(default=None, ge=0)
    """For input tokens that Anthropic caches for five minutes; None: 1.25 times `input`, as it charges."""
    cache_write_hour: float | None = Field(default=None, ge=0)
    """For input tokens that Anthropic caches for an hour; None: twice `input`, as it charges."""

    def dollars(self, usage: Usage) -> float:
        """The cost of a call."""
        cached = self.input if self.cached_input is None else self.cached_input
        written = self.input * 1.25 if self.cache_write is None else self.cache_write
        hour = self.input * 2 if self.cache_write_hour is None else self.cache_write_hour
        cache_cost = usage.cached_tokens * cached + usage.written_tokens * written + usage.written_hour_tokens * hour
        uncached = usage.input_tokens - usage.cached_tokens - usage.written_tokens - usage.written_hour_tokens
        return (max(0, uncached) * self.input + cache_cost + usage.output_tokens * self.output) / 1e6


class BudgetConfig(BaseModel):
    """Limits for the cost of calls to providers. Calls to local policies are not counted."""

    model_config = _CONFIG

    dollars: float | None = Field(default=None, gt=0)
    """US dollars for all rollouts together; None: no limit."""
    tokens: int | None = Field(default=None, ge=1)
    """Input and output tokens of all rollouts together; None: no limit."""
    rollout_dollars: float | None = Field(default=None, gt=0)
    """US dollars for each rollout, over all its attempts; None: no limit."""
    rollout_tokens: int | None = Field(default=None, ge=1)
    """Tokens of each rollout, over all its attempts; None: no limit."""
    file: str | None = None
    """The file that keeps the total across restarts of the server; remove it to start at zero. None: beside the store's
    file, or in memory if the store has none."""

    def __bool__(self) -> bool:
        return any((self.dollars, self.tokens, self.rollout_dollars, self.rollout_tokens))
