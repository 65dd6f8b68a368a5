"""Requests that a client sends again: what says so, as the span of the call keeps it.

Called for every model call of an attempt. A client that lost the answer to a request sends the same request once more,
so that one of the two answers was never heard. The gateway cannot know which it is until the next one comes, so it
records what it sees; `assemble` leaves out the answers nobody heard.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final

from msgspec import Struct

from agentlightning import span as names

_RETRIES: Final = "x-stainless-retry-count"
"""The official SDKs of OpenAI and Anthropic count here how often they have sent a request before."""
_IDENTITIES: Final = ("idempotency-key", "x-claude-code-session-id", "x-claude-code-agent-id")
"""Claude Code counts nothing, but no conversation of one session sends the same twice unless it got no answer."""


class RequestIdentity(Struct, frozen=True):
    """What a call says of having been made before."""

    request: str
    """The same for the same request; see `names.REQUEST`."""
    retries: int

    @classmethod
    def of(cls, headers: Mapping[str, str], path: str, body: bytes) -> RequestIdentity:
        """`path`: without what names the attempt."""
        digest = blake2b(body, digest_size=12, key=path.encode()[:64])
        said = [headers[name] for name in _IDENTITIES if name in headers]
        for each in said:
            digest.update(b"\0" + each.encode())
        counted = headers.get(_RETRIES, "")
        retries = int(counted) if counted.isdecimal() and len(counted) < 9 else 0
        return cls(f"{names.SENT_ONCE if said else ''}{digest.hexdigest()}", retries)

    def attributes(self) -> dict[str, Any]:
        found: dict[str, Any] = {names.REQUEST: self.request}
        return found | {names.RETRIES: self.retries} if self.retries else found
