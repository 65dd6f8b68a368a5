"""The reward of an answer: 1 where the number in `### ANSWER: ... ###` is the result, else 0."""

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

ANSWER = re.compile(r"###\s*ANSWER:\s*(.+?)\s*###")
TOLERANCE = 1e-4
"""Relative: results are often rounded to a few digits."""


def score(task: Mapping[str, Any], output: str) -> float:
    """The last answer counts. A number equals the result as far as TOLERANCE goes; any other text, such as the letter
    of a choice, has to be the same."""
    found = ANSWER.findall(output)
    if not found:
        return 0.0
    given, wanted = number(found[-1]), task.get("result_float")
    wanted = number(task["result"]) if wanted is None else wanted
    if wanted is None:
        return float(found[-1].casefold() == task["result"].strip().casefold())
    return float(given is not None and math.isclose(given, wanted, rel_tol=TOLERANCE, abs_tol=1e-9))


def number(text: str) -> float | None:
    """The value of a number, a fraction, or a percentage; None for any other text."""
    bare = text.strip().replace(",", "").removeprefix("$").strip("()")
    share = bare.endswith("%")
    try:
        value = float(Fraction(bare.removesuffix("%").strip()))
    except (ValueError, ZeroDivisionError, OverflowError):
        return None
    return value / 100 if share else value
