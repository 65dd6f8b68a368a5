"""Decompresses request bodies up to a limit, large ones in a thread.

A few kilobytes can become many megabytes. Bodies of up to INLINE_BYTES are decompressed at once, larger ones in one of
few threads, so that a client can neither block the event loop nor exhaust the memory. Used by the store's server, the
OTLP receiver and the gateway.
"""

from __future__ import annotations

import asyncio
import importlib
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, Final

from agentlightning.errors import ConfigError

INLINE_BYTES: Final = 256 * 1024
"""Size of a body that is decompressed on the event loop, which takes well under a millisecond."""
THREADS: Final = 2
"""Bodies that are decompressed concurrently in threads."""
_IDENTITY: Final = ("", "identity")


class CodingError(ConfigError):
    """A body that cannot be decompressed, with the HTTP status of the response: 400, 413 or 415."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


async def decompress(body: bytes, coding: str, limit: int) -> bytes:
    """The body without its `content-encoding`. Raises CodingError if that is unknown (415), the data invalid (400), or
    the result larger than `limit` bytes (413)."""
    coding = coding.strip().lower()
    if coding in _IDENTITY:
        return body
    decompressor = _open(coding, body)
    first = decompressor.read(min(INLINE_BYTES, limit + 1))
    if decompressor.ended or len(first) > limit:
        return _check_size(first, limit)
    work = partial(_read_rest, decompressor, first, limit)
    return await asyncio.get_running_loop().run_in_executor(_executor(), work)


def decompress_now(body: bytes, coding: str, limit: int) -> bytes:
    """As `decompress`, in the calling thread."""
    coding = coding.strip().lower()
    return body if coding in _IDENTITY else _read_rest(_open(coding, body), b"", limit)


def _read_rest(decompressor: _Zlib | _FileDecompressor, first: bytes, limit: int) -> bytes:
    return _check_size(first + decompressor.read(limit + 1 - len(first)), limit)


def _check_size(data: bytes, limit: int) -> bytes:
    if len(data) > limit:
        raise CodingError(f"the decompressed body has more than {limit} bytes; send less at once", 413)
    return data


@lru_cache(maxsize=1)
def _executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="agl-decompress")


def _open(coding: str, body: bytes) -> _Zlib | _FileDecompressor:
    if coding in ("gzip", "x-gzip"):
        return _Zlib(body, 31, "gzip")
    if coding == "deflate":  # some clients send the raw stream, without the zlib header
        framed = len(body) > 1 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
        return _Zlib(body, 15 if framed else -15, "deflate")
    if coding == "zstd" and (found := _zstd(body)) is not None:
        return found
    known = "gzip, deflate" + (", zstd" if _has_zstd() else "")
    raise CodingError(f"content-encoding={coding!r} is not supported; send {known}, or none", 415)


class _Zlib:
    """Reads one compressed body."""

    def __init__(self, body: bytes, wbits: int, name: str) -> None:
        self._decompressor = zlib.decompressobj(wbits=wbits)
        self._remaining = body
        self._name = name

    @property
    def ended(self) -> bool:
        return self._decompressor.eof

    def read(self, most: int) -> bytes:
        """Up to `most` bytes; fewer only at the end. Raises CodingError if the data is invalid or truncated."""
        try:
            data = self._decompressor.decompress(self._remaining, most)
        except zlib.error as error:
            raise CodingError(f"the body is not {self._name}: {error}", 400) from None
        self._remaining = self._decompressor.unconsumed_tail
        truncated = len(data) < most and not self._decompressor.eof
        if truncated or self._decompressor.unused_data:
            raise CodingError(
                f"the body is not one complete {self._name} stream: it is truncated, or followed by other data", 400
            )
        return data


class _FileDecompressor:
    """The same through a library's decompressing file object."""

    def __init__(self, file: Any, *errors: type[Exception]) -> None:
        self._file = file
        self._errors = (OSError, EOFError, ValueError, *errors)
        """What the file raises for invalid data."""
        self.ended = False

    def read(self, most: int) -> bytes:
        try:
            data = bytes(self._file.read(most))
        except self._errors as error:
            raise CodingError(f"the body is not zstd: {error}", 400) from None
        self.ended = len(data) < most
        return data


def _zstd(body: bytes) -> _FileDecompressor | None:
    """With the standard library (Python 3.14), or pyarrow."""
    if (own := _module("compression.zstd")) is not None:
        import io

        return _FileDecompressor(own.ZstdFile(io.BytesIO(body)), own.ZstdError)
    if (arrow := _module("pyarrow")) is not None:
        return _FileDecompressor(arrow.CompressedInputStream(arrow.BufferReader(body), "zstd"))
    return None


def _has_zstd() -> bool:
    return _module("compression.zstd") is not None or _module("pyarrow") is not None


@lru_cache
def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
