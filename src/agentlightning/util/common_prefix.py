"""Length of the common prefix of two sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def common_prefix_length(left: Sequence[Any], right: Sequence[Any], start: int = 0) -> int:
    """Number of leading items of `left` equal to those of `right` from `start` on. Both are of one sliceable type.

    Bisects on slice comparisons, so the inner loop runs in C."""
    low, high = 0, min(len(left), len(right) - start)
    if left[:high] == right[start : start + high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[start + low : start + middle]:
            low = middle
        else:
            high = middle
    return low
