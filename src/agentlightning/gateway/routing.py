"""Resolves a call: its agent, and the route from model name and agent to an engine or a provider. Lists the models.

The first rule that matches decides; then come the engines by name, then the default model. Each call is resolved once.

`/v1/models` has the formats of OpenAI and Anthropic. Models with a route come first, then the models that providers
with a pattern route list themselves. Their lists are cached, and concurrent callers share one request, with a timeout
of a few seconds. A provider that fails or responds in an unknown format has an empty list.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from itertools import takewhile
from typing import Any, Final, Literal, NamedTuple, cast
from urllib.parse import quote

import orjson
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from agentlightning.attempt_address import AGENT_BAGGAGE, JUDGE_HEADER
from agentlightning.engine.base import AgentEngines, Engine
from agentlightning.engine.servers.joining import RENEW_SECONDS
from agentlightning.errors import ConfigError, ConflictError
from agentlightning.gateway.answer import object_of, objects
from agentlightning.gateway.callers import Agent, AttemptContext, Caller, read_baggage
from agentlightning.gateway.config import MAX_NAME_CHARACTERS, AgentRule, Price, RouteRule
from agentlightning.gateway.dialects.base import ApiPath, optional
from agentlightning.gateway.dialects.content_parts import BILLING
from agentlightning.gateway.errors import ApiError, bad_request, conflict
from agentlightning.gateway.upstream.call import ServerPool
from agentlightning.transport import TransportError
from agentlightning.util.json_values import Json

logger = logging.getLogger(__name__)

HEADER: Final = "x-agentlightning-agent"
KEY_CHARACTERS: Final = 2048
"""The part of the system prompt in the key: what differs between calls (a date, a file) usually stands further down."""


_JUDGED_BY_POLICY: Final = (
    "a reward function asked the policy that is being trained (model={!r}): a policy that judges itself learns to"
    " please itself. Give the judge another endpoint, or lead its model elsewhere with a route ([gateway] routes)"
)


# -- the agent ---------------------------------------------------------------------------------------------------------


class AgentMatcher:
    """Identifies agents by their calls and by the first rule that matches. Raises ConfigError if a model name belongs
    to two agents."""

    def __init__(self, rules: Sequence[AgentRule] = ()) -> None:
        self._aliases: dict[str, AgentRule] = {}
        for rule in rules:
            for model in rule.models:
                if model in self._aliases:
                    raise ConfigError(f"the model name {model!r} belongs to two agents; leave it to one")
                self._aliases[model] = rule
        self._patterns = [
            (rule.name, rule.contains or "", re.compile(rule.matches or ""))
            for rule in rules
            if rule.contains is not None or rule.matches is not None
        ]

    def identify(self, headers: Mapping[str, str], body: Json, served: Container[str] = ()) -> Agent:
        """The agent behind a call. `headers` have lower-case names; `body` is a request in any dialect; `served` are
        the existing model names, which distinguish `writer@policy` from a model of that name."""
        requested, system, tools = body.get("model"), system_prompt(body), tool_names(body)
        alias, model = self.alias(requested if isinstance(requested, str) else None, served)
        in_baggage = read_baggage(headers.get("baggage", "")).get(AGENT_BAGGAGE)
        candidates = [("the header", headers.get(HEADER)), ("the baggage", in_baggage), ("the model name", alias)]
        names = [(source, name[:MAX_NAME_CHARACTERS]) for source, name in candidates if name]
        name = names[0][1] if names else self._by_pattern(system)
        ignored = tuple(f"agent {other!r} of {source}" for source, other in names if other != name)
        return Agent(name, agent_key(system, tools), model, ignored)

    def alias(self, model: str | None, served: Container[str] = ()) -> tuple[str | None, str | None]:
        """(agent, model) of a model name: `writer@policy` is the model `policy` for the agent `writer`, and `writer@`
        the default model, unless there is a model with the whole name."""
        if model is None:
            return None, None
        if (rule := self._aliases.get(model)) is not None:
            return rule.name, rule.serve or (model if model in served else None)
        agent, at, base = model.rpartition("@")
        if not at or not agent or model in served or (base and base not in served):
            return None, model
        return agent, base or None

    def _by_pattern(self, system: str) -> str | None:
        for name, text, pattern in self._patterns:
            if text in system and (match := pattern.search(system)) is not None:
                agent = name or match.groupdict().get("agent")
                return agent[:MAX_NAME_CHARACTERS] if agent else None
        return None


# -- what identifies an agent ------------------------------------------------------------------------------------------


def system_prompt(body: Json) -> str:
    """The system prompt of a request in any dialect; "" if it has none."""
    if prompt := body.get("system") or body.get("instructions"):
        return _text(prompt)
    turns = objects(body.get("messages") or body.get("input"))
    first = takewhile(lambda turn: turn.get("role") in ("system", "developer"), turns)
    return "\n".join([_text(turn.get("content")) for turn in first])


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    texts = [block.get("text") for block in objects(content)]
    return "\n".join(text for text in texts if isinstance(text, str) and not text.startswith(BILLING))


def tool_names(body: Json) -> list[str]:
    """The names of the tools of a request, sorted; the type of a tool without a name."""
    tools = objects(body.get("tools"))
    found = [(object_of(tool, "function") or tool).get("name") or tool.get("type") for tool in tools]
    return sorted(name for name in found if isinstance(name, str) and name)


def agent_key(system: str, tools: Sequence[str]) -> str | None:
    """A key that is the same for every call of an agent; None without a system prompt and tools."""
    if not system and not tools:
        return None
    identity = "\0".join((system[:KEY_CHARACTERS], *tools))
    return blake2b(identity.encode(errors="replace"), digest_size=6).hexdigest()


# -- the route ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """The route of a model name and agent: to an engine, or to the servers of a provider."""

    name: str
    """The model name in replies and spans."""
    engine: Engine | None = None
    servers: ServerPool | None = None
    """Those of a provider."""
    send_model: str = ""
    """The provider's name of the model."""
    price: Price | None = None


