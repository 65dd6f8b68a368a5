"""An HTTP/1.1 client over asyncio and httptools: a pool of kept-alive connections for each origin, with timeouts.

A connection sends requests and parses their responses, one after the other. It handles bodies with Content-Length, in
chunks or up to the end of the connection, and pauses reading while the consumer is slower than the server. One timer
checks all calls in flight for silent servers, since a timer for each call would cost as much as the call. Choice of the
server, retries and the meaning of responses are left to the users.
"""

from __future__ import annotations

import asyncio
import math
import ssl
import time
import zlib
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, suppress
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, Final, Self, cast
from urllib.parse import urlsplit

import httptools

from agentlightning.transport.base import MAX_HEAD_BYTES, Headers, Origin, Reason, TransportError, request_bytes
from agentlightning.transport.options import ConnectOptions, Proxy, ssl_context, tls_error

IDLE_SECONDS: Final = 55.0
"""Idle connections are closed after this time; many servers close them after a minute."""
MAX_IDLE: Final = 1024
"""Idle connections to one origin."""
MAX_BODY_BYTES: Final = 256 * 1024 * 1024
"""Limit for a body that is read as a whole."""
STALE_SECONDS: Final = 1.0
"""A connection that closes so soon after a request was idle too long. Later, the server may have received the request
and worked on it."""
MAX_INFLATED_BYTES: Final = 64 * 1024 * 1024
"""Limit for what one read of a compressed body may become."""
HIGH_WATER_BYTES: Final = 262144
"""Unread bytes of a body above which reading pauses."""

# -- the pool ----------------------------------------------------------------------------------------------------------


