"""What the endpoints of the store share: errors as HTTP responses and back, authorization, request bodies, and JSON
responses."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Final

import msgspec
import orjson
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive

from agentlightning import errors
from agentlightning.errors import AgentLightningError, ConfigError, StoreAuthError, StoreError
from agentlightning.util.api_key import api_key
from agentlightning.util.decompression import CodingError, decompress

logger = logging.getLogger(__name__)

BASE_PATH: Final = "/v1/agl"
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


# -- errors ---------------------------------------------------------------------------------------------------------


class RequestError(ConfigError):
    """An invalid request: malformed, of the wrong type, or too large."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


_STATUS: Final[tuple[tuple[type[AgentLightningError], int], ...]] = (
    (ConfigError, 400),
    (errors.RewardError, 400),
    (errors.NotFoundError, 404),
    (errors.ConflictError, 409),
    (errors.StoreFullError, 507),
    (errors.StoreClosedError, 503),
    (StoreAuthError, 401),
    (errors.StoreServerError, 502),
)
_TYPES: Final = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, AgentLightningError) and "__init__" not in vars(kind)
}


def status_of(error: AgentLightningError) -> int:
    """The HTTP status of an error."""
    if isinstance(error, RequestError):
        return error.status
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


class ErrorBody(Struct):
    type: str
    message: str


class Refusal(Struct):
    """The response body of every request that fails."""

    error: ErrorBody
    detail: str
    """The message again, for 0.x clients."""


def error_body(error: AgentLightningError) -> ErrorBody:
    return ErrorBody(type(error).__name__.lstrip("_"), str(error))


def error_of(error: Exception) -> AgentLightningError:
    """The error to respond with, for any exception that a call has raised."""
    if isinstance(error, AgentLightningError):
        return error
    if isinstance(error, OverflowError | UnicodeError):
        return ConfigError(f"a value cannot be stored: {error}")
    logger.error("a call of the store failed", exc_info=error)
    return StoreError(f"the server failed: {type(error).__name__}; see its log")


def error_from(body: ErrorBody) -> AgentLightningError:
    """The exception for an error that a server responded with."""
    kind = _TYPES.get(body.type, ConfigError if body.type == RequestError.__name__ else StoreError)
    return kind(body.message)


_place = re.compile(r" - at `\$(.*)`$")
_step = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")


def decode_error(error: Exception, data: bytes) -> RequestError:
    """The error for a body that could not be decoded: it says where, and what is there."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ConfigError):
        return RequestError(str(error))
    if isinstance(error, RecursionError):
        return RequestError("the body is nested too deeply; send flatter values")
    if not isinstance(error, msgspec.ValidationError):
        return RequestError(f"the body is not JSON in UTF-8: {error}; NaN and Infinity are not JSON either")
    text = str(error)
    place = _place.search(text)
    path = place[1] if place else ""
    complaint = text[: place.start()] if place else text
    if "Number out of range" in complaint:
        return RequestError(f"a number in the body is out of range{path and f', in {path}'}; use finite numbers")
    shown = _describe_value(data, path)
    hint = "; times are seconds since the epoch (UTC), as a number" if "_time" in path or "timestamp" in path else ""
    return RequestError(f"{path.lstrip('.') or 'the body'}{shown}: {complaint[:1].lower()}{complaint[1:]}{hint}")


def _describe_value(data: bytes, path: str) -> str:
    """` is VALUE` for the value at `path`; "" if it cannot be found."""
    try:
        value = orjson.loads(data)
        for name, index in _step.findall(path):
            value = value[name] if name else value[int(index)]
        text = orjson.dumps(value).decode()
    except (ValueError, LookupError, TypeError):
        return ""
    return f" is {text if len(text) <= 80 else text[:77] + '...'}"


# -- request bodies --------------------------------------------------------------------------------------------------


async def read_body(headers: Mapping[str, str], receive: Receive, limit: int) -> bytes:
    """Read and decompress a JSON body. Raises RequestError if it is over `limit` bytes (413) or not JSON (415)."""
    data = await receive_body(receive, limit, "send less at once, or raise the server's limit")
    if not data:
        return data
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise RequestError(f"content-type={content_type!r} is not supported; send application/json", 415)
    try:
        return await decompress(data, headers.get("content-encoding", ""), limit)
    except CodingError as error:
        raise RequestError(str(error), error.status) from None


async def receive_body(receive: Receive, limit: int, hint: str) -> bytes:
    """The body of a request as it was sent. Raises RequestError (413) with the hint if it is over `limit` bytes, and
    ClientDisconnected."""
    parts, size, more = list[bytes](), 0, True
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
