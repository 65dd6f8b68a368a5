"""`/v1/models`: what is served, as OpenAI's and Anthropic's clients want to be told."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime

import orjson
from starlette.requests import Request
from starlette.responses import Response

from agentlightning.gateway.dialects.chat import CHAT
from agentlightning.gateway.dialects.messages import MESSAGES
from agentlightning.gateway.problems import Problem
from agentlightning.gateway.routing import Routes


class Models:
    """The names of a routing table."""

    def __init__(self, table: Routes) -> None:
        self._table = table
        self._created = int(time.time())

    async def list(self, request: Request) -> Response:
        """GET /v1/models."""
        data = [self._model(request, name) for name in self._table.models]
        if is_anthropic(request):
            edges = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
            return json_reply({"data": data, "has_more": False, "first_id": None, "last_id": None} | edges)
        return json_reply({"object": "list", "data": data})

    async def show(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        try:
            route = self._table.resolve(request.path_params["model"])
        except Problem as problem:
            return refusal(request, problem)
        return json_reply(self._model(request, route.name))

    def _model(self, request: Request, name: str) -> dict[str, str | int]:
        if is_anthropic(request):
            created = datetime.fromtimestamp(self._created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            return {"type": "model", "id": name, "display_name": name, "created_at": created}
        return {"id": name, "object": "model", "created": self._created, "owned_by": "agentlightning"}


def is_anthropic(request: Request) -> bool:
    """Whether it was made by an Anthropic client."""
    return "anthropic-version" in request.headers


def refusal(request: Request, problem: Problem) -> Response:
    """An error as the caller's client knows it, where the path does not say whose client it is."""
    dialect = MESSAGES if is_anthropic(request) else CHAT
    return Response(dialect.refusal(problem), problem.status, media_type="application/json")


def json_reply(content: Mapping[str, object]) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")
