"""HTTP of the gateway: request bodies, parsed and read off the event loop if they are large, and responses.

Written over ASGI without a framework for speed: every model call passes here.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeVar

import msgspec
import orjson
from starlette.types import Receive, Scope, Send

from agentlightning.gateway.errors import ApiError
from agentlightning.store.http.endpoint import RequestError, receive_body
from agentlightning.util.decompression import CodingError, decompress
from agentlightning.util.json_values import loads

T = TypeVar("T")

# -- large requests ----------------------------------------------------------------------------------------------------

# The loop serves all agents and the heartbeats of runners, so work on large requests runs in threads. Work on small
# ones runs in the loop, because a thread would cost more than it saves. A parser holds the GIL until it returns, also
# in another thread: a body of 30 MB would block the loop for 0.2 seconds. Splitting a large body into its parts is ten
# times as fast as parsing it; the parts are then parsed one by one, and the GIL is free in between.

MAX_INLINE_BYTES: Final = 8 * 1024
"""Largest request handled in the loop: reading, rendering and encoding it takes some milliseconds."""
PASSED: Final = 8
"""How many times faster a request is passed on, or shown in a span, than it is read: its size is divided by this."""

_pool: Final = ThreadPoolExecutor(4, thread_name_prefix="gateway-request")


async def offload(size: int, work: Callable[[], T]) -> T:
    """Return `work()`; in a thread if the request has more than `MAX_INLINE_BYTES`."""
    if size <= MAX_INLINE_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_pool, work)


MAX_CHUNK_BYTES: Final = 256 * 1024
"""Largest part that is parsed at once."""

_object: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_array: Final = msgspec.json.Decoder(list[msgspec.Raw])


def parse(body: bytes) -> Any:
    """Raises orjson.JSONDecodeError."""
    try:
        return _parse(memoryview(body))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:  # UnicodeDecodeError: of a key
        raise orjson.JSONDecodeError(str(error), "", 0) from None


def _parse(data: memoryview) -> Any:
    if len(data) <= MAX_CHUNK_BYTES:
        return loads(data)
    match bytes(data[:64]).lstrip()[:1]:
        case b"{":
            return {name: _parse(memoryview(value)) for name, value in _object.decode(data).items()}
        case b"[":
            return [_parse(memoryview(value)) for value in _array.decode(data)]
        case _:
            return loads(data)


# -- requests ----------------------------------------------------------------------------------------------------------


def headers_by_name(scope: Scope) -> dict[str, str]:
    """Headers by lower-case name; of a repeated one the last, except for `baggage`, whose values are joined."""
    headers = scope["headers"]
    by_name = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
    if len(by_name) < len(headers) and "baggage" in by_name:
        by_name["baggage"] = ",".join(value.decode("latin-1") for name, value in headers if name == b"baggage")
    return by_name


async def read_body(receive: Receive, headers: Mapping[str, str], limit: int) -> bytes:
    """The complete body, decompressed. Raises ApiError 413 above `limit` bytes, 415 for an unknown content coding, and
    ClientDisconnected."""
    try:
        body = await receive_body(headers, receive, limit, "shorten the conversation")
        coding = headers.get("content-encoding")
        return await decompress(body, coding, limit) if coding else body
    except (RequestError, CodingError) as error:
        code = "body_too_large" if error.status == 413 else "content_encoding"
        raise ApiError(error.status, str(error), code=code) from None


async def run_to_completion(work: Awaitable[object]) -> None:
    """Await work that must complete even if the current task is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


# -- calls in progress -------------------------------------------------------------------------------------------------

# Every call takes a slot. A call that waits for a weight update releases its slot meanwhile (`released_slot`), so that
# thousands of calls may wait for one policy while others are served.


class Slot(ExitStack):
    """One slot of the calls in progress; `close` releases it, if it is taken."""

    def __init__(self, limit: asyncio.Semaphore) -> None:
        super().__init__()
        self._limit = limit
        _current.set(self)

    async def acquire(self) -> None:
        await self._limit.acquire()
        self.callback(self._limit.release)


_current: ContextVar[Slot | None] = ContextVar("slot", default=None)
"""That of the current call."""


@asynccontextmanager
async def released_slot() -> AsyncGenerator[None]:
    """Release the slot of the current call inside the context, and take one again after it unless it raised."""
    slot = _current.get()
    if slot is not None:
        slot.close()
    yield
    if slot is not None:
        await slot.acquire()


# -- responses ---------------------------------------------------------------------------------------------------------

KEEP_ALIVE_SECONDS = 10.0
"""A stream that was silent for that long gets a ping within as much again."""
_JSON: Final = (b"content-type", b"application/json")
_STREAM: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ResponseWriter:
    """Writes the response. With `chunked` False a stream is sent as one body, since HTTP/1.0 has no chunks. `ping` is
    sent while a stream is silent."""

    def __init__(self, send: Send, chunked: bool = True, ping: bytes = b"") -> None:
        self._send = send
        self._ping = ping
        self._lock = asyncio.Lock()
        self._num_sent = 0
        self._buffer: list[bytes] | None = None if chunked else []
        self.started = False
        self.extra_headers: Sequence[tuple[bytes, bytes]] = ()
        """Further headers: the id of the request, or headers of the provider's response."""

    async def send_json(
        self, status: int, body: bytes, retry: bool | None = None, retry_after: float | None = None
    ) -> None:
        """Send a JSON response. `retry` tells the SDK whether to retry, `retry_after` after how many seconds."""
        headers = [_JSON, (b"content-length", str(len(body)).encode()), *self.extra_headers]
        if retry is not None:
            headers.append((b"x-should-retry", b"true" if retry else b"false"))
        if retry_after is not None and not any(name == b"retry-after" for name, _ in headers):
            headers.append((b"retry-after", b"%d" % math.ceil(retry_after)))
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def send_events(self, events: bytes) -> None:
        """Send more of an event stream."""
        if self._buffer is not None:
            self.started = True
            self._buffer.append(events)
            return
        async with self._lock:
            self._num_sent += 1
            if not self.started:
                self.started = True
                head = [*_STREAM, *self.extra_headers]
                await self._send({"type": "http.response.start", "status": 200, "headers": head})
            await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def finish(self, end: bytes, stream: bool) -> None:
        """Send the end of an event stream, or a whole JSON response."""
        if not stream:
            return await self.send_json(200, end)
        await self.send_events(end)
        await self.close()

    @contextmanager
    def kept_alive(self, may_start: Callable[[], bool] = lambda: True) -> Generator[None]:
        """Within it, a stream that is silent gets a ping now and then, so that neither client nor proxy gives it up. It
        begins the stream only where `may_start`: an error after that is an event of the stream."""
        pings = asyncio.create_task(self._ping_while_silent(may_start))
        try:
            yield
        finally:
            pings.cancel()

    async def _ping_while_silent(self, may_start: Callable[[], bool]) -> None:
        while self._ping and self._buffer is None:
            num_sent = self._num_sent
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            if num_sent == self._num_sent and (num_sent or may_start()):
                await self.send_events(self._ping)

    async def close(self) -> None:
        self._ping = b""
        if self._buffer is not None:
            body = b"".join(self._buffer)
            headers = [*_STREAM, (b"content-length", str(len(body)).encode()), *self.extra_headers]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            return await self._send({"type": "http.response.body", "body": body})
        async with self._lock:
            await self._send({"type": "http.response.body", "body": b""})
