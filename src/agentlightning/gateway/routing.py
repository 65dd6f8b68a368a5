"""Where a call goes: the table from model names and agents to engines and providers.

Rules are read in order and the first that fits decides; after them come the engines by their own names, then the
default. Called by the gateway once for each call. It sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from agentlightning.engine.base import Engine
from agentlightning.errors import ConfigError
from agentlightning.gateway.callers.agents import AgentMatcher
from agentlightning.gateway.callers.attribution import Caller
from agentlightning.gateway.config import RouteRule
from agentlightning.gateway.errors import ApiError, bad_request
from agentlightning.gateway.upstream.pricing import Price
from agentlightning.gateway.upstream.provider import ApiPath, Provider
from agentlightning.gateway.upstream.servers import ServerPool

_MAX_CACHED: Final = 4096
"""Names whose routes are remembered: callers make names up."""


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """Where the calls of one model name and agent go: to an engine, or to a provider's servers."""

    name: str
    """The served model: what replies and spans call it."""
    engine: Engine | None = None
    servers: ServerPool | None = None
    """The servers of `provider`."""
    send_model: str = ""
    """What the provider calls the model."""
    price: Price | None = None

    @property
    def provider(self) -> Provider | None:
        return self.servers.provider if self.servers else None


class Router:
    """The table. `default_model` names an engine, or a model that a rule fits: it serves requests that name no model
    and, with `accept_any_model`, those that name an unknown one; a single engine is its own default. Raises ConfigError
    on a rule or a default that leads nowhere."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        rules: Sequence[RouteRule] = (),
        servers: Mapping[str, ServerPool] | None = None,
        *,
        default_model: str | None = None,
        accept_any_model: bool = False,
    ) -> None:
        self._engines, self._rules, self._servers = dict(engines), tuple(rules), dict(servers or {})
        self._accept_any = accept_any_model
        self._cache: dict[tuple[str | None, str | None, str], ModelRoute] = {}
        self._check_rules()
        named = [rule.model for rule in rules if not rule.is_pattern]
        self.models: tuple[str, ...] = tuple(dict.fromkeys([*engines, *named]))
        """The names that are served, patterns left out."""
        if default_model is None and len(engines) == 1:
            default_model = next(iter(engines))
        if default_model is not None and self._find(default_model, None) is None:
            raise ConfigError(f"default_model={default_model!r} is not served; use one of {', '.join(self.models)}")
        if accept_any_model and default_model is None:
            raise ConfigError("accept_any_model=True needs a default_model to serve unknown names")
        self._default = default_model

    def __contains__(self, model: object) -> bool:
        """Whether a name is served as it is, and not as the default. A name with an `@` fits no pattern: it says who
        asks."""
        if model in self.models:
            return True
        return isinstance(model, str) and "@" not in model and self._find(model, None) is not None

    def resolve(self, model: str | None, agent: str | None = None, path: str = "") -> ModelRoute:
        """Where a call to `path` goes ("messages", say). Raises ApiError 400 where no model is named, 404 for an
        unknown one."""
        dialect = "anthropic" if path == "messages" else "openai"
        if (known := self._cache.get((model, agent, dialect))) is not None:
            return known
        route = self._find(model, agent, dialect)
        if route is None and self._default is not None and (self._accept_any or model is None):
            route = self._find(self._default, agent, dialect)
        if route is None:
            raise self._unknown(model)
        if len(self._cache) >= _MAX_CACHED:
            self._cache.clear()
        self._cache[model, agent, dialect] = route
        return route

    def names(self, dialect: str) -> list[str]:
        """Those of `models` that are served to callers of a dialect."""
        own = {rule.model for rule in self._rules if rule.dialect in (None, dialect)}
        return [name for name in self.models if name in own or name in self._engines]

    def patterns(self, dialect: str) -> list[str]:
        """What else may be asked for: the patterns of the rules that callers of a dialect are led by."""
        found = [rule.model for rule in self._rules if rule.is_pattern and rule.dialect in (None, dialect)]
        return list(dict.fromkeys(found))

    def open_pools(self, dialect: str) -> list[ServerPool]:
        """The providers of whose models any may be asked for, as a rule leads there by a pattern."""
        found = [
            self._servers[rule.provider]
            for rule in self._rules
            if rule.provider is not None and rule.is_pattern and rule.dialect in (None, dialect)
        ]
        return list(dict.fromkeys(found))

    def serves_under_own_name(self, model: str, dialect: str, pool: ServerPool) -> bool:
        """Whether a provider's model is asked for under its own name."""
        route = None if "@" in model else self._find(model, None, dialect)
        return route is not None and route.servers is pool and route.send_model == model

    def _find(self, model: str | None, agent: str | None, dialect: str | None = None) -> ModelRoute | None:
        for rule in self._rules:
            if rule.matches(model, agent, dialect) and (route := self._route_for(rule, model)) is not None:
                return route
        return ModelRoute(model, self._engines[model]) if model in self._engines else None

    def _route_for(self, rule: RouteRule, model: str | None) -> ModelRoute | None:
        """None where nothing says which of the provider's models is meant."""
        if rule.engine is not None:
            return ModelRoute(rule.engine, self._engines[rule.engine])
        pool = self._servers[rule.provider or ""]
        sent = rule.send_model or pool.provider.model or model
        if not sent:
            return None
        return ModelRoute(model or sent, None, pool, sent, rule.price or pool.provider.price)

    def _unknown(self, model: str | None) -> ApiError:
        known = ", ".join(self.models) or "none, start the server with one: agl serve --model DIR"
        if model is None:
            return bad_request("model", f"the request names no model; this server has: {known}")
        whose = " to callers of this dialect" if self._find(model, None) is not None else ""
        message = f"the model {model!r} is not served here{whose}; known: {known}"
        return ApiError(404, message, code="model_not_found", param="model")

    def _check_rules(self) -> None:
        for number, rule in enumerate(self._rules, 1):
            where = f"rule {number} (model={rule.model!r}, agent={rule.agent!r})"
            if rule.engine is not None and rule.engine not in self._engines:
                known = ", ".join(self._engines) or "none"
                raise ConfigError(f"{where} leads to the engine {rule.engine!r}, which is not here; known: {known}")
            if rule.provider is not None and rule.provider not in self._servers:
                known = ", ".join(self._servers) or "none"
                raise ConfigError(f"{where} leads to the provider {rule.provider!r}, which is not here; known: {known}")


class ResolvedCall(NamedTuple):
    """A call with everything that is found out once: who calls, what it asks for, and where it goes."""

    path: ApiPath
    headers: Mapping[str, str]
    """By lower-case name."""
    caller: Caller
    """With its agent."""
    body: dict[str, Any]
    """The parsed request."""
    route: ModelRoute


class CallResolver:
    """Finds the agent and the route of a call."""

    def __init__(self, agents: AgentMatcher, router: Router) -> None:
        self._agents, self._router = agents, router

    def resolve(
        self, path: ApiPath, headers: Mapping[str, str], caller: Caller, body: dict[str, Any]
    ) -> ResolvedCall | None:
        """None if the model in the body is not a name. Raises ApiError 400 or 404 if there is no such route."""
        model = body.get("model")
        if model is not None and not isinstance(model, str):
            return None
        caller = caller.with_agent(self._agents.identify(headers, body, self._router), self._router)
        route = self._router.resolve(caller.agent.model, caller.agent.name, path)
        return ResolvedCall(path, headers, caller, body, route)
