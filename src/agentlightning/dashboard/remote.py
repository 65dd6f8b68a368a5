"""The dashboard of a server elsewhere, read-only: this process serves the page and asks that server for the JSON.

A server without a dashboard, of an earlier version, is shown by its store alone.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import httpx
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentlightning.dashboard.app import HEADERS, PATH, dashboard_routes, page_routes
from agentlightning.dashboard.data.catalog import Catalog
from agentlightning.dashboard.data.run_data import DashboardData
from agentlightning.errors import AgentLightningError, ServerError, StoreAuthError
from agentlightning.store.http.client import LightningStoreClient
from agentlightning.store.http.encoding import encode
from agentlightning.store.http.errors import error_response, status_of
from agentlightning.store.http.server.asgi import authorize

TIMEOUT: Final = 60.0
PASSED: Final = ("etag", "content-type")
"""Headers of a response that are passed on."""


@asynccontextmanager
async def remote_routes(server: str, server_token: str | None, token: str | None) -> AsyncGenerator[list[Route]]:
    """Routes that show what a server has. `token` is that of this process. Raises ServerError for a server that cannot
    be reached, and StoreAuthError for a wrong `server_token`."""
    headers = {"authorization": f"Bearer {server_token}"} if server_token else {}
    async with httpx.AsyncClient(base_url=server.rstrip("/"), headers=headers, timeout=TIMEOUT) as client:
        if await _has_dashboard(client, server):
            yield [Route(f"{PATH}/api/{{path:path}}", _forward(client, token), methods=["GET"]), *page_routes()]
            return
    store = LightningStoreClient(server, token=server_token)
    data = DashboardData(Catalog(store))
    try:
        yield dashboard_routes(data, token)
    finally:
        await data.close()
        await store.close()


async def _has_dashboard(client: httpx.AsyncClient, server: str) -> bool:
    try:
        response = await client.get(f"{PATH}/api/runs")
    except httpx.HTTPError as error:
        raise ServerError(f"the server {server} cannot be reached: {error or type(error).__name__}") from error
    if response.status_code == 401:
        raise StoreAuthError(f"the server {server} requires its access token; set AGL_TOKEN, or give --token")
    return response.status_code == 200


def _forward(client: httpx.AsyncClient, token: str | None) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        try:
            authorize(dict(request.headers), token)
        except AgentLightningError as error:
            return Response(encode(error_response(error)), status_of(error), HEADERS, media_type="application/json")
        known = request.headers.get("if-none-match")
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        try:
            found = await client.get(path, headers={"if-none-match": known} if known else {})
        except httpx.HTTPError as error:
            problem = ServerError(f"the server cannot be reached: {error or type(error).__name__}")
            return Response(encode(error_response(problem)), 502, HEADERS, media_type="application/json")
        headers = {**HEADERS, **{name: found.headers[name] for name in PASSED if name in found.headers}}
        return Response(found.content, found.status_code, {**headers, "cache-control": "private, no-cache"})

    return respond
