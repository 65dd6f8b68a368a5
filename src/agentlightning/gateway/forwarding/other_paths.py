"""Forwards calls to the other paths of a provider's API as they are: files, moderations, audio, images and all else;
and requests for the responses that it stores.

They are not calls of a policy: their spans have method, path, status and usage, and no content. Limits, budgets and
retries of the provider do not apply.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Final
from urllib.parse import quote, unquote

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from agentlightning import span as names
from agentlightning.gateway.callers import AttemptIds, Caller
from agentlightning.gateway.dialects.base import loads_tolerantly
from agentlightning.gateway.dialects.chat import ChatResponse
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.http import parse_object, run_to_completion
from agentlightning.gateway.record import CallRecord, failure_of
from agentlightning.gateway.upstream.call import ServerPool, from_response, from_transport
from agentlightning.span import Span
from agentlightning.transport import Headers, TransportError
from agentlightning.util.json_values import Json

MAX_UPLOAD_BYTES: Final = 512 * 1024 * 1024
"""The largest file that OpenAI accepts."""
_MAX_READ_BYTES: Final = 1024 * 1024
"""A longer response is not searched for its usage."""
_OWN_HEADERS: Final = (b"content-type", b"content-disposition", b"x-should-retry")
_DROPPED: Final = frozenset(
    {
        *(b"host", b"content-length", b"content-encoding", b"transfer-encoding", b"connection", b"keep-alive", b"te"),
        *(b"expect", b"upgrade", b"http2-settings", b"accept-encoding"),
        *(b"authorization", b"x-api-key", b"api-key", b"cookie"),
    }
)
"""Headers of the caller's connection, and its credentials."""


async def forward_as_is(
    pool: ServerPool, request: Request, caller: Caller, body: bytes, keep: Callable[[list[Span]], Awaitable[None]]
) -> Response:
    """The provider's response to a request, as it arrives, recorded before its last bytes. Raises ApiError."""
    provider, server = pool.provider, pool.choose(caller.affinity)
    path = request.scope["raw_path"].decode("latin-1").partition("/v1/")[2]
    if ".." in unquote(path).split("/"):
        raise ApiError(404, f"/v1/{path} is no path of the provider {provider.name!r}")
    model = (parse_object(body) or {}).get("model") if body[:1] == b"{" else None
    attributes: Json = {
        names.PROVIDER_NAME: provider.name,
        names.HTTP_METHOD: request.method,
        names.URL_PATH: f"/v1/{path}",
        **({names.REQUEST_MODEL: model} if isinstance(model, str) else {}),
    }
    record = CallRecord(f"{request.method} /v1/{path}", caller)

    async def keep_span(failure: tuple[str, str] | None) -> None:
        if caller.attempt is not None:
            await run_to_completion(keep([record.span(attributes, failure)]))

    query = f"?{request.url.query}" if request.url.query else ""
    try:
        response = await pool.transport.send(
            request.method,
            provider.url(server.url, path) + query,
            _headers(request.headers.raw, server.headers),
            body,
            connect_seconds=provider.connect_seconds,
            timeout_seconds=provider.timeout_seconds,
        )
    except TransportError as error:
        api_error = from_transport(pool, error).api_error
        await keep_span(failure_of(api_error))
        raise api_error from error
    attributes[names.HTTP_STATUS] = response.status

    async def chunks() -> AsyncGenerator[bytes]:
        start, last, failure = b"", b"", None
        error: tuple[str, str] | None = ("client_disconnected", "the caller hung up before the answer was whole")
        try:
            async with response:
                async for chunk in response.chunks():
                    if last:
                        yield last
                    last = pool.redactor.redact_body(chunk)
                    start = start + last if len(start) < _MAX_READ_BYTES else start
            text = pool.redactor.text(start.decode(errors="replace")) if response.status >= 400 else ""
            error = (str(response.status), text) if response.status >= 400 else None
        except TransportError as broken:
            failure = from_transport(pool, broken).api_error
            error = failure_of(failure)
        finally:
            attributes.update(_usage(start))
            await keep_span(error)
        yield last
        if failure is not None:
            raise failure  # The caller must not take the response for complete.

    streamed = StreamingResponse(chunks(), response.status)
    own = [header for header in response.headers if header[0] in _OWN_HEADERS]
    streamed.raw_headers = [*own, *pool.redactor.visible_headers(response.headers)]
    return streamed


def _headers(requested: Headers, configured: Headers) -> Headers:
    """The caller's headers, with the credentials of the provider."""
    passed = [
        (name, value) for name, value in requested if name not in _DROPPED and not name.startswith(b"x-agentlightning-")
    ]
    given = {b"content-type", *(name for name, _ in passed)}
    return [*passed, *(header for header in configured if header[0] not in given)]


def _usage(body: bytes) -> Json:
    response = ChatResponse()
    with suppress(ValueError):
        response.read(loads_tolerantly(body))
    used = response.usage
    return {names.INPUT_TOKENS: used.input_tokens, names.OUTPUT_TOKENS: used.output_tokens} if used else {}


# -- stored responses --------------------------------------------------------------------------------------------------

# `dialects.response_store` records the attempt and the provider of each while the attempt runs, since the provider's
# key alone would give access to those of all attempts.


async def request_stored_response(pool: ServerPool, method: str, attempt: AttemptIds, response_id: str) -> bytes:
    """The body of the provider's response. POST cancels. Raises ApiError."""
    provider, action = pool.provider, "/cancel" if method == "POST" else ""
    path = f"responses/{quote(response_id, safe='')}{action}"
    try:
        status, headers, body = await pool.fetch(
            method, path, timeout_seconds=provider.timeout_seconds, affinity="/".join(attempt)
        )
    except TransportError as error:
        raise from_transport(pool, error).api_error from error
    if not 200 <= status < 300:
        raise from_response(pool, status, headers, body).api_error
    return body
