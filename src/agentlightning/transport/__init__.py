"""An HTTP/1.1 client for many concurrent calls to a few servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentlightning.transport.base import Headers, Response, Transport, TransportError

if TYPE_CHECKING:
    from agentlightning.transport.connector import ConnectOptions

__all__ = ["Headers", "Response", "Transport", "TransportError", "open_transport"]


def open_transport(options: ConnectOptions | None = None) -> Transport:
    """Open a transport for the event loop that uses it first; close it when done. Without `options` it uses the proxies
    of the environment. Raises ConfigError for invalid options."""
    from agentlightning.transport.connector import ConnectOptions
    from agentlightning.transport.pool import ConnectionPool

    return ConnectionPool(ConnectOptions.create() if options is None else options)
