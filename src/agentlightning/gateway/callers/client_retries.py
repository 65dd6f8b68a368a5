"""Identifies repeated requests of a client, for the span of the call.

A client that lost the response to a request sends the request again, so one of the two responses never reached the
agent. The gateway cannot know which one until the next request arrives, so it records the identity of each request;
`assemble` leaves out the responses that were lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final

from msgspec import Struct

from agentlightning import span as names

_RETRIES: Final = "x-stainless-retry-count"
"""The retry count of the official SDKs of OpenAI and Anthropic."""
_IDENTITIES: Final = ("idempotency-key", "x-claude-code-session-id", "x-claude-code-agent-id")
"""Claude Code sends no retry count, but repeats a request within a session only if it got no response."""


class RequestIdentity(Struct, frozen=True):
    """A digest of a request, and the number of times its client sent it before."""

    request: str
    """Equal for equal requests; see `names.REQUEST`."""
    retries: int

    @classmethod
    def of(cls, headers: Mapping[str, str], path: str, body: bytes) -> RequestIdentity:
        """`path` is the API path, without the attempt."""
        digest = blake2b(body, digest_size=12, key=path.encode()[:64])
        identities = [headers[name] for name in _IDENTITIES if name in headers]
        for identity in identities:
            digest.update(b"\0" + identity.encode())
        count = headers.get(_RETRIES, "")
        retries = int(count) if count.isdecimal() and len(count) < 9 else 0
        return cls(f"{names.SENT_ONCE if identities else ''}{digest.hexdigest()}", retries)

    def attributes(self) -> dict[str, Any]:
        attributes: dict[str, Any] = {names.REQUEST: self.request}
        return attributes | {names.RETRIES: self.retries} if self.retries else attributes
