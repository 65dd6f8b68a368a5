"""The routes under /v1/policies, for training runs that join this server (`engine.servers.joining`)."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from typing import Final

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
    PauseRequest,
    RunRequest,
)
from agentlightning.errors import StoreAuthError
from agentlightning.server.joining.service import JoinedPolicies, JoinError
from agentlightning.store.http.endpoint import authorize, headers_by_name, read_body
from agentlightning.store.http.errors import RequestError

MAX_BODY_BYTES: Final = 64 * 1024 * 1024
REQUESTS: Final[dict[str, type[RunRequest]]] = {
    "/check": CheckRequest,
    "": JoinRequest,
    "/pause": PauseRequest,
    "/announce": AnnounceRequest,
    "/resume": RunRequest,
    "/renew": RunRequest,
    "/leave": RunRequest,
}


def joining_routes(policies: JoinedPolicies, token: str | None) -> list[Route]:
    """The routes, which require `token` if there is one."""
    return [
        Route(f"{BASE_PATH}/{{model}}{action}", partial(_answer, policies, token, action), methods=["POST"])
        for action in REQUESTS
    ]


async def _answer(policies: JoinedPolicies, token: str | None, action: str, request: Request) -> Response:
    headers = headers_by_name(request.scope)
    try:
        authorize(headers, token)
        body = await read_body(headers, request.receive, MAX_BODY_BYTES)
        status = await policies.answer(request.path_params["model"], action, _read(REQUESTS[action], body))
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
