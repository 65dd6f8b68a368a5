"""Serializes HTTP/1.1 requests to bytes, and rejects headers that would inject further lines."""

from __future__ import annotations

from agentlightning.transport.base import Headers, TransportError


def request_bytes(method: str, target: bytes, host: bytes, headers: Headers, body: bytes) -> bytes:
    """The bytes of a whole request. `host` may include further header lines. Raises TransportError if a header contains
    a line break."""
    lines = [b"%s %s HTTP/1.1\r\nhost: %s" % (method.encode(), target, host)]
    lines += [b"%s: %s" % header for header in headers]
    head = b"\r\n".join(lines)
    num_breaks = len(lines) + host.count(b"\n")
    if head.count(b"\n") != num_breaks or head.count(b"\r") != num_breaks:
        names = ", ".join(name.decode("latin-1") for name, value in headers if b"\r" in value or b"\n" in value)
        raise TransportError(f"a header holds a line break: {names}", "protocol")
    if body or method not in ("GET", "HEAD"):
        head += b"\r\ncontent-length: %d" % len(body)
    return b"%s\r\n\r\n%s" % (head, body)
