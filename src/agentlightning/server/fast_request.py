"""One model call that takes the short way from the socket to the gateway and back (see http_protocol.py).

Holds its body, offers it to the way without a task, or serves it as an ASGI connection; writes the answer.
"""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Scope

from agentlightning.gateway.forwarding.service import ON_DISCONNECT
from agentlightning.server.request_tracker import CLIENT_CLOSED, ROUTE, forbidden

if TYPE_CHECKING:
    from agentlightning.server.http_protocol import GatewayHttpProtocol

logger = logging.getLogger(__name__)

_PHRASES: Final = {each.value: each.phrase.encode() for each in http.HTTPStatus}
STATUS_LINES: Final = {
    status: b"HTTP/1.1 %d %s\r\n" % (status, _PHRASES.get(status, b"")) for status in range(100, 600)
}
CLOSE: Final = b"connection: close\r\n"


class FastRequest:
    """One call; to uvicorn's protocol it is a cycle like its own."""

    __slots__ = (
        *(
            "_started_at",
            "_on_fast_path",
            "_flow",
            "_disconnected",
            "_head",
            "_disconnect_callback",
            "_protocol",
            "_route",
            "_scope",
            "_has_length",
            "disconnected",
        ),
        *("body", "caller", "headers", "keep_alive", "parts", "path_params", "rejection", "response_complete"),
        *("response_started", "url"),
    )

    def __init__(
        self, protocol: GatewayHttpProtocol, route: Route, path_params: dict[str, Any], keep_alive: bool
    ) -> None:
        self.url, self.headers, self.path_params = protocol.url, protocol.headers, path_params
        self.parts: list[bytes] | None = []
        """Of the body; None once it was taken, or where nobody wants it."""
        self.caller: Any = None
        """Who calls, where the endpoint knows that by the head."""
        self.rejection: tuple[int, bytes] | None = None
        """Its answer, where the head was enough to refuse it."""
        self.body = b""
        self.disconnected = False
        self.keep_alive = keep_alive
        self.response_started = False
        self.response_complete = False
        self._protocol = protocol
        self._flow = protocol.flow
        self._route = route
        self._scope = cast("Scope", protocol.scope)
        self._started_at = 0.0
        self._on_fast_path = False
        """It is being served without a task."""
        self._head: bytes | None = None
        self._has_length = False
        self._disconnected: asyncio.Future[None] | None = None
        self._disconnect_callback: Any = None

    # -- the direct way --------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """The head is whole."""
        tracker = self._protocol.fast_routes.tracker
        if (why := tracker.guard.rejection(self.headers)) is not None:
            self.rejection = 403, forbidden(why)
        elif (admit := getattr(self._route.endpoint, "admit", None)) is not None:
            self.rejection = admit(self)
        if self.rejection is not None:
            self.parts = None

    def start(self) -> None:
        """The request is whole."""
        if self.rejection is not None:
            self._started_at = self._protocol.fast_routes.tracker.started()
            return self.reply(*self.rejection, ())
        parts, self.parts = self.parts or [], []
        self.body = parts[0] if len(parts) == 1 else b"".join(parts)
        self._started_at = self._protocol.fast_routes.tracker.started()
        fast_path = getattr(self._route.endpoint, "fast_path", None)
        self._on_fast_path = fast_path is not None and fast_path(self)
        if not self._on_fast_path:
            self.hand_over(self._route.app)

    def hand_over(self, app: ASGIApp) -> None:
        """Have an application serve it, in a task."""
        self._on_fast_path = False
        task = self._protocol.loop.create_task(self._run(app))
        self._protocol.tasks.add(task)
        task.add_done_callback(self._protocol.tasks.discard)

    def reply(self, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Answer with JSON, without a task."""
        self._protocol.fast_routes.tracker.finished(self._route.path, "POST", status, self._started_at)
        lines = b"".join([b"%s: %s\r\n" % header for header in headers]) if headers else b""
        self.response_started = True
        self._protocol.transport.write(
            b"%scontent-type: application/json\r\ncontent-length: %d\r\n%s%s\r\n%s"
            % (STATUS_LINES[status], len(body), lines, b"" if self.keep_alive else CLOSE, body)
        )
        self._finish()

    def drop(self) -> None:
        """Hang up on the caller."""
        self._protocol.transport.abort()

    def _finish(self) -> None:
        self.response_complete = True
        if not self.keep_alive:
            self._protocol.transport.close()
        self._protocol.on_response_complete()

    # -- what uvicorn's protocol says ------------------------------------------------------------------------------

    @property
    def message_event(self) -> FastRequest:
        return self

    def set(self) -> None:
        """uvicorn's protocol says so when something happened; what it was is known from `hang_up`."""

    def handle_disconnect(self) -> None:
        """The caller is gone."""
        self.disconnected = True
        if self._disconnected is not None and not self._disconnected.done():
            self._disconnected.set_result(None)
        if self._disconnect_callback is not None:
            self._disconnect_callback()
        if self._on_fast_path:
            self._protocol.fast_routes.tracker.finished(self._route.path, "POST", CLIENT_CLOSED, self._started_at)

    def on_disconnect(self, end: Any) -> None:
        self._disconnect_callback = end
        if end is not None and self.disconnected:
            end()

    # -- an ASGI connection ----------------------------------------------------------------------------------------

    async def _run(self, app: ASGIApp) -> None:
        scope = self._scope
        scope["method"], scope["path"], scope["query_string"] = "POST", self.url.decode(), b""
        scope["raw_path"], scope["path_params"], scope[ON_DISCONNECT] = self.url, self.path_params, self.on_disconnect
        scope[ROUTE] = self._route.path
        try:
            await self._protocol.fast_routes.tracker.track(app, scope, self.receive, self.send, self._started_at)
        except Exception:
            logger.exception("a model call failed on its way")
        finally:
            if not self.response_complete and not self.disconnected:
                self._protocol.transport.close()

    async def receive(self) -> Message:
        if self.parts is not None:
            self.parts = None
            return {"type": "http.request", "body": self.body}
        if not self.disconnected:
            if self._disconnected is None:
                self._disconnected = self._protocol.loop.create_future()
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
            return self._protocol.transport.write(b"%s\r\n%s" % (head, body))
        self._protocol.transport.write(b"%stransfer-encoding: chunked\r\n\r\n%s" % (head, _chunk(body, more)))

    def _write_more(self, body: bytes, more: bool) -> None:
        if data := body if self._has_length else _chunk(body, more):
            self._protocol.transport.write(data)


def _chunk(body: bytes, more: bool) -> bytes:
    data = b"%x\r\n%s\r\n" % (len(body), body) if body else b""
    return data if more else data + b"0\r\n\r\n"
