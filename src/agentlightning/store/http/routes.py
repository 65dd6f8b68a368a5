"""The store's routes: the REST API under /v1/agl, calls in batches, events of agents, and health checks."""

from __future__ import annotations

from typing import Any, Final

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agentlightning.errors import AgentLightningError, NotFoundError
from agentlightning.ingest.agent_events import event_routes, read_event
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.http.asgi import admit, answer, headers_of, only_get, presented_key, refuse
from agentlightning.store.http.batch_endpoint import PROTOCOL_HEADER, Batches
from agentlightning.store.http.encoding import BASE, MAX_BODY_BYTES, PROTOCOL, encode, version
from agentlightning.store.http.openapi import document
from agentlightning.store.http.operations import OPERATIONS
from agentlightning.store.http.rest_endpoint import Endpoint, gathered

__all__ = ["event_routes", "presented_key", "read_event", "store_routes"]

_FIXED_FIRST: Final = "~"
"""Sorts after every character of a path."""


def store_routes(
    store: LightningStoreBase,
    secret: str,
    token: str | None = None,
    *,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> list[Route]:
    """Routes for a Starlette application.

    `secret` is the one the attempts' keys are made with, `token` what everything under /v1/agl but its health check
    asks for (None: nothing). Bodies are refused over `max_body_bytes`, as sent and as inflated.
    """
    calls = Batches(store, token, max_body_bytes)
    paths = gathered(OPERATIONS)
    ordered = sorted(paths, key=lambda path: path.replace("{", _FIXED_FIRST))  # names before parameters
    told = {"status": "ok", "version": version(), "protocol": PROTOCOL}
    return [
        Route(f"{BASE}/calls", calls),
        Route(f"{BASE}/waits/calls", calls),
        *(Route(BASE + path, Endpoint(paths[path], store, token, max_body_bytes)) for path in ordered),
        Route(f"{BASE}/health", _Health(store, told)),
        Route(f"{BASE}/openapi.json", _Document(token)),
        Route(BASE + "/{path:path}", _Nowhere(token)),
        *event_routes(store, secret),
        Route("/health", _Health(store, {"status": "ok"})),
    ]


class _Health:
    """Whether the store answers."""

    def __init__(self, store: LightningStoreBase, told: dict[str, Any]) -> None:
        self._store = store
        self._body = encode(told)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if await only_get(scope, send):
            return
        try:
            await self._store.check_health()
        except AgentLightningError as error:
            await refuse(send, error, [PROTOCOL_HEADER])
            return
        await answer(send, 200, self._body, [PROTOCOL_HEADER])


class _Document:
    """The OpenAPI document."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if await only_get(scope, send):
            return
        try:
            admit(headers_of(scope), self._token)
        except AgentLightningError as error:
            await refuse(send, error)
            return
        await answer(send, 200, encode(document(with_token=self._token is not None)))


class _Nowhere:
    """Any other path under /v1/agl."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            admit(headers_of(scope), self._token)
            raise NotFoundError(f"there is nothing at {scope['path']!r}; {BASE}/openapi.json says what there is")
        except AgentLightningError as error:
            await refuse(send, error)
