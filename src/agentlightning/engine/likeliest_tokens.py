"""The likeliest tokens at each token of an answer as short text, for an attribute of a span. People look at them;
nothing is learned from them.

A worked example, the rows ((4, -0.1), (9, -2.5)) and ((7, 0.0),), as `util.ragged_text` writes them:

    sizes 2 1    ids 4 9 7, int32    log-probabilities -0.1 -2.5 0.0, float16, which keeps three digits
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from agentlightning.util.ragged_text import ragged_from_text, ragged_to_text

Row = tuple[tuple[int, float], ...]
"""(token, natural log-probability), the likeliest first."""
MAX_ROW = 1024
"""The most tokens of a row."""
LOWEST = -60000.0
"""What float16 can hold."""


def likeliest_to_text(rows: Sequence[Row]) -> str:
    """
    >>> likeliest_from_text(likeliest_to_text([((4, -0.5), (9, -2.5)), ((7, 0.0),)]), 2)
    [((4, -0.5), (9, -2.5)), ((7, 0.0),)]
    """
    pairs = [pair for row in rows for pair in row]
    ids = struct.pack(f"<{len(pairs)}i", *(token for token, _ in pairs))
    values = struct.pack(f"<{len(pairs)}e", *(max(LOWEST, value) for _, value in pairs))
    return ragged_to_text(struct.pack(f"<{len(rows)}i", *map(len, rows)), (4, ids), (2, values))


def likeliest_from_text(text: str, tokens: int) -> list[Row]:
    """The rows of an answer of so many tokens. Raises ValueError for what `likeliest_to_text` did not write."""
    columns = zip("iie", ragged_from_text(text, tokens, MAX_ROW, 4, 2), strict=True)
    sizes, ids, values = ([number for (number,) in struct.iter_unpack(f"<{kind}", data)] for kind, data in columns)
    pairs = iter(zip(ids, values, strict=True))
    return [tuple(next(pairs) for _ in range(size)) for size in sizes]
