"""The way into a server: it sees every request come and go, for the metrics and the log, and closes in good order.

Once closed it gives what is under way a moment. A request of the store that has not begun to be answered by then can
only be waiting for rollouts: its work is cancelled and it is answered with 503 and `Retry-After`. A model call may go
on until the server's grace is over.
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
"""The route of a path that nobody serves: paths made up by strangers must not become series of their own."""
DRAIN_SECONDS: Final = 0.3
"""How long requests of the store have to end by themselves once the door is closed."""
STORE_PREFIX: Final = "/v1/agl/"
CLIENT_CLOSED: Final = 499
"""The status of a request whose caller hung up before it was answered."""


class RequestTracker:
    """An ASGI application around another. `open` may follow `close`."""

    def __init__(
        self,
        app: Starlette,
        metrics: Metrics | None = None,
        slow: SlowLog | None = None,
        guard: OriginGuard | None = None,
    ) -> None:
        self.guard = guard or OriginGuard()
        for route in app.routes:
            if isinstance(route, Route):
                route.app = _RouteMarker(route.app, route.path)
        self._app = app
        self._metrics, self._slow_log = metrics, slow
        self._in_flight: set[_TrackedRequest] = set()
        self._closed = False

    def open(self) -> None:
        self._closed = False

    def close(self) -> None:
        """Send away, soon, those who wait."""
        self._closed = True
        asyncio.get_running_loop().call_later(DRAIN_SECONDS, self._cancel_store_requests)

    def _cancel_store_requests(self) -> None:
        for visit in list(self._in_flight):
            if self._closed:
                visit.cancel_with_503()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        why = self.guard.rejection(scope["headers"]) if scope["type"] == "http" else None
        await self.track(self._app if why is None else _Forbidden(why), scope, receive, send)

    async def track(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, began: float | None = None) -> None:
        """Have an application serve a scope: this one's own, or one of its routes where it is known which. `began` is
        of one who `started` before."""
        if scope["type"] != "http":
            return await app(scope, receive, send)
        visit = _TrackedRequest(scope["path"], send, self.started() if began is None else began)
        self._in_flight.add(visit)
        wait_time.set(visit.waited)
        try:
            await visit.run(app, scope, receive)
        finally:
            self._in_flight.discard(visit)
            self._record(scope, visit)

    def started(self) -> float:
        """A request has come; returns when, for `went` or `visit`."""
        if self._metrics is not None:
            self._metrics.request_began()
        return time.perf_counter()

    def finished(self, route: str, method: str, status: int, began: float) -> None:
        """A request that was served by nobody in here is over."""
        self._record_end(route, method, status, time.perf_counter() - began)

    def _record(self, scope: Scope, visit: _TrackedRequest) -> None:
        """Time that was spent waiting for rollouts is no time to answer."""
        seconds = time.perf_counter() - visit.began - visit.waited.seconds
        self._record_end(scope.get(ROUTE, UNKNOWN_ROUTE), scope["method"], visit.status, seconds)

    def _record_end(self, route: str, method: str, status: int, seconds: float) -> None:
        if self._metrics is not None:
            self._metrics.request_ended(route, method, status, seconds)
        if self._slow_log is not None:
            self._slow_log.request_ended(route, method, status, seconds)


class _TrackedRequest:
    """One request on its way through."""

    __slots__ = ("_is_cancelled", "_path", "_send", "_task", "began", "status", "waited")

    def __init__(self, path: str, send: Send, began: float) -> None:
        self.began = began
        self.status = CLIENT_CLOSED
        self.waited = WaitTime()
        self._path, self._send = path, send
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
            (b"connection", b"close"),
        ]
        await self._send_message({"type": "http.response.start", "status": 503, "headers": headers})
        await self._send_message({"type": "http.response.body", "body": body})

    async def _send_message(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


def forbidden(why: str) -> bytes:
    """The body of the answer to a page that may not use this server."""
    return orjson.dumps({"error": {"type": "ForbiddenError", "message": why}, "detail": why})


class _Forbidden:
    """Answers 403."""

    def __init__(self, why: str) -> None:
        self._body = forbidden(why)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(self._body)).encode())]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": self._body})


class _RouteMarker:
    """A route's application, which leaves word of the route it was reached by."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        self._app, self._path = app, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ROUTE] = self._path
        await self._app(scope, receive, send)
