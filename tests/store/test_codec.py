"""Values survive the way to the database and back; what cannot is refused."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.errors import ConfigError
from agentlightning.rollouts import RolloutConfig
from agentlightning.span import LOGPROBS, PROMPT_TOKEN_IDS, RESPONSE_TOKEN_IDS
from agentlightning.store import codec

int32 = st.integers(-(2**31), 2**31 - 1)
float32 = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100)
finite = st.floats(allow_nan=False, allow_infinity=False)
json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | finite | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def through(attributes: dict[str, Any]) -> dict[str, Any]:
    data, rest = codec.pack_tokens(attributes)
    return rest if data is None else {**rest, **codec.unpack_tokens(data)}


@given(st.lists(int32), st.lists(int32), st.lists(float32), json)
def test_tokens_and_log_probabilities_come_back_as_they_were(
    prompt: list[int], response: list[int], logprobs: list[float], other: Any
) -> None:
    attributes = {PROMPT_TOKEN_IDS: prompt, RESPONSE_TOKEN_IDS: response, LOGPROBS: logprobs, "other": other}
    assert through(attributes) == attributes


@given(st.lists(st.floats(-100, 0, allow_nan=False)))
def test_log_probabilities_are_rounded_to_float32(logprobs: list[float]) -> None:
    assert through({LOGPROBS: logprobs})[LOGPROBS] == array("f", logprobs).tolist()


@given(json)
def test_json_comes_back_as_it_was(value: Any) -> None:
    assert codec.load(codec.dump(value, "value")) == value


def test_tokens_take_four_bytes_each() -> None:
    data, rest = codec.pack_tokens({PROMPT_TOKEN_IDS: list(range(1000)), LOGPROBS: [-1.0] * 1000})
    assert data is not None
    assert len(data) == 12 + 4 * 2000
    assert rest == {}


@pytest.mark.parametrize("value", [[2**40], ["a"], [None], [1.5], "text", 3, None, {"a": 1}])
def test_a_token_attribute_that_is_no_list_of_token_ids_is_kept_as_json(value: Any) -> None:
    assert through({PROMPT_TOKEN_IDS: value}) == {PROMPT_TOKEN_IDS: value}


def test_an_absent_list_and_an_empty_one_are_told_apart() -> None:
    assert through({PROMPT_TOKEN_IDS: []}) == {PROMPT_TOKEN_IDS: []}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_a_log_probability_that_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(ConfigError, match=r"logprobs\[1\] is"):
        codec.pack_tokens({LOGPROBS: [-0.5, bad]})


@pytest.mark.parametrize(
    ("value", "name"),
    [(math.nan, "task"), ({"a": [0, math.inf]}, r"task\['a'\]\[1\]"), ([None, -math.inf], r"task\[1\]")],
)
def test_a_number_json_cannot_hold_is_refused_by_its_place(value: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        codec.dump(value, "task")


@pytest.mark.parametrize("value", [{1, 2}, object(), {1: 2}, 2**70, b"bytes"])
def test_what_is_not_json_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="task cannot be stored as JSON"):
        codec.dump(value, "task")


def test_none_and_the_word_null_are_no_trouble() -> None:
    value = {"a": None, "b": "null", "c": [None, {"d": None}]}
    assert codec.load(codec.dump(value, "value")) == value


def test_the_default_configuration_takes_no_space() -> None:
    assert codec.config_text(RolloutConfig()) is None
    config = RolloutConfig(max_attempts=2, timeout_seconds=1.5)
    assert codec.load_config(codec.config_text(config)) == config
