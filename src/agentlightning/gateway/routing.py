"""Resolves a call: its agent, and the route from model name and agent to an engine or a provider.

The first rule that matches decides; then come the engines by name, then the default model. Each call is resolved once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from agentlightning.attempt_address import JUDGE_HEADER
from agentlightning.engine.adapter_view import AgentEngines
from agentlightning.engine.base import Engine
from agentlightning.engine.servers.joining import RENEW_SECONDS
from agentlightning.errors import ConfigError
from agentlightning.gateway.callers.agents import AgentMatcher
from agentlightning.gateway.callers.attempts import AttemptContext
from agentlightning.gateway.callers.attribution import Caller
from agentlightning.gateway.config import RouteRule
from agentlightning.gateway.dialects.base import ApiPath, optional
from agentlightning.gateway.errors import ApiError, bad_request, conflict
from agentlightning.gateway.upstream.call import ServerPool
from agentlightning.gateway.upstream.provider import Price, Provider
from agentlightning.resources import LLM

Given = Mapping[str, tuple[str, LLM]]
"""The models of a caller's resources: model -> (name of the resource, the resource)."""
NOTHING_GIVEN: Final[Given] = MappingProxyType({})
_JUDGED_BY_POLICY: Final = (
    "a reward function asked the policy that is being trained (model={!r}): a policy that judges itself learns to"
    " please itself. Give the judge another endpoint, or lead its model elsewhere with a route ([gateway] routes)"
)


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """The route of a model name and agent: to an engine, or to the servers of a provider."""

    name: str
    """The model name in replies and spans."""
    engine: Engine | None = None
    servers: ServerPool | None = None
    """The servers of `provider`."""
    send_model: str = ""
    """The provider's name of the model."""
    price: Price | None = None

    @property
    def provider(self) -> Provider | None:
        return self.servers.provider if self.servers else None


class ResolvedCall(NamedTuple):
    """A call with everything that is found out once: who calls, what it asks for, and where it goes."""

    path: ApiPath
    headers: Mapping[str, str]
    """By lower-case name."""
    caller: Caller
    """With its agent."""
    context: AttemptContext | None
    """The attempt of the caller, if it has one."""
    body: dict[str, Any]
    """The parsed request."""
    route: ModelRoute


