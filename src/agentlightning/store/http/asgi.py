"""What the endpoints of the store share: authorization, request bodies, JSON responses.

Plain ASGI, because these few lines run for every request.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.types import Receive, Scope, Send

from agentlightning.errors import AgentLightningError, StoreAuthError
from agentlightning.store.http.encoding import encode
from agentlightning.store.http.errors import RequestError, error_of, error_response, status_of
from agentlightning.util.api_key import api_key
from agentlightning.util.decompression import CodingError, decompress

DISCARDED_BYTES: Final = 256 * 1024 * 1024
"""How much of a body over the limit is read and discarded: most clients read no response before they sent it all."""
CHUNK_BYTES: Final = 64 * 1024
"""Size of the chunks in which a long response is sent."""
Headers = Iterable[tuple[bytes, bytes]]


class ClientDisconnected(Exception):
    """The client has disconnected."""


@dataclass(slots=True)
class Request:
    scope: Scope
    headers: Mapping[str, str]
    """By lower-case name."""
    receive: Receive
    send: Send


@dataclass
class Endpoint:
    """An ASGI application: a handler behind the access token. What the handler raises becomes the response."""

    handle: Callable[[Request], Awaitable[None]]
    token: str | None = None
    error_headers: Headers = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = headers_by_name(scope)
            authorize(headers, self.token)
            await self.handle(Request(scope, headers, receive, send))
        except ClientDisconnected:
            return
        except Exception as error:  # noqa: BLE001  the boundary: every failure gets a response
            await respond_error(send, error_of(error), self.error_headers)


def headers_by_name(scope: Scope) -> dict[str, str]:
    """The request headers by lower-case name; of a repeated one, the last."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def authorize(headers: Mapping[str, str], token: str | None) -> None:
    """Raise StoreAuthError unless the request carries the access token. `token=None` lets every request pass."""
    if token is None:
        return
    key = api_key(headers)
    if not key:
        raise StoreAuthError(
            "this store requires an access token; send `Authorization: Bearer <token>` or set AGL_TOKEN"
        )
    if not hmac.compare_digest(key.encode(), token.encode()):
        raise StoreAuthError("the access token is not that of this store; check AGL_TOKEN")


# -- request bodies --------------------------------------------------------------------------------------------------


async def read_body(headers: Mapping[str, str], receive: Receive, limit: int) -> bytes:
    """Read and decompress a JSON body. Raises RequestError if it is over `limit` bytes (413) or not JSON (415)."""
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit + DISCARDED_BYTES:
        raise _too_large(int(announced), limit)
    data = await _receive_all(receive, limit)
    if not data:
        return data
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise RequestError(f"content-type={content_type!r} is not supported; send application/json", 415)
    try:
        return await decompress(data, headers.get("content-encoding", ""), limit)
    except CodingError as error:
        raise RequestError(str(error), error.status) from None


async def _receive_all(receive: Receive, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part: bytes = message.get("body", b"")
        size += len(part)
        if size <= limit:
            parts.append(part)
        else:
            parts.clear()
        more = message.get("more_body", False)
        if size > limit and (not more or size > limit + DISCARDED_BYTES):
            raise _too_large(size, limit)
        if not more:
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(size: int, limit: int) -> RequestError:
    return RequestError(
        f"the body has at least {size} bytes, and this server accepts {limit}; send less at once, or raise its limit",
        413,
    )


# -- responses -------------------------------------------------------------------------------------------------------


async def respond(send: Send, status: int, body: bytes, headers: Headers = ()) -> None:
    """Send a JSON response."""
    start = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})


async def respond_error(send: Send, error: AgentLightningError, headers: Headers = ()) -> None:
    """Send the response for a request that failed."""
    status = status_of(error)
    more = list(headers)
    if status == 401:
        more.append((b"www-authenticate", b'Bearer realm="agentlightning"'))
    if status == 503:
        more.append((b"retry-after", b"1"))
    await respond(send, status, encode(error_response(error)), more)


class ChunkedResponse:
    """A JSON response of unknown length: sent at once if it is short, else in chunks as it is written."""

    def __init__(self, send: Send, status: int, headers: Headers = ()) -> None:
        self._send = send
        self._status = status
        self._headers = headers
        self._parts: list[bytes] = []
        self._size = 0
        self._started = False

    async def write(self, data: bytes, more: bool = True) -> None:
        """Add to the response. `more` is False for the last part."""
        self._parts.append(data)
        self._size += len(data)
        if more and self._size < CHUNK_BYTES:
            return
        body = b"".join(self._parts)
        self._parts, self._size = [], 0
        if not (more or self._started):
            return await respond(self._send, self._status, body, self._headers)
        if not self._started:
            self._started = True
            headers = [(b"content-type", b"application/json"), *self._headers]
            await self._send({"type": "http.response.start", "status": self._status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


async def run_until_disconnect(receive: Receive, work: Awaitable[Any]) -> Any:
    """The result of `work`. It is cancelled, and ClientDisconnected raised, if the client disconnects."""
    working = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnected
    finally:
        working.cancel()
        disconnected.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
