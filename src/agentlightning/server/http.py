"""What every request passes before its handler: the bounds of its connection, the check of its origin, its tracking.

Connections are those of uvicorn's HTTP protocol, with upload limits and timeouts for slow clients. Idle ones are
closed; a request that stalls gets a 408, a client that no longer reads its response is cut off. Incomplete bodies share
one size limit; the rest of a body whose request was answered already is thrown away. An `Upgrade` is ignored, as HTTP
allows: the request is served in HTTP/1.1, with its own body. Only what uvicorn's protocol shares with asyncio and the
parser is overridden or called, no private method.

Requests from web pages of other sites are rejected, which a browser on this machine may send without its user's
consent. Such pages can reach a server on loopback; the browser names their site in `Origin`. With DNS rebinding a page
appears to be of this server: without a token, `Host` must therefore be a name that no stranger can control.

Requests in progress are counted and timed. When the server stops, they have a moment to finish. A store request without
a response by then must be waiting for rollouts: it is cancelled, with a 503 and `Retry-After`. A model call may
continue until the server's grace period ends.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, cast
from urllib.parse import urlsplit

import httptools
import orjson
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from agentlightning.observability.logs import SlowLog
from agentlightning.observability.metrics import Metrics
from agentlightning.store.instrumented import WaitTime, wait_time
from agentlightning.transport.options import address_of

MAX_HEAD_BYTES: Final = 65536
IDLE_SECONDS: Final = 120.0
"""How long a connection may be idle between requests."""
STALLED_SECONDS: Final = 30.0
"""Time for the head of a request, and again for its body, in addition to its transfer time at the minimum rate."""
MIN_BYTES_PER_SECOND: Final = 8192
"""Slowest upload that is allowed."""
MAX_UNFINISHED_BYTES: Final = 1024**3
"""Limit for all incomplete bodies together."""
_LONG: Final = b'{"error":{"message":"the head of the request is too long","type":"invalid_request_error"}}'
_FULL: Final = b'{"error":{"message":"too many uploads at once; try again in a moment","type":"overloaded_error"}}'
_TUNNEL: Final = b'{"error":{"message":"this server is no proxy","type":"invalid_request_error"}}'
_LATE: Final = b'{"error":{"message":"the request did not come to its end in time","type":"timeout_error"}}'


class Bounds:
    """The limits of a server's connections together."""

    def __init__(self) -> None:
        self.stalled_seconds, self.max_unfinished_bytes = STALLED_SECONDS, MAX_UNFINISHED_BYTES
        self.unfinished_bytes = 0
        """Size of all incomplete bodies."""

    async def watch(self, connections: Collection[Any]) -> None:
        """Check all connections for timeouts, again and again."""
        while True:
            await asyncio.sleep(min(5.0, self.stalled_seconds / 4))
            loop = asyncio.get_running_loop()
            for each in connections:  # Not called here: an error with one must not end the watch of all.
                loop.call_soon(each.check_timeouts, loop.time())


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    parser: Any
    cycle: Any
    """The latest request whose head is complete; None before the first."""

    def __init__(self, config: Config, server_state: ServerState, bounds: Bounds) -> None:
        super().__init__(config, server_state, app_state={})
        self.bounds = bounds
        self._upgrade: list[tuple[bytes, bytes]] = []
        """The ignored `Upgrade` header, kept for the application."""
        self._reading = False
        """A request is being received."""
        self._in_head = False
        self._since = self.loop.time()
        """Time of the last event: connected, request started, head complete, or response sent."""
        self._received = 0
        """Bytes received since then."""
        self._unsent, self._unsent_since = -1, 0.0
        """Bytes in the write buffer, and since when that number has not changed."""
        self._body_bytes = 0
        """Bytes received of the current body."""

    # -- the connection ------------------------------------------------------------------------------------------

    def connection_lost(self, exc: Exception | None) -> None:
        self._release_body()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        """Does nothing: one task watches all connections."""

    def data_received(self, data: bytes) -> None:
        try:
            self._feed(data)
        except httptools.HttpParserError:
            if not self.transport.is_closing():
                self.send_400_response("Invalid HTTP request received.")
            return
        self._received += len(data)
        if self._in_head and self._received > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.reject(431, _LONG)

    def _feed(self, data: bytes) -> None:
        """Feed the parser. It stops after a head with an `Upgrade`, although a body may follow; so a new parser gets
        the same head without that header, and then the rest."""
        rest = memoryview(data)
        while not self.transport.is_closing():
            try:
                return self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
            parser, headers = self.parser, self.headers
            if parser.get_method() == b"CONNECT":
                return self.reject(405, _TUNNEL)
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            lines = [b"%s %s HTTP/%s\r\n" % (parser.get_method(), self.url, parser.get_http_version().encode())]
            lines += [b"%s: %s\r\n" % header for header in headers if header[0] != b"upgrade"]
            self._upgrade = [header for header in headers if header[0] == b"upgrade"]
            self.parser.feed_data(b"".join([*lines, b"\r\n"]))

    def _release_body(self) -> None:
        self.bounds.unfinished_bytes -= self._body_bytes
        self._body_bytes = 0

    def check_timeouts(self, now: float) -> None:
        """Close the connection if it timed out."""
        silent = now - self._since
        if self._reading and not self.flow.read_paused:
            allowed = self.bounds.stalled_seconds + (0 if self._in_head else self._received / MIN_BYTES_PER_SECOND)
            if silent >= allowed and not self.transport.is_closing():
                self.reject(408, _LATE)
        elif self.flow.write_paused:
            unsent = self.transport.get_write_buffer_size()
            if unsent != self._unsent:
                self._unsent, self._unsent_since = unsent, now
            elif now - self._unsent_since >= self.bounds.stalled_seconds:
                self.transport.abort()  # It has stopped reading, and occupies a slot, an engine and a connection.
        elif silent >= IDLE_SECONDS and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()

    def reject(self, status: int, body: bytes, headers: bytes = b"") -> None:
        """Respond to an incomplete request, and close the connection."""
        cycle = self.cycle
        self._release_body()
        if cycle is not None:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
            if cycle.response_started and not (cycle.response_complete and self._in_head):
                return self.transport.close()
        self.transport.write(
            b"%scontent-type: application/json\r\ncontent-length: %d\r\n%sconnection: close\r\n\r\n%s"
            % (STATUS_LINE[status], len(body), headers, body)
        )
        self.transport.close()

    # -- called by the parser -------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._reading = self._in_head = True
        self._since, self._received = self.loop.time(), 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # the head is parsed again
        if self._upgrade:
            self.headers += self._upgrade
            self._upgrade = []
        self._in_head, self._since, self._received = False, self.loop.time(), 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self.transport.is_closing():
            return
        if not self.cycle.response_complete:
            self._body_bytes += len(body)
            self.bounds.unfinished_bytes += len(body)
            if self.bounds.unfinished_bytes > self.bounds.max_unfinished_bytes:
                self.reject(503, _FULL, b"retry-after: 1\r\n")
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._reading = False
        self._release_body()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.cycle.response_complete:  # else it was an earlier request that is answered now
            self._release_body()
        self._since = self.loop.time()
        super().on_response_complete()


