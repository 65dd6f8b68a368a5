"""Decompresses request bodies up to a limit, large ones in a thread.

A few kilobytes can become many megabytes. Bodies of up to INLINE_BYTES are decompressed at once, larger ones in one of
few threads, so that a client can neither block the event loop nor exhaust the memory. Used by the store's server, the
OTLP receiver and the gateway.
"""

from __future__ import annotations

import asyncio
import io
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib import import_module
from typing import Any, Final, TypeAlias

from agentlightning.errors import ConfigError

INLINE_BYTES: Final = 256 * 1024
"""Size of a body that is decompressed on the event loop, which takes well under a millisecond."""
THREADS: Final = 2
"""Bodies that are decompressed concurrently in threads."""

Read: TypeAlias = Callable[[int], bytes]
"""Up to so many further bytes of a body, fewer only at its end. Raises CodingError for data that is invalid or cut."""


class CodingError(ConfigError):
    """A body that cannot be decompressed, with the HTTP status of the response: 400, 413 or 415."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


async def decompress(body: bytes, coding: str, limit: int) -> bytes:
    """The body without its `content-encoding`. Raises CodingError if that is unknown (415), the data invalid (400), or
    the result larger than `limit` bytes (413)."""
    if (read := _open(body, coding)) is None:
        return body
    data = read(min(INLINE_BYTES, limit + 1))
    if INLINE_BYTES <= len(data) <= limit:
        data += await asyncio.get_running_loop().run_in_executor(_executor(), read, limit + 1 - len(data))
    if len(data) > limit:
        raise CodingError(f"the decompressed body has more than {limit} bytes; send less at once", 413)
    return data


@lru_cache(maxsize=1)
def _executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="agl-decompress")


def _open(body: bytes, coding: str) -> Read | None:
    """What reads a body; None: it is not compressed."""
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        return None
    if coding in ("gzip", "x-gzip"):
        return _checked("gzip", _zlib(body, 31), zlib.error)
    if coding == "deflate":  # some clients send the raw stream, without the zlib header
        framed = len(body) > 1 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
        return _checked("deflate", _zlib(body, 15 if framed else -15), zlib.error)
    own = _module("compression.zstd")  # from Python 3.14 on
    arrow = None if own else _module("pyarrow")
    if coding == "zstd" and own:
        return _checked("zstd", own.ZstdFile(io.BytesIO(body)).read, own.ZstdError)
    if coding == "zstd" and arrow:
        return _checked("zstd", arrow.CompressedInputStream(arrow.BufferReader(body), "zstd").read)
    known = "gzip, deflate" + (", zstd" if own or arrow else "")
    raise CodingError(f"content-encoding={coding!r} is not supported; send {known}, or none", 415)


def _checked(name: str, read: Read, *errors: type[Exception]) -> Read:
    """With what a library raises for invalid data as CodingError."""

    def checked(most: int) -> bytes:
        try:
            return bytes(read(most))
        except (OSError, EOFError, ValueError, *errors) as error:
            raise CodingError(f"the body is not one complete {name} stream: {error}", 400) from None

    return checked


def _zlib(body: bytes, wbits: int) -> Read:
    opened, left = zlib.decompressobj(wbits=wbits), body

    def read(most: int) -> bytes:
        nonlocal left
        data = opened.decompress(left, most)
        left = opened.unconsumed_tail
        if opened.unused_data or (len(data) < most and not opened.eof):
            raise ValueError("it is truncated, or followed by other data")
        return data

    return read


@lru_cache
def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        return None
