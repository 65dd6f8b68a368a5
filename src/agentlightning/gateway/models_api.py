"""`/v1/models`: the list of models, in the formats of OpenAI and Anthropic.

Models with a route come first, then the models that providers with a pattern route list themselves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import orjson
from starlette.requests import Request
from starlette.responses import Response

from agentlightning.gateway.dialects.anthropic.request import MESSAGES
from agentlightning.gateway.dialects.openai.chat import CHAT
from agentlightning.gateway.errors import ApiError, bad_request
from agentlightning.gateway.forwarding.upstream_models import UpstreamModels, anthropic_model, openai_model, rfc3339
from agentlightning.gateway.routing import Router
from agentlightning.gateway.upstream.servers import ServerPool

Json = dict[str, Any]

_MAX_PAGE: Final = 1000


class ModelsEndpoint:
    """Lists the models of a router. `check` gets the headers and path parameters, and raises ApiError to reject."""

    def __init__(self, table: Router, check: Callable[[Mapping[str, str], Mapping[str, str]], None]) -> None:
        self._table = table
        self._check = check
        self._created = int(time.time())
        self._listings: dict[ServerPool, UpstreamModels] = {}

    async def list(self, request: Request) -> Response:
        """GET /v1/models, with Anthropic's `limit`, `after_id` and `before_id`. Without a limit, all models."""
        dialect = client_family(request)
        try:
            self._check(request.headers, request.path_params)
        except ApiError as api_error:
            return error_body(request, api_error)
        models = await self._models(dialect)
        if dialect == "openai":
            patterns = self._table.patterns(dialect)
            more = {"patterns": patterns} if patterns else {}
            return json_response({"object": "list", "data": list(models.values())} | more)
        try:
            return json_response(_page(list(models.values()), request.query_params))
        except ApiError as api_error:
            return error_body(request, api_error)

    async def retrieve(self, request: Request) -> Response:
        """GET /v1/models/NAME. A name that matches a pattern is found even if its provider does not list it, because
        providers do not list aliases."""
        dialect, name = client_family(request), request.path_params["model"]
        try:
            self._check(request.headers, request.path_params)
            route = self._table.resolve(name, path="messages" if dialect == "anthropic" else "")
        except ApiError as api_error:
            return error_body(request, api_error)
        listed = await self._models(dialect) if route.name == name else {}
        return json_response(listed.get(name) or self._describe(dialect, route.name))

    async def _models(self, dialect: ClientFamily) -> dict[str, Json]:
        """All models, by name."""
        models = {name: self._describe(dialect, name) for name in self._table.names(dialect)}
        open_ended = self._table.open_pools(dialect)
        lists = await asyncio.gather(*(self._models_of(pool).models() for pool in open_ended))
        describe = anthropic_model if dialect == "anthropic" else openai_model
        for pool, upstream in zip(open_ended, lists, strict=True):
            for model in upstream:
                if model["id"] not in models and self._table.serves_under_own_name(model["id"], dialect, pool):
                    models[model["id"]] = describe(model)
        return models

    def _models_of(self, pool: ServerPool) -> UpstreamModels:
        if (listing := self._listings.get(pool)) is None:
            listing = self._listings[pool] = UpstreamModels(pool)
        return listing

    def _describe(self, dialect: ClientFamily, name: str) -> Json:
        if dialect == "anthropic":
            return {"type": "model", "id": name, "display_name": name, "created_at": rfc3339(self._created)}
        return {"id": name, "object": "model", "created": self._created, "owned_by": "agentlightning"}


ClientFamily = Literal["openai", "anthropic"]


def client_family(request: Request) -> ClientFamily:
    """Which family of clients sent a request, by its headers."""
    return "anthropic" if "anthropic-version" in request.headers else "openai"


def _page(models: list[Json], query: Mapping[str, str]) -> Json:
    """One page of Anthropic's list. Raises ApiError 400 for an invalid limit."""
    limit, names = query.get("limit"), [model["id"] for model in models]
    if limit is not None and not (limit.isdecimal() and 1 <= int(limit) <= _MAX_PAGE):
        raise bad_request("limit", f"limit={limit!r} is no number from 1 to {_MAX_PAGE}")
    after, before = query.get("after_id"), query.get("before_id")
    first = names.index(after) + 1 if after in names else 0
    last = names.index(before) if before in names else len(names)
    shown, more = models[first:last], False
    if limit is not None and len(shown) > int(limit):
        shown, more = (shown[-int(limit) :] if before in names and after is None else shown[: int(limit)]), True
    edges = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return {"data": shown, "has_more": more, "first_id": edges[0], "last_id": edges[1]}


def error_body(request: Request, api_error: ApiError) -> Response:
    """An error response in the format of the client, by its headers."""
    dialect = MESSAGES if client_family(request) == "anthropic" else CHAT
    return Response(dialect.error_body(api_error), api_error.status, media_type="application/json")


def json_response(content: Mapping[str, object]) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")
