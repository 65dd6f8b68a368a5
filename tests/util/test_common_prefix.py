"""Length of a common prefix."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentlightning.util.common_prefix import common_prefix_length

items = st.lists(st.integers(0, 1), max_size=20)


@given(left=items, right=items, start=st.integers(0, 5))
def test_counts_equal_leading_items_from_an_offset(left: list[int], right: list[int], start: int) -> None:
    equal = [a == b for a, b in zip(left, right[start:], strict=False)]
    assert common_prefix_length(left, [9] * start + right[start:], start) == (
        equal.index(False) if False in equal else len(equal)
    )
