"""Serves a dashboard by itself, read-only: of a run that is over, a database, a server elsewhere, or two
recorded runs."""

from __future__ import annotations

import re
import socket
import tarfile
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import httpx
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from agentlightning.dashboard.actions import ONLY_READS, RECORDS_HEADER, SKIPPED_HEADER
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
from agentlightning.dashboard.data.run_data import Catalog
from agentlightning.errors import ConfigError, NotFoundError, ServerError, StoreAuthError
from agentlightning.server.http import OriginGuard, RequestTracker
from agentlightning.store.clock import Clock
from agentlightning.store.export.copy import import_store
from agentlightning.store.http.client import LightningStoreClient
from agentlightning.store.sql.store import SqlStore


def dashboard_app(routes: Sequence[BaseRoute], host: str, *, has_token: bool) -> RequestTracker:
    """The ASGI application, which rejects pages of other sites as the server does."""
    app = Starlette(routes=[*routes, Route("/", _to_page)])
    app.router.redirect_slashes = False
    return RequestTracker(app, guard=OriginGuard((host,), any_host=has_token))


async def _to_page(request: Request) -> Response:
    return RedirectResponse(PATH)


async def serve_dashboard(app: RequestTracker, listener: socket.socket) -> None:
    """Serve until cancelled. Signals are the caller's."""
    config = uvicorn.Config(
        app, lifespan="off", ws="none", log_config=None, access_log=False, server_header=False, date_header=False
    )
    await _Server(config).serve(sockets=[listener])


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


# -- a server elsewhere -----------------------------------------------------------------------------------------------
#
# A server without a dashboard, of an earlier version, is shown by its store alone.


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
                Route(f"{api}{EXPORT}", authorized(token, _reached(_forward_export(client))), methods=["POST"]),
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


def _forward_export(client: httpx.AsyncClient) -> Handler:
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


# -- two recorded runs ------------------------------------------------------------------------------------------------
#
# `recorded.tar.xz` has of each run what the pages show: files, and an export of the store for each version of its
# resources. Times are seconds before the end of the run. `python -m tools.record_demo`, in a checkout, writes it.


RECORDED: Final = Path(__file__).with_name("recorded.tar.xz")
EXPORTS: Final = "exports"
TIME: Final = re.compile(rb'(time":)(-?[\d.]+)')


class ThenClock(Clock):
    """Says what time it was."""

    def __init__(self, then: float) -> None:
        super().__init__()
        self._then = then

    def wall(self) -> float:
        return self._then


async def write_demo(root: Path) -> None:
    """Write the directories of both runs below another one, as if they had just ended."""
    for export in _unpack(root):
        first = TIME.search(export.read_bytes())
        assert first is not None
        store = SqlStore(export.parents[1] / "store.db", ThenClock(float(first[2])))
        try:
            await import_store(store, export)
        finally:
            await store.close()


def _unpack(root: Path) -> list[Path]:
    """Write all files; returns the exports, in order."""
    now = time.time()
    with tarfile.open(RECORDED) as recorded:
        for member in recorded:
            path, content = root / member.name, recorded.extractfile(member)
            assert content is not None
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(TIME.sub(lambda found: b"%b%.3f" % (found[1], now + float(found[2])), content.read()))
    return sorted(root.glob(f"*/{EXPORTS}/*.jsonl"))
