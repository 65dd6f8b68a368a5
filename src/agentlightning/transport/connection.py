"""One connection to a server: it writes requests and reads answers, one after the other.

Responsible for HTTP/1.1 as bytes: heads, bodies of a known length, in chunks or up to the end of the connection, and
for not reading faster than the body is taken. Made and kept by `pool`, which also watches for silence.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self, cast

import httptools

from agentlightning.transport.base import Headers, TransportError

MAX_HEAD_BYTES: Final = 65536
MAX_WHOLE_BYTES: Final = 256 * 1024 * 1024
"""Of a body that is read in one piece."""
STALE_SECONDS: Final = 1.0
"""A connection that is closed so soon after a request was written had been closed before. Later, the server has heard
it, and may have worked on it."""
HIGH_WATER: Final = 262144
"""Bytes of a body that nobody has taken; above it the server is made to wait."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a connection leads."""

    secure: bool
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{host}:{self.port}"


class Connection(asyncio.Protocol):
    """A connection and the answer that is read on it, if any."""

    __slots__ = (
        "_answer",
        "_head_bytes",
        "_parser",
        "_pool",
        "_transport",
        "idle_since",
        "last_heard",
        "origin",
        "timeout_seconds",
    )

    def __init__(self, pool: Keeper, origin: Origin) -> None:
        self.origin = origin
        self.idle_since = 0.0
        self.last_heard = 0.0
        self.timeout_seconds = 0.0
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._answer: HttpAnswer | None = None
        self._head_bytes = 0
        self._transport: asyncio.Transport | None = None

    # -- for the pool --------------------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def waiting(self) -> bool:
        """Whether it is the server's turn to say something."""
        return self._answer is not None and not self._answer.held

    def ask(
        self, request: bytes, timeout_seconds: float, now: float, on_end: Callable[[], None] | None = None
    ) -> HttpAnswer:
        """Write a request. The answer's head is there when its `head` is done; it is whole, or has failed, when
        `on_end` is called."""
        assert self._transport is not None
        assert self._answer is None
        self.timeout_seconds, self.last_heard, self._head_bytes = timeout_seconds, now, 0
        answer = self._answer = HttpAnswer(self, on_end)
        self._transport.write(request)
        return answer

    def abort(self, error: TransportError | None = None) -> None:
        """Close at once; who reads the answer is told."""
        answer, self._answer = self._answer, None
        if self._transport is not None:
            self._transport.abort()
        if answer is not None:
            answer.fail(error or TransportError("the call was given up", "closed"))

    # -- for the answer ------------------------------------------------------------------------------------------

    def hold(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def go_on(self) -> None:
        self.last_heard = self._pool.now()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # -- what asyncio calls --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # nobody asked for anything
            return self.abort()
        self.last_heard = self._pool.now()
        answer.began = True
        if not answer.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            return self.abort(TransportError(f"{self.origin} does not answer in HTTP: {error}", "protocol"))
        if self._head_bytes > MAX_HEAD_BYTES and not answer.status:
            self.abort(
                TransportError(
                    f"the head of the answer of {self.origin} has more than {MAX_HEAD_BYTES} bytes", "protocol"
                )
            )
        elif answer.done:
            self._release(answer)
            answer.ended()
        elif answer.size > HIGH_WATER and not answer.held:
            answer.grew()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._pool.lost(self)
        answer, self._answer = self._answer, None
        if answer is None or answer.done:
            return
        if answer.until_end and exc is None:
            answer.done = True
            return answer.ended()
        cause = f": {exc}" if exc else ""
        answer.stale = not answer.began and self._pool.now() - self.last_heard < STALE_SECONDS
        where = "before it answered" if not answer.began else "in the middle of its answer"
        answer.fail(TransportError(f"{self.origin} closed the connection {where}{cause}", "closed"))

    def _release(self, answer: HttpAnswer) -> None:
        self._answer = None
        if answer.held:
            answer.held = False
            self.go_on()
        if answer.keep_alive and self.open:
            self._pool.idle(self)
        elif self._transport is not None:
            self._transport.close()

    # -- what the parser calls -----------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if (answer := self._answer) is not None and not answer.done:
            answer.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        answer, status = self._answer, self._parser.get_status_code()
        if answer is None:
            return
        if answer.done:  # another answer than the one that was asked for
            answer.keep_alive = False
            return
        if status < 200:  # 100 Continue and its like: the answer comes after it
            answer.headers.clear()
            return
        answer.status, answer.keep_alive = status, self._parser.should_keep_alive()
        known = {name for name, _ in answer.headers if name in (b"content-length", b"transfer-encoding")}
        answer.until_end = not known and status not in (204, 304)
        answer.head_came()

    def on_body(self, body: bytes) -> None:
        if (answer := self._answer) is not None and answer.status and not answer.done:
            answer.take(body)

    def on_message_complete(self) -> None:
        if (answer := self._answer) is not None and answer.status and not answer.done:
            answer.done = True


class Keeper(Protocol):
    """What a connection needs of its pool."""

    def now(self) -> float: ...

    def idle(self, connection: Connection) -> None:
        """It may be used again."""
        ...

    def lost(self, connection: Connection) -> None:
        """It is gone."""
        ...


class HttpAnswer:
    """An answer as it comes in."""

    __slots__ = (
        "_connection",
        "_head",
        "_on_end",
        "_parts",
        "_waiter",
        "began",
        "done",
        "error",
        "headers",
        "held",
        "keep_alive",
        "size",
        "stale",
        "status",
        "until_end",
    )

    def __init__(self, connection: Connection, on_end: Callable[[], None] | None = None) -> None:
        self.status: int = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.error: TransportError | None = None
        self.began = False
        """A byte of it has come."""
        self.done = False
        self.stale = False
        """See `Arriving.stale`."""
        self.keep_alive = False
        self.until_end = False
        """The body ends with the connection."""
        self.held = False
        """The server waits until some of the body is taken."""
        self.size = 0
        """Bytes of the body that nobody has taken yet."""
        self._connection = connection
        self._parts: deque[bytes] = deque()
        self._head: asyncio.Future[None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._on_end = on_end
        """Somebody waits for the whole of it, and takes nothing before."""

    async def head(self) -> None:
        """Wait for status and headers. Raises TransportError."""
        if self.status:
            return
        if self.error is not None:
            raise self.error
        self._head = asyncio.get_running_loop().create_future()
        await self._head

    def whole(self) -> bytes:
        """The body of an answer that has ended."""
        return self._pop() if len(self._parts) == 1 else b"".join(self._parts)

    async def read(self) -> bytes:
        if self.done and self.error is None and len(self._parts) == 1:
            return self._pop()
        parts, size = [], 0
        async for part in self.chunks():
            parts.append(part)
            size += len(part)
            if size > MAX_WHOLE_BYTES:
                error = _too_long()
                self._connection.abort(error)
                raise error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def chunks(self) -> AsyncIterator[bytes]:
        while True:
            while self._parts:
                yield self._pop()
            if self.error is not None:
                raise self.error
            if self.done:
                return
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _pop(self) -> bytes:
        part = self._parts.popleft()
        self.size -= len(part)
        if self.held and self.size <= HIGH_WATER // 2:
            self.held = False
            self._connection.go_on()
        return part

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()

    def drop(self) -> None:
        """Nobody wants the rest."""
        self._on_end = None
        self._parts.clear()
        self.size = 0
        if not self.done and self.error is None:
            self._connection.abort()

    # -- for the connection --------------------------------------------------------------------------------------

    def head_came(self) -> None:
        if self._head is not None and not self._head.done():
            self._head.set_result(None)

    def take(self, body: bytes) -> None:
        self._parts.append(body)
        self.size += len(body)
        self.wake()

    def grew(self) -> None:
        """More has come than is being taken."""
        if self._on_end is None:
            self.held = True
            self._connection.hold()
        elif self.size > MAX_WHOLE_BYTES:
            self._connection.abort(_too_long())

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def ended(self) -> None:
        """It is whole, or never will be."""
        self.wake()
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()

    def fail(self, error: TransportError) -> None:
        self.error = error
        if self._head is not None and not self._head.done():
            self._head.set_exception(error)
        self.ended()


def _too_long() -> TransportError:
    return TransportError(f"the answer is longer than {MAX_WHOLE_BYTES} bytes", "protocol")


def request_bytes(method: str, target: bytes, host: bytes, headers: Headers, body: bytes) -> bytes:
    """A request as it is written; `host` may bring lines of its own with it. Raises TransportError where a header would
    be more than one line."""
    head = head_bytes(method, target, host, headers)
    if body or method not in ("GET", "HEAD"):
        head += b"content-length: %d\r\n" % len(body)
    return b"%s\r\n%s" % (head, body)


def head_bytes(method: str, target: bytes, host: bytes, headers: Headers) -> bytes:
    """Of a request, what comes before the length of its body."""
    lines = [b"%s %s HTTP/1.1\r\nhost: %s" % (method.encode(), target, host)]
    lines += [b"%s: %s" % header for header in headers]
    head = b"\r\n".join(lines)
    many = len(lines) + host.count(b"\n")
    if head.count(b"\n") != many or head.count(b"\r") != many:
        names = ", ".join(name.decode("latin-1") for name, value in headers if b"\r" in value or b"\n" in value)
        raise TransportError(f"a header holds a line break: {names}", "protocol")
    return head + b"\r\n"