class ResolvedCall(NamedTuple):
    """A call with everything that is found out once: who calls, what it asks for, and where it goes."""

    path: ApiPath
    headers: Mapping[str, str]
    """By lower-case name."""
    caller: Caller
    """With its agent."""
    context: AttemptContext | None
    """The attempt of the caller, if it has one."""
    body: Json
    """The parsed request."""
    route: ModelRoute

    @property
    def trace_id(self) -> str:
        """That of the attempt, if there is one."""
        return self.context.trace_id if self.context else ""


class Router:
    """The routes. An engine may answer some agents with adapters (`AgentEngines`). `default_model` is an engine, or a
    model that a rule matches: it serves requests without a model and, with `accept_any_model`, those for an unknown
    one. A single engine is the default. With `takes_runs`, training runs elsewhere may join (`add_policy`). Raises
    ConfigError for a rule or a default without a target."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        rules: Sequence[RouteRule],
        servers: Mapping[str, ServerPool],
        agents: AgentMatcher,
        *,
        default_model: str | None = None,
        accept_any_model: bool = False,
        takes_runs: bool = False,
    ) -> None:
        self._engines, self._rules, self.servers = _with_views(engines), rules, servers
        self._agents, self._accept_any, self._takes_runs = agents, accept_any_model, takes_runs
        for number, rule in enumerate(rules, 1):
            if rule.engine is not None and rule.engine not in self._engines:
                where = f"rule {number} (model={rule.model!r}, agent={rule.agent!r})"
                known = ", ".join(self._engines) or "none"
                raise ConfigError(f"{where} leads to the engine {rule.engine!r}, which is not here; known: {known}")
        self._named = [rule.model for rule in rules if not rule.is_pattern]
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
        earlier one of that name. Raises as `check_names`."""
        found = _with_views({model: engine})
        self.check_names(model, found)
        self.remove_policy(model)
        self._joined |= dict.fromkeys(found, model)
        self._engines |= found

    def check_names(self, model: str, names: Iterable[str]) -> None:
        """Raises ConflictError if one of the names has a route other than to the policy `model` of a run."""
        for name in names:
            if name in self and self._joined.get(name) != model:
                raise ConflictError(
                    f"the model name {name!r} is used by this server's own models; set another policy.name"
                )

    def remove_policy(self, model: str) -> Engine | None:
        """Undo `add_policy`; returns its engine."""
        policy = self._engines.get(model)
        for name in [name for name, owner in self._joined.items() if owner == model]:
            del self._joined[name], self._engines[name]
        return policy

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
        self, model: str | None, agent: str | None = None, path: str = "", context: AttemptContext | None = None
    ) -> ModelRoute:
        """The route of a call to `path` (for example "messages"). An unknown name leads to the policy of the caller's
        training run, where that has joined and is among the models that its rollout names (`context`). Raises ApiError
        400 if no model is named, 404 for an unknown model, and 503 if the caller's run has not joined."""
        dialect = "anthropic" if path == "messages" else "openai"
        route = self._find(model, agent, dialect)
        if route is None and self._takes_runs and (policy := self._policy_of_run(context)) is not None:
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
        body: Json,
        context: AttemptContext | None = None,
    ) -> ResolvedCall:
        """Find the agent and the route of a call. `context`: the attempt of the caller. Raises ApiError if there is no
        such route, or the model in the body is not a name."""
        optional(body, "model", str)
        agent = self._agents.identify(headers, body, self)
        if caller.mode is not None and agent.model is not None and agent.model not in self:
            agent = replace(agent, model=None)  # 1.0 had one model only, so a call to 1.0's URL may name any.
        route = self.resolve(agent.model, agent.name, path, context)
        if JUDGE_HEADER in headers and route.engine is not None:
            # A judge may not be what learns: a policy that joined, or the default of all names.
            policy = self._engines.get(self._default or "") if self._accept_any else None
            learning = [policy, *(policy.views.values() if isinstance(policy, AgentEngines) else ())]
            if route.name in self._joined or route.engine in learning:
                raise conflict("judge_as_agent", _JUDGED_BY_POLICY.format(agent.model))
        return ResolvedCall(path, headers, replace(caller, agent=agent), context, body, route)

    def rules_of(self, dialect: str) -> list[RouteRule]:
        """The rules for callers of a dialect."""
        return [rule for rule in self._rules if rule.dialect in (None, dialect)]

    def names(self, dialect: str) -> list[str]:
        """The model names for callers of a dialect."""
        own = {rule.model for rule in self.rules_of(dialect)}
        return [name for name in self.models if name in own or name in self._engines]

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

    def _policy_of_run(self, context: AttemptContext | None) -> str | None:
        """The joined policy among the models that a rollout itself names, as those of training runs do; None if it
        belongs to no run. Raises ApiError 503 for a run that is not here: this server was started again, and the run
        will join it."""
        given = context.llms if context is not None and context.names_resources else {}
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


