"""Grouping of rows by a common prefix."""

from __future__ import annotations

from agentlightning.engine.local import cascade_attention


def test_rows_are_grouped_by_the_prefix_that_saves_most_reads() -> None:
    system, one, two = [1] * 64, [2] * 64, [3] * 64
    rows = [[*system, *one]] * 4 + [[*system, *two]] * 4
    groups = cascade_attention.find_groups([cascade_attention.hash_prefixes(row) for row in rows], [128] * 8, 1 << 20)
    assert groups is not None
    assert (groups.length, groups.rows) == (128, ((0, 1, 2, 3), (4, 5, 6, 7)))
    apart = [[*system, *([i] * 64)] for i in range(8)]
    groups = cascade_attention.find_groups([cascade_attention.hash_prefixes(row) for row in apart], [128] * 8, 1 << 20)
    assert groups is not None
    assert (groups.length, groups.rows) == (64, (tuple(range(8)),))


def test_rows_with_little_in_common_are_not_grouped() -> None:
    rows = [cascade_attention.hash_prefixes([i] * 64) for i in range(8)]
    assert cascade_attention.find_groups(rows, [64] * 8, 1 << 30) is None
    assert cascade_attention.find_groups([cascade_attention.hash_prefixes([1] * 64)] * 8, [64] * 8, 1) is None
    assert cascade_attention.find_groups([[]], [1], 1 << 30) is None
