"""What is stored of a file, and the file again: all of it, or its difference from another of the same size: XOR, a part
of CHUNK bytes after the other, compressed by zstd.

Most bytes of weights in bfloat16 do not change in a step, so the difference is mostly zeros. Each part of the result is
checked against its digest; an unchanged part has no difference. Works on bytes: it needs no torch, and the result is
the same file, byte for byte.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

import numpy as np
import zstandard  # pyright: ignore[reportMissingImports]

from agentlightning_weights.bucket import FileEntry, Part

LEVEL: Final = 1
CHUNK: Final = 32 << 20


class DamagedDifferenceError(Exception):
    """A difference, or the file it is applied to, is not what it should be."""


def digest(data: Any) -> str:
    """BLAKE2b of bytes or a NumPy array, 16 bytes."""
    return hashlib.blake2b(memoryview(data), digest_size=16).hexdigest()


def stored_form(file: Path, name: str, base: Path | None) -> tuple[FileEntry, bytes]:
    """The entry of a file, and what is stored of it: its difference from `base`, or all where that has another size."""
    size = file.stat().st_size
    if base is None or not base.exists() or base.stat().st_size != size:
        data = file.read_bytes()
        return FileEntry(name=name, size=size, kind="whole", digest=digest(data)), data
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    old, own = _mapped(base), _mapped(file)
    entries: list[Part] = []
    stored: list[bytes] = []
    for number, begin in enumerate(range(0, size, CHUNK)):
        end = min(begin + CHUNK, size)
        changed = _xor(old[begin:end], own[begin:end])
        stored.append(compressor.compress(changed.tobytes()) if changed.any() else b"")
        checked = digest(own[begin:end])
        entries.append(Part(name=str(number), begin=begin, end=end, digest=checked, stored=len(stored[-1])))
    return FileEntry(name=name, size=size, kind="xor", parts=tuple(entries)), b"".join(stored)


def restore(entry: FileEntry, data: bytes, base: Path | None, target: Path) -> None:
    """Write the file that is stored so. Raises DamagedDifferenceError where it is not what was published."""
    if entry.kind != "whole" and (base is None or not base.exists()):
        raise DamagedDifferenceError(f"{entry.name}: the version before is not here")
    if entry.kind == "xor" and base is not None:
        return _apply(base, entry, data, target)
    own = data if base is None or entry.kind == "whole" else base.read_bytes()
    if digest(own) != entry.digest:
        raise DamagedDifferenceError(f"{entry.name} is not the file that was published")
    target.write_bytes(own)


def _apply(base: Path, entry: FileEntry, data: bytes, target: Path) -> None:
    if base.stat().st_size != entry.size or len(data) != entry.stored:
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
                    raise DamagedDifferenceError(f"{entry.name}: {part.name}: {error}") from error
                start += part.stored
                own = _xor(own, np.frombuffer(raw, np.uint8)) if len(raw) == size else own[:0]
            if digest(own) != part.digest:
                raise DamagedDifferenceError(f"{entry.name}: {part.name} is not what was published")
            opened.write(memoryview(own))


def _mapped(file: Path) -> Any:
    return np.memmap(file, np.uint8, mode="r") if file.stat().st_size else np.zeros(0, np.uint8)


def _xor(a: Any, b: Any) -> Any:
    """Eight bytes at a time where they allow it."""
    if len(a) % 8 == 0 and len(a):
        return np.bitwise_xor(np.ascontiguousarray(a).view("<u8"), np.ascontiguousarray(b).view("<u8")).view(np.uint8)
    return np.bitwise_xor(a, b)
