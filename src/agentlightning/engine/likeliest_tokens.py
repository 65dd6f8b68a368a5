"""The likeliest tokens at each token of an answer as short text, for an attribute of a span. People look at them;
nothing is learned from them.

A worked example, the rows ((4, -0.1), (9, -2.5)) and ((7, 0.0),):

    sizes 2 1    ids 4 9 7    log-probabilities -0.1 -2.5 0.0
    text = base64(zlib(count, sizes, ids, log-probabilities)), as int32, int32, int32 and float16, little endian

The ids and log-probabilities are written byte by byte: the lowest of all, then the next. float16 keeps three digits.
"""

from __future__ import annotations

import struct
import zlib
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Final

Row = tuple[tuple[int, float], ...]
"""(token, natural log-probability), the likeliest first."""
MAX_ROW: Final = 1024
"""The most tokens of a row."""
LOWEST: Final = -60000.0
"""What float16 can hold."""


def likeliest_to_text(rows: Sequence[Row]) -> str:
    """
    >>> likeliest_from_text(likeliest_to_text([((4, -0.5), (9, -2.5)), ((7, 0.0),)]), 2)
    [((4, -0.5), (9, -2.5)), ((7, 0.0),)]
    """
    pairs = [pair for row in rows for pair in row]
    ids = struct.pack(f"<{len(pairs)}i", *(token for token, _ in pairs))
    values = struct.pack(f"<{len(pairs)}e", *(max(LOWEST, value) for _, value in pairs))
    head = struct.pack(f"<{1 + len(rows)}i", len(rows), *map(len, rows))
    return b64encode(zlib.compress(head + _transpose(ids, 4) + _transpose(values, 2), 1)).decode()


def likeliest_from_text(text: str, tokens: int) -> list[Row]:
    """The rows of an answer of so many tokens. Raises ValueError for what `likeliest_to_text` did not write."""
    opened = zlib.decompressobj()
    try:
        data = opened.decompress(b64decode(text, validate=True), 4 + tokens * (4 + 6 * MAX_ROW) + 1)
    except (zlib.error, ValueError) as error:
        raise ValueError(f"they are no compressed data ({error})") from error
    if len(data) < 4 + 4 * tokens:
        raise ValueError(f"they are cut off: {len(data)} bytes for {tokens} tokens")
    count, *sizes = struct.unpack_from(f"<{1 + tokens}i", data)
    total, rest = sum(sizes), data[4 + 4 * tokens :]
    if count != tokens or min(sizes, default=0) < 0 or len(rest) != 6 * total:
        raise ValueError(f"there are {count} rows for {tokens} tokens, or their sizes do not add up")
    ids = struct.unpack(f"<{total}i", _transpose(rest[: 4 * total], total))
    values = struct.unpack(f"<{total}e", _transpose(rest[4 * total :], total))
    pairs = iter(zip(ids, values, strict=True))
    return [tuple(next(pairs) for _ in range(size)) for size in sizes]


def _transpose(data: bytes, columns: int) -> bytes:
    """The bytes of a table of so many columns, column by column."""
    return b"".join(data[place::columns] for place in range(columns))
