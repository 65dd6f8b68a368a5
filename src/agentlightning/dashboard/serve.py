"""Serves a dashboard by itself, read-only: for a run that is over, a database, a server elsewhere."""

from __future__ import annotations

import socket
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from agentlightning.dashboard.app import PATH
from agentlightning.server.http import OriginGuard, RequestTracker


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
