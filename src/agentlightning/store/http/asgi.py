"""Requests as a store's server takes them: who may send them, how large they may be, and how they are answered.

Plain ASGI, because these few lines run for every request.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, Final

from starlette.types import Receive, Scope, Send

from agentlightning.errors import AgentLightningError, StoreAuthError
from agentlightning.store.http.encoding import encode
from agentlightning.store.http.errors import RequestError, refusal_of, status_of
from agentlightning.util.decompression import CodingError, inflated

DISCARDED_BYTES: Final = 256 * 1024 * 1024
"""How much of a body that is too large is read and thrown away: a client reads no answer while it is still sending."""
PIECE_BYTES: Final = 64 * 1024
"""Of an answer that is made bit by bit: so many leave together."""
MAX_WAIT_SECONDS: Final = 3600.0
"""No request waits longer; a client that wants to asks again."""
Headers = Iterable[tuple[bytes, bytes]]


class ClientDisconnected(Exception):
    """Nobody is left to be answered."""


def presented_key(headers: Mapping[str, str]) -> str:
    """The API key of a request, by `Authorization: Bearer` or `x-api-key`; "" without one."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()
    return key if key.isascii() else ""


def headers_of(scope: Scope) -> dict[str, str]:
    """By name in lower case; the last one wins."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def admit(headers: Mapping[str, str], token: str | None) -> None:
    """Raises StoreAuthError without the access token."""
    if token is None:
        return
    key = presented_key(headers)
    if not key:
        raise StoreAuthError("this store wants its access token; send `Authorization: Bearer <token>` or set AGL_TOKEN")
    if not hmac.compare_digest(key.encode(), token.encode()):
        raise StoreAuthError("the access token is not this store's; check AGL_TOKEN")


# -- bodies ----------------------------------------------------------------------------------------------------------


async def body_of(headers: Mapping[str, str], receive: Receive, limit: int) -> bytes:
    """The whole body, inflated. Raises RequestError over `limit` bytes (413) or of another type than JSON (415)."""
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit + DISCARDED_BYTES:
        raise _too_large(int(announced), limit)
    data = await _received(receive, limit)
    if not data:
        return data
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(f"content-type={kind!r} is not understood; send application/json", 415)
    try:
        return await inflated(data, headers.get("content-encoding", ""), limit)
    except CodingError as error:
        raise RequestError(str(error), error.status) from None


async def _received(receive: Receive, limit: int) -> bytes:
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
        f"the body has {size} bytes or more, and this server takes {limit}; send less at once, or raise its limit", 413
    )


# -- answers ---------------------------------------------------------------------------------------------------------


async def answer(send: Send, status: int, body: bytes, headers: Headers = ()) -> None:
    """One JSON answer."""
    start = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})


class Pieces:
    """One JSON answer that is written as it is made: in one piece where it is short, else as it comes."""

    def __init__(self, send: Send, status: int, headers: Headers = ()) -> None:
        self._send = send
        self._status = status
        self._headers = headers
        self._parts: list[bytes] = []
        self._size = 0
        self._started = False

    async def write(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._size >= PIECE_BYTES:
            await self._pass_on(more=True)

    async def close(self) -> None:
        if self._started:
            return await self._pass_on(more=False)
        await answer(self._send, self._status, b"".join(self._parts), self._headers)

    async def _pass_on(self, more: bool) -> None:
        if not self._started:
            self._started = True
            headers = [(b"content-type", b"application/json"), *self._headers]
            await self._send({"type": "http.response.start", "status": self._status, "headers": headers})
        body = b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


async def only_get(scope: Scope, send: Send) -> bool:
    """Whether the request was refused, because it wants to do more than look."""
    if scope["method"] in ("GET", "HEAD"):
        return False
    error = RequestError(f"{scope['method']} is not allowed at {scope['path']}", 405)
    await refuse(send, error, [(b"allow", b"GET, HEAD")])
    return True


async def refuse(send: Send, error: AgentLightningError, headers: Headers = ()) -> None:
    """The answer to a request that could not be done."""
    status = status_of(error)
    more = list(headers)
    if status == 401:
        more.append((b"www-authenticate", b'Bearer realm="agentlightning"'))
    if status == 503:
        more.append((b"retry-after", b"1"))
    await answer(send, status, encode(refusal_of(error)), more)


async def while_wanted(receive: Receive, work: Awaitable[Any]) -> Any:
    """What `work` answers; it is cancelled when the client goes away (ClientDisconnected)."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnected
    finally:
        working.cancel()
        gone.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
