"""One model call that takes the short way from the socket to the gateway and back (see fastpath.py).

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

from agentlightning.gateway.forwarding.service import HANG_UP
from agentlightning.server.request_tracker import GONE, ROUTE, forbidden

if TYPE_CHECKING:
    from agentlightning.server.http_protocol import ModelCalls

logger = logging.getLogger(__name__)

_PHRASES: Final = {each.value: each.phrase.encode() for each in http.HTTPStatus}
STATUS_LINES: Final = {
    status: b"HTTP/1.1 %d %s\r\n" % (status, _PHRASES.get(status, b"")) for status in range(100, 600)
}
CLOSE: Final = b"connection: close\r\n"


class Call:
    """One call; to uvicorn's protocol it is a cycle like its own."""

    __slots__ = (
        *(
            "_began",
            "_direct",
            "_flow",
            "_gone",
            "_head",
            "_on_gone",
            "_protocol",
            "_route",
            "_scope",
            "_sized",
            "disconnected",
        ),
        *("body", "caller", "headers", "keep_alive", "parts", "path_params", "refusal", "response_complete"),
        *("response_started", "url"),
    )

    def __init__(self, protocol: ModelCalls, route: Route, path_params: dict[str, Any], keep_alive: bool) -> None:
        self.url, self.headers, self.path_params = protocol.url, protocol.headers, path_params
        self.parts: list[bytes] | None = []
        """Of the body; None once it was taken, or where nobody wants it."""
        self.caller: Any = None
        """Who calls, where the endpoint knows that by the head."""
        self.refusal: tuple[int, bytes] | None = None
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
        self._began = 0.0
        self._direct = False
        """It is being served without a task."""
        self._head: bytes | None = None
        self._sized = False
        self._gone: asyncio.Future[None] | None = None
        self._on_gone: Any = None

    # -- the direct way --------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """The head is whole."""
        door = self._protocol.shortcuts.door
        if (why := door.guard.refusal(self.headers)) is not None:
            self.refusal = 403, forbidden(why)
        elif (admit := getattr(self._route.endpoint, "admit", None)) is not None:
            self.refusal = admit(self)
        if self.refusal is not None:
            self.parts = None

    def begin(self) -> None:
        """The request is whole."""
        if self.refusal is not None:
            self._began = self._protocol.shortcuts.door.came()
            return self.reply(*self.refusal, ())
        parts, self.parts = self.parts or [], []
        self.body = parts[0] if len(parts) == 1 else b"".join(parts)
        self._began = self._protocol.shortcuts.door.came()
        direct = getattr(self._route.endpoint, "direct", None)
        self._direct = direct is not None and direct(self)
        if not self._direct:
            self.hand_over(self._route.app)

    def hand_over(self, app: ASGIApp) -> None:
        """Have an application serve it, in a task."""
        self._direct = False
        task = self._protocol.loop.create_task(self._run(app))
        self._protocol.tasks.add(task)
        task.add_done_callback(self._protocol.tasks.discard)

    def reply(self, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Answer with JSON, without a task."""
        self._protocol.shortcuts.door.went(self._route.path, "POST", status, self._began)
        lines = b"".join([b"%s: %s\r\n" % header for header in headers]) if headers else b""
        self.response_started = True
        self._protocol.transport.write(
            b"%scontent-type: application/json\r\ncontent-length: %d\r\n%s%s\r\n%s"
            % (STATUS_LINES[status], len(body), lines, b"" if self.keep_alive else CLOSE, body)
        )
        self._completed()

    def drop(self) -> None:
        """Hang up on the caller."""
        self._protocol.transport.abort()

    def _completed(self) -> None:
        self.response_complete = True
        if not self.keep_alive:
            self._protocol.transport.close()
        self._protocol.on_response_complete()

    # -- what uvicorn's protocol says ------------------------------------------------------------------------------

    @property
    def message_event(self) -> Call:
        return self

    def set(self) -> None:
        """uvicorn's protocol says so when something happened; what it was is known from `hang_up`."""

    def hang_up(self) -> None:
        """The caller is gone."""
        self.disconnected = True
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)
        if self._on_gone is not None:
            self._on_gone()
        if self._direct:
            self._protocol.shortcuts.door.went(self._route.path, "POST", GONE, self._began)

    def when_gone(self, end: Any) -> None:
        self._on_gone = end
        if end is not None and self.disconnected:
            end()

    # -- an ASGI connection ----------------------------------------------------------------------------------------

    async def _run(self, app: ASGIApp) -> None:
        scope = self._scope
        scope["method"], scope["path"], scope["query_string"] = "POST", self.url.decode(), b""
        scope["raw_path"], scope["path_params"], scope[HANG_UP] = self.url, self.path_params, self.when_gone
        scope[ROUTE] = self._route.path
        try:
            await self._protocol.shortcuts.door.visit(app, scope, self.receive, self.send, self._began)
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
            if self._gone is None:
                self._gone = self._protocol.loop.create_future()
            await self._gone
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
            self._begin(body, more)
        else:
            self._go_on(body, more)
        if not more:
            self._completed()

    def _write_head(self, message: Message) -> bytes:
        lines = [STATUS_LINES[message["status"]]]
        lines += [b"%s: %s\r\n" % header for header in message["headers"]]
        if not self.keep_alive:
            lines.append(CLOSE)
        return b"".join(lines)

    def _begin(self, body: bytes, more: bool) -> None:
        head, self._head = self._head or b"", None
        self.response_started = True
        self._sized = b"content-length: " in head
        if self._sized:
            return self._protocol.transport.write(b"%s\r\n%s" % (head, body))
        self._protocol.transport.write(b"%stransfer-encoding: chunked\r\n\r\n%s" % (head, _chunk(body, more)))

    def _go_on(self, body: bytes, more: bool) -> None:
        if data := body if self._sized else _chunk(body, more):
            self._protocol.transport.write(data)


def _chunk(body: bytes, more: bool) -> bytes:
    data = b"%x\r\n%s\r\n" % (len(body), body) if body else b""
    return data if more else data + b"0\r\n\r\n"
