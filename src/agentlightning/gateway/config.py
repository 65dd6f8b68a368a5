"""The configuration of a gateway: where calls go, what they may cost, how agents are recognised.

Given to `agl serve --routes FILE`, as the section `[gateway]` of a training run, or in Python. Only shapes: what they
mean is the business of `gateway.routing`, `upstream.servers`, `upstream.budget` and `callers.agents`.
"""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentlightning.engine.servers.config import ServedModel
from agentlightning.gateway.callers.agents import AgentRule
from agentlightning.gateway.upstream.pricing import BudgetConfig, Price
from agentlightning.gateway.upstream.provider import Provider

_SECTION: Final = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, hide_input_in_errors=True)
"""What is wrong may be a provider's key, or beside one."""


class RouteRule(BaseModel):
    """Which calls go where."""

    model_config = _SECTION

    model: str = "*"
    """The name that is asked for: as it is, or a pattern with `*`, `?` and `[...]`."""
    agent: str = "*"
    """The agent that asks: as it is, or a pattern. A call whose agent is not known fits `*` only."""
    dialect: Literal["openai", "anthropic"] | None = None
    """Whose calls: anthropic, those to `/v1/messages`; openai, those to all other paths. None: both."""
    engine: str | None = None
    """The engine that serves them, by its name: the policy, an adapter, a frozen reference."""
    provider: str | None = None
    """The provider that serves them, by its name."""
    send_model: str | None = None
    """What the provider calls the model; None: as the provider is configured."""
    price: Price | None = None
    """US dollars for a million tokens of this model; None: as the provider is configured."""

    @model_validator(mode="after")
    def _leads_somewhere(self) -> RouteRule:
        if (self.engine is None) == (self.provider is None):
            raise ValueError("a rule names an engine or a provider, one of them")
        if self.engine is not None and (self.send_model is not None or self.price is not None):
            raise ValueError("send_model and price are for a provider; an engine has neither")
        return self

    @property
    def is_pattern(self) -> bool:
        """Whether it fits more than one name."""
        return bool(set(self.model) & set("*?["))

    def matches(self, model: str | None, agent: str | None, dialect: str | None = None) -> bool:
        """`dialect` is the caller's; None: any will do."""
        if self.dialect is not None and dialect is not None and self.dialect != dialect:
            return False
        return fnmatchcase(model or "", self.model) and (self.agent == "*" or fnmatchcase(agent or "", self.agent))


class GatewayConfig(BaseModel):
    """Where model calls go.

    >>> agl.GatewayConfig(default_model="policy").routes
    ()
    """

    model_config = _SECTION

    default_model: str | None = None
    """Serves requests that name no model; None: the only engine there is, or the first `--model` of `agl serve`."""
    accept_any_model: bool | None = None
    """Whether the default model also serves requests that name an unknown one; None: in training, and where there are
    no routes."""
    models: dict[str, str | ServedModel] = Field(default_factory=dict[str, str | ServedModel])
    """Further models to serve, which do not learn (a frozen reference, say): name -> directory that transformers
    loads, or a table of the servers that sample from it."""
    routes: tuple[RouteRule, ...] = ()
    """Which calls go where: read in order, the first that fits decides. After them come engines by their names."""
    providers: tuple[Provider, ...] = ()
    """Other people's model servers, and vLLM or SGLang servers, that routes lead to."""
    agents: tuple[AgentRule, ...] = ()
    """How agents are recognised that do not name themselves."""
    structured_output: Literal["auto", "always", "never"] = "auto"
    """Which answers are held to the tool calls and JSON schemas their request asks for, where the engine can: auto,
    those nobody learns from (rollouts in the modes val and test, calls of no rollout); the others are drawn freely,
    and checked."""
    budget: BudgetConfig = Field(default_factory=BudgetConfig)
    """What calls to providers may cost."""

    @model_validator(mode="after")
    def _agrees(self) -> GatewayConfig:
        twice = [name for name, times in Counter(provider.name for provider in self.providers).items() if times > 1]
        if twice:
            raise ValueError(f"two providers are called {twice[0]!r}; give each a name of its own")
        known = {provider.name for provider in self.providers}
        for number, rule in enumerate(self.routes):
            if rule.provider is not None and rule.provider not in known:
                listed = ", ".join(sorted(known)) or "none"
                raise ValueError(f"routes.{number} leads to the provider {rule.provider!r}; known: {listed}")
        return self
