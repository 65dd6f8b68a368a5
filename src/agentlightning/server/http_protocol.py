"""uvicorn's HTTP protocol with a fast path for model calls, upload limits and timeouts for slow clients.

Most requests go to the gateway. They skip uvicorn's request cycle and Starlette's router, their responses are sent with
one write, and those that the gateway can serve without a task get none. Unusual requests (a long body or one of unknown
length, `Expect`, pipelining, HTTP/1.0) take the regular path to the same code.

A request whose caller is rejected loses its body: the check happens at the end of the request head. An `Upgrade` is
ignored, as HTTP allows: the request is served in HTTP/1.1, with its own body. Incomplete bodies share one size limit.
Idle connections are closed; a request that stalls gets a 408.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Collection, Sequence
from typing import Any, Final, cast

import httptools
from starlette.routing import Match, Route
from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from agentlightning.server.fast_request import STATUS_LINES, FastRequest
from agentlightning.server.request_tracker import RequestTracker

logger = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 1024 * 1024
"""Largest request body on the fast path."""
MAX_HEAD_BYTES: Final = 65536
IDLE_SECONDS: Final = 120.0
"""How long a connection may be idle between requests."""
STALLED_SECONDS: Final = 30.0
"""Time for the head of a request, and again for its body, in addition to its transfer time at the minimum rate."""
MIN_BYTES_PER_SECOND: Final = 8192
"""Slowest upload that is allowed."""
MAX_UNFINISHED_BYTES: Final = 1024**3
"""Limit for all incomplete bodies together."""
_MAX_KNOWN_PATHS: Final = 16384
_LONGEST_KNOWN_PATH: Final = 512
_LONG: Final = b'{"error":{"message":"the head of the request is too long","type":"invalid_request_error"}}'
_FULL: Final = b'{"error":{"message":"too many uploads at once; try again in a moment","type":"overloaded_error"}}'
_TUNNEL: Final = b'{"error":{"message":"this server is no proxy","type":"invalid_request_error"}}'
_LATE: Final = b'{"error":{"message":"the request did not come to its end in time","type":"timeout_error"}}'


class FastRoutes:
    """The routes on the fast path: those of `routes` whose endpoint is an ASGI application. An endpoint with a method
    `fast_path` may serve a request without a task."""

    def __init__(
        self,
        routes: Sequence[Route],
        tracker: RequestTracker,
        stalled_seconds: float = STALLED_SECONDS,
        max_unfinished_bytes: int = MAX_UNFINISHED_BYTES,
    ) -> None:
        self.tracker = tracker
        self.stalled_seconds = stalled_seconds
        self.max_unfinished_bytes = max_unfinished_bytes
        self.unfinished_bytes = 0
        """Size of all incomplete bodies."""
        self._routes = [route for route in routes if not inspect.isroutine(route.endpoint)]
        self._known: dict[bytes, tuple[Route, dict[str, Any]]] = {}
        self._watched: asyncio.TimerHandle | None = None

    def find(self, url: bytes) -> tuple[Route, dict[str, Any]] | None:
        """The route of a POST and its path parameters. None if there is none, and for a URL with a query or escapes."""
        known = self._known.get(url)
        if known is not None:
            return known
        if b"?" in url or b"%" in url or not url.isascii():
            return None
        scope: Scope = {"type": "http", "method": "POST", "path": url.decode()}
        for route in self._routes:
            match, child_scope = route.matches(scope)
            if match is Match.FULL:
                known = route, child_scope["path_params"]
                if len(url) > _LONGEST_KNOWN_PATH:
                    return known
                if len(self._known) >= _MAX_KNOWN_PATHS:
                    self._known.clear()
                self._known[url] = known
                return known
        return None

    def watch(self, connections: Collection[Any]) -> None:
        """Check for timeouts regularly while there are connections."""
        if self._watched is None:
            seconds = min(5.0, self.stalled_seconds / 4)
            self._watched = asyncio.get_running_loop().call_later(seconds, self._check_timeouts, connections)

    def _check_timeouts(self, connections: Collection[Any]) -> None:
        self._watched = None
        now = asyncio.get_running_loop().time()
        for each in list(connections):
            if isinstance(each, GatewayHttpProtocol):
                each.check_timeouts(now)
        if connections:
            self.watch(connections)


class GatewayHttpProtocol(HttpToolsProtocol):
    """One connection."""

    parser: Any
    cycle: Any
    """The current request: uvicorn's cycle or a `FastRequest`; None before the first."""
    fast_routes: FastRoutes
    """Set by each server, in a subclass."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
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
        self._incoming: FastRequest | None = None
        """The request whose body is being received."""
        self._request: FastRequest | None = None
        """The request that is being served."""

    # -- the connection ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self.fast_routes.watch(self.connections)

    def connection_lost(self, exc: Exception | None) -> None:
        request, self._request, self._incoming = self._request, None, None
        self._release_body()
        super().connection_lost(exc)
        if request is not None:
            request.handle_disconnect()

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
                self._ignore_upgrade()

    def _ignore_upgrade(self) -> None:
        parser, headers = self.parser, self.headers
        if parser.get_method() == b"CONNECT":
            return self.reject(405, _TUNNEL)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        lines = [b"%s %s HTTP/%s\r\n" % (parser.get_method(), self.url, parser.get_http_version().encode())]
        lines += [b"%s: %s\r\n" % header for header in map(_without_upgrade, headers) if header is not None]
        self._upgrade = [header for header in headers if header[0] == b"upgrade"]
        self.parser.feed_data(b"".join([*lines, b"\r\n"]))

    def _count_body(self, count: int) -> None:
        """Count received bytes of a body, and reject the request above the limit."""
        self._body_bytes += count
        self.fast_routes.unfinished_bytes += count
        if (
            self.fast_routes.unfinished_bytes > self.fast_routes.max_unfinished_bytes
            and not self.transport.is_closing()
        ):
            self.reject(503, _FULL, b"retry-after: 1\r\n")

    def _release_body(self) -> None:
        self.fast_routes.unfinished_bytes -= self._body_bytes
        self._body_bytes = 0

    def check_timeouts(self, now: float) -> None:
        """Close the connection if it timed out."""
        silent = now - self._since
        if self._reading:
            allowed = self.fast_routes.stalled_seconds + (0 if self._in_head else self._received / MIN_BYTES_PER_SECOND)
            if silent >= allowed and not self.transport.is_closing():
                self.reject(408, _LATE)
        elif self.flow.write_paused:
            self._check_writes(now)
        elif silent >= IDLE_SECONDS and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()

    def _check_writes(self, now: float) -> None:
        """Abort if the client has stopped reading: it occupies a slot, an engine and a connection."""
        unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent:
            self._unsent, self._unsent_since = unsent, now
        elif now - self._unsent_since >= self.fast_routes.stalled_seconds:
            self.transport.abort()

    def reject(self, status: int, body: bytes, headers: bytes = b"") -> None:
        """Respond to an incomplete request, and close the connection."""
        cycle, self._incoming = self.cycle, None
        self._release_body()
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                return self.transport.close()
        self.transport.write(
            b"%scontent-type: application/json\r\ncontent-length: %d\r\n%sconnection: close\r\n\r\n%s"
            % (STATUS_LINES[status], len(body), headers, body)
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
        found = self.fast_routes.find(self.url) if self.parser.get_method() == b"POST" else None
        draining = self.fast_routes.tracker.draining
        if found is None or not self._is_fast():
            super().on_headers_complete()
            self.cycle.keep_alive = self.cycle.keep_alive and not draining
            return
        route, path_params = found
        self.cycle = self._incoming = request = FastRequest(
            self, self.fast_routes.tracker, route, path_params, self.parser.should_keep_alive() and not draining
        )
        request.admit()

    def _is_fast(self) -> bool:
        if self.expect_100_continue or (self.cycle is not None and not self.cycle.response_complete):
            return False
        if self.parser.get_http_version() != "1.1":
            return False
        for name, value in self.headers:
            if name == b"content-length":
                return len(value) < 8 and int(value) <= MAX_BODY_BYTES
        return False

    def on_body(self, body: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._incoming is None:
            if not self.cycle.response_complete:
                self._count_body(len(body))
            return super().on_body(body)
        if self._incoming.parts is not None:
            self._incoming.parts.append(body)
            self._count_body(len(body))

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._reading = False
        self._release_body()
        request, self._incoming = self._incoming, None
        if self.transport.is_closing():
            return
        if request is None:
            return super().on_message_complete()
        self._request = request
        request.start()

    def on_response_complete(self) -> None:
        """Unlike uvicorn, sets no timer: one timer watches all connections."""
        self._request = None
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self._since = self.loop.time()
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)


def _without_upgrade(header: tuple[bytes, bytes]) -> tuple[bytes, bytes] | None:
    """The header without the request for an upgrade; None if nothing is left."""
    name, value = header
    if name in (b"upgrade", b"http2-settings"):
        return None
    if name != b"connection":
        return header
    options = [option.strip() for option in value.split(b",")]
    return name, b", ".join(option for option in options if option.lower() not in (b"upgrade", b"http2-settings"))
