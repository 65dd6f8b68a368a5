"""Interfaces of an HTTP client: a transport sends requests, and returns responses whole or in chunks.

A transport manages connections and bytes. Choice of the server, retries and the meaning of responses are left to its
users.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Literal, Protocol, Self

from agentlightning.errors import AgentLightningError

Headers = Sequence[tuple[bytes, bytes]]
"""Names in lower case."""


Reason = Literal["connect", "timeout", "closed", "protocol", "tls", "proxy"]
"""The cause: no connection, no data in time, a closed connection, invalid HTTP, a failed TLS handshake or an untrusted
certificate, a proxy that rejects the request. The last two persist until a setting changes."""


class TransportError(AgentLightningError):
    """No response, or an incomplete one."""

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message)
        self.reason = reason


class Response(Protocol):
    """The response to one request, its body not read yet. Use as `async with`; an early exit drops the connection."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Headers: ...

    async def read(self) -> bytes:
        """Read the whole body. Raises TransportError if it breaks off."""
        ...

    def chunks(self, gather_seconds: float = 0.0) -> AsyncIterator[bytes]:
        """The body as it arrives; after each part, nothing is read for `gather_seconds`, so that the next is larger.
        Raises TransportError if it breaks off."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Transport(Protocol):
    """Sends requests over kept-alive connections; one for each event loop."""

    async def send(
        self,
        method: str,
        url: str,
        headers: Headers,
        body: bytes = b"",
        *,
        connect_seconds: float = 10.0,
        timeout_seconds: float = 600.0,
    ) -> Response:
        """Send a request, and return once the head of its response arrived. `timeout_seconds` limits the time between
        reads, not the total.

        A kept-alive connection that turns out to be closed before the first byte of the response is replaced; nothing
        else is sent twice. Raises TransportError.
        """
        ...

    async def close(self) -> None: ...
