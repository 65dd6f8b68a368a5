"""What the parts of the transport share: servers, errors, and the text of an error response, however it is wrapped."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final, Literal, Self
from urllib.parse import SplitResult

from agentlightning.errors import AgentLightningError
from agentlightning.util.json_values import loads

Headers = Sequence[tuple[bytes, bytes]]
"""Names in lower case."""
Reason = Literal["connect", "timeout", "closed", "protocol", "tls", "proxy"]
"""The cause: no connection, no data in time, a closed connection, invalid HTTP, a failed TLS handshake or an untrusted
certificate, a proxy that rejects the request. The last two persist until a setting changes."""
MAX_HEAD_BYTES: Final = 65536


class TransportError(AgentLightningError):
    """No response, or an incomplete one."""

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Origin:
    """Scheme, host and port of a server."""

    secure: bool
    host: str
    port: int

    @classmethod
    def of(cls, url: SplitResult) -> Self:
        """Raises ValueError for an invalid port."""
        secure = url.scheme == "https"
        return cls(secure, url.hostname or "", url.port or (443 if secure else 80))

    @property
    def scheme(self) -> str:
        return "https" if self.secure else "http"

    @property
    def authority(self) -> str:
        """Host and port, as in URLs."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


# -- requests ----------------------------------------------------------------------------------------------------------


def request_bytes(method: str, target: bytes, headers: Headers, body: bytes = b"") -> bytes:
    """The bytes of a whole request. Raises TransportError if a header contains a line break."""
    lines = [b"%s %s HTTP/1.1" % (method.encode(), target), *(b"%s: %s" % header for header in headers)]
    head = b"\r\n".join(lines)
    if {head.count(b"\n"), head.count(b"\r")} != {len(lines) - 1}:
        names = ", ".join(name.decode("latin-1") for name, value in headers if b"\r" in value or b"\n" in value)
        raise TransportError(f"a header holds a line break: {names}", "protocol")
    if body or method not in ("GET", "HEAD", "CONNECT"):
        head += b"\r\ncontent-length: %d" % len(body)
    return b"%s\r\n\r\n%s" % (head, body)


# -- responses that ask to wait ----------------------------------------------------------------------------------------


def retry_after(headers: Headers) -> float | None:
    """The pause that a server asks for, in seconds, from OpenAI's `retry-after-ms` or HTTP's `retry-after`."""
    values = dict(headers)
    text = values.get(b"retry-after", b"").decode("latin-1")
    try:
        if b"retry-after-ms" in values:
            seconds = float(values[b"retry-after-ms"]) / 1000
        elif text.replace(".", "", 1).isdecimal():
            seconds = float(text)
        else:
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, OverflowError):
        return None
    return None if math.isnan(seconds) else min(max(0.0, seconds), 86_400.0)


# -- error responses ---------------------------------------------------------------------------------------------------

_MARKUP: Final = re.compile(r"<(script|style|head)\b.*?</\1>|<[^>]*>", re.IGNORECASE | re.DOTALL)
CONTEXT_ERROR: Final = re.compile(
    r"context (length|window|size)|maximum (context|model length)|model's context|(prompt|input) is too long"
    r"|too many (input )?tokens",
    re.IGNORECASE,
)
"""What servers write of a prompt that the model's context does not hold."""
_TEXT_FIELDS: Final = ("error", "message", "detail", "msg", "errors", "error_description", "title")
"""Fields with the text of an error, in order of precedence; each may hold a text, an object or a list of these."""


def error_fields(body: bytes, parse: Callable[[bytes], Any] = loads) -> tuple[str, str | None, str | None]:
    """(message, code, parameter) of an error response. What has no known shape is the message as it is."""
    try:
        data = parse(body)
    except ValueError:
        data = body.decode(errors="replace")
    error: Any = data[0] if isinstance(data, list) and data else data
    error = error.get("error") or error if isinstance(error, dict) else error
    known = (error.get("code"), error.get("param")) if isinstance(error, dict) else (None, None)
    code, param = (value if isinstance(value, str) else None for value in known)
    text = _text_of(data) or (body.decode(errors="replace") if data else "")
    if text.lstrip()[:1] == "<":
        text = " ".join(_MARKUP.sub(" ", text).split())
    return text.strip(), code, param


def _text_of(value: Any, depth: int = 8) -> str:
    """The text of an error in any of the usual shapes; OpenRouter's has that of the actual provider in `metadata`."""
    match value:
        case str():
            return value
        case [*items] if depth:
            return "; ".join(filter(None, (_text_of(each, depth - 1) for each in items)))
        case {**fields} if depth:
            text = next((text for name in _TEXT_FIELDS if (text := _text_of(fields.get(name), depth - 1))), "")
            match fields.get("metadata"):
                case {"raw": str(raw)}:
                    return f"{text}: {raw}"
                case _:
                    return text
        case _:
            return ""
