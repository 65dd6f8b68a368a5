"""One HTTP/1.1 connection to a server: sends requests and parses their responses, one after the other.

Handles bodies with Content-Length, in chunks or up to the end of the connection, and pauses reading while the consumer
is slower than the server. `pool` owns the connections and enforces timeouts.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self, cast

import httptools

from agentlightning.transport.base import TransportError

MAX_HEAD_BYTES: Final = 65536
MAX_BODY_BYTES: Final = 256 * 1024 * 1024
"""Limit for a body that is read as a whole."""
STALE_SECONDS: Final = 1.0
"""A connection that closes so soon after a request was idle too long. Later, the server may have received the request
and worked on it."""
MAX_INFLATED_BYTES: Final = 64 * 1024 * 1024
"""Limit for what one read of a compressed body may become."""
HIGH_WATER_BYTES: Final = 262144
"""Unread bytes of a body above which reading pauses."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Scheme, host and port of a server."""

    secure: bool
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{host}:{self.port}"


class Connection(asyncio.Protocol):
    """A connection, and the response in progress on it, if any."""

    __slots__ = (
        "_head_bytes",
        "_owner",
        "_parser",
        "_response",
        "_transport",
        "idle_since",
        "last_data_at",
        "origin",
        "timeout_seconds",
    )

    def __init__(self, pool: ConnectionOwner, origin: Origin) -> None:
        self.origin = origin
        self.idle_since = 0.0
        self.last_data_at = 0.0
        self.timeout_seconds = 0.0
        self._owner = pool
        self._parser = httptools.HttpResponseParser(self)
        self._response: HttpResponse | None = None
        self._head_bytes = 0
        self._transport: asyncio.Transport | None = None

    # -- for the pool --------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def awaits_data(self) -> bool:
        """Whether the server has data to send."""
        return self._response is not None and not self._response.paused

    def send(self, request: bytes, timeout_seconds: float, now: float) -> HttpResponse:
        """Write a request."""
        assert self._transport is not None
        assert self._response is None
        self.timeout_seconds, self.last_data_at, self._head_bytes = timeout_seconds, now, 0
        answer = self._response = HttpResponse(self)
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

    def pause(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        self.last_data_at = self._owner.now()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # -- called by asyncio ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        answer = self._response
        if answer is None:  # data without a request
            return self.abort()
        self.last_data_at = self._owner.now()
        answer.has_data = True
        if not answer.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            return self.abort(TransportError(f"{self.origin} sent an invalid HTTP response: {error}", "protocol"))
        if self._head_bytes > MAX_HEAD_BYTES and not answer.status:
            self.abort(
                TransportError(
                    f"the response of {self.origin} has a head of more than {MAX_HEAD_BYTES} bytes", "protocol"
                )
            )
        elif answer.is_complete:
            self._release(answer)
            answer.wake()
        elif answer.buffered_bytes > HIGH_WATER_BYTES and not answer.paused:
            answer.paused = True
            self.pause()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._owner.remove(self)
        answer, self._response = self._response, None
        if answer is None or answer.is_complete:
            return
        if answer.until_end and exc is None:
            answer.is_complete = True
            return answer.wake()
        cause = f": {exc}" if exc else ""
        answer.stale = not answer.has_data and self._owner.now() - self.last_data_at < STALE_SECONDS
        when = "before its response" if not answer.has_data else "in the middle of its response"
        answer.fail(TransportError(f"{self.origin} closed the connection {when}{cause}", "closed"))

    def _release(self, answer: HttpResponse) -> None:
        self._response = None
        if answer.paused:
            answer.paused = False
            self.resume()
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
        has_length = any(name in (b"content-length", b"transfer-encoding") for name, _ in answer.headers)
        answer.until_end = not has_length and status not in (204, 304)
        coding = dict(answer.headers).get(b"content-encoding", b"").lower()
        if coding in _INFLATED:
            answer.inflate = _inflater()
        elif coding not in (b"", b"identity"):
            message = f"{self.origin} sent the content-encoding {coding.decode('latin-1')!r}, which was not requested"
            return self.abort(TransportError(message, "protocol"))
        answer.head_received()

    def on_body(self, body: bytes) -> None:
        if (answer := self._response) is None or not answer.status or answer.is_complete:
            return
        try:
            body = answer.inflate(body) if answer.inflate else body
        except zlib.error as error:
            return self.abort(TransportError(f"{self.origin} sent an invalid compressed response: {error}", "protocol"))
        if body:
            answer.feed(body)

    def on_message_complete(self) -> None:
        if (answer := self._response) is not None and answer.status and not answer.is_complete:
            answer.is_complete = True


class ConnectionOwner(Protocol):
    """The pool of a connection."""

    def now(self) -> float: ...

    def release(self, connection: Connection) -> None:
        """Take back a connection that can be reused."""
        ...

    def remove(self, connection: Connection) -> None:
        """Remove a closed connection."""
        ...


class HttpResponse:
    """A response while it arrives, and after."""

    __slots__ = (
        "_connection",
        "_head",
        "_parts",
        "_waiter",
        "buffered_bytes",
        "error",
        "has_data",
        "headers",
        "inflate",
        "is_complete",
        "keep_alive",
        "paused",
        "stale",
        "status",
        "until_end",
    )

    def __init__(self, connection: Connection) -> None:
        self.status: int = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.error: TransportError | None = None
        self.has_data = False
        """Whether a byte of it arrived."""
        self.inflate: Callable[[bytes], bytes] | None = None
        """Decompresses the next part of the body; some servers compress although `identity` was requested."""
        self.is_complete = False
        self.stale = False
        """Whether it failed because the idle connection was closed already, so that the request never arrived."""
        self.keep_alive = False
        self.until_end = False
        """Whether the end of the connection ends the body."""
        self.paused = False
        """Whether reading is paused until some of the body is consumed."""
        self.buffered_bytes = 0
        """Unread bytes of the body."""
        self._connection = connection
        self._parts: deque[bytes] = deque()
        self._head: asyncio.Future[None] | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def wait_for_head(self) -> None:
        """Wait for status and headers. Raises TransportError."""
        if self.status:
            return
        if self.error is not None:
            raise self.error
        self._head = asyncio.get_running_loop().create_future()
        await self._head

    async def read(self) -> bytes:
        if self.is_complete and self.error is None and len(self._parts) == 1:
            return self._pop()
        parts, size = [], 0
        async for part in self.chunks():
            parts.append(part)
            size += len(part)
            if size > MAX_BODY_BYTES:
                error = TransportError(f"the response is longer than {MAX_BODY_BYTES} bytes", "protocol")
                self._connection.abort(error)
                raise error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def chunks(self, gather_seconds: float = 0.0) -> AsyncIterator[bytes]:
        while True:
            if self._parts:
                yield b"".join([self._pop() for _ in range(len(self._parts))])
                if gather_seconds and not self.is_complete:
                    await self._leave_alone(gather_seconds)
                continue
            if self.error is not None:
                raise self.error
            if self.is_complete:
                return
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    async def _leave_alone(self, seconds: float) -> None:
        self._connection.pause()
        try:
            await asyncio.sleep(seconds)
        finally:
            self._connection.resume()

    def _pop(self) -> bytes:
        part = self._parts.popleft()
        self.buffered_bytes -= len(part)
        if self.paused and self.buffered_bytes <= HIGH_WATER_BYTES // 2:
            self.paused = False
            self._connection.resume()
        return part

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()

    def drop(self) -> None:
        """Discard the rest, and close the connection if the response is not complete."""
        self._parts.clear()
        self.buffered_bytes = 0
        if not self.is_complete and self.error is None:
            self._connection.abort()

    # -- for the connection --------------------------------------------------------------------------------------

    def head_received(self) -> None:
        if self._head is not None and not self._head.done():
            self._head.set_result(None)

    def feed(self, body: bytes) -> None:
        self._parts.append(body)
        self.buffered_bytes += len(body)
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: TransportError) -> None:
        self.error = error
        if self._head is not None and not self._head.done():
            self._head.set_exception(error)
        self.wake()


_INFLATED: Final = (b"gzip", b"x-gzip", b"deflate")


def _inflater() -> Callable[[bytes], bytes]:
    """Decompresses a body part by part. Its function raises zlib.error."""
    decompressor = zlib.decompressobj(wbits=47)  # gzip or zlib, by the header
    is_first = True

    def inflate(data: bytes) -> bytes:
        nonlocal decompressor, is_first
        try:
            text = decompressor.decompress(data, MAX_INFLATED_BYTES)
        except zlib.error:
            if not is_first:
                raise
            decompressor = zlib.decompressobj(wbits=-15)  # deflate without a header, as some servers send it
            text = decompressor.decompress(data, MAX_INFLATED_BYTES)
        is_first = False
        if decompressor.unconsumed_tail:
            raise zlib.error(f"it becomes more than {MAX_INFLATED_BYTES} bytes at once")
        return text

    return inflate
