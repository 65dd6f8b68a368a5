"""A provider: someone else's model server that calls are passed on to, as it is written in the configuration.

Responsible for what is known of a provider before the first call. Which calls go to it is `gateway.routing`; how they
are sent is `gateway.forward`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr


class Price(BaseModel):
    """US dollars for a million tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input: float = Field(default=0.0, ge=0)
    output: float = Field(default=0.0, ge=0)
    cached_input: float | None = Field(default=None, ge=0)
    """Of input tokens the provider had in its cache; None: as all input."""


class Provider(BaseModel):
    """One provider, or several servers of one model that stand in for one another."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    """What spans call it, as OTel's `gen_ai.provider.name`."""
    dialect: Literal["openai", "anthropic"] = "openai"
    """What it speaks: OpenAI's paths, or Anthropic's `/v1/messages`."""
    base_urls: tuple[str, ...] = Field(min_length=1)
    """As its SDK is given them: with `/v1` for OpenAI, without for Anthropic."""
    api_key: SecretStr | None = None
    """Never written to a log, a span or an error."""
    api_key_env: str | None = None
    """The environment variable that holds the key, read at the start."""
    headers: dict[str, str] = Field(default_factory=dict[str, str])
    """Sent with every call, beside its own."""
    model: str | None = None
    """What the provider calls the model; None: the name that was asked for."""
    price: Price | None = None
    max_concurrency: int = Field(default=256, ge=1)
    """Calls under way at once; more wait."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    connect_seconds: float = Field(default=10.0, gt=0)
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Without a byte from it for so long, the call has failed."""
    retries: int = Field(default=1, ge=0)
    """How many times a call that failed before its first byte is sent again, to another server where there is one."""
    token_ids: bool = False
    """Whether to ask for token ids and log-probabilities, as vLLM and SGLang give them."""
