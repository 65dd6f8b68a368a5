"""Differences between two safetensors files of the same tensors: XOR, tensor by tensor, compressed by zstd at level 1.

Most bytes of weights in bfloat16 do not change in a step, so the difference is mostly zeros. Each tensor of the result
is checked against its digest; an unchanged tensor has no difference. Works on bytes: it needs no torch, and the result
is the same file, byte for byte.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import zstandard  # pyright: ignore[reportMissingImports]

from agentlightning_weights.bucket import FileEntry, Part

LEVEL: Final = 1
HEADER: Final = "header"


class DamagedDifferenceError(Exception):
    """A difference, or the file it is applied to, is not what it should be."""


def digest(data: Any) -> str:
    """BLAKE2b of bytes or a NumPy array, 16 bytes."""
    return hashlib.blake2b(memoryview(data), digest_size=16).hexdigest()


def layout(file: Path) -> list[tuple[str, int, int]] | None:
    """Name, begin and end of the header and of each tensor of a safetensors file, in their order in the file; None for
    a file that is none."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        first = opened.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
        if 8 + length > size:
            return None
        try:
            header = orjson.loads(opened.read(length))
            begin = 8 + length
            found = [
                (str(name), begin + int(each["data_offsets"][0]), begin + int(each["data_offsets"][1]))
                for name, each in header.items()
                if name != "__metadata__"
            ]
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
    found.sort(key=lambda part: part[1:])
    return [(HEADER, 0, begin), *found]


def difference(base: Path, new: Path, name: str) -> tuple[FileEntry, bytes] | None:
    """How `new`, a file of this name, differs from `base`; None where they do not have the same tensors in the same
    places."""
    parts = layout(new)
    if parts is None or not base.exists() or layout(base) != parts:
        return None
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    old, own = _mapped(base), _mapped(new)
    entries: list[Part] = []
    stored: list[bytes] = []
    for tensor, begin, end in parts:
        changed = _xor(old[begin:end], own[begin:end])
        data = compressor.compress(changed.tobytes()) if changed.any() else b""
        entries.append(Part(name=tensor, begin=begin, end=end, digest=digest(own[begin:end]), stored=len(data)))
        stored.append(data)
    return FileEntry(name=name, size=len(own), kind="xor", parts=tuple(entries)), b"".join(stored)


def apply(base: Path, entry: FileEntry, data: bytes, target: Path) -> None:
    """Write what `base` becomes. Raises DamagedDifferenceError, and leaves no file, where a tensor of the result is not
    the one that was published."""
    if base.stat().st_size != entry.size or sum(part.stored for part in entry.parts) != len(data):
        raise DamagedDifferenceError(f"{entry.name}: the sizes do not fit")
    old, decompressor, start = _mapped(base), zstandard.ZstdDecompressor(), 0
    with target.open("wb") as opened:
        for part in entry.parts:
            size = part.end - part.begin
            own = old[part.begin : part.end]
            if part.stored:
                try:
                    # A frame says itself how large it becomes, and the one-shot call would believe it.
                    raw = decompressor.stream_reader(data[start : start + part.stored]).read(size + 1)
                except zstandard.ZstdError as error:
                    target.unlink()
                    raise DamagedDifferenceError(f"{entry.name}: {part.name}: {error}") from error
                start += part.stored
                own = _xor(own, np.frombuffer(raw, np.uint8)) if len(raw) == size else own[:0]
            if digest(own) != part.digest:
                target.unlink()
                raise DamagedDifferenceError(f"{entry.name}: {part.name} is not the tensor that was published")
            opened.write(memoryview(own))


def total(entries: Sequence[FileEntry]) -> int:
    """Bytes of the files of a version."""
    return sum(entry.size for entry in entries)


def _mapped(file: Path) -> Any:
    return np.memmap(file, np.uint8, mode="r") if file.stat().st_size else np.zeros(0, np.uint8)


def _xor(a: Any, b: Any) -> Any:
    """Eight bytes at a time where they allow it."""
    if len(a) % 8 == 0 and len(a):
        return np.bitwise_xor(np.ascontiguousarray(a).view("<u8"), np.ascontiguousarray(b).view("<u8")).view(np.uint8)
    return np.bitwise_xor(a, b)
