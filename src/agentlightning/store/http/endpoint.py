"""What the endpoints of the store share: authorization, request bodies, and JSON responses."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive

from agentlightning.errors import StoreAuthError
from agentlightning.store.http.errors import Refusal, RequestError, error_body, error_of, status_of
from agentlightning.util.api_key import api_key
from agentlightning.util.decompression import CodingError, decompress

MAX_BODY_BYTES: Final = 64 * 1024 * 1024
DISCARDED_BYTES: Final = 256 * 1024 * 1024
"""How much of a body over the limit is read and discarded: most clients read no response before they sent it all."""
SHORT_BYTES: Final = 64 * 1024
"""Responses up to this size are sent at once."""
_JSON: Final = "application/json"
Headers = Mapping[str, str]
Handler = Callable[[Request], Awaitable[Response]]


class ClientDisconnected(Exception):
    """The client has disconnected."""


def endpoint(handle: Handler, token: str | None = None, error_headers: Headers | None = None) -> Handler:
    """A handler behind the access token. What it raises becomes the response."""

    async def respond(request: Request) -> Response:
        try:
            authorize(request.headers, token)
            return await handle(request)
        except ClientDisconnected:
            return Response(status_code=499)
        except Exception as error:  # noqa: BLE001  the boundary: every failure gets a response
            return refuse(error, error_headers)

    return respond


def authorize(headers: Headers, token: str | None) -> None:
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
    data = await receive_body(headers, receive, limit, "send less at once, or raise the server's limit")
    if not data:
        return data
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise RequestError(f"content-type={content_type!r} is not supported; send application/json", 415)
    try:
        return await decompress(data, headers.get("content-encoding", ""), limit)
    except CodingError as error:
        raise RequestError(str(error), error.status) from None


async def receive_body(headers: Mapping[str, str], receive: Receive, limit: int, hint: str) -> bytes:
    """The body of a request as it was sent. Raises RequestError (413) with the hint if it is over `limit` bytes, and
    ClientDisconnected."""
    announced = headers.get("content-length", "")
    parts, size, more = list[bytes](), 0, True
    if announced.isdecimal() and int(announced) > limit + DISCARDED_BYTES:
        size = int(announced)  # nothing of it is read
    while more and size <= limit + DISCARDED_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        parts.append(message.get("body", b""))
        size, more = size + len(parts[-1]), message.get("more_body")
        if size > limit:
            parts.clear()
    if size > limit:
        raise RequestError(f"the body is larger than {limit} bytes; {hint}", 413)
    return b"".join(parts)


# -- responses -------------------------------------------------------------------------------------------------------


def respond(body: bytes, status: int = 200, headers: Headers | None = None) -> Response:
    return Response(body, status, headers, _JSON)


def refuse(error: Exception, headers: Headers | None = None) -> Response:
    """The response to a request that failed."""
    known = error_of(error)
    status = status_of(known)
    more = {401: {"www-authenticate": 'Bearer realm="agentlightning"'}, 503: {"retry-after": "1"}}.get(status, {})
    return respond(msgspec.json.encode(Refusal(error_body(known), str(known))), status, {**(headers or {}), **more})


async def respond_in_parts(parts: AsyncIterator[bytes], status: int = 200, headers: Headers | None = None) -> Response:
    """A response of unknown length: sent at once if it is short, else as its parts come."""
    start = b""
    async for part in parts:
        start += part
        if len(start) >= SHORT_BYTES:
            break
    else:
        return respond(start, status, headers)

    async def content() -> AsyncIterator[bytes]:
        yield start
        async for part in parts:
            yield part

    return StreamingResponse(content(), status, headers, _JSON)


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
    while (await receive())["type"] != "http.disconnect":
        pass
