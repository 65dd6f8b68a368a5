"""HTTP of the gateway: request bodies, parsed and read off the event loop if they are large, and responses.

Written over ASGI without a framework for speed: every model call passes here.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Generator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, TypeVar, cast

import msgspec
import orjson
from starlette.types import Receive, Scope, Send

from agentlightning.gateway.errors import ApiError
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
_WORKERS: Final = 4

_pool: Final = ThreadPoolExecutor(_WORKERS, thread_name_prefix="gateway-request")


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
    if len(body) <= MAX_CHUNK_BYTES:
        return loads(body)
    try:
        return _parse(memoryview(body))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:  # UnicodeDecodeError: of a key
        raise orjson.JSONDecodeError(str(error), "", 0) from None


def parse_object(body: bytes) -> dict[str, Any] | None:
    """None if the body is no JSON object; the reader of the request reports the error."""
    try:
        data = parse(body)
    except orjson.JSONDecodeError:
        return None
    return cast("dict[str, Any]", data) if isinstance(data, dict) else None


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


class ClientDisconnected(Exception):
    """The client disconnected."""


def read_headers(scope: Scope) -> dict[str, str]:
    """Headers by lower-case name."""
    return headers_by_name(scope["headers"])


def headers_by_name(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """Headers by lower-case name. The last of repeated headers wins, except for `baggage`, whose values are joined."""
    by_name = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
    if len(by_name) < len(headers) and "baggage" in by_name:
        by_name["baggage"] = ",".join(value.decode("latin-1") for name, value in headers if name == b"baggage")
    return by_name


async def read_body(receive: Receive, headers: Mapping[str, str], limit: int) -> bytes:
    """The complete body, decompressed. Raises ApiError 413 above `limit` bytes, 415 for an unknown content coding, and
    ClientDisconnected."""
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        parts.append(message.get("body", b""))
        size, more = size + len(parts[-1]), message.get("more_body", False)
        if size > limit:
            raise _too_large(limit)
    body = b"".join(parts)
    if "content-encoding" not in headers:
        return body
    try:
        return await decompress(body, headers["content-encoding"], limit)
    except CodingError as error:
        code = "body_too_large" if error.status == 413 else "content_encoding"
        raise ApiError(error.status, str(error), code=code) from None


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes; shorten the conversation", code="body_too_large")


@contextmanager
def cancel_on_disconnect(receive: Receive) -> Generator[None]:
    """Within it, a disconnect of the client cancels the current task; raises ClientDisconnected after one."""
    task, disconnected, exited = asyncio.current_task(), False, False
    assert task is not None

    def on_disconnect(watcher: asyncio.Task[None]) -> None:
        nonlocal disconnected
        if not watcher.cancelled() and not exited:
            disconnected = True
            task.cancel()

    watcher = asyncio.create_task(_wait_for_disconnect(receive))
    watcher.add_done_callback(on_disconnect)
    try:
        yield
    except asyncio.CancelledError:
        if not disconnected:
            raise
        task.uncancel()
        raise ClientDisconnected from None
    finally:
        exited = True
        watcher.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    message: MutableMapping[str, Any] = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


async def run_to_completion(work: Awaitable[object]) -> None:
    """Await work that must complete even if the current task is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


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
        self._timer: asyncio.TimerHandle | None = None
        self._pinging: asyncio.Task[None] | None = None
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

    @contextmanager
    def kept_alive(self, may_start: Callable[[], bool]) -> Generator[None]:
        """Within it, a stream that is silent gets a ping now and then, so that neither client nor proxy gives it up. It
        begins the stream only where `may_start`: an error after that is an event of the stream."""
        self._watch(may_start)
        try:
            yield
        finally:
            for each in (self._timer, self._pinging):
                if each is not None:
                    each.cancel()
            self._timer = self._pinging = None  # else the call would be garbage that only the collector finds

    def _watch(self, may_start: Callable[[], bool]) -> None:
        later = asyncio.get_running_loop().call_later
        self._timer = later(KEEP_ALIVE_SECONDS, self._check, may_start, self._num_sent)

    def _check(self, may_start: Callable[[], bool], num_sent: int) -> None:
        silent = num_sent == self._num_sent and not self._lock.locked() and self._buffer is None
        if silent and (num_sent or may_start()):
            self._pinging = asyncio.ensure_future(self._send_ping())
        self._watch(may_start)

    async def _send_ping(self) -> None:
        if self._ping:
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
