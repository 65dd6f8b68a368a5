"""HTTP to another server, for those who pass on many calls: one request out, one answer in, whole or piece by piece.

Responsible for connections and bytes. Who is called, what is repeated and what an answer means are the business of
those who call it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Literal, Protocol, Self

from agentlightning.errors import AgentLightningError

Headers = Sequence[tuple[bytes, bytes]]
"""Names in lower case."""


Reason = Literal["connect", "timeout", "closed", "protocol", "tls", "proxy"]
"""What happened: no way there, silence, a connection that was closed, what is no HTTP, a certificate that is not to be
trusted (or no agreement on TLS), a proxy that refuses. The last two stay as they are until somebody changes a
setting."""


class TransportError(AgentLightningError):
    """No answer, or not all of one."""

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message)
        self.reason = reason


class Response(Protocol):
    """The answer to one request, its body not read yet. Use as `async with`: leaving early drops the connection."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Headers: ...

    async def read(self) -> bytes:
        """The whole body. Raises TransportError where it is cut short."""
        ...

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises TransportError where it is cut short."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class PendingResponse(Protocol):
    """An answer that is waited for without a task: it is whole, or has failed, when it says so."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Headers: ...

    @property
    def error(self) -> TransportError | None:
        """Why there is no whole answer."""
        ...

    @property
    def stale(self) -> bool:
        """It failed because the connection had been closed before it was used: nobody has heard the request."""
        ...

    def body(self) -> bytes:
        """The body."""
        ...

    def drop(self) -> None:
        """Nobody waits for it any more."""
        ...


class Transport(Protocol):
    """Keeps connections alive between calls; one for an event loop."""

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
        """Returns when the answer's head is there. `timeout_seconds` is the longest silence, not the whole.

        A connection that was kept alive and turns out to be closed at once, before a byte of the answer came, is
        replaced; nothing else is sent twice. Raises TransportError."""
        ...

    def try_send(
        self,
        method: str,
        url: str,
        headers: Headers,
        body: bytes,
        on_done: Callable[[], None],
        *,
        timeout_seconds: float = 600.0,
    ) -> PendingResponse | None:
        """Send at once, and call `on_end` when the answer is whole or has failed; it is read there and then. None,
        and nothing is sent, where no connection is at hand. Raises TransportError for what cannot be sent."""
        ...

    async def close(self) -> None: ...
