"""One server: the store's routes, OTLP, metrics and the gateway in one ASGI application, on one port, in the running
loop.

Wiring and nothing else. The trainer and `agl serve` start it; it handles no signals and writes no access log.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Generator, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Self

import orjson
import uvicorn
from prometheus_client.metrics_core import Metric
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from agentlightning.errors import ConfigError, ServerError
from agentlightning.gateway.app import Gateway
from agentlightning.ingest.agent_events import event_routes
from agentlightning.ingest.otlp import OtlpReceiver
from agentlightning.observability.logs import SlowLog
from agentlightning.observability.metrics import Metrics, counters, metrics_routes
from agentlightning.server.http_protocol import MAX_UNFINISHED_BYTES, STALLED_SECONDS, ModelCalls, Shortcuts
from agentlightning.server.origin_guard import SiteGuard
from agentlightning.server.request_tracker import Door
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.http.encoding import MAX_BODY_BYTES
from agentlightning.store.http.server.routes import store_routes


class Server:
    """Serves a store, and a gateway where one is given.

    `port` 0 takes a free one; `url` then says which. `secret` is the one the attempts' keys are made with. With a
    `token`, the store, traces and metrics are for those who present it. With `metrics` there is `/metrics`; `slow`
    mentions slow requests; `adopt_traces` keeps traces of unknown programs as rollouts of their own. Requests to the
    store, traces among them, are refused over `max_body_bytes`. It listens at `host` and `port`, or with the
    `listener` that `listen` has made there. A request that does not come to its end for `stalled_seconds` is answered
    with 408, and its connection closed; bodies that have not come to their end have `max_unfinished_bytes` in all.

    Pages of other sites are refused but for those of `allowed_origins` (CORS): `https://name:port`, or "*" where there
    is a token; ConfigError for anything else. Without a token, so is a request whose `Host` is not an address,
    `localhost`, a name without a domain, this machine's or `host`'s, or one of `allowed_hosts`; where the gateway asks
    for no key, so is a page of such a name, token or not.
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
        stalled_seconds: float = STALLED_SECONDS,
        listener: socket.socket | None = None,
        max_unfinished_bytes: int = MAX_UNFINISHED_BYTES,
        allowed_hosts: Iterable[str] = (),
        allowed_origins: Iterable[str] = (),
    ) -> None:
        self.traces = OtlpReceiver(store, secret, token, adopt=adopt_traces, max_body_bytes=max_body_bytes)
        calls, origins = gateway.routes() if gateway else [], tuple(allowed_origins)
        self.app = Starlette(
            routes=[
                *store_routes(store, token, max_body_bytes=max_body_bytes),
                *event_routes(store, secret),
                *self.traces.routes(),
                *(metrics_routes(metrics, token) if metrics else []),
                *calls,
            ],
            middleware=_cross_origin(origins, token),
            exception_handlers={HTTPException: _refused, Exception: _failed},
        )
        self.app.router.redirect_slashes = False  # it would lead to whatever address the request says it was sent to
        if metrics is not None:
            metrics.add_source(lambda: counters("otlp", "Traces taken in", asdict(self.traces.counts)))
        if gateway is not None:
            gateway.attribution.traces = self.traces
            if metrics is not None:
                metrics.add_source(partial(_gateway_counters, gateway))
        self.host = host
        self.port = port
        keyless = gateway is not None and not gateway.attribution.requires_key
        guard = SiteGuard((host, *allowed_hosts), origins, any_host=token is not None, keyless=keyless)
        self._door = Door(self.app, metrics, slow, guard)
        self.shortcuts = Shortcuts([] if origins else calls, self._door, stalled_seconds, max_unfinished_bytes)
        self._grace = grace_seconds
        self.gateway = gateway
        self._listener = listener
        self._uvicorn: _Uvicorn | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where agents reach it. A server that listens on every address is reached on this machine's own."""
        return url_of(self.host, self.port)

    async def start(self) -> Self:
        """Listen. Raises ServerError where the address cannot be had."""
        if self._serving is not None:
            raise ServerError(f"the server is already listening at {self.url}; stop it first")
        listener, self._listener = self._listener or listen(self.host, self.port), None
        self.port = listener.getsockname()[1]
        await self.traces.__aenter__()
        self._door.open()
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                self._door,
                http=type("ServedCalls", (ModelCalls,), {"shortcuts": self.shortcuts}),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                log_level="warning",
                timeout_keep_alive=120,
                timeout_graceful_shutdown=self._grace,
                server_header=False,
                date_header=False,
            )
        )
        self._serving = asyncio.create_task(self._uvicorn.serve(sockets=[listener]))
        ready = asyncio.create_task(self._uvicorn.ready.wait())
        await asyncio.wait({ready, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            await self.stop()
            raise ServerError(f"the server at {self.url} ended while it started")
        return self

    async def stop(self) -> None:
        """Finish what is under way (for at most `grace_seconds`; those who wait for rollouts are sent away at once),
        then close. Safe to call twice."""
        if self._serving is None or self._uvicorn is None:
            return
        self._door.close()
        self._uvicorn.leave()
        serving, self._serving = self._serving, None
        await serving
        await self.traces.__aexit__()
        if self.gateway is not None:
            await self.gateway.close()

    async def wait(self) -> None:
        """Wait until it has ended."""
        if self._serving is not None:
            await asyncio.wait({self._serving})

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


class _Uvicorn(uvicorn.Server):
    """uvicorn as a guest: it says when it listens, leaves when told, and leaves signals to the host."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        self.should_exit = True
        self._leaving.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    async def main_loop(self) -> None:
        """Its ten ticks a second serve only the Date header, which we do not send."""
        await self._leaving.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def is_loopback(host: str) -> bool:
    """Whether nobody on another machine can reach a server that listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def url_of(host: str, port: int) -> str:
    """Where a server that listens there is reached from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """An address, taken: whoever calls there before a server is given it waits. Raises ServerError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio then sends without delay
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ServerError(
            f"cannot listen on {host}:{port}: {error}; stop what uses it, or choose another port (0 takes a free one)"
        ) from error
    return listener


def _gateway_counters(gateway: Gateway) -> Iterable[Metric]:
    return counters("gateway", "Model calls", gateway.figures())


def _cross_origin(origins: Sequence[str], token: str | None) -> list[Middleware]:
    """What tells browsers that pages of these origins may read the answers. Model calls then take the common way."""
    for origin in origins:
        scheme, _, rest = origin.partition("://")
        if origin != "*" and (scheme not in ("http", "https") or not rest or "/" in rest):
            raise ConfigError(f"origin {origin!r} is no site; write https://name or https://name:port, without a path")
    if "*" in origins and token is None:
        raise ConfigError("origin '*' would let every page of the web in; name the sites, or set an access token")
    if not origins:
        return []
    cross = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["*"],
        allow_credentials="*" not in origins,
    )
    return [cross]


async def _refused(request: Request, error: Exception) -> Response:
    """A path or a verb that is not served, in the shape of every other error."""
    assert isinstance(error, HTTPException)
    status = error.status_code
    message = f"{request.method} {request.url.path} is not served here ({error.detail})"
    kind = {404: "NotFoundError", 405: "MethodNotAllowed"}.get(status, "HTTPError")
    return _error(status, kind, message, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    """Starlette raises the error again after this, so that it is logged with its traceback."""
    return _error(500, type(error).__name__, f"the server failed on {request.method} {request.url.path}", None)


def _error(status: int, kind: str, message: str, headers: object) -> Response:
    body = orjson.dumps({"error": {"type": kind, "message": message}, "detail": message})
    given = {str(k): str(v) for k, v in headers.items()} if isinstance(headers, dict) else None
    return Response(body, status, given, media_type="application/json")