# -- origins -----------------------------------------------------------------------------------------------------------


class OriginGuard:
    """Checks `Host` and `Origin`.

    `hosts` are further names of this server. `origins` are other sites whose pages are allowed, as `https://name:port`;
    "*" for all. With `any_host` every name is allowed, since a page without the token can do nothing. With `keyless`,
    model calls need no key: pages then need a known name all the same, but programs, which send no `Origin`, do not.
    """

    def __init__(
        self, hosts: Iterable[str] = (), origins: Iterable[str] = (), *, any_host: bool = False, keyless: bool = False
    ) -> None:
        self._any_host = any_host
        self._any_page = any_host and not keyless
        self._hosts = frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origin.lower().rstrip("/").encode() for origin in origins)
        self._is_own_host = lru_cache(1024)(self._is_host)

    def rejection(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """Why a request with these headers (names in lower case) is rejected; None if it is allowed."""
        host = origin = None
        for name, value in headers:
            if name == b"host":
                host = value
                if not self._any_host and not self._is_own_host(value):
                    return (
                        f"{_shown(value)} is no name of this server; use its IP address, or allow the name: "
                        "agl serve --allow-host NAME"
                    )
            elif name == b"origin":
                origin = value
        if origin is None or self._is_allowed(origin, host):
            return None
        return f"a page of {_shown(origin)} may not use this server; only pages of this server may"

    def _is_allowed(self, origin: bytes, host: bytes | None) -> bool:
        if b"*" in self._origins or origin.lower() in self._origins:
            return True
        if host is None or origin.partition(b"://")[2].lower() != host.lower():
            return False
        return self._any_page or self._is_own_host(host)

    def _is_host(self, host: bytes) -> bool:
        """Whether `name:port` names this server, or no stranger can control the name: an address, a name without a
        domain, or the name of this machine."""
        try:
            name = (urlsplit(f"//{host.decode('ascii')}").hostname or "").rstrip(".")
        except ValueError:
            return False
        return name != "" and (
            "." not in name
            or name.endswith(".localhost")
            or name == socket.gethostname().lower()
            or name in self._hosts
            or address_of(name) is not None
        )


def _shown(value: bytes) -> str:
    return repr(value[:200].decode("latin-1"))


# -- requests in progress ----------------------------------------------------------------------------------------------

ROUTE: Final = "agentlightning.route"
DRAIN_SECONDS: Final = 0.3
"""Time for store requests to finish after `close`."""
CLIENT_CLOSED: Final = 499
"""The status of a request whose client disconnected before the response."""


@dataclass(slots=True, eq=False)
class _TrackedRequest:
    """One request in progress."""

    path: str
    task: asyncio.Task[Any]
    status: int = CLIENT_CLOSED
    is_cancelled: bool = False
    """It gets a 503 instead of its response."""


class RequestTracker:
    """ASGI middleware. `open` may follow `close`."""

    def __init__(
        self,
        app: Starlette,
        guard: OriginGuard,
        metrics: Metrics | None = None,
        slow: SlowLog | None = None,
        calls: Iterable[Route] = (),
    ) -> None:
        for route in app.routes:
            if isinstance(route, Route):
                route.app = _marked(route.app, route.path)
        self._app, self._guard, self._metrics, self._slow = app, guard, metrics, slow
        self._calls = {route.path for route in calls}
        """The routes of calls to models, which take as long as a model does and are not slow."""
        self.in_flight: set[_TrackedRequest] = set()
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
        for each in self.in_flight if self._closed else ():
            if each.status == CLIENT_CLOSED and each.path.startswith("/v1/agl/"):
                each.is_cancelled = True
                each.task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        tracked = _TrackedRequest(scope["path"], cast("asyncio.Task[Any]", asyncio.current_task()))
        self.in_flight.add(tracked)
        waited = WaitTime()
        wait_time.set(waited)

        async def send_tracked(message: Message) -> None:
            if message["type"] == "http.response.start":
                tracked.status = message["status"]
                if self.draining:
                    message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
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
            self.in_flight.discard(tracked)
            seconds = time.perf_counter() - began - waited.seconds  # without the wait for rollouts
            route = scope.get(ROUTE, "other")  # Strangers cannot create metric series by unknown paths.
            for observer in (self._metrics, None if route in self._calls else self._slow):
                if observer is not None:
                    observer.request_ended(route, scope["method"], tracked.status, seconds)


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
