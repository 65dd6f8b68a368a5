"""Values are read from a server's metrics, whatever else is there."""

from __future__ import annotations

import pytest

from agentlightning.engine.servers.clients.http import largest_metric


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("used 0.5", 0.5),
        ("used 0.5 1700000000", 0.5),
        ('used{a="x} y",b="1"} 0.25\nused{a="z"} 0.5\n', 0.5),
        ("used_total 3\n# used 4\nused NaN\nused\nused much", None),
        ("older 0.1", 0.1),
        ("older 0.1\nused 0.2", 0.2),
    ],
)
def test_the_largest_sample_of_the_first_name_counts(text: str, expected: float | None) -> None:
    assert largest_metric(text, "used", "older") == expected
