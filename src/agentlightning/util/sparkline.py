"""A series of numbers as one line of block characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

BLOCKS: Final = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """The values from the lowest to the highest; more than `width` are averaged in equal parts. NaN is a space.

    >>> sparkline([0, 1, 2, 3])
    '▁▃▆█'
    """
    count = min(len(values), width)
    parts = [_mean(values[i * len(values) // count : (i + 1) * len(values) // count]) for i in range(count)]
    known = [value for value in parts if not math.isnan(value)]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    scale = (len(BLOCKS) - 1) / span if span else 0.0
    return "".join(" " if math.isnan(value) else BLOCKS[round((value - low) * scale)] for value in parts)


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
