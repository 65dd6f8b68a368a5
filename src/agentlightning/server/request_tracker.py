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
from agentlightning.server.origin_guard import SiteGuard
from agentlightning.store.instrumented import WaitTime, wait_time

ROUTE: Final = "agentlightning.route"
UNKNOWN: Final = "other"
"""The route of a path that nobody serves: paths made up by strangers must not become series of their own."""
LINGER_SECONDS: Final = 0.3
"""How long requests of the store have to end by themselves once the door is closed."""
STORE: Final = "/v1/agl/"
GONE: Final = 499
"""The status of a request whose caller hung up before it was answered."""


class Door:
    """An ASGI application around another. `open` may follow `close`."""

    def __init__(
        self,
        app: Starlette,
        metrics: Metrics | None = None,
        slow: SlowLog | None = None,
        guard: SiteGuard | None = None,
    ) -> None:
        self.guard = guard or SiteGuard()
        for route in app.routes:
            if isinstance(route, Route):
                route.app = _Named(route.app, route.path)
        self._app = app
        self._metrics, self._slow = metrics, slow
        self._under_way: set[_Visit] = set()
        self._closed = False

    def open(self) -> None:
        self._closed = False

    def close(self) -> None:
        """Send away, soon, those who wait."""
        self._closed = True
        asyncio.get_running_loop().call_later(LINGER_SECONDS, self._send_away)

    def _send_away(self) -> None:
        for visit in list(self._under_way):
            if self._closed:
                visit.send_away()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        why = self.guard.refusal(scope["headers"]) if scope["type"] == "http" else None
        await self.visit(self._app if why is None else _Refused(why), scope, receive, send)

    async def visit(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, began: float | None = None) -> None:
        """Have an application serve a scope: this one's own, or one of its routes where it is known which. `began` is
        of one who `came` before."""
        if scope["type"] != "http":
            return await app(scope, receive, send)
        visit = _Visit(scope["path"], send, self.came() if began is None else began)
        self._under_way.add(visit)
        wait_time.set(visit.waited)
        try:
            await visit.run(app, scope, receive)
        finally:
            self._under_way.discard(visit)
            self._note(scope, visit)

    def came(self) -> float:
        """A request has come; returns when, for `went` or `visit`."""
        if self._metrics is not None:
            self._metrics.request_began()
        return time.perf_counter()

    def went(self, route: str, method: str, status: int, began: float) -> None:
        """A request that was served by nobody in here is over."""
        self._ended(route, method, status, time.perf_counter() - began)

    def _note(self, scope: Scope, visit: _Visit) -> None:
        """Time that was spent waiting for rollouts is no time to answer."""
        seconds = time.perf_counter() - visit.began - visit.waited.seconds
        self._ended(scope.get(ROUTE, UNKNOWN), scope["method"], visit.status, seconds)

    def _ended(self, route: str, method: str, status: int, seconds: float) -> None:
        if self._metrics is not None:
            self._metrics.request_ended(route, method, status, seconds)
        if self._slow is not None:
            self._slow.request_ended(route, method, status, seconds)


class _Visit:
    """One request on its way through."""

    __slots__ = ("_path", "_send", "_sent_away", "_task", "began", "status", "waited")

    def __init__(self, path: str, send: Send, began: float) -> None:
        self.began = began
        self.status = GONE
        self.waited = WaitTime()
        self._path, self._send = path, send
        self._task = asyncio.current_task()
        self._sent_away = False

    async def run(self, app: ASGIApp, scope: Scope, receive: Receive) -> None:
        try:
            await app(scope, receive, self._pass_on)
        except asyncio.CancelledError:
            if not self._sent_away or self._task is None:
                raise
            self._task.uncancel()
            await self._say_goodbye()

    def send_away(self) -> None:
        if self._task is not None and self.status == GONE and self._path.startswith(STORE):
            self._sent_away = True
            self._task.cancel()

    async def _say_goodbye(self) -> None:
        message = "the server is about to stop; try again in a moment"
        body = orjson.dumps({"error": {"type": "StoreClosedError", "message": message}, "detail": message})
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"retry-after", b"1"),
            (b"connection", b"close"),
        ]
        await self._pass_on({"type": "http.response.start", "status": 503, "headers": headers})
        await self._pass_on({"type": "http.response.body", "body": body})

    async def _pass_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


def forbidden(why: str) -> bytes:
    """The body of the answer to a page that may not use this server."""
    return orjson.dumps({"error": {"type": "ForbiddenError", "message": why}, "detail": why})


class _Refused:
    """Answers 403."""

    def __init__(self, why: str) -> None:
        self._body = forbidden(why)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(self._body)).encode())]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": self._body})


class _Named:
    """A route's application, which leaves word of the route it was reached by."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        self._app, self._path = app, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ROUTE] = self._path
        await self._app(scope, receive, send)