# -- the list of models ------------------------------------------------------------------------------------------------

ClientFamily = Literal["openai", "anthropic"]


def client_family(request: Request) -> ClientFamily:
    """Which family of clients sent a request, by its headers."""
    return "anthropic" if "anthropic-version" in request.headers else "openai"


def json_response(content: Mapping[str, object]) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")


class ModelsEndpoint:
    """Lists the models of a router. `check` gets the headers and path parameters, and raises ApiError to reject."""

    def __init__(self, router: Router, check: Callable[[Mapping[str, str], Mapping[str, str]], None]) -> None:
        self._router, self._check, started = router, check, datetime.now(UTC)
        self._own: Json = {
            "owned_by": "agentlightning",
            "created": int(started.timestamp()),
            "created_at": f"{started:%Y-%m-%dT%H:%M:%SZ}",
        }
        """What is said of each model of ours."""
        self._listings = {pool: UpstreamModels(pool) for pool in router.servers.values()}

    async def list(self, request: Request) -> Response:
        """GET /v1/models: all models on one page. Raises ApiError."""
        dialect = client_family(request)
        self._check(request.headers, request.path_params)
        found = await self._models(dialect)
        models, names = list(found.values()), [*found] or [None]
        if dialect == "anthropic":
            return json_response({"data": models, "has_more": False, "first_id": names[0], "last_id": names[-1]})
        patterns = dict.fromkeys(rule.model for rule in self._router.rules_of(dialect) if rule.is_pattern)
        return json_response({"object": "list", "data": models} | ({"patterns": [*patterns]} if patterns else {}))

    async def retrieve(self, request: Request) -> Response:
        """GET /v1/models/NAME. A name that matches a pattern is found even if its provider does not list it, because
        providers do not list aliases. Raises ApiError."""
        dialect, name = client_family(request), request.path_params["model"]
        self._check(request.headers, request.path_params)
        route = self._router.resolve(name, path="messages" if dialect == "anthropic" else "")
        listed = await self._models(dialect) if route.name == name else {}
        return json_response(listed.get(name) or describe_model({"id": route.name} | self._own, dialect))

    async def _models(self, dialect: ClientFamily) -> dict[str, Json]:
        """All models, by name."""
        router = self._router
        models = {name: describe_model({"id": name} | self._own, dialect) for name in router.names(dialect)}
        open_ended = [rule.provider for rule in router.rules_of(dialect) if rule.provider and rule.is_pattern]
        pools = [router.servers[provider] for provider in dict.fromkeys(open_ended)]
        lists = await asyncio.gather(*(self._listings[pool].models() for pool in pools))
        for pool, listed in zip(pools, lists, strict=True):
            for model in listed:
                if model["id"] not in models and router.serves_under_own_name(model["id"], dialect, pool):
                    models[model["id"]] = describe_model(model, dialect)
        return models


