"""Retrieves, cancels and deletes responses that a provider stores (`/v1/responses/{id}`), for the attempt that created
them.

`dialects.response_store` records the attempt and the provider of each while the attempt runs, since the provider's key
alone would give access to those of all attempts.
"""

from __future__ import annotations

from urllib.parse import quote

from agentlightning.gateway.callers.attempts import AttemptIds
from agentlightning.gateway.upstream.failures import from_response, from_transport
from agentlightning.gateway.upstream.servers import ServerPool
from agentlightning.transport import TransportError


async def request_stored_response(pool: ServerPool, method: str, attempt: AttemptIds, response_id: str) -> bytes:
    """The body of the provider's response. POST cancels. Raises ApiError."""
    provider, server = pool.provider, pool.choose("/".join(attempt))
    try:
        action = "/cancel" if method == "POST" else ""
        url = provider.url(server.url, f"responses/{quote(response_id, safe='')}{action}")
        status, headers, body = await pool.fetch(method, url, server.headers, timeout_seconds=provider.timeout_seconds)
    except TransportError as error:
        raise from_transport(provider, error).api_error from error
    if not 200 <= status < 300:
        raise from_response(provider, status, headers, body).api_error
    return pool.redactor.redact_body(body)
