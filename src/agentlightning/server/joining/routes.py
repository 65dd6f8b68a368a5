"""The routes under /v1/policies, for training runs that join this server (`engine.servers.joining`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from importlib.metadata import version
from typing import Any, Final

import orjson
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentlightning.engine.servers.joining import (
    BASE_PATH,
    PROTOCOL,
    AnnounceRequest,
    CheckRequest,
    JoinRequest,
    JoinStatus,
    PauseRequest,
    RunRequest,
)
from agentlightning.errors import StoreAuthError
from agentlightning.server.joining.service import JoinedPolicies, JoinError
from agentlightning.store.http.errors import RequestError
from agentlightning.store.http.server.asgi import authorize, headers_by_name, read_body

MAX_BODY_BYTES: Final = 64 * 1024 * 1024
Action = Callable[[str, Any], Awaitable[JoinStatus]]


def joining_routes(policies: JoinedPolicies, token: str | None) -> list[Route]:
    """The routes, which require `token` if there is one."""
    actions: dict[str, tuple[type[RunRequest], Action]] = {
        "/check": (CheckRequest, policies.check),
        "": (JoinRequest, policies.join),
        "/pause": (PauseRequest, policies.pause),
        "/announce": (AnnounceRequest, policies.announce),
        "/resume": (RunRequest, policies.resume),
        "/renew": (RunRequest, policies.renew),
        "/leave": (RunRequest, policies.leave),
    }
    return [
        Route(f"{BASE_PATH}/{{model}}{path}", partial(_answer, kind, action, token), methods=["POST"])
        for path, (kind, action) in actions.items()
    ]


async def _answer(kind: type[RunRequest], action: Action, token: str | None, request: Request) -> Response:
    headers = headers_by_name(request.scope)
    try:
        authorize(headers, token)
        body = await read_body(headers, request.receive, MAX_BODY_BYTES)
        status = await action(request.path_params["model"], _read(kind, body))
    except StoreAuthError as error:
        return _error(401, str(error))
    except (JoinError, RequestError) as error:
        return _error(error.status, str(error))
    return Response(orjson.dumps(status.model_dump()), media_type="application/json")


def _read(kind: type[RunRequest], body: bytes) -> RunRequest:
    """Raises JoinError for a request of another version, or none at all."""
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise JoinError(400, f"the request is not JSON: {error}") from None
    if kind is JoinRequest and isinstance(content, dict) and content.get("protocol") != PROTOCOL:
        here, there = version("agentlightning"), content.get("package", "of an older version")
        raise JoinError(
            422,
            f"this server has agentlightning {here}, which speaks version {PROTOCOL} of the protocol for joining, and"
            f" the run has agentlightning {there}, which speaks version {content.get('protocol')}; install the same"
            " version on both",
        )
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise JoinError(400, f"the request cannot be read: {error}") from None


def _error(status: int, message: str) -> Response:
    return Response(orjson.dumps({"error": message}), status, media_type="application/json")
