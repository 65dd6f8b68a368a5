"""Rows of different lengths, one for each token of an answer, as short text for an attribute of a span.

    text = base64(zlib(number of rows, size of each row, columns)), sizes as int32, little endian

A column has one number for each entry of all rows, of so many bytes. It is written byte by byte: the lowest of all
entries, then the next; those above are nearly all 0.
"""

from __future__ import annotations

import struct
import zlib
from base64 import b64decode, b64encode


def ragged_to_text(sizes: bytes, *columns: tuple[int, bytes]) -> str:
    """`sizes`: int32; `columns`: bytes of a number, and the numbers of all rows, one behind the other."""
    parts = [column[place::width] for width, column in columns for place in range(width)]
    data = b"".join([struct.pack("<i", len(sizes) // 4), sizes, *parts])
    return b64encode(zlib.compress(data, 1)).decode()


def ragged_from_text(text: str, rows: int, most: int, *widths: int) -> tuple[bytes, ...]:
    """The sizes and the columns of so many rows of at most so many entries. Raises ValueError for what `ragged_to_text`
    did not write, or wrote of other rows."""
    opened = zlib.decompressobj()
    try:
        data = opened.decompress(b64decode(text, validate=True), 4 + rows * (4 + most * sum(widths)) + 1)
    except (zlib.error, ValueError) as error:
        raise ValueError(f"they are no compressed data ({error})") from error
    if not opened.eof or len(data) < 4:
        raise ValueError(f"they are cut off, or more than {most} for each of {rows} tokens")
    count, begin = int.from_bytes(data[:4], "little"), 4 + 4 * rows
    sizes = struct.unpack(f"<{rows}i", data[4:begin]) if count == rows and len(data) >= begin else (-1,)
    total = sum(sizes)
    if min(sizes, default=0) < 0 or len(data) != begin + total * sum(widths):
        raise ValueError(f"there are {count} sets for {rows} tokens, or their sizes do not add up")
    columns: list[bytes] = []
    for width in widths:
        column = bytearray(total * width)
        for place in range(width):
            column[place::width] = data[begin : begin + total]
            begin += total
        columns.append(bytes(column))
    return data[4 : 4 + 4 * rows], *columns
