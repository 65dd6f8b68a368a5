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
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from typing import Any, Final, TypeAlias

from agentlightning.errors import ConfigError

INLINE_BYTES: Final = 256 * 1024
"""Size of a body that is decompressed on the event loop, which takes well under a millisecond."""
THREADS: Final = 2
"""Bodies that are decompressed concurrently in threads."""

Read: TypeAlias = Callable[[int], bytes]
"""Up to so many further bytes of a body, fewer only at its end. Raises for data that is invalid or cut."""


class CodingError(ConfigError):
    """A body that cannot be decompressed, with the HTTP status of the response: 400, 413 or 415."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


async def decompress(body: bytes, coding: str, limit: int) -> bytes:
    """The body without its `content-encoding`. Raises CodingError if that is unknown (415), the data invalid (400), or
    the result larger than `limit` bytes (413)."""
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        return body
    read = _reader(body, coding)
    try:
        data = read(min(INLINE_BYTES, limit + 1))
        if INLINE_BYTES <= len(data) <= limit:
            data += await asyncio.get_running_loop().run_in_executor(_executor(), read, limit + 1 - len(data))
    except Exception as error:  # noqa: BLE001  each library raises exceptions of its own for invalid data
        raise CodingError(f"the body is not one complete {coding} stream: {error}", 400) from None
    if len(data) > limit:
        raise CodingError(f"the decompressed body has more than {limit} bytes; send less at once", 413)
    return data


@lru_cache(maxsize=1)
def _executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="agl-decompress")


def _reader(body: bytes, coding: str) -> Read:
    if coding in ("gzip", "x-gzip"):
        return _zlib(body, 31)
    if coding == "deflate":  # some clients send the raw stream, without the zlib header
        framed = len(body) > 1 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
        return _zlib(body, 15 if framed else -15)
    zstd = _zstd()
    if coding == "zstd" and zstd:
        return zstd(body)
    known = "gzip, deflate" + (", zstd" if zstd else "")
    raise CodingError(f"content-encoding={coding!r} is not supported; send {known}, or none", 415)


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


@lru_cache(maxsize=1)
def _zstd() -> Callable[[bytes], Read] | None:
    with suppress(ImportError):
        own: Any = import_module("compression.zstd")  # from Python 3.14 on
        return lambda body: own.ZstdFile(io.BytesIO(body)).read
    with suppress(ImportError):
        arrow: Any = import_module("pyarrow")
        return lambda body: arrow.CompressedInputStream(arrow.BufferReader(body), "zstd").read
    return None
