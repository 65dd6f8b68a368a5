"""A model call as the HTTP server handles it: buffers the body, tries the endpoint's fast path, writes the response.

A call that the fast path does not take is served as an ASGI connection, in a task.
"""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, cast

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Scope

from agentlightning.gateway.forwarding.disconnect import ON_DISCONNECT
from agentlightning.gateway.forwarding.fast_path import RAW_REQUEST
from agentlightning.server.request_tracker import CLIENT_CLOSED, ROUTE, RequestTracker, forbidden

logger = logging.getLogger(__name__)

_PHRASES: Final = {each.value: each.phrase.encode() for each in http.HTTPStatus}
STATUS_LINES: Final = {
    status: b"HTTP/1.1 %d %s\r\n" % (status, _PHRASES.get(status, b"")) for status in range(100, 600)
}
CLOSE: Final = b"connection: close\r\n"


class Connection(Protocol):
    """The connection of a request; see `GatewayHttpProtocol`."""

    loop: asyncio.AbstractEventLoop
    transport: Any
    flow: Any
    tasks: Any
    url: bytes
    headers: list[tuple[bytes, bytes]]
    scope: Any

    def on_response_complete(self) -> None: ...


class FastRequest:
    """One request, in place of uvicorn's `RequestResponseCycle`."""

    __slots__ = (
        *("_connection", "_disconnect_callback", "_disconnected", "_flow", "_has_length", "_head", "_on_fast_path"),
        *("_route", "_scope", "_started_at", "_tracker", "body", "call", "caller", "disconnected", "headers"),
        *("keep_alive", "parts", "path_params", "rejection", "response_complete", "response_started", "url"),
    )

    def __init__(
        self,
        connection: Connection,
        tracker: RequestTracker,
        route: Route,
        path_params: dict[str, Any],
        keep_alive: bool,
    ) -> None:
        self.url, self.headers, self.path_params = connection.url, connection.headers, path_params
        self.parts: list[bytes] | None = []
        """Chunks of the body; None after `receive`, and for a rejected request."""
        self.caller: Any = None
        """The caller, if the endpoint identified it from the request head."""
        self.call: Any = None
        """The resolved call, if the endpoint's fast path got so far."""
        self.rejection: tuple[int, bytes] | None = None
        """Status and body of the response, if the request head was enough to reject the request."""
        self.body = b""
        self.disconnected = False
        self.keep_alive = keep_alive
        self.response_started = False
        self.response_complete = False
        self._connection = connection
        self._tracker = tracker
        self._flow = connection.flow
        self._route = route
        self._scope = cast("Scope", connection.scope)
        self._started_at = 0.0
        self._on_fast_path = False
        """Served without a task."""
        self._head: bytes | None = None
        """Head of the response, not yet written."""
        self._has_length = False
        """The response has a Content-Length; otherwise it is chunked."""
        self._disconnected: asyncio.Future[None] | None = None
        self._disconnect_callback: Callable[[], None] | None = None

    # -- the fast path ---------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Check the request head. Sets `rejection`, and then discards the body."""
        if (reason := self._tracker.guard.rejection(self.headers)) is not None:
            self.rejection = 403, forbidden(reason)
        elif (admit := getattr(self._route.endpoint, "admit", None)) is not None:
            self.rejection = admit(self)
        if self.rejection is not None:
            self.parts = None

    def start(self) -> None:
        """Serve the request, whose body is complete."""
        self._started_at = self._tracker.started()
        if self.rejection is not None:
            return self.reply(*self.rejection, ())
        parts, self.parts = self.parts or [], []
        self.body = parts[0] if len(parts) == 1 else b"".join(parts)
        fast_path = getattr(self._route.endpoint, "fast_path", None)
        self._on_fast_path = fast_path is not None and fast_path(self)
        if not self._on_fast_path:
            self.hand_over(self._route.app)

    def hand_over(self, app: ASGIApp) -> None:
        """Continue in a task, with an ASGI application."""
        self._on_fast_path = False
        task = self._connection.loop.create_task(self._run(app))
        self._connection.tasks.add(task)
        task.add_done_callback(self._connection.tasks.discard)

    def reply(self, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Send a JSON response, without a task."""
        self._tracker.finished(self._route.path, "POST", status, self._started_at)
        lines = b"".join([b"%s: %s\r\n" % header for header in headers]) if headers else b""
        self.response_started = True
        self._connection.transport.write(
            b"%scontent-type: application/json\r\ncontent-length: %d\r\n%s%s\r\n%s"
            % (STATUS_LINES[status], len(body), lines, b"" if self.keep_alive else CLOSE, body)
        )
        self._finish()

    def drop(self) -> None:
        """Close the connection to the client."""
        self._connection.transport.abort()

    def _finish(self) -> None:
        self.response_complete = True
        if not self.keep_alive:
            self._connection.transport.close()
        self._connection.on_response_complete()

    # -- called by uvicorn's protocol ------------------------------------------------------------------------------

    @property
    def message_event(self) -> FastRequest:
        return self

    def set(self) -> None:
        """Does nothing: uvicorn sets `message_event` at every change, and the changes arrive through other methods."""

    def handle_disconnect(self) -> None:
        """The client disconnected."""
        self.disconnected = True
        if self._disconnected is not None and not self._disconnected.done():
            self._disconnected.set_result(None)
        if self._disconnect_callback is not None:
            self._disconnect_callback()
        if self._on_fast_path:
            self._tracker.finished(self._route.path, "POST", CLIENT_CLOSED, self._started_at)

    def on_disconnect(self, callback: Callable[[], None] | None) -> None:
        """Register the callback for a disconnect of the client; None removes it."""
        self._disconnect_callback = callback
        if callback is not None and self.disconnected:
            callback()

    # -- an ASGI connection ----------------------------------------------------------------------------------------

    async def _run(self, app: ASGIApp) -> None:
        scope = self._scope
        scope["method"], scope["path"], scope["query_string"] = "POST", self.url.decode(), b""
        scope["raw_path"], scope["path_params"], scope[ON_DISCONNECT] = self.url, self.path_params, self.on_disconnect
        scope[ROUTE], scope[RAW_REQUEST] = self._route.path, self
        try:
            await self._tracker.track(app, scope, self.receive, self.send, self._started_at)
        except Exception:
            logger.exception("a model call failed")
        finally:
            if not self.response_complete and not self.disconnected:
                self._connection.transport.close()

    async def receive(self) -> Message:
        if self.parts is not None:
            self.parts = None
            return {"type": "http.request", "body": self.body}
        if not self.disconnected:
            if self._disconnected is None:
                self._disconnected = self._connection.loop.create_future()
            await self._disconnected
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self.disconnected:
            return
        if self._flow.write_paused:
            await self._flow.drain()
        if message["type"] == "http.response.start":
            self._head = self._write_head(message)
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        if self._head is not None:
            self._write_first(body, more)
        else:
            self._write_more(body, more)
        if not more:
            self._finish()

    def _write_head(self, message: Message) -> bytes:
        lines = [STATUS_LINES[message["status"]]]
        lines += [b"%s: %s\r\n" % header for header in message["headers"]]
        if not self.keep_alive:
            lines.append(CLOSE)
        return b"".join(lines)

    def _write_first(self, body: bytes, more: bool) -> None:
        head, self._head = self._head or b"", None
        self.response_started = True
        self._has_length = b"content-length: " in head
        if self._has_length:
            return self._connection.transport.write(b"%s\r\n%s" % (head, body))
        self._connection.transport.write(b"%stransfer-encoding: chunked\r\n\r\n%s" % (head, _chunk(body, more)))

    def _write_more(self, body: bytes, more: bool) -> None:
        if data := body if self._has_length else _chunk(body, more):
            self._connection.transport.write(data)


def _chunk(body: bytes, more: bool) -> bytes:
    data = b"%x\r\n%s\r\n" % (len(body), body) if body else b""
    return data if more else data + b"0\r\n\r\n"
