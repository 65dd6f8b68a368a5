"""An HTTP/1.1 client for many concurrent calls to a few servers."""

from agentlightning.transport.base import Headers, TransportError
from agentlightning.transport.pool import Response, Transport

__all__ = ["Headers", "Response", "Transport", "TransportError"]
