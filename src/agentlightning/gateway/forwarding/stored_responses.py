"""Responses that a provider keeps: retrieved and deleted there, by the attempt that they were an answer to.

Called by the gateway for `/v1/responses/{id}`, where the response is not one of ours. Whose it is, and who has it, is
remembered in `dialects.response_store` while the attempt goes on: a provider's key would open those of all.
"""

from __future__ import annotations

from urllib.parse import quote

from agentlightning.gateway.callers.attempts import AttemptIds
from agentlightning.gateway.upstream.failures import from_response, from_transport
from agentlightning.gateway.upstream.servers import ServerPool
from agentlightning.transport import TransportError


async def request_stored_response(pool: ServerPool, method: str, attempt: AttemptIds, response_id: str) -> bytes:
    """What the provider answers. Raises ApiError."""
    provider, server = pool.provider, pool.choose("/".join(attempt))
    try:
        answer = await pool.transport.send(
            method,
            provider.url(server.url, f"responses/{quote(response_id, safe='')}"),
            server.headers,
            connect_seconds=provider.connect_seconds,
            timeout_seconds=provider.timeout_seconds,
        )
        async with answer:
            body = await answer.read()
    except TransportError as error:
        raise from_transport(provider, error).api_error from error
    if not 200 <= answer.status < 300:
        raise from_response(provider, answer.status, answer.headers, body).api_error
    return pool.redactor.redact_body(body)
