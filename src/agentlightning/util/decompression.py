"""Compressed request bodies, inflated up to a limit; what takes long, beside the event loop.

A few kilobytes can become many megabytes: what fits INLINE_BYTES is inflated at once, the rest in one of few threads,
so that neither the loop nor the memory is at the mercy of who sends. Called by the store's server, its OTLP receiver
and the gateway.
"""

from __future__ import annotations

import asyncio
import importlib
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, Final, Protocol

from agentlightning.errors import ConfigError

INLINE_BYTES: Final = 256 * 1024
"""Of an inflated body, on the event loop: well under a millisecond."""
THREADS: Final = 2
"""Bodies that are inflated at the same time beside it."""
_IDENTITY: Final = ("", "identity")


class CodingError(ConfigError):
    """A body that cannot be inflated, and the HTTP status that says so: 400, 413 or 415."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class _Inflater(Protocol):
    """Reads one compressed body."""

    def read(self, most: int) -> bytes:
        """So many bytes more, or all there are. Raises CodingError for what is broken or cut."""
        ...

    @property
    def ended(self) -> bool: ...


async def inflated(body: bytes, coding: str, limit: int) -> bytes:
    """The body without its `content-encoding`. Raises CodingError for one that is not known (415), broken (400) or,
    inflated, larger than `limit` bytes (413)."""
    coding = coding.strip().lower()
    if coding in _IDENTITY:
        return body
    inflater = _open(coding, body)
    first = inflater.read(min(INLINE_BYTES, limit + 1))
    if inflater.ended or len(first) > limit:
        return _within(first, limit)
    work = partial(_rest, inflater, first, limit)
    return await asyncio.get_running_loop().run_in_executor(_threads(), work)


def inflated_now(body: bytes, coding: str, limit: int) -> bytes:
    """The same, here and now."""
    coding = coding.strip().lower()
    return body if coding in _IDENTITY else _rest(_open(coding, body), b"", limit)


def _rest(inflater: _Inflater, first: bytes, limit: int) -> bytes:
    return _within(first + inflater.read(limit + 1 - len(first)), limit)


def _within(data: bytes, limit: int) -> bytes:
    if len(data) > limit:
        raise CodingError(f"the inflated body has more than {limit} bytes; send less at once", 413)
    return data


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="agl-inflate")


def _open(coding: str, body: bytes) -> _Inflater:
    if coding in ("gzip", "x-gzip"):
        return _Zlib(body, 31, "gzip")
    if coding == "deflate":  # some send the bare stream, without zlib's frame
        framed = len(body) > 1 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
        return _Zlib(body, 15 if framed else -15, "deflate")
    if coding == "zstd" and (found := _zstd(body)) is not None:
        return found
    known = "gzip, deflate" + (", zstd" if _has_zstd() else "")
    raise CodingError(f"content-encoding={coding!r} is not understood; send {known}, or none", 415)


class _Zlib:
    def __init__(self, body: bytes, wbits: int, name: str) -> None:
        self._inflater = zlib.decompressobj(wbits=wbits)
        self._left = body
        self._name = name

    @property
    def ended(self) -> bool:
        return self._inflater.eof

    def read(self, most: int) -> bytes:
        try:
            data = self._inflater.decompress(self._left, most)
        except zlib.error as error:
            raise CodingError(f"the body is not {self._name}: {error}", 400) from None
        self._left = self._inflater.unconsumed_tail
        cut = len(data) < most and not self._inflater.eof
        if cut or self._inflater.unused_data:
            raise CodingError(f"the body is not one whole {self._name} stream; it was cut, or something follows", 400)
        return data


class _File:
    """What a library reads as a file."""

    def __init__(self, file: Any, *errors: type[Exception]) -> None:
        self._file = file
        self._errors = (OSError, EOFError, ValueError, *errors)
        """What reading a broken one raises."""
        self.ended = False

    def read(self, most: int) -> bytes:
        try:
            data = bytes(self._file.read(most))
        except self._errors as error:
            raise CodingError(f"the body is not zstd: {error}", 400) from None
        self.ended = len(data) < most
        return data


def _zstd(body: bytes) -> _File | None:
    """With Python's own module (3.14), or pyarrow's."""
    if (own := _module("compression.zstd")) is not None:
        import io

        return _File(own.ZstdFile(io.BytesIO(body)), own.ZstdError)
    if (arrow := _module("pyarrow")) is not None:
        return _File(arrow.CompressedInputStream(arrow.BufferReader(body), "zstd"))
    return None


def _has_zstd() -> bool:
    return _module("compression.zstd") is not None or _module("pyarrow") is not None


@lru_cache
def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
