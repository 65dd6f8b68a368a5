"""Tracks requests in progress: records metrics and slow requests, and ends waiting requests when the server stops.

After `close`, requests have a moment to finish. A store request without a response by then must be waiting for
rollouts: it is cancelled, with a 503 and `Retry-After`. A model call may continue until the server's grace period ends.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

import orjson
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentlightning.observability.logs import SlowLog
from agentlightning.observability.metrics import Metrics
from agentlightning.server.origin_guard import OriginGuard
from agentlightning.store.instrumented import WaitTime, wait_time

ROUTE: Final = "agentlightning.route"
UNKNOWN_ROUTE: Final = "other"
"""The route label of unknown paths, so that strangers cannot create metric series."""
DRAIN_SECONDS: Final = 0.3
"""Time for store requests to finish after `close`."""
STORE_PREFIX: Final = "/v1/agl/"
_CLOSE: Final = (b"connection", b"close")
CLIENT_CLOSED: Final = 499
"""The status of a request whose client disconnected before the response."""


class RequestTracker:
    """ASGI middleware. `open` may follow `close`."""

    def __init__(
        self,
        app: Starlette,
        metrics: Metrics | None = None,
        slow: SlowLog | None = None,
        guard: OriginGuard | None = None,
    ) -> None:
        self._guard = guard or OriginGuard()
        for route in app.routes:
            if isinstance(route, Route):
                route.app = _RouteMarker(route.app, route.path)
        self._app = app
        self._metrics, self._slow_log = metrics, slow
        self._in_flight: set[_TrackedRequest] = set()
        self._closed = False
        self.draining = False
        """The server is about to stop: clients should reconnect to another one."""

    def open(self) -> None:
        self._closed = self.draining = False

    def close(self) -> None:
        """Cancel waiting store requests soon."""
        self._closed = self.draining = True
        asyncio.get_running_loop().call_later(DRAIN_SECONDS, self._cancel_store_requests)

    def _cancel_store_requests(self) -> None:
        for tracked in list(self._in_flight):
            if self._closed:
                tracked.cancel_with_503()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if self._metrics is not None:
            self._metrics.request_began()
        tracked = _TrackedRequest(scope["path"], send, self)
        self._in_flight.add(tracked)
        wait_time.set(tracked.waited)
        reason = self._guard.rejection(scope["headers"])
        try:
            await tracked.run(self._app if reason is None else _Forbidden(reason), scope, receive)
        finally:
            self._in_flight.discard(tracked)
            self._record(scope, tracked)

    def _record(self, scope: Scope, tracked: _TrackedRequest) -> None:
        """Record the end of a request, without the time it waited for rollouts."""
        seconds = time.perf_counter() - tracked.began - tracked.waited.seconds
        ended = scope.get(ROUTE, UNKNOWN_ROUTE), scope["method"], tracked.status, seconds
        if self._metrics is not None:
            self._metrics.request_ended(*ended)
        if self._slow_log is not None:
            self._slow_log.request_ended(*ended)


class _TrackedRequest:
    """One request in progress."""

    __slots__ = ("_is_cancelled", "_path", "_send", "_task", "_tracker", "began", "status", "waited")

    def __init__(self, path: str, send: Send, tracker: RequestTracker) -> None:
        self.began = time.perf_counter()
        self.status = CLIENT_CLOSED
        self.waited = WaitTime()
        self._path, self._send, self._tracker = path, send, tracker
        self._task = asyncio.current_task()
        self._is_cancelled = False

    async def run(self, app: ASGIApp, scope: Scope, receive: Receive) -> None:
        try:
            await app(scope, receive, self._send_message)
        except asyncio.CancelledError:
            if not self._is_cancelled or self._task is None:
                raise
            self._task.uncancel()
            await self._send_503()

    def cancel_with_503(self) -> None:
        if self._task is not None and self.status == CLIENT_CLOSED and self._path.startswith(STORE_PREFIX):
            self._is_cancelled = True
            self._task.cancel()

    async def _send_503(self) -> None:
        message = "the server is about to stop; try again in a moment"
        body = orjson.dumps({"error": {"type": "StoreClosedError", "message": message}, "detail": message})
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"retry-after", b"1"),
        ]
        await self._send_message({"type": "http.response.start", "status": 503, "headers": headers})
        await self._send_message({"type": "http.response.body", "body": body})

    async def _send_message(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self._tracker.draining:
                message["headers"] = [*message.get("headers", ()), _CLOSE]
        await self._send(message)


class _Forbidden:
    """Answers 403."""

    def __init__(self, reason: str) -> None:
        self._body = orjson.dumps({"error": {"type": "ForbiddenError", "message": reason}, "detail": reason})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(self._body)).encode())]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": self._body})


class _RouteMarker:
    """Wraps the application of a route to store the route in the scope."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        self._app, self._path = app, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ROUTE] = self._path
        await self._app(scope, receive, send)
