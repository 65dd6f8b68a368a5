"""Validation of arguments, and JSON that is read back as it was written."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.errors import ConfigError
from agentlightning.store import validation


@dataclass
class Limits:
    limit: float


finite = st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | finite | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(values)
def test_json_comes_back_as_it_was(value: Any) -> None:
    assert json.loads(validation.to_json(value, "value")) == value


@pytest.mark.parametrize(
    ("value", "name"),
    [(math.nan, "task"), ({"a": [0, math.inf]}, r"task\['a'\]\[1\]"), ([None, -math.inf], r"task\[1\]")],
)
def test_a_number_json_cannot_hold_is_refused_by_its_place(value: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        validation.to_json(value, "task")


@pytest.mark.parametrize("value", [{1, 2}, object(), {1: 2}, b"bytes"])
def test_what_is_not_json_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="task cannot be stored as JSON"):
        validation.to_json(value, "task")


def test_none_and_the_word_null_are_no_trouble() -> None:
    value = {"a": None, "b": "null", "c": [None, {"d": None}]}
    assert json.loads(validation.to_json(value, "value")) == value


def test_a_number_json_cannot_hold_is_found_in_a_dataclass() -> None:
    with pytest.raises(ConfigError, match=r"task\['x'\]\['limit'\] is nan"):
        validation.to_json({"x": Limits(math.nan)}, "task")
