"""Tracks requests in progress: records metrics and slow requests, and ends waiting requests when the server stops.

After `close`, requests have a moment to finish. A store request without a response by then must be waiting for
rollouts: it is cancelled, with a 503 and `Retry-After`. A model call may continue until the server's grace period ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

import orjson
from starlette.applications import Starlette
from starlette.responses import Response
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


@dataclass(slots=True, eq=False)
class _TrackedRequest:
    """One request in progress."""

    path: str
    task: asyncio.Task[Any]
    status: int = CLIENT_CLOSED
    waited: WaitTime = field(default_factory=WaitTime)
    is_cancelled: bool = False
    """It gets a 503 instead of its response."""


class RequestTracker:
    """ASGI middleware. `open` may follow `close`."""

    def __init__(
        self, app: Starlette, guard: OriginGuard, metrics: Metrics | None = None, slow: SlowLog | None = None
    ) -> None:
        for route in app.routes:
            if isinstance(route, Route):
                route.app = _marked(route.app, route.path)
        self._app, self._guard = app, guard
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
        for each in self._in_flight if self._closed else ():
            if each.status == CLIENT_CLOSED and each.path.startswith(STORE_PREFIX):
                each.is_cancelled = True
                each.task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        if self._metrics is not None:
            self._metrics.request_began()
        tracked = _TrackedRequest(scope["path"], cast("asyncio.Task[Any]", asyncio.current_task()))
        self._in_flight.add(tracked)
        wait_time.set(tracked.waited)

        async def send_tracked(message: Message) -> None:
            if message["type"] == "http.response.start":
                tracked.status = message["status"]
                if self.draining:
                    message["headers"] = [*message.get("headers", ()), _CLOSE]
            await send(message)

        reason = self._guard.rejection(scope["headers"])
        app = self._app if reason is None else error_response(403, "ForbiddenError", reason)
        try:
            await app(scope, receive, send_tracked)
        except asyncio.CancelledError:
            if not tracked.is_cancelled:
                raise
            tracked.task.uncancel()
            message = "the server is about to stop; try again in a moment"
            stopping = error_response(503, "StoreClosedError", message, {"retry-after": "1"})
            await stopping(scope, receive, send_tracked)
        finally:
            self._in_flight.discard(tracked)
            seconds = time.perf_counter() - began - tracked.waited.seconds  # without the wait for rollouts
            for observer in (self._metrics, self._slow_log):
                if observer is not None:
                    observer.request_ended(scope.get(ROUTE, UNKNOWN_ROUTE), scope["method"], tracked.status, seconds)


def _marked(app: ASGIApp, path: str) -> ASGIApp:
    """The application of a route, which stores the route in the scope."""

    async def marked(scope: Scope, receive: Receive, send: Send) -> None:
        scope[ROUTE] = path
        await app(scope, receive, send)

    return marked


def error_response(status: int, kind: str, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """The response to a request that failed, in the shape of every error."""
    body = orjson.dumps({"error": {"type": kind, "message": message}, "detail": message})
    return Response(body, status, headers, media_type="application/json")