class Transport:
    """Sends requests over kept-alive connections of the event loop that uses it first; close it when done. Without
    `options` it uses the proxies of the environment. Raises ConfigError for invalid options."""

    def __init__(self, options: ConnectOptions | None = None) -> None:
        self._options = ConnectOptions.create() if options is None else options
        self._idle: defaultdict[Origin, deque[Connection]] = defaultdict(deque)
        self._busy: set[Connection] = set()
        self._parsed_url = lru_cache(1024)(self._parse_url)
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def send(
        self,
        method: str,
        url: str,
        headers: Headers,
        body: bytes = b"",
        *,
        connect_seconds: float = 10.0,
        timeout_seconds: float = 600.0,
    ) -> Response:
        """Send a request, and return once the head of its response arrived. `timeout_seconds` limits the time between
        reads, not the total.

        A kept-alive connection that turns out to be closed before the first byte of the response is replaced; nothing
        else is sent twice. Raises TransportError.
        """
        origin, target, own = self._parsed_url(url)
        request = request_bytes(method, target, [*own, *headers], body)
        for kept in (self._take_idle(origin), None):
            connection = kept or await self._connect(origin, connect_seconds)
            response = connection.send(request, timeout_seconds)
            self._busy.add(connection)
            self._schedule_check(connection.last_data_at + min(timeout_seconds, IDLE_SECONDS))
            try:
                await response.wait_for_head()
                return response
            except TransportError:
                if kept is None or not response.stale or self._closed:
                    raise
            except asyncio.CancelledError:
                connection.abort()
                raise
        raise AssertionError("a new connection gives a response, or raises")

    async def close(self) -> None:
        """Close every connection; calls in flight fail."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for connection in self._connections():
            connection.abort(TransportError("the transport was closed", "closed"))
        self._idle.clear()
        await asyncio.sleep(0)  # The connections close in the next iteration of the loop.

    # -- connections ---------------------------------------------------------------------------------------------

    def _take_idle(self, origin: Origin) -> Connection | None:
        """The idle connection that was used last, which is most likely open."""
        idle = self._idle[origin]
        while idle:
            connection = idle.pop()
            if connection.is_open and time.monotonic() < connection.deadline:
                return connection
            connection.abort()
        return None

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl_context(self._options.ca_file)

    async def _connect(self, origin: Origin, seconds: float) -> Connection:
        """A new connection to a server. `seconds` limits the time until a request can be sent. Raises
        TransportError."""
        if self._closed:
            raise TransportError("the transport was closed", "closed")
        loop, proxy = asyncio.get_running_loop(), self._options.proxy(origin)
        tunnel, connection = Tunnel(self, proxy.origin) if proxy and origin.secure else None, Connection(self, origin)
        via, server, opened = (
            f" through the proxy {proxy}" if proxy else "",
            proxy.origin if proxy else origin,
            tunnel or connection,
        )
        try:
            async with asyncio.timeout(seconds):
                with ExitStack() as undo:
                    undo.callback(opened.abort)
                    tls: dict[str, Any] = {"ssl": self._tls, "server_hostname": server.host} if server.secure else {}
                    await loop.create_connection(lambda: opened, server.host, server.port, **tls)
                    if proxy and tunnel:
                        plain, server = await tunnel.open(proxy, origin), origin
                        secured = await loop.start_tls(plain, connection, self._tls, server_hostname=origin.host)
                        if secured is None or secured.is_closing():
                            raise TransportError(f"{origin} closed the connection after the TLS handshake", "connect")
                        connection.connection_made(secured)  # `start_tls` does not call it.
                    undo.pop_all()
                    return connection
        except TimeoutError:
            raise TransportError(f"{origin} accepted no connection{via} within {seconds:g} s", "connect") from None
        except ssl.SSLError as error:
            raise tls_error(server, error) from error
        except OSError as error:
            raise TransportError(f"{origin} cannot be reached{via}: {error}", "connect") from error

    def _connections(self) -> list[Connection]:
        return [*self._busy, *chain.from_iterable(self._idle.values())]

    def release(self, connection: Connection) -> None:
        """Take back a connection that can be reused."""
        self._busy.discard(connection)
        idle = self._idle[connection.origin]
        if len(idle) >= MAX_IDLE or self._closed:
            return connection.abort()
        connection.last_data_at, connection.timeout_seconds = time.monotonic(), IDLE_SECONDS
        idle.append(connection)

    def remove(self, connection: Connection) -> None:
        """Remove a closed connection."""
        self._busy.discard(connection)
        with suppress(ValueError):  # It was in use.
            self._idle[connection.origin].remove(connection)

    # -- timeouts ------------------------------------------------------------------------------------------------

    def _schedule_check(self, until: float) -> None:
        """Check all connections at `until`, or before."""
        timer = self._timer
        if timer is None or timer.when() > until:
            if timer is not None:
                timer.cancel()
            self._timer = asyncio.get_running_loop().call_at(until, self._check_timeouts)

    def _check_timeouts(self) -> None:
        self._timer, now = None, time.monotonic()
        for connection in self._connections():
            if connection.deadline <= now:
                message = f"{connection.origin} sent nothing for {connection.timeout_seconds:g} s"
                connection.abort(TransportError(message, "timeout"))
        if ends := [end for connection in self._connections() if (end := connection.deadline) > now]:
            self._schedule_check(max(now + 0.01, min(now + IDLE_SECONDS, *ends)))

    # -- URLs ----------------------------------------------------------------------------------------------------

    def _parse_url(self, url: str) -> tuple[Origin, bytes, Headers]:
        """(origin, request target, the Host header). For a proxy without a tunnel the target is the whole URL, and the
        proxy's headers follow the Host header. Raises TransportError for an invalid URL."""
        try:
            parts = urlsplit(url)
            origin = Origin.of(parts)
        except ValueError as error:
            raise TransportError(f"invalid URL: {error}", "protocol") from None
        if parts.scheme != origin.scheme or not origin.host or not url.isascii() or not url.isprintable():
            raise TransportError(f"{parts.scheme}://{parts.hostname} is no valid URL", "protocol")
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        host = parts.netloc.rpartition("@")[2]
        headers = [(b"host", host.encode())]
        if not origin.secure and (proxy := self._options.proxy(origin)) is not None:
            target = f"http://{host}{target}"
            headers += proxy.headers
        return origin, target.encode(), headers


# -- connections -------------------------------------------------------------------------------------------------------


