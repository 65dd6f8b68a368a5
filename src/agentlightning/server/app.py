"""The HTTP server: routes of store, traces, metrics and gateway in one ASGI application, in the running event loop.

It only wires these parts, handles no signals and writes no access log.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import Self

import uvicorn
from prometheus_client.metrics_core import Metric
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from uvicorn.server import ServerState

from agentlightning.attempt_address import without_key
from agentlightning.errors import AgentLightningError, ConfigError, ServerError
from agentlightning.gateway.app import Gateway
from agentlightning.ingest.agent_events import event_routes
from agentlightning.ingest.feedback import feedback_routes
from agentlightning.ingest.otlp import OtlpReceiver
from agentlightning.observability.logs import SlowLog
from agentlightning.observability.metrics import Metrics, counters, metric_of, metrics_routes
from agentlightning.server.http import BoundedHttpProtocol, Bounds, OriginGuard, RequestTracker, error_response
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.http.endpoint import MAX_BODY_BYTES
from agentlightning.store.http.server import store_routes
from agentlightning.transport.options import address_of

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_POLL_SECONDS = 0.02
_CUT_OFF_SECONDS = 5.0
"""Time for requests that are cut off to be recorded."""


class Server:
    """Serves a store, and optionally a gateway.

    It listens at `host` and `port`, of which 0 takes a free one (see `url`), or on a socket made by `listen`. `secret`
    signs the keys of attempts. With a `token`, requests to the store, for traces and metrics must carry it. `metrics`
    enables `/metrics`, `slow` logs slow requests, `adopt_traces` stores traces of unknown programs as rollouts of their
    own. Requests to the store and of traces may have up to `max_body_bytes`; `bounds` limits connections. `pages` are
    further routes, those of the dashboard. `shared` is a folder for what several processes of one server share.

    Pages of other sites are rejected, except those of `allowed_origins` (CORS): `https://name:port`, or "*" if there is
    a token; anything else is a ConfigError. Against DNS rebinding, a server without a token accepts only requests whose
    `Host` is an address, `localhost`, a name without a domain, the name of this machine, `host`, or one of
    `allowed_hosts`. If the gateway requires no key, that holds for pages of such names even with a token.
    """

    def __init__(
        self,
        store: LightningStoreBase,
        gateway: Gateway | None = None,
        *,
        secret: str,
        token: str | None = None,
        metrics: Metrics | None = None,
        slow: SlowLog | None = None,
        adopt_traces: bool = False,
        max_body_bytes: int = MAX_BODY_BYTES,
        host: str = "127.0.0.1",
        port: int = 0,
        grace_seconds: int = 10,
        listener: socket.socket | None = None,
        allowed_hosts: Iterable[str] = (),
        allowed_origins: Iterable[str] = (),
        pages: Iterable[BaseRoute] = (),
        shared: Path | None = None,
    ) -> None:
        self.traces = OtlpReceiver(
            store, secret, token, adopt=adopt_traces, max_body_bytes=max_body_bytes, shared=shared
        )
        calls, origins = gateway.routes() if gateway else [], tuple(allowed_origins)
        self.app = Starlette(
            routes=[
                # First, as nearly all requests are model calls.
                *(route for route in calls if route.methods == {"POST"}),
                Route("/livez", self._live, methods=["GET"]),
                Route("/readyz", self._ready, methods=["GET"]),
                *feedback_routes(store, secret, token),
                *store_routes(store, token, max_body_bytes=max_body_bytes),
                *event_routes(store, secret),
                *self.traces.routes(),
                *(metrics_routes(metrics, token) if metrics else []),
                *pages,
                *(route for route in calls if route.methods != {"POST"}),
            ],
            middleware=_cross_origin(origins, token),
            exception_handlers={HTTPException: _http_error, Exception: _server_error},
        )
        self.app.router.redirect_slashes = False  # it would redirect to the Host of the request
        if gateway is not None:
            gateway.attribution.traces = self.traces
        if metrics is not None:
            metrics.add_source(self._own_metrics)
        self.host = host
        self.port = port
        keyless = gateway is not None and not gateway.attribution.requires_key
        guard = OriginGuard((host, *allowed_hosts), origins, any_host=token is not None, keyless=keyless)
        self._tracker = RequestTracker(self.app, guard, metrics, slow, calls)
        self.bounds = Bounds()
        self._grace = grace_seconds
        self.gateway = gateway
        self._store, self._has_answered = store, False
        self._listener = listener
        self._listening: asyncio.Server | None = None
        self._watching: asyncio.Task[None] | None = None
        self._connections, self._stopped = ServerState(), asyncio.Event()

    @property
    def url(self) -> str:
        """The URL for agents on this machine, also if the server listens on all addresses."""
        return url_of(self.host, self.port)

    async def start(self) -> Self:
        """Start listening. Raises ServerError if the address is not available."""
        if self._listening is not None:
            raise ServerError(f"the server is already listening at {self.url}; stop it first")
        listener, self._listener = self._listener or listen(self.host, self.port), None
        self.port = listener.getsockname()[1]
        await self.traces.start()
        self._tracker.open()
        self._stopped.clear()
        config = uvicorn.Config(
            self._tracker, ws="none", log_config=None, access_log=False, log_level="warning", proxy_headers=False
        )
        make = partial(BoundedHttpProtocol, config, self._connections, self.bounds)
        self._listening = await asyncio.get_running_loop().create_server(make, sock=listener, backlog=_BACKLOG)
        self._watching = asyncio.create_task(self.bounds.watch(self._connections.connections))
        return self

    def drain(self) -> None:
        """Let load balancers leave before `stop`: `/readyz` responds 503, and each response closes its connection.
        Requests are still served. `start` ends it."""
        self._tracker.draining = True

    async def stop(self) -> None:
        """Finish requests in progress, for at most `grace_seconds`, then close. Requests that wait for rollouts end at
        once. Safe to call twice."""
        if self._listening is None:
            return
        self._tracker.close()
        listening, self._listening = self._listening, None
        listening.close()
        try:
            await self._end_connections()
            await self.traces.close()
            if self.gateway is not None:
                await self.gateway.close()
        finally:
            if self._watching is not None:
                self._watching.cancel()
            self._stopped.set()

    async def _end_connections(self) -> None:
        tasks, connections = self._connections.tasks, self._connections.connections
        for connection in list(connections):
            connection.shutdown()
        for _ in range(2):  # idle ones are closed when the event loop comes round
            await asyncio.sleep(0)
        for _ in range(ceil(self._grace / _POLL_SECONDS)):
            if not (tasks or connections):
                break
            await asyncio.sleep(_POLL_SECONDS)
        if tasks:
            logger.warning("%d requests were still unanswered and are cut off", len(tasks))
        for connection in list(connections):
            connection.transport.abort()
        for task in tasks:
            task.cancel()
        if tasks:  # what is cut off is recorded
            await asyncio.wait(tasks, timeout=_CUT_OFF_SECONDS)

    async def wait(self) -> None:
        """Wait until the server has stopped."""
        if self._listening is not None:
            await self._stopped.wait()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _own_metrics(self) -> Iterable[Metric]:
        yield metric_of("http_requests_under_way", "Requests not answered yet.", len(self._tracker.in_flight))
        yield from counters("otlp", "Traces taken in", self.traces.counts)
        if self.gateway is not None:
            yield from counters("gateway", "Model calls", self.gateway.metrics())

    # -- probes ------------------------------------------------------------------------------------------------------

    # Health checks for orchestrators and load balancers: `/livez` and `/readyz`.
    #
    # `/livez` says that the process answers, and nothing about the database: a new process would not repair that.
    # `/readyz` says whether to send requests here: from the moment the store has answered once, until the server begins
    # to drain. Later outages of the store do not change it, because calls wait for the store, and all servers that
    # share it would leave at once. `/health` of the store's routes asks the store each time.

    async def _live(self, request: Request) -> Response:
        return _status(200, "ok")

    async def _ready(self, request: Request) -> Response:
        if self._tracker.draining:
            return _status(503, "the server is about to stop")
        if not self._has_answered:
            try:
                await self._store.check_health()
            except AgentLightningError as error:
                return _status(503, str(error))
            self._has_answered = True
        return _status(200, "ok")


def _status(code: int, text: str) -> Response:
    return JSONResponse({"status": text}, code)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    address = address_of(host)
    return host == "localhost" if address is None else address.is_loopback


def url_of(host: str, port: int) -> str:
    """The URL, on this machine, of a server that listens there."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Bind and listen; `shared`: on a port of several sockets. Connections wait until a server is started with the
    socket. Raises ServerError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With this protocol number asyncio sets TCP_NODELAY.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ServerError(
            f"cannot listen on {host}:{port}: {error}; stop its user, or choose another port (0 takes a free one)"
        ) from error
    return listener


