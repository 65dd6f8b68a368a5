"""The routes of the store's server: the REST API under /v1/agl, batches of calls, and health checks."""

from __future__ import annotations

from typing import Any, Final

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agentlightning.errors import AgentLightningError, NotFoundError
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.http.encoding import BASE_PATH, MAX_BODY_BYTES, PROTOCOL_VERSION, encode, version
from agentlightning.store.http.openapi import document
from agentlightning.store.http.operations import OPERATIONS
from agentlightning.store.http.server.asgi import (
    authorize,
    headers_by_name,
    refuse_unless_get,
    respond,
    respond_error,
)
from agentlightning.store.http.server.batch_endpoint import PROTOCOL_HEADER, BatchEndpoint
from agentlightning.store.http.server.rest_endpoint import RestEndpoint, operations_by_path

_AFTER_ALL_NAMES: Final = "~"
"""Sorts after every character of a path."""
_PATHS: Final = dict(
    sorted(operations_by_path(OPERATIONS).items(), key=lambda item: item[0].replace("{", _AFTER_ALL_NAMES))
)
"""Fixed paths first."""


def store_routes(
    store: LightningStoreBase, token: str | None = None, *, max_body_bytes: int = MAX_BODY_BYTES
) -> list[Route]:
    """Routes for a Starlette application.

    With a `token`, everything under /v1/agl requires it, except the health check. `max_body_bytes` limits request
    bodies, as sent and as decompressed.
    """
    batches = BatchEndpoint(store, token, max_body_bytes)
    return [
        Route(f"{BASE_PATH}/calls", batches),
        Route(f"{BASE_PATH}/waits/calls", batches),
        *(Route(BASE_PATH + path, RestEndpoint(_PATHS[path], store, token, max_body_bytes)) for path in _PATHS),
        Route(
            f"{BASE_PATH}/health", _Health(store, {"status": "ok", "version": version(), "protocol": PROTOCOL_VERSION})
        ),
        Route(f"{BASE_PATH}/openapi.json", _Document(token)),
        Route(BASE_PATH + "/{path:path}", _NotFound(token)),
        Route("/health", _Health(store, {"status": "ok"})),
    ]


class _Health:
    """Responds with a fixed body if the store works, else with its error."""

    def __init__(self, store: LightningStoreBase, content: dict[str, Any]) -> None:
        self._store = store
        self._body = encode(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if await refuse_unless_get(scope, send):
            return
        try:
            await self._store.check_health()
        except AgentLightningError as error:
            await respond_error(send, error, [PROTOCOL_HEADER])
            return
        await respond(send, 200, self._body, [PROTOCOL_HEADER])


class _Document:
    """Responds with the OpenAPI document."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if await refuse_unless_get(scope, send):
            return
        try:
            authorize(headers_by_name(scope), self._token)
        except AgentLightningError as error:
            await respond_error(send, error)
            return
        await respond(send, 200, encode(document(with_token=self._token is not None)))


class _NotFound:
    """Responds to every other path under /v1/agl."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            authorize(headers_by_name(scope), self._token)
            raise NotFoundError(f"there is nothing at {scope['path']!r}; {BASE_PATH}/openapi.json lists all paths")
        except AgentLightningError as error:
            await respond_error(send, error)
