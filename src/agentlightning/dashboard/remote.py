"""The dashboard of a server elsewhere, read-only: this process serves the page and asks that server for the JSON.

A server without a dashboard, of an earlier version, is shown by its store alone.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import quote

import httpx
import orjson
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from agentlightning.dashboard.actions import ONLY_READS
from agentlightning.dashboard.app import (
    EXPORT,
    HEADERS,
    PATH,
    VIEWS,
    Handler,
    authorized,
    dashboard_routes,
    error_json,
    page_routes,
    unknown,
)
from agentlightning.dashboard.data.catalog import Catalog
from agentlightning.dashboard.export import RECORDS_HEADER, SKIPPED_HEADER
from agentlightning.errors import ConfigError, NotFoundError, ServerError, StoreAuthError
from agentlightning.store.http.client import LightningStoreClient

TIMEOUT: Final = 60.0
PASSED: Final = ("etag", "content-type", RECORDS_HEADER, SKIPPED_HEADER)
"""Headers of a response that are passed on."""


@asynccontextmanager
async def remote_routes(server: str, server_token: str | None, token: str | None) -> AsyncGenerator[list[Route]]:
    """Routes that show what a server has. `token` is that of this process. Raises ServerError for a server that cannot
    be reached, and StoreAuthError for a wrong `server_token`."""
    headers = {"authorization": f"Bearer {server_token}"} if server_token else {}
    async with httpx.AsyncClient(base_url=server.rstrip("/"), headers=headers, timeout=TIMEOUT) as client:
        if await _has_dashboard(client, server):
            api = f"{PATH}/api"
            views = {view: authorized(token, _reached(_forward(client, view))) for view in VIEWS}
            yield [
                *(Route(f"{api}{view}", handler, methods=["GET"]) for view, handler in views.items()),
                Route(f"{api}{EXPORT}", authorized(token, _reached(_export(client))), methods=["POST"]),
                Route(f"{api}/{{path:path}}", authorized(token, _refuse), methods=["POST"]),
                Route(f"{api}/{{path:path}}", authorized(token, unknown), methods=["GET"]),
                *page_routes(),
            ]
            return
    store = LightningStoreClient(server, token=server_token)
    data = Catalog(store)
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
        given = "authorization" in client.headers
        problem = "does not accept this access token" if given else "requires its access token"
        raise StoreAuthError(f"the server {server} {problem}; set AGL_TOKEN, or give --token")
    return response.status_code == 200


def _reached(handler: Handler) -> Handler:
    async def respond(request: Request) -> Response:
        try:
            return await handler(request)
        except httpx.HTTPError as error:
            return error_json(ServerError(f"the server cannot be reached: {error or type(error).__name__}"), 502)

    return respond


def _address(pattern: str, request: Request) -> str:
    """The path of a view of the server. Each part of it is quoted again: the server's token opens more than the views,
    and a part that is `..` once it is decoded must not lead there."""
    parts = {name: quote(value, safe="") for name, value in request.path_params.items()}
    if not {".", ".."}.isdisjoint(parts.values()):
        raise NotFoundError(f"there is no view at {request.url.path!r}")
    return f"{PATH}/api{pattern.format(**parts)}"


def _forward(client: httpx.AsyncClient, view: str) -> Handler:
    async def respond(request: Request) -> Response:
        known = request.headers.get("if-none-match")
        path = _address(view, request) + (f"?{request.url.query}" if request.url.query else "")
        found = await client.get(path, headers={"if-none-match": known} if known else {})
        content = _read_only(found.content) if found.status_code == 200 else found.content
        return Response(content, found.status_code, {**_passed(found), "cache-control": "private, no-cache"})

    return respond


def _read_only(content: bytes) -> bytes:
    """A view that offers no actions, which this process refuses."""
    view: Any = orjson.loads(content)
    return orjson.dumps({**view, "writable": False}) if view.get("writable") else content


def _export(client: httpx.AsyncClient) -> Handler:
    """Exports a selection, which changes nothing."""

    async def respond(request: Request) -> Response:
        kind = {"content-type": request.headers.get("content-type", "")}
        asked = client.build_request("POST", _address(EXPORT, request), content=await request.body(), headers=kind)
        found = await client.send(asked, stream=True)
        end = BackgroundTask(found.aclose)
        return StreamingResponse(found.aiter_bytes(), found.status_code, _passed(found), background=end)

    return respond


async def _refuse(request: Request) -> Response:
    raise ConfigError(ONLY_READS)


def _passed(found: httpx.Response) -> dict[str, str]:
    return {**HEADERS, **{name: found.headers[name] for name in PASSED if name in found.headers}}