CACHE_SECONDS: Final = 300.0
"""Seconds that a list is cached."""
RETRY_SECONDS: Final = 30.0
"""Seconds until a failed request is repeated."""
TIMEOUT_SECONDS: Final = 3.0
"""Seconds for the whole list."""
_MAX_PAGES: Final = 20
_MAX_NAMES: Final = 10_000


class UpstreamModels:
    """The models of one provider."""

    def __init__(self, pool: ServerPool, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool, self._clock = pool, clock
        self._models: list[Json] = []
        self._expires_at = 0.0
        self._lock = asyncio.Lock()

    async def models(self) -> list[Json]:
        """The models as the provider describes them, each with an `id`; after a failure those of the last list."""
        async with self._lock:
            if self._clock() < self._expires_at:
                return self._models
            seconds = CACHE_SECONDS
            try:
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    self._models = await self._pages()
            except (TransportError, TimeoutError, ConfigError, ValueError) as error:
                seconds, reason = RETRY_SECONDS, str(error) or f"no response within {TIMEOUT_SECONDS:g} s"
                name = self._pool.provider.name
                logger.info("the models of the provider %r could not be listed: %s", name, reason)
            self._expires_at = self._clock() + seconds
            return self._models

    async def _pages(self) -> list[Json]:
        """All pages of the list: Anthropic has a thousand models per page, OpenAI one page. Raises TransportError, or
        ValueError for an error response or invalid JSON."""
        anthropic = self._pool.provider.dialect == "anthropic"
        listed, query = list[Json](), "?limit=1000" if anthropic else ""
        for _ in range(_MAX_PAGES):
            status, _, body = await self._pool.fetch("GET", "models" + query, timeout_seconds=TIMEOUT_SECONDS)
            if status != 200:
                raise ValueError(f"status {status}")
            page = orjson.loads(body)
            models = read_models(page)
            listed += models
            if not (anthropic and models and isinstance(page, dict) and cast("Json", page).get("has_more") is True):
                break
            query = "?limit=1000&after_id=" + quote(models[-1]["id"], safe="")
        return list({model["id"]: model for model in listed[:_MAX_NAMES]}.values())


def read_models(page: Any) -> list[Json]:
    """The models of a list in OpenAI's or Anthropic's format, or without an envelope; those without a name are left
    out."""
    models = objects(cast("Json", page).get("data") if isinstance(page, dict) else page)
    return [
        each
        for each in models
        if isinstance(name := each.get("id"), str) and name.isprintable() and 0 < len(name) <= 256
    ]


def describe_model(model: Json, family: ClientFamily) -> Json:
    """A model in the format of a family of clients. Fields of its provider's format stay."""
    if family == "anthropic":
        return {"display_name": model["id"], "created_at": _UNKNOWN_TIME} | model | {"type": "model"}
    return {"created": 0, "owned_by": "unknown"} | model | {"object": "model"}


_UNKNOWN_TIME: Final = "1970-01-01T00:00:00Z"
