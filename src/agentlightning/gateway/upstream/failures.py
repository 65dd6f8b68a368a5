"""Translates failures of providers to errors for the caller, without credentials, and decides whether to retry.

A provider with `retries` is retried here: its errors carry `x-should-retry: false`, since further retries by the client
would multiply the load of an outage. Without `retries`, and while the retry budget is empty, the client decides by the
status. What the provider itself says in `x-should-retry` is respected and passed on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from agentlightning.gateway.dialects.sse import loads
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.upstream.provider import Provider
from agentlightning.gateway.upstream.servers import HIDDEN, redact_text
from agentlightning.transport import Headers, TransportError
from agentlightning.transport.base import CONTEXT_ERROR, error_fields, retry_after

_RETRYABLE: Final = frozenset({408, 409, 429})
"""Statuses below 500 that the SDKs of OpenAI and Anthropic retry; they retry all from 500."""
_KEY: Final = re.compile(r"api[ _-]?key|access token|credentials?\b", re.IGNORECASE)
_REFUSED: Final = re.compile(
    r"invalid|incorrect|not valid|expired|revoked|missing|no such|unknown|wrong", re.IGNORECASE
)
_MASKED: Final = re.compile(r"\S*\*{3}\S*")
"""What a provider shows of a key that it refuses."""
_MAX_MESSAGE_CHARS: Final = 2000


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed try."""

    api_error: ApiError
    """The error for the caller if there is no further try."""
    is_retryable: bool = False
    """Whether another try may succeed."""
    counts_against_health: bool = False
    """Whether the server counts as unhealthy for it."""
    unreachable: bool = False
    retry_after_seconds: float | None = None
    """Seconds without calls that the server asked for."""


def from_transport(provider: Provider, error: TransportError) -> Failure:
    """The failure of a try without a response."""
    subject = f"the provider {provider.name!r}"
    text = display_text(provider, str(error))
    if error.reason == "timeout":
        message = f"{subject} sent nothing for {provider.timeout_seconds:g} s: {text}"
        api_error = ApiError(504, message, code="provider_timeout", retry=provider.final)
        return Failure(api_error, counts_against_health=True)
    problem, code = {
        "tls": ("cannot be reached over TLS", "provider_tls"),
        "proxy": ("cannot be reached through its proxy", "proxy_refused"),
        "connect": ("cannot be reached", "provider_unreachable"),
        "closed": ("closed the connection before its response was complete", "provider_closed"),
        "protocol": ("sent an invalid HTTP response", "provider_protocol"),
    }[error.reason]
    api_error = ApiError(502, f"{subject} {problem}: {text}", code=code, retry=provider.final)
    return Failure(
        api_error,
        is_retryable=error.reason in ("connect", "closed"),
        counts_against_health=error.reason != "proxy",
        unreachable=error.reason in ("connect", "tls"),
    )


def from_response(provider: Provider, status: int, headers: Headers, body: bytes) -> Failure:
    """The failure of a try with an error response."""
    subject = f"the provider {provider.name!r}"
    text, code, param = (text and display_text(provider, text) for text in error_fields(body, loads))
    if status == 401 or (status == 403 and _KEY.search(f"{code} {text}") and _REFUSED.search(f"{code} {text}")):
        # It is not the caller's key, so it must not see what the provider shows of it.
        shown = _MASKED.sub(HIDDEN, (text or "").replace(provider.key() or HIDDEN, HIDDEN))
        has_key = provider.key() or provider.headers
        given = "the configured API key" if has_key else "the call, for which no API key is configured"
        message = f"{subject} rejected {given} (status {status})" + (f": {shown}" if shown else "")
        api_error = ApiError(502, message, code="provider_key_refused", retry=False)
        return Failure(api_error)
    if status == 407:  # Addressed to the client of the proxy, which is the gateway.
        message = f"{subject} cannot be reached through its proxy: it requires other credentials"
        api_error = ApiError(502, message, code="proxy_refused", retry=provider.final)
        return Failure(api_error)
    after, hint = retry_after(headers), dict(headers).get(b"x-should-retry")
    should_retry = {b"true": True, b"false": False}.get(hint or b"")
    message = text or f"{subject} responded with status {status}"
    failed = status >= 500
    if status < 400:
        failed, status, code = True, 502, "provider_protocol"
        should_retry = False
    elif failed:
        code = code or "provider_error"
    elif code is None and status in (400, 413, 422) and CONTEXT_ERROR.search(message):
        code = "context_length_exceeded"
    api_error = ApiError(
        status,
        message,
        code=code,
        param=param,
        retry=provider.final if should_retry is None else should_retry,
        retry_after=after,
    )
    retryable = failed or status in _RETRYABLE
    return Failure(
        api_error,
        is_retryable=retryable if should_retry is None else should_retry,
        counts_against_health=failed,
        retry_after_seconds=after,
    )


def unreadable_response(provider: Provider, problem: str) -> ApiError:
    """The error for a complete response that cannot be parsed."""
    message = f"the provider {provider.name!r} sent an unreadable response: {display_text(provider, problem)}"
    return ApiError(502, message, code="provider_protocol", retry=provider.final)


def display_text(provider: Provider, text: str) -> str:
    """A text of a provider for agents and spans: without secrets, and of limited length."""
    text = redact_text(provider, text)
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[:_MAX_MESSAGE_CHARS] + "..."