class Connection(asyncio.Protocol):
    """A connection, and the response in progress on it, if any."""

    last_data_at = 0.0
    """When data came last, or it was asked for any, or became idle."""
    timeout_seconds = 0.0
    _response: Response | None = None
    _head_bytes = 0
    _transport: asyncio.Transport | None = None

    def __init__(self, pool: Transport, origin: Origin) -> None:
        self.origin, self._owner = origin, pool
        self._parser = httptools.HttpResponseParser(self)

    # -- for the pool --------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def deadline(self) -> float:
        """When it is closed unless data comes; while reading is paused, the earliest time."""
        last = time.monotonic() if self._response and self._response.paused else self.last_data_at
        return last + self.timeout_seconds

    def send(self, request: bytes, timeout_seconds: float) -> Response:
        """Write a request."""
        assert self._transport is not None
        assert self._response is None
        self.timeout_seconds, self.last_data_at, self._head_bytes = timeout_seconds, time.monotonic(), 0
        answer = self._response = Response(self)
        self._transport.write(request)
        return answer

    def abort(self, error: TransportError | None = None) -> None:
        """Close at once; the response in progress fails."""
        answer, self._response = self._response, None
        if self._transport is not None:
            self._transport.abort()
        if answer is not None:
            answer.fail(error or TransportError("the call was cancelled", "closed"))

    # -- for the response ----------------------------------------------------------------------------------------

    def pause(self, response: Response, paused: bool) -> None:
        """Stop to read, or go on."""
        if response.paused is not paused:
            response.paused, self.last_data_at = paused, time.monotonic()
            if self._transport is not None and self.is_open:
                (self._transport.pause_reading if paused else self._transport.resume_reading)()

    # -- called by asyncio ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        answer = self._response
        if answer is None:  # data without a request
            return self.abort()
        self.last_data_at = time.monotonic()
        answer.has_data = True
        if not answer.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            return self.abort(TransportError(f"{self.origin} sent an invalid HTTP response: {error}", "protocol"))
        if self._head_bytes > MAX_HEAD_BYTES and not answer.status:
            self.abort(TransportError(f"{self.origin} sent a head of more than {MAX_HEAD_BYTES} bytes", "protocol"))
        elif answer.is_complete:
            self._release(answer)
        elif len(answer.unread) > HIGH_WATER_BYTES:
            self.pause(answer, True)
        if not answer.gathers or answer.is_complete:
            answer.changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._owner.remove(self)
        answer, self._response = self._response, None
        if answer is None or answer.is_complete:
            return
        if answer.until_end and exc is None:
            answer.is_complete = True
            return answer.changed.set()
        cause = f": {exc}" if exc else ""
        answer.stale = not answer.has_data and time.monotonic() - self.last_data_at < STALE_SECONDS
        when = "before its response" if not answer.has_data else "in the middle of its response"
        answer.fail(TransportError(f"{self.origin} closed the connection {when}{cause}", "closed"))

    def _release(self, answer: Response) -> None:
        self._response = None
        self.pause(answer, False)
        if answer.keep_alive and self.is_open:
            self._owner.release(self)
        elif self._transport is not None:
            self._transport.close()

    # -- called by the parser ------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if (answer := self._response) is not None and not answer.is_complete:
            answer.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        answer, status = self._response, self._parser.get_status_code()
        if answer is None:
            return
        if answer.is_complete:  # a second response to one request
            answer.keep_alive = False
            return
        if status < 200:  # an interim response, such as 100 Continue
            answer.headers.clear()
            return
        answer.status, answer.keep_alive = status, self._parser.should_keep_alive()
        headers = dict(answer.headers)
        has_length = b"content-length" in headers or b"transfer-encoding" in headers
        answer.until_end = not has_length and status not in (204, 304)
        coding = headers.get(b"content-encoding", b"").lower()
        if coding in (b"gzip", b"x-gzip", b"deflate"):
            answer.inflate = _inflater()
        elif coding not in (b"", b"identity"):
            message = f"{self.origin} sent the content-encoding {coding.decode('latin-1')!r}, which was not requested"
            self.abort(TransportError(message, "protocol"))

    def on_body(self, body: bytes) -> None:
        if (answer := self._response) is None or not answer.status or answer.is_complete:
            return
        try:
            answer.unread += answer.inflate(body) if answer.inflate else body
        except zlib.error as error:
            self.abort(TransportError(f"{self.origin} sent an invalid compressed response: {error}", "protocol"))

    def on_message_complete(self) -> None:
        if (answer := self._response) is not None and answer.status and not answer.is_complete:
            answer.is_complete = True


