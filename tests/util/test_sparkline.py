"""A series becomes one line of blocks, its gaps spaces."""

import math

from agentlightning.util.progress import sparkline


def test_the_lowest_and_the_highest_value_are_the_ends_of_the_scale():
    assert sparkline([0, 1, 2, 3]) == "▁▃▆█"
    assert sparkline([2, 2]) == "▁▁"


def test_a_long_series_is_averaged_and_a_gap_stays_a_gap():
    assert len(sparkline(list(range(1000)), width=20)) == 20
    assert sparkline([0.0, math.nan, 1.0]) == "▁ █"
    assert sparkline([]) == sparkline([math.nan]) == ""
