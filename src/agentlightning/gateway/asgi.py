"""Reads request bodies and writes responses over ASGI.

Written without a framework for speed: every model call passes here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Final

from starlette.types import Receive, Scope, Send

from agentlightning.gateway.errors import ApiError
from agentlightning.util.decompression import CodingError, decompress

_JSON: Final = (b"content-type", b"application/json")
_STREAM: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


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


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client disconnects."""
    message: MutableMapping[str, Any] = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


class ResponseWriter:
    """Writes the response. With `chunked` False a stream is sent as one body, since HTTP/1.0 has no chunks."""

    def __init__(self, send: Send, chunked: bool = True) -> None:
        self._send = send
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
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": [*_STREAM, *self.extra_headers]})
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def close(self) -> None:
        if self._buffer is not None:
            body = b"".join(self._buffer)
            headers = [*_STREAM, (b"content-length", str(len(body)).encode()), *self.extra_headers]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            return await self._send({"type": "http.response.body", "body": body})
        await self._send({"type": "http.response.body", "body": b""})