class Tunnel(Connection):
    """A connection to a proxy, until that has connected it to a server."""

    status_text = b""

    def on_status(self, text: bytes) -> None:
        self.status_text = text

    def _release(self, answer: Response) -> None:
        """Nothing: its response has no body, whatever the headers say."""

    async def open(self, proxy: Proxy, origin: Origin) -> asyncio.Transport:
        """The connection to the server. Raises TransportError if the proxy opens none."""
        authority, reason = origin.authority.encode(), cast("Reason", "connect")
        request = request_bytes("CONNECT", authority, [(b"host", authority), *proxy.headers])
        answer = self.send(request, math.inf)
        try:
            await answer.wait_for_head()
        except TransportError as error:
            reason = "protocol" if error.reason == "protocol" else reason
            raise TransportError(f"{origin}: the proxy {error}", reason) from None
        status = answer.status
        if self._transport is not None and status < 300 and not answer.unread:
            return self._transport
        if status < 300:
            problem, reason = "sent an invalid HTTP response", "protocol"
        elif status in (401, 407):  # Some proxies send 401 for wrong credentials.
            problem, reason = "requires credentials, or other ones: http://USER:PASSWORD@HOST:PORT", "proxy"
        else:
            problem = f"opened no connection: status {status} {self.status_text.decode('latin-1')[:200]}".rstrip()
            reason = (
                "connect" if status in (500, 502, 503, 504) else "proxy"
            )  # With these it could not reach the server.
        raise TransportError(f"{origin}: the proxy {proxy} {problem}", reason)


class Response:
    """The response to one request while it arrives, and after. Use as `async with`; an early exit drops the
    connection."""

    status = 0
    error: TransportError | None = None
    has_data = False
    """Whether a byte of it arrived."""
    inflate: Callable[[bytes], bytes] | None = None
    """Decompresses the next part of the body; some servers compress although `identity` was requested."""
    is_complete = False
    stale = False
    """Whether it failed because the idle connection was closed already, so that the request never arrived."""
    keep_alive = False
    until_end = False
    """Whether the end of the connection ends the body."""
    paused = False
    """Whether reading is paused until some of the body is consumed."""
    gathers = False
    """Whether a part that has come waits for more."""

    def __init__(self, connection: Connection) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.unread = bytearray()
        """What has arrived of the body since the last time."""
        self.changed = asyncio.Event()
        """Set when more of it has arrived, or it has failed."""
        self._connection = connection

    async def wait_for_head(self) -> None:
        """Wait for status and headers. Raises TransportError."""
        while not self.status:
            await self._wait()

    async def read(self) -> bytes:
        """Read the whole body. Raises TransportError if it breaks off."""
        if self.is_complete and self.error is None:
            return self._take()
        body = bytearray()
        async for part in self.chunks():
            body += part
            if len(body) > MAX_BODY_BYTES:
                error = TransportError(f"the response is longer than {MAX_BODY_BYTES} bytes", "protocol")
                self._connection.abort(error)
                raise error
        return bytes(body)

    async def chunks(self, gather_seconds: float = 0.0) -> AsyncIterator[bytes]:
        """The body as it arrives; the next part gathers for `gather_seconds`, unless it is the last. Raises
        TransportError if the body breaks off."""
        loop = asyncio.get_running_loop()
        while True:
            if self.unread:
                body = self._take()
                if gather_seconds and not self.is_complete:
                    self.gathers = True
                    loop.call_later(gather_seconds, self._end_gathering)
                yield body
                while self.gathers and not self.is_complete and self.error is None:
                    await self._wait()
            elif self.is_complete and self.error is None:
                return
            else:
                await self._wait()

    async def _wait(self) -> None:
        """Until more of it has arrived. Raises TransportError once it has failed."""
        if self.error is not None:
            raise self.error
        self.changed.clear()
        await self.changed.wait()

    def _end_gathering(self) -> None:
        self.gathers = False
        self.changed.set()

    def _take(self) -> bytes:
        body = bytes(self.unread)
        self.unread.clear()
        self._connection.pause(self, False)
        return body

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Discard the rest, and close the connection if the response is not complete."""
        self.unread.clear()
        if not self.is_complete and self.error is None:
            self._connection.abort()

    # -- for the connection --------------------------------------------------------------------------------------

    def fail(self, error: TransportError) -> None:
        self.error = error
        self.changed.set()


def _inflater() -> Callable[[bytes], bytes]:
    """Decompresses a body part by part. Its function raises zlib.error."""
    decompressor: Any = None

    def inflate(data: bytes) -> bytes:
        nonlocal decompressor
        if decompressor is None:  # gzip or zlib; some servers send deflate without the header that it should have
            has_header = data[0] == 0x1F or data[0] & 0x0F == 8
            decompressor = zlib.decompressobj(wbits=47 if has_header else -15)
        text: bytes = decompressor.decompress(data, MAX_INFLATED_BYTES)
        if decompressor.unconsumed_tail:
            raise zlib.error(f"it becomes more than {MAX_INFLATED_BYTES} bytes at once")
        return text

    return inflate