def _cross_origin(origins: Sequence[str], token: str | None) -> list[Middleware]:
    """The CORS middleware for these origins."""
    for origin in origins:
        scheme, _, rest = origin.partition("://")
        if origin != "*" and (scheme not in ("http", "https") or not rest or "/" in rest):
            raise ConfigError(
                f"origin {origin!r} is not a site; write https://name or https://name:port, without a path"
            )
    if "*" in origins and token is None:
        raise ConfigError("origin '*' would allow every web page; name the sites, or set an access token")
    cors = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["*"],
        allow_credentials="*" not in origins,
    )
    return [cors] if origins else []


async def _http_error(request: Request, error: Exception) -> Response:
    """The response for an unknown path or method, in the shape of every other error."""
    assert isinstance(error, HTTPException)
    status = error.status_code
    message = f"{request.method} {without_key(request.url.path)} is not served here ({error.detail})"
    kind = {404: "NotFoundError", 405: "MethodNotAllowed"}.get(status, "HTTPError")
    return error_response(status, kind, message, error.headers)


async def _server_error(request: Request, error: Exception) -> Response:
    """The response for an exception; Starlette raises it again, so that it is logged with its traceback."""
    return error_response(
        500, type(error).__name__, f"the server failed on {request.method} {without_key(request.url.path)}"
    )
