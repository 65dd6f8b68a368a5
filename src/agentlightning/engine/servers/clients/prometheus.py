"""Reads single values from the text that a server's `/metrics` answers (Prometheus' exposition format)."""

from __future__ import annotations

import math


def largest_metric(text: str, *names: str) -> float | None:
    """The largest sample, over all labels, of the first of these metrics that is there; None where none is.

    >>> largest_metric('# TYPE a gauge\\na{engine="0"} 0.25\\na{engine="1"} 0.5\\n', "a")
    0.5
    """
    for name in names:
        found = [value for line in text.splitlines() if (value := _sample(line, name)) is not None]
        if found:
            return max(found)
    return None


def _sample(line: str, name: str) -> float | None:
    """The value of a line `name{labels} value [timestamp]`; None for other lines."""
    if not line.startswith(name) or line[len(name) :][:1] not in ("{", " "):
        return None
    try:
        value = float(line[len(name) :].rpartition("}")[2].split()[0])
    except (IndexError, ValueError):
        return None
    return value if math.isfinite(value) else None