class Router:
    """The routes. An engine may answer some agents with adapters (`AgentEngines`). `default_model` is an engine, or a
    model that a rule matches: it serves requests without a model and, with `accept_any_model`, those for an unknown
    one. A single engine is the default. Raises ConfigError for a rule or a default without a target."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        rules: Sequence[RouteRule] = (),
        servers: Mapping[str, ServerPool] | None = None,
        agents: AgentMatcher | None = None,
        *,
        default_model: str | None = None,
        accept_any_model: bool = False,
    ) -> None:
        self._engines, self._rules, self.servers = _with_views(engines), tuple(rules), dict(servers or {})
        self._agents, self._accept_any = agents or AgentMatcher(), accept_any_model
        self._check_rules()
        self._named = [rule.model for rule in rules if not rule.is_pattern]
        self.takes_runs = False
        """Whether training runs elsewhere may join (`add_policy`)."""
        self._joined: dict[str, str] = {}
        """The models of these runs -> the name of their policy; those of single agents are among them."""
        if default_model is None and len(engines) == 1:
            default_model = next(iter(engines))
        if default_model is not None and self._find(default_model, None) is None:
            raise ConfigError(f"default_model={default_model!r} is not served; use one of {', '.join(self.models)}")
        if accept_any_model and default_model is None:
            raise ConfigError("accept_any_model=True needs a default_model to serve unknown names")
        self._default = default_model

    def add_policy(self, model: str, engine: Engine) -> None:
        """Route a model name, and those of single agents, to the policy of a training run elsewhere, instead of an
        earlier one of that name. Raises ConfigError if a name has another route."""
        found = _with_views({model: engine})
        self.check_names(model, found)
        self.remove_policy(model)
        self._joined |= dict.fromkeys(found, model)
        self._engines |= found

    def check_names(self, model: str, names: Iterable[str]) -> None:
        """Raises ConfigError if one of the names has a route other than to the policy `model` of a run."""
        for name in names:
            if name in self and self._joined.get(name) != model:
                raise ConfigError(
                    f"the model name {name!r} is used by this server's own models; set another policy.name"
                )

    def remove_policy(self, model: str) -> None:
        """Undo `add_policy`."""
        for name in [name for name, owner in self._joined.items() if owner == model]:
            del self._joined[name], self._engines[name]

    @property
    def models(self) -> tuple[str, ...]:
        """Names of models, without patterns."""
        return tuple(dict.fromkeys([*self._engines, *self._named]))

    def __contains__(self, model: object) -> bool:
        """Whether a name has a route other than the default. A name with an `@` matches no pattern, because it names an
        agent."""
        if model in self._engines or model in self._named:
            return True
        return isinstance(model, str) and "@" not in model and self._find(model, None) is not None

    def resolve(
        self, model: str | None, agent: str | None = None, path: str = "", given: Given = NOTHING_GIVEN
    ) -> ModelRoute:
        """The route of a call to `path` (for example "messages"). An unknown name leads to the policy of the caller's
        training run, where that has joined and is among the models that the caller was `given`. Raises ApiError 400 if
        no model is named, 404 for an unknown model, and 503 if the caller's run has not joined."""
        dialect = "anthropic" if path == "messages" else "openai"
        route = self._find(model, agent, dialect)
        if route is None and self.takes_runs and (policy := self._policy_of_run(given)) is not None:
            return self._engine_route(policy, agent)
        if route is None and self._default is not None and (self._accept_any or model is None):
            route = self._find(self._default, agent, dialect)
        if route is None:
            raise self._unknown(model)
        return route

    def resolve_call(
        self,
        path: ApiPath,
        headers: Mapping[str, str],
        caller: Caller,
        body: dict[str, Any],
        context: AttemptContext | None = None,
    ) -> ResolvedCall:
        """Find the agent and the route of a call. `context`: the attempt of the caller. Raises ApiError if there is no
        such route, or the model in the body is not a name."""
        optional(body, "model", str)
        caller = caller.with_agent(self._agents.identify(headers, body, self), self)
        given = NOTHING_GIVEN if context is None else context.given
        route = self.resolve(caller.agent.model, caller.agent.name, path, given)
        if JUDGE_HEADER in headers and self._trains(route):
            raise conflict("judge_as_agent", _JUDGED_BY_POLICY.format(caller.agent.model))
        return ResolvedCall(path, headers, caller, context, body, route)

    def rules_of(self, dialect: str) -> list[RouteRule]:
        """The rules for callers of a dialect."""
        return [rule for rule in self._rules if rule.dialect in (None, dialect)]

    def names(self, dialect: str) -> list[str]:
        """The model names for callers of a dialect."""
        own = {rule.model for rule in self.rules_of(dialect)}
        return [name for name in self.models if name in own or name in self._engines]

    def _trains(self, route: ModelRoute) -> bool:
        """Whether a route leads to the policy of a training run: one that joined, or the default of all names."""
        if route.engine is not None and route.name in self._joined:
            return True
        if not self._accept_any or self._default is None or route.engine is None:
            return False
        policy = self._engines.get(self._default)
        return route.engine is policy or (isinstance(policy, AgentEngines) and route.engine in policy.views.values())

    def serves_under_own_name(self, model: str, dialect: str, pool: ServerPool) -> bool:
        """Whether a request for a provider's model name goes to that provider and model."""
        route = None if "@" in model else self._find(model, None, dialect)
        return route is not None and route.servers is pool and route.send_model == model

    def _find(self, model: str | None, agent: str | None, dialect: str | None = None) -> ModelRoute | None:
        for rule in self._rules:
            if rule.matches(model, agent, dialect) and (route := self._route_for(rule, model, agent)) is not None:
                return route
        return self._engine_route(model, agent) if model in self._engines else None

    def _engine_route(self, name: str, agent: str | None) -> ModelRoute:
        engine = self._engines[name]
        own = engine.for_agent(agent) if isinstance(engine, AgentEngines) else engine
        return ModelRoute(name if own is engine else own.model, own)

    def _route_for(self, rule: RouteRule, model: str | None, agent: str | None) -> ModelRoute | None:
        """None if neither the rule, the provider nor the request names a model."""
        if rule.engine is not None:
            return self._engine_route(rule.engine, agent)
        pool = self.servers[rule.provider or ""]
        sent = rule.send_model or pool.provider.model or model
        if not sent:
            return None
        return ModelRoute(model or sent, None, pool, sent, rule.price or pool.provider.price)

    def _policy_of_run(self, given: Given) -> str | None:
        """The joined policy among the models that a caller was given; None if it belongs to no run. Raises ApiError 503
        for a run that is not here: this server was started again, and the run will join it."""
        if (joined := next((name for name in given if name in self._joined), None)) is not None:
            return self._joined[joined]
        policies = [name for name, (_, llm) in given.items() if llm.policy_version is not None]
        if policies and not any(name in self for name in policies):
            message = (
                f"the training run of this rollout, whose policy is {policies[0]!r}, has not joined this server, or has"
                " left it; if the server was started again, the run joins within seconds: repeat the call"
            )
            raise ApiError(503, message, code="policy_unavailable", retry_after=math.ceil(RENEW_SECONDS))
        return None

    def _unknown(self, model: str | None) -> ApiError:
        known = ", ".join(self.models) or "none, start the server with one: agl serve --model MODEL"
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


def _with_views(engines: Mapping[str, Engine]) -> dict[str, Engine]:
    """The engines, and those of single agents, by model name. Raises ConfigError for a name of two engines."""
    found = dict(engines)
    for engine in engines.values():
        for name, view in engine.views.items() if isinstance(engine, AgentEngines) else ():
            if name in found:
                raise ConfigError(
                    f"two engines are called {name!r}: it is an adapter of {engine.model!r}; rename the other"
                )
            found[name] = view
    return found
