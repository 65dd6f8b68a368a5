"""uvicorn's HTTP protocol with upload limits and timeouts for slow clients.

Idle connections are closed; a request that stalls gets a 408, a client that no longer reads its response is cut off.
Incomplete bodies share one size limit; the rest of a body whose request was answered already is thrown away. An
`Upgrade` is ignored, as HTTP allows: the request is served in HTTP/1.1, with its own body.

Only what uvicorn's protocol shares with asyncio and the parser is overridden or called, no private method.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, Final, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

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

    def __init__(self, stalled_seconds: float, max_unfinished_bytes: int) -> None:
        self.stalled_seconds = stalled_seconds
        self.max_unfinished_bytes = max_unfinished_bytes
        self.unfinished_bytes = 0
        """Size of all incomplete bodies."""
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, connections: Collection[Any]) -> None:
        """Check for timeouts regularly while there are connections."""
        if self._timer is None:
            seconds = min(5.0, self.stalled_seconds / 4)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._check_timeouts, connections)

    def _check_timeouts(self, connections: Collection[Any]) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for each in list(connections):
            each.check_timeouts(now)
        if connections:
            self.watch(connections)


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

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self.bounds.watch(self.connections)

    def connection_lost(self, exc: Exception | None) -> None:
        self._release_body()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        """Does nothing: one timer watches all connections."""

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
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        if cycle is not None and cycle.response_started and not (cycle.response_complete and self._in_head):
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
