"""Forwards calls to the other paths of a provider's API as they are: files, moderations, audio, images and all else.

They are not calls of a policy: their spans have method, path, status and usage, and no content. Limits, budgets and
retries of the provider do not apply.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any, Final
from urllib.parse import unquote

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from agentlightning import span as names
from agentlightning.gateway.callers.attribution import Caller
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.forwarding.passthrough import RecordSpans, run_to_completion
from agentlightning.gateway.json_body import parse_object
from agentlightning.gateway.recording.provider_response import usage_of
from agentlightning.gateway.upstream.failures import display_text, from_transport
from agentlightning.gateway.upstream.provider import visible_headers
from agentlightning.gateway.upstream.servers import ServerPool
from agentlightning.span import Span, new_span_id, new_trace_id
from agentlightning.transport import Headers, TransportError

MAX_UPLOAD_BYTES: Final = 512 * 1024 * 1024
"""The largest file that OpenAI accepts."""
_MAX_READ_BYTES: Final = 1024 * 1024
"""A longer response is not searched for its usage."""
_OWN_HEADERS: Final = (b"content-type", b"content-disposition", b"x-should-retry")
_DROPPED: Final = frozenset(
    {
        *(b"host", b"content-length", b"content-encoding", b"transfer-encoding", b"connection", b"keep-alive", b"te"),
        *(b"expect", b"upgrade", b"accept-encoding", b"authorization", b"x-api-key", b"api-key", b"cookie"),
    }
)
"""Headers of the caller's connection, and its credentials."""


async def forward_as_is(
    pool: ServerPool, request: Request, caller: Caller, body: bytes, record: RecordSpans
) -> Response:
    """The provider's response to a request, as it arrives, recorded before its last bytes. Raises ApiError."""
    provider, server = pool.provider, pool.choose("/".join(caller.attempt or ()))
    path = request.scope["raw_path"].decode("latin-1").partition("/v1/")[2]
    if ".." in unquote(path).split("/"):
        raise ApiError(404, f"/v1/{path} is no path of the provider {provider.name!r}")
    started, model = time.time(), (parse_object(body) or {}).get("model") if body[:1] == b"{" else None
    attributes: dict[str, Any] = {
        names.PROVIDER_NAME: provider.name,
        names.HTTP_METHOD: request.method,
        names.URL_PATH: f"/v1/{path}",
        **({names.REQUEST_MODEL: model} if isinstance(model, str) else {}),
        **caller.attributes(),
    }

    async def keep(error_type: str | None = None, message: str | None = None) -> None:
        if caller.rollout_id is None or caller.attempt_id is None:
            return
        span = Span(
            rollout_id=caller.rollout_id,
            attempt_id=caller.attempt_id,
            name=f"{request.method} /v1/{path}",
            start_time=started,
            end_time=time.time(),
            trace_id=caller.trace_id or new_trace_id(),
            span_id=new_span_id(),
            parent_id=caller.parent_id,
            status_code="ERROR" if error_type else "OK",
            status_message=message,
            attributes=attributes | ({names.ERROR_TYPE: error_type} if error_type else {}),
        )
        await run_to_completion(record([span]))

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
        api_error = from_transport(provider, error).api_error
        await keep(api_error.code, api_error.message)
        raise api_error from error
    attributes[names.HTTP_STATUS] = response.status

    async def chunks() -> AsyncGenerator[bytes]:
        start, last, failure = b"", b"", None
        error = ("client_disconnected", "the caller hung up before the answer was whole")
        try:
            async with response:
                async for chunk in response.chunks():
                    if last:
                        yield last
                    last = pool.redactor.redact_body(chunk)
                    start = start + last if len(start) < _MAX_READ_BYTES else start
            error = (str(response.status), display_text(provider, start.decode(errors="replace")))
            error = error if response.status >= 400 else (None, None)
        except TransportError as broken:
            failure = from_transport(provider, broken).api_error
            error = (failure.code, failure.message)
        finally:
            attributes.update(_usage(start))
            await keep(*error)
        yield last
        if failure is not None:
            raise failure  # The caller must not take the response for complete.

    streamed = StreamingResponse(chunks(), response.status)
    own = [header for header in response.headers if header[0] in _OWN_HEADERS]
    streamed.raw_headers = [*own, *pool.redactor.redact_headers(visible_headers(response.headers))]
    return streamed


def _headers(requested: Headers, configured: Headers) -> Headers:
    """The caller's headers, with the credentials of the provider."""
    passed = [
        (name, value) for name, value in requested if name not in _DROPPED and not name.startswith(b"x-agentlightning-")
    ]
    given = {b"content-type", *(name for name, _ in passed)}
    return [*passed, *(header for header in configured if header[0] not in given)]


def _usage(body: bytes) -> dict[str, Any]:
    with suppress(msgspec.MsgspecError):
        used = usage_of("responses" if b'"input_tokens"' in body else "chat/completions", body)
        if used is not None:
            return {names.INPUT_TOKENS: used.input_tokens, names.OUTPUT_TOKENS: used.output_tokens}
    return {}
