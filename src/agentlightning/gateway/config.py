"""The configuration of a gateway: routes, providers, budget, and rules that recognize agents.

From `agl serve --routes FILE`, the section `[gateway]` of a training run, or Python.
"""

from __future__ import annotations

import re
from collections import Counter
from fnmatch import fnmatchcase
from typing import Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from agentlightning.engine.servers.config import ServedModel
from agentlightning.gateway.upstream.limits import BudgetConfig
from agentlightning.gateway.upstream.provider import Price, PrivateSection, Provider
from agentlightning.util.settings import Section

MAX_NAME_CHARACTERS: Final = 256


class AgentRule(Section):
    """How calls of one agent are recognized: an entry of `[[agents]]` in the configuration.

    A rule without a `name` takes it from the group `agent` of `matches`.
    """

    name: str | None = Field(default=None, min_length=1, max_length=MAX_NAME_CHARACTERS)
    """The name of the agent on spans."""
    models: tuple[str, ...] = ()
    """Model names that mean this agent."""
    serve: str | None = None
    """The model that serves these names; None: the model of that name, or else the default model."""
    contains: str | None = Field(default=None, min_length=1)
    """Text that the agent's system prompt contains."""
    matches: str | None = Field(default=None, min_length=1)
    """Regular expression that is searched for in the agent's system prompt."""

    @field_validator("matches")
    @classmethod
    def _check_pattern(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"matches={pattern!r} is not a regular expression: {error}") from None
        return pattern

    @model_validator(mode="after")
    def _check_complete(self) -> Self:
        if self.name is None and "agent" not in re.compile(self.matches or "").groupindex:
            raise ValueError("an agent without a name needs `matches` with a group (?P<agent>...) for it")
        if not self.models and self.contains is None and self.matches is None:
            raise ValueError(f"nothing identifies the calls of agent {self.name!r}: set models, contains or matches")
        if self.serve is not None and not self.models:
            raise ValueError(f"agent {self.name!r} has serve={self.serve!r} but no models to serve")
        if self.models and self.name is None:
            raise ValueError(f"models={list(self.models)} need the name of their agent")
        return self


class RouteRule(PrivateSection):
    """A route: the calls that match go to an engine or a provider."""

    model: str = "*"
    """The requested model name, or a pattern with `*`, `?` and `[...]`."""
    agent: str = "*"
    """The agent's name, or a pattern. A call of an unknown agent matches only `*`."""
    dialect: Literal["openai", "anthropic"] | None = None
    """anthropic: calls to `/v1/messages`; openai: calls to all other paths; None: both."""
    engine: str | None = None
    """The engine that serves the calls: the policy, an adapter, a frozen reference."""
    provider: str | None = None
    """The provider that serves the calls."""
    send_model: str | None = None
    """The provider's name of the model; None: as configured for the provider."""
    price: Price | None = None
    """US dollars per million tokens of this model; None: as configured for the provider."""

    @model_validator(mode="after")
    def _check_target(self) -> RouteRule:
        if (self.engine is None) == (self.provider is None):
            raise ValueError("a rule names an engine or a provider, one of them")
        if self.engine is not None and (self.send_model is not None or self.price is not None):
            raise ValueError("send_model and price are for a provider; an engine has neither")
        return self

    @property
    def is_pattern(self) -> bool:
        """Whether it matches more than one model name."""
        return bool(set(self.model) & set("*?["))

    def matches(self, model: str | None, agent: str | None, dialect: str | None = None) -> bool:
        """Whether the rule applies to a call; `dialect` None means any."""
        if self.dialect is not None and dialect is not None and self.dialect != dialect:
            return False
        return fnmatchcase(model or "", self.model) and (self.agent == "*" or fnmatchcase(agent or "", self.agent))


class GatewayConfig(PrivateSection):
    """Where model calls go.

    >>> agl.config.GatewayConfig(default_model="policy").routes
    ()
    """

    default_model: str | None = None
    """Serves requests without a model; None: the only engine, or the first `--model` of `agl serve`."""
    accept_any_model: bool | None = None
    """Whether the default model also serves requests for unknown models; None: in training, and without routes."""
    models: dict[str, str | ServedModel] = Field(default={})
    """Further models that are served but not trained, such as a frozen reference: name -> directory that transformers
    loads, or a table of the servers that sample from it."""
    routes: tuple[RouteRule, ...] = ()
    """Routes, in order: the first that matches decides. Engines follow, by name."""
    providers: tuple[Provider, ...] = ()
    """Third-party APIs, and vLLM or SGLang servers, that routes use."""
    agents: tuple[AgentRule, ...] = ()
    """Rules that recognize agents that do not name themselves."""
    structured_output: Literal["auto", "always", "never"] = "auto"
    """Which answers are constrained to the tool calls and JSON schemas of their request, if the engine can. auto: those
    that nobody learns from (rollouts in the modes val and test, calls of no rollout); others are sampled freely and
    checked."""
    record_top_logprobs: int = Field(default=0, ge=0, le=20)
    """The number of likeliest tokens that spans keep for each token our own engines sample, for the dashboard's token
    view: about 5 bytes each in the store. A call that asks for more is recorded with those. 0: only what calls ask
    for."""
    budget: BudgetConfig = BudgetConfig()
    """Limits of what calls to providers may cost."""

    @model_validator(mode="after")
    def _check_names(self) -> GatewayConfig:
        duplicates = [
            name for name, times in Counter(provider.name for provider in self.providers).items() if times > 1
        ]
        if duplicates:
            raise ValueError(f"two providers are called {duplicates[0]!r}; give each a name of its own")
        known = {provider.name for provider in self.providers}
        for number, rule in enumerate(self.routes):
            if rule.provider is not None and rule.provider not in known:
                listed = ", ".join(sorted(known)) or "none"
                raise ValueError(f"routes.{number} leads to the provider {rule.provider!r}; known: {listed}")
        return self

    def divided(self, number: int, count: int) -> GatewayConfig:
        """The configuration of one of `count` processes, by number from 1, which share the limits of providers. Raises
        ConfigError for a limit that cannot be divided."""
        return self.model_copy(update={"providers": tuple(each.divided(number, count) for each in self.providers)})
