"""`/v1/models`: the list of models, in the formats of OpenAI and Anthropic.

Models with a route come first, then the models that providers with a pattern route list themselves. Their lists are
cached, and concurrent callers share one request, with a timeout of a few seconds. A provider that fails or responds in
an unknown format has an empty list.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal, cast
from urllib.parse import quote

import orjson
from starlette.requests import Request
from starlette.responses import Response

from agentlightning.errors import ConfigError
from agentlightning.gateway.answer import objects
from agentlightning.gateway.dialects.chat import CHAT
from agentlightning.gateway.dialects.messages import MESSAGES
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.routing import Router
from agentlightning.gateway.upstream.call import ServerPool
from agentlightning.transport import TransportError
from agentlightning.util.json_values import Json

logger = logging.getLogger(__name__)


class ModelsEndpoint:
    """Lists the models of a router. `check` gets the headers and path parameters, and raises ApiError to reject."""

    def __init__(self, table: Router, check: Callable[[Mapping[str, str], Mapping[str, str]], None]) -> None:
        self._table = table
        self._check = check
        self._started = datetime.now(UTC)
        self._listings: dict[ServerPool, UpstreamModels] = {}

    async def list(self, request: Request) -> Response:
        """GET /v1/models: all models on one page. Raises ApiError."""
        dialect = client_family(request)
        self._check(request.headers, request.path_params)
        found = await self._models(dialect)
        models, names = list(found.values()), [*found] or [None]
        if dialect == "anthropic":
            page = {"data": models, "has_more": False, "first_id": names[0], "last_id": names[-1]}
            return json_response(page)
        patterns = dict.fromkeys(rule.model for rule in self._table.rules_of(dialect) if rule.is_pattern)
        return json_response({"object": "list", "data": models} | ({"patterns": [*patterns]} if patterns else {}))

    async def retrieve(self, request: Request) -> Response:
        """GET /v1/models/NAME. A name that matches a pattern is found even if its provider does not list it, because
        providers do not list aliases. Raises ApiError."""
        dialect, name = client_family(request), request.path_params["model"]
        self._check(request.headers, request.path_params)
        route = self._table.resolve(name, path="messages" if dialect == "anthropic" else "")
        listed = await self._models(dialect) if route.name == name else {}
        return json_response(listed.get(name) or describe_model(self._own(route.name), dialect))

    async def _models(self, dialect: ClientFamily) -> dict[str, Json]:
        """All models, by name."""
        rules, table = self._table.rules_of(dialect), self._table
        models = {name: describe_model(self._own(name), dialect) for name in table.names(dialect)}
        open_ended = [*{table.servers[rule.provider]: None for rule in rules if rule.provider and rule.is_pattern}]
        listings = [self._listings.setdefault(pool, UpstreamModels(pool)) for pool in open_ended]
        lists = await asyncio.gather(*(listing.models() for listing in listings))
        for pool, upstream in zip(open_ended, lists, strict=True):
            for model in upstream:
                if model["id"] not in models and table.serves_under_own_name(model["id"], dialect, pool):
                    models[model["id"]] = describe_model(model, dialect)
        return models

    def _own(self, name: str) -> Json:
        started = {
            "created": int(self._started.timestamp()),
            "created_at": self._started.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        return {"id": name, "owned_by": "agentlightning", **started}


ClientFamily = Literal["openai", "anthropic"]


def client_family(request: Request) -> ClientFamily:
    """Which family of clients sent a request, by its headers."""
    return "anthropic" if "anthropic-version" in request.headers else "openai"


def error_body(request: Request, api_error: ApiError) -> Response:
    """An error response in the format of the client, by its headers."""
    dialect = MESSAGES if client_family(request) == "anthropic" else CHAT
    return Response(dialect.error_body(api_error), api_error.status, media_type="application/json")


def json_response(content: Mapping[str, object]) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")


# -- the models of a provider ------------------------------------------------------------------------------------------

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
        self._pool = pool
        self._clock = clock
        self._models: list[Json] = []
        self._expires_at = 0.0
        self._lock = asyncio.Lock()

    async def models(self) -> list[Json]:
        """The models as the provider describes them, each with an `id`; after a failure those of the last list."""
        if self._clock() >= self._expires_at:
            async with self._lock:
                if self._clock() >= self._expires_at:
                    await self._refresh()
        return self._models

    async def _refresh(self) -> None:
        provider, seconds = self._pool.provider, CACHE_SECONDS
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                self._models = await self._pages()
        except (TransportError, TimeoutError, ConfigError, ValueError) as error:
            seconds = RETRY_SECONDS
            reason = str(error) or f"no response within {TIMEOUT_SECONDS:g} s"
            logger.info("the models of the provider %r could not be listed: %s", provider.name, reason)
        self._expires_at = self._clock() + seconds

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
