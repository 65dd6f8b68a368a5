"""Which of many known byte strings another one begins with, without keeping any of them."""

from __future__ import annotations

import hashlib
from bisect import bisect_right, insort
from typing import Generic, TypeVar

T = TypeVar("T")


class PrefixIndex(Generic[T]):
    """Values by byte string: only lengths and digests are kept."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        """In order, each once."""
        self._values: dict[tuple[int, bytes], T] = {}

    def add(self, data: bytes, value: T) -> None:
        if len(data) not in self._lengths:
            insort(self._lengths, len(data))
        self._values[len(data), _hasher(data).digest()] = value

    def longest(self, data: bytes) -> tuple[int, T] | None:
        """(length, value) of the longest known string that `data` begins with. Reads `data` once."""
        found: tuple[int, T] | None = None
        hasher, start = _hasher(b""), 0
        for length in self._lengths[: bisect_right(self._lengths, len(data))]:
            hasher.update(data[start:length])
            start = length
            value = self._values.get((length, hasher.copy().digest()))
            found = found if value is None else (length, value)
        return found


def _hasher(data: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=16)
