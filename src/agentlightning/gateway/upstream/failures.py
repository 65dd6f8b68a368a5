"""Translates failures of providers to errors for the caller, without credentials, and decides whether to retry.

Errors carry `x-should-retry: false`: the gateway has retried already, within a retry budget, and further retries by the
client would multiply the load of an outage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import time
from typing import Any, Final

import orjson

from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.upstream.provider import Provider
from agentlightning.gateway.upstream.redaction import redact_text
from agentlightning.transport import Headers, TransportError

_SERVER_ERRORS: Final = frozenset({500, 502, 503, 504, 529})
_CLIENT_ERRORS: Final = frozenset({400, 404, 409, 413, 415, 422, 429})
"""Statuses that refer to the caller's own request."""
_MAX_MESSAGE_CHARS: Final = 2000
_MAX_RETRY_AFTER: Final = 86_400.0
"""Seconds; longer values are clamped."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed try."""

    api_error: ApiError
    """The error for the caller if there is no further try."""
    is_retryable: bool
    """Whether another try may succeed."""
    counts_against_health: bool
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
        return Failure(
            ApiError(504, message, code="provider_timeout", retry=False), is_retryable=False, counts_against_health=True
        )
    problem, code = {
        "tls": ("cannot be reached over TLS", "provider_tls"),
        "proxy": ("cannot be reached through its proxy", "proxy_refused"),
        "connect": ("cannot be reached", "provider_unreachable"),
        "closed": ("closed the connection before its response was complete", "provider_closed"),
        "protocol": ("sent an invalid HTTP response", "provider_protocol"),
    }[error.reason]
    api_error = ApiError(502, f"{subject} {problem}: {text}", code=code, retry=False)
    return Failure(
        api_error,
        is_retryable=error.reason in ("connect", "closed"),
        counts_against_health=error.reason != "proxy",
        unreachable=error.reason in ("connect", "tls"),
    )


def from_response(provider: Provider, status: int, headers: Headers, body: bytes) -> Failure:
    """The failure of a try with an error response."""
    message, code, param = (_display_optional(provider, text) for text in _error_fields(body))
    message = message or f"the provider {provider.name!r} responded with status {status}"
    after = retry_after(headers)
    if status in (401, 403):
        # The message may contain the key, and it is not the caller's key.
        message = f"the provider {provider.name!r} rejected the configured API key (status {status})"
        return Failure(
            ApiError(502, message, code="provider_key_refused", retry=False),
            is_retryable=False,
            counts_against_health=False,
        )
    if status == 407:  # Addressed to the client of the proxy, which is the gateway.
        message = f"the provider {provider.name!r} cannot be reached through its proxy: it requires other credentials"
        return Failure(
            ApiError(502, message, code="proxy_refused", retry=False), is_retryable=False, counts_against_health=False
        )
    if status in _SERVER_ERRORS:
        api_error = ApiError(503 if status == 529 else status, message, code=code or "provider_error", retry=False)
        return Failure(api_error, is_retryable=True, counts_against_health=True, retry_after_seconds=after)
    if status in _CLIENT_ERRORS or 400 <= status < 500:
        api_error = ApiError(status, message, code=code, param=param, retry=False, retry_after=after)
        return Failure(api_error, is_retryable=status == 429, counts_against_health=False, retry_after_seconds=after)
    api_error = ApiError(
        502, f"the provider {provider.name!r} responded with status {status}", code="provider_protocol"
    )
    api_error.retry = False
    return Failure(api_error, is_retryable=False, counts_against_health=True)


def unreadable_response(provider: Provider, problem: str) -> ApiError:
    """The error for a complete response that cannot be parsed."""
    message = f"the provider {provider.name!r} sent an unreadable response: {display_text(provider, problem)}"
    return ApiError(502, message, code="provider_protocol", retry=False)


def retry_after(headers: Headers) -> float | None:
    """The pause that a server asks for, in seconds, from OpenAI's `retry-after-ms` or HTTP's `retry-after`."""
    values = {name: value for name, value in headers if name in (b"retry-after", b"retry-after-ms")}
    try:
        if b"retry-after-ms" in values:
            return _clamp_retry_after(float(values[b"retry-after-ms"]) / 1000)
        if b"retry-after" not in values:
            return None
        text = values[b"retry-after"].decode("latin-1")
        if text.replace(".", "", 1).isdecimal():
            return _clamp_retry_after(float(text))
        return _clamp_retry_after(parsedate_to_datetime(text).timestamp() - time())
    except (ValueError, OverflowError):
        return None


def _clamp_retry_after(seconds: float) -> float | None:
    return None if math.isnan(seconds) else min(max(0.0, seconds), _MAX_RETRY_AFTER)


def _error_fields(body: bytes) -> tuple[str, str | None, str | None]:
    """(message, code, parameter) of an error response in any of the usual shapes."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return "", None, None
    error: Any = data.get("error", data) if isinstance(data, dict) else data
    if not isinstance(error, dict):
        return (error if isinstance(error, str) else ""), None, None
    message = next((error[key] for key in ("message", "detail") if isinstance(error.get(key), str)), "")
    code, param = error.get("code"), error.get("param")
    return message, code if isinstance(code, str) else None, param if isinstance(param, str) else None


def _display_optional(provider: Provider, text: str | None) -> str | None:
    return None if text is None else display_text(provider, text)


def display_text(provider: Provider, text: str) -> str:
    """A text of a provider for agents and spans: without secrets, and of limited length."""
    text = redact_text(provider, text)
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[:_MAX_MESSAGE_CHARS] + "..."
