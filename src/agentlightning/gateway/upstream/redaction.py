"""Redacts the credentials of a provider in its responses, stream events, headers and errors.

Otherwise a provider that echoes requests, or names its key in an error, would reveal it to agents and spans. Runs for
every response before it is parsed, so it only searches the bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final
from urllib.parse import quote

from agentlightning.gateway.upstream.provider import Provider
from agentlightning.transport import Headers

HIDDEN: Final = "***"
MIN_BODY_SECRET_CHARS: Final = 16
"""Shorter credentials are redacted in errors and headers only: in a response they may be words of the model, and no
provider issues such keys."""
_ERROR: Final = b'"error"'
_NO_ERROR: Final = (b'"error":null', b'"error": null')


class Redactor:
    """Hides the credentials of one provider."""

    def __init__(self, provider: Provider) -> None:
        credentials = [text for text in provider.credentials() if len(text) >= MIN_BODY_SECRET_CHARS]
        self._in_bodies = _encodings(credentials)
        self._everywhere = _encodings(provider.secrets())

    def redact_body(self, data: bytes) -> bytes:
        """Redact a response or a stream event; errors are searched for every secret."""
        encodings = self._in_bodies
        if encodings != self._everywhere and data.count(_ERROR) > sum(data.count(null) for null in _NO_ERROR):
            encodings = self._everywhere
        return _replace(data, encodings)

    def redact_headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        return [(name, _replace(value, self._everywhere)) for name, value in headers]


def redact_text(provider: Provider, text: str) -> str:
    """Redact a text of a provider."""
    data = text.encode("utf-8", "surrogatepass")
    return _replace(data, _encodings(provider.secrets())).decode("utf-8", "surrogatepass")


def _replace(data: bytes, encodings: Iterable[bytes]) -> bytes:
    for encoded in encodings:
        if encoded in data:
            data = data.replace(encoded, HIDDEN.encode())
    return data


def _encodings(secrets: Iterable[str]) -> tuple[bytes, ...]:
    """How secrets may be written in a body or a header; the longest first, since one may contain another."""
    encodings: set[bytes] = set()
    for secret in secrets:
        escaped = json.dumps(secret, ensure_ascii=False)[1:-1]
        texts = (secret, escaped, escaped.replace("/", "\\/"), json.dumps(secret)[1:-1], quote(secret, safe=""))
        encodings |= {text.encode("utf-8", "surrogatepass") for text in texts}
    return tuple(sorted(encodings, key=lambda encoded: (-len(encoded), encoded)))
