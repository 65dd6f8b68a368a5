"""HTTP to another server, for those who pass on many calls. See `base` for what is promised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentlightning.transport.base import Headers, PendingResponse, Response, Transport, TransportError

if TYPE_CHECKING:
    from agentlightning.transport.connector import ConnectOptions

__all__ = ["Headers", "PendingResponse", "Response", "Transport", "TransportError", "open_transport"]


def open_transport(options: ConnectOptions | None = None) -> Transport:
    """A transport for the event loop that uses it first. Close it when done. `dial` says how connections are opened;
    None: through the proxies that the environment names. Raises ConfigError where it says what cannot be used."""
    from agentlightning.transport.connector import ConnectOptions
    from agentlightning.transport.pool import ConnectionPool

    return ConnectionPool(ConnectOptions.create() if options is None else options)
