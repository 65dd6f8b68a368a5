"""Credentials of a provider, hidden in whatever it says: answers, events of streams, headers and errors.

A provider that echoes a request, or puts its key into an error, shows it to agents and to spans otherwise. Made once
for each provider by `upstream.servers`; called for every answer before anybody reads it, so that it costs no more than
a search of the bytes.
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
"""Characters of a credential that is looked for in answers. A shorter one may be a word a model says, and no provider
makes such keys; errors and headers are searched for those as well."""
_ERROR: Final = b'"error"'
_NO_ERROR: Final = (b'"error":null', b'"error": null')


class Redactor:
    """Hides the credentials of one provider."""

    def __init__(self, provider: Provider) -> None:
        credentials = [text for text in provider.credentials() if len(text) >= MIN_BODY_SECRET_CHARS]
        self._in_answers = _encodings(credentials)
        self._everywhere = _encodings(provider.secrets())

    def redact_body(self, data: bytes) -> bytes:
        """A whole answer, or an event of one. What says that something failed is searched for every secret."""
        shapes = self._in_answers
        if shapes != self._everywhere and data.count(_ERROR) > sum(data.count(said) for said in _NO_ERROR):
            shapes = self._everywhere
        return _replace(data, shapes)

    def redact_headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        return [(name, _replace(value, self._everywhere)) for name, value in headers]


def redact_text(provider: Provider, text: str) -> str:
    """A text of a provider's, without any of its secrets."""
    data = text.encode("utf-8", "surrogatepass")
    return _replace(data, _encodings(provider.secrets())).decode("utf-8", "surrogatepass")


def _replace(data: bytes, shapes: Iterable[bytes]) -> bytes:
    for shape in shapes:
        if shape in data:
            data = data.replace(shape, HIDDEN.encode())
    return data


def _encodings(secrets: Iterable[str]) -> tuple[bytes, ...]:
    """How each may be written in a body or a header; the longest first, as one may hold another."""
    found: set[bytes] = set()
    for secret in secrets:
        escaped = json.dumps(secret, ensure_ascii=False)[1:-1]
        texts = (secret, escaped, escaped.replace("/", "\\/"), json.dumps(secret)[1:-1], quote(secret, safe=""))
        found |= {text.encode("utf-8", "surrogatepass") for text in texts}
    return tuple(sorted(found, key=lambda shape: (-len(shape), shape)))
