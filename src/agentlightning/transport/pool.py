"""A pool of kept-alive connections for each origin, with timeouts.

One timer checks all calls in flight for silent servers, since a timer for each call would cost as much as the call.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Final
from urllib.parse import urlsplit

from agentlightning.transport.base import Headers, TransportError
from agentlightning.transport.connection import Connection, HttpResponse, Origin
from agentlightning.transport.connector import ConnectOptions, Connector

# -- http writer -----------------------------------------------------------------------------------------------------

# Serializes HTTP/1.1 requests to bytes, and rejects headers that would inject further lines.


def request_bytes(method: str, target: bytes, host: bytes, headers: Headers, body: bytes) -> bytes:
    """The bytes of a whole request. `host` may include further header lines. Raises TransportError if a header contains
    a line break."""
    lines = [b"%s %s HTTP/1.1\r\nhost: %s" % (method.encode(), target, host)]
    lines += [b"%s: %s" % header for header in headers]
    head = b"\r\n".join(lines)
    num_breaks = len(lines) + host.count(b"\n")
    if head.count(b"\n") != num_breaks or head.count(b"\r") != num_breaks:
        names = ", ".join(name.decode("latin-1") for name, value in headers if b"\r" in value or b"\n" in value)
        raise TransportError(f"a header holds a line break: {names}", "protocol")
    if body or method not in ("GET", "HEAD"):
        head += b"\r\ncontent-length: %d" % len(body)
    return b"%s\r\n\r\n%s" % (head, body)


IDLE_SECONDS: Final = 55.0
"""Idle connections are closed after this time; many servers close them after a minute."""
MAX_IDLE: Final = 1024
"""Idle connections to one origin."""
MAX_CACHED_URLS: Final = 1024


class ConnectionPool:
    """A `Transport` over asyncio and httptools."""

    def __init__(self, options: ConnectOptions) -> None:
        self._connector = Connector(options)
        self._idle: dict[Origin, deque[Connection]] = {}
        self._busy: set[Connection] = set()
        self._parsed_urls: dict[str, tuple[Origin, bytes, bytes]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def now(self) -> float:
        """The time of the event loop's clock, several times faster than `loop.time()`."""
        return time.monotonic()

    async def send(
        self,
        method: str,
        url: str,
        headers: Headers,
        body: bytes = b"",
        *,
        connect_seconds: float = 10.0,
        timeout_seconds: float = 600.0,
    ) -> HttpResponse:
        """See `Transport.send`."""
        origin, target, host = self._parsed_urls.get(url) or self._parse_url(url)
        request = request_bytes(method, target, host, headers, body)
        if (connection := self._take_idle(origin)) is not None:
            answer = await self._send_on(connection, request, timeout_seconds)
            if answer is not None:
                return answer
        connection = await self._connect(origin, connect_seconds)
        answer = await self._send_on(connection, request, timeout_seconds, fresh=True)
        assert answer is not None
        return answer

    async def close(self) -> None:
        """Close every connection; calls in flight fail."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for connection in [*self._busy, *(each for idle in self._idle.values() for each in idle)]:
            connection.abort(TransportError("the transport was closed", "closed"))
        self._idle.clear()
        await asyncio.sleep(0)  # The connections close in the next iteration of the loop.

    async def _send_on(
        self, connection: Connection, request: bytes, timeout_seconds: float, *, fresh: bool = False
    ) -> HttpResponse | None:
        """None if a kept-alive connection turned out to be closed."""
        now = self.now()
        answer = connection.send(request, timeout_seconds, now)
        self._busy.add(connection)
        self._schedule_check(now + min(timeout_seconds, IDLE_SECONDS))
        try:
            await answer.wait_for_head()
        except TransportError:
            if fresh or not answer.stale or self._closed:
                raise
            return None
        except asyncio.CancelledError:
            connection.abort()
            raise
        return answer

    # -- connections ---------------------------------------------------------------------------------------------

    def _take_idle(self, origin: Origin) -> Connection | None:
        """The idle connection that was used last, which is most likely open."""
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if connection.is_open and self.now() - connection.idle_since < IDLE_SECONDS:
                return connection
            connection.abort()
        return None

    async def _connect(self, origin: Origin, seconds: float) -> Connection:
        if self._closed:
            raise TransportError("the transport was closed", "closed")
        return await self._connector.connect(origin, lambda: Connection(self, origin), seconds)

    def release(self, connection: Connection) -> None:
        """Take back a connection that can be reused."""
        self._busy.discard(connection)
        idle = self._idle.get(connection.origin)
        if idle is None:
            idle = self._idle[connection.origin] = deque()
        if len(idle) >= MAX_IDLE or self._closed:
            return connection.abort()
        connection.idle_since = self.now()
        idle.append(connection)

    def remove(self, connection: Connection) -> None:
        """Remove a closed connection."""
        self._busy.discard(connection)
        idle = self._idle.get(connection.origin)
        if idle and connection in idle:
            idle.remove(connection)

    # -- timeouts ------------------------------------------------------------------------------------------------

    def _schedule_check(self, until: float) -> None:
        """Check all connections at `until`, or before."""
        timer = self._timer
        if timer is None or timer.when() > until:
            if timer is not None:
                timer.cancel()
            self._timer = asyncio.get_running_loop().call_at(until, self._check_timeouts)

    def _check_timeouts(self) -> None:
        self._timer, now = None, self.now()
        for connection in list(self._busy):
            silent = now - connection.last_data_at
            if connection.awaits_data and silent >= connection.timeout_seconds:
                message = f"{connection.origin} sent nothing for {connection.timeout_seconds:g} s"
                connection.abort(TransportError(message, "timeout"))
        for idle in self._idle.values():
            while idle and now - idle[0].idle_since >= IDLE_SECONDS:
                idle.popleft().abort()
        ends = [
            connection.last_data_at + connection.timeout_seconds for connection in self._busy if connection.awaits_data
        ]
        ends += [idle[0].idle_since + IDLE_SECONDS for idle in self._idle.values() if idle]
        if self._busy or ends:
            self._schedule_check(max(now + 0.01, min((now + IDLE_SECONDS, *ends))))

    # -- URLs ----------------------------------------------------------------------------------------------------

    def _parse_url(self, url: str) -> tuple[Origin, bytes, bytes]:
        """(origin, request target, Host header). For a proxy without a tunnel the target is the whole URL, and the
        proxy's headers follow the Host header. Raises TransportError for an invalid URL."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise TransportError(f"invalid URL: {error}", "protocol") from None
        secure = parts.scheme == "https"
        if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii() or not url.isprintable():
            raise TransportError(f"{parts.scheme}://{parts.hostname} is no valid URL", "protocol")
        origin = Origin(secure, parts.hostname, port or (443 if secure else 80))
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        host = parts.netloc.rpartition("@")[2]
        proxy_headers = b""
        if not secure and (proxy := self._connector.proxy(origin)) is not None:
            target = f"http://{host}{target}"
            proxy_headers = b"".join(b"\r\n%s: %s" % header for header in proxy.headers)
        if len(self._parsed_urls) >= MAX_CACHED_URLS:
            self._parsed_urls.clear()
        self._parsed_urls[url] = parsed = (origin, target.encode(), host.encode() + proxy_headers)
        return parsed
