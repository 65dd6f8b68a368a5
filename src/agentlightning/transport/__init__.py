"""HTTP to another server, for those who pass on many calls. See `base` for what is promised."""

from __future__ import annotations

from agentlightning.transport.base import Answer, Arriving, Headers, Transport, TransportError

__all__ = ["Answer", "Arriving", "Headers", "Transport", "TransportError", "open_transport"]


def open_transport() -> Transport:
    """A transport for the event loop that uses it first. Close it when done."""
    from agentlightning.transport.pool import Pool

    return Pool()
