"""Spans come back from a pack exactly as they were put in; what could not is refused by name."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.errors import ConfigError
from agentlightning.span import LOGPROBS, PROMPT_TOKEN_IDS, RESPONSE_TOKEN_IDS, SUPERSEDED, Span, SpanEvent
from agentlightning.store.sql.pack import (
    LONG_PROMPT,
    SpanPack,
    join_ids,
    pack,
    pack_ids,
    pack_logprobs,
    read_logprobs,
    select,
    split_ids,
    unpack,
)

BLOCK = LONG_PROMPT // 4
"""Tokens from which a prompt is kept apart from its span."""
IDS = ("ro-1", "at-1")
SPAN = Span(*IDS, "work", 1.5, span_id="00000000000000aa")

int32 = st.integers(-(2**31), 2**31 - 1)
float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
finite = st.floats(allow_nan=False, allow_infinity=False)
text = st.text(st.characters(exclude_categories=["Cs"]))
name = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | finite | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
prompt = st.lists(int32, max_size=20) | st.integers(0, 3 * BLOCK).map(lambda count: list(range(count)))
tokens = st.fixed_dictionaries(
    {}, optional={PROMPT_TOKEN_IDS: prompt | json, RESPONSE_TOKEN_IDS: prompt, LOGPROBS: st.lists(float32)}
)
attributes = st.builds(lambda some, other: {**some, **other}, st.dictionaries(text, json, max_size=3), tokens)
events = st.lists(st.builds(SpanEvent, name, finite, st.dictionaries(text, json, max_size=2)), max_size=2).map(tuple)
spans = st.lists(
    st.builds(
        Span,
        st.just(IDS[0]),
        st.just(IDS[1]),
        name,
        finite,
        st.none() | finite | st.just(0),
        st.integers(0, 2**53),
        name,
        st.text("0123456789abcdef", min_size=16, max_size=16) | name.filter(bool),
        st.none() | name,
        st.sampled_from(["UNSET", "OK", "ERROR"]),
        st.none() | text,
        attributes,
        events,
        st.sampled_from([{}, {"service.name": "agent"}]) | st.dictionaries(text, json, max_size=2),
    ),
    max_size=5,
)


def read(whole: SpanPack, **changes: Any) -> list[Span]:
    """As a store does it: from the body, the compact ids and the long prompts."""
    arguments: dict[str, Any] = {
        "rollout_id": IDS[0],
        "attempt_id": IDS[1],
        "span_ids": split_ids(whole.ids),
        "sequence_ids": whole.sequence_ids,
        "prompt": dict(whole.prompts).__getitem__,
    }
    return unpack(whole.body, **(arguments | changes))


@settings(max_examples=60)
@given(spans)
def test_spans_come_back_as_they_were(some: list[Span]) -> None:
    assert read(pack(some)) == some


def test_numbers_come_back_with_their_types() -> None:
    numbers = [1, 1.0, True, -0.0, 2**63, 1e300, None, False]
    [span] = read(pack([replace(SPAN, start_time=2, end_time=0, attributes={"numbers": numbers})]))
    assert repr(span.attributes["numbers"]) == repr(numbers)
    assert repr((span.start_time, span.end_time)) == "(2, 0)"


@settings(max_examples=40)
@given(spans.filter(bool), st.data())
def test_some_spans_of_a_pack_can_be_left_out(some: list[Span], data: st.DataObject) -> None:
    kept = data.draw(st.sets(st.integers(0, len(some) - 1)).map(sorted))
    assert read(select(pack(some), kept)) == [some[index] for index in kept]


@given(st.lists(name | st.text("0123456789abcdefABCDEF ", min_size=16, max_size=16)).map(tuple))
def test_ids_come_back_as_they_were(ids: tuple[str, ...]) -> None:
    assert split_ids(join_ids(ids)) == ids


def test_an_id_of_opentelemetry_takes_eight_bytes() -> None:
    assert len(join_ids([f"{number:016x}" for number in range(100)])) == 801


def test_a_span_without_an_id_gets_one() -> None:
    first, second = pack([replace(SPAN, span_id=""), replace(SPAN, span_id="")]).span_ids
    assert len(first) == len(second) == 16
    assert first != second


def test_what_the_store_decides_is_told_when_reading() -> None:
    found = read(pack([SPAN]), rollout_id="ro-9", attempt_id="at-9", sequence_ids=(7,), superseded=True)
    expected = replace(SPAN, rollout_id="ro-9", attempt_id="at-9", sequence_id=7, attributes={SUPERSEDED: True})
    assert found == [expected]


def test_spans_that_share_a_resource_do_not_share_the_dict() -> None:
    first, second = read(pack([replace(SPAN, resource={"service.name": "a"})] * 2))
    first.resource["changed"] = True
    assert second.resource == {"service.name": "a"}


def test_packing_leaves_the_span_alone() -> None:
    span = replace(SPAN, attributes={PROMPT_TOKEN_IDS: [1, 2], "other": 1})
    pack([span])
    assert span.attributes == {PROMPT_TOKEN_IDS: [1, 2], "other": 1}


def test_an_attribute_of_ten_megabytes_is_kept() -> None:
    span = replace(SPAN, attributes={"page": "é" * 5_000_000, "word": "null"})
    assert read(pack([span])) == [span]


def test_a_span_whose_prompt_is_gone_says_so() -> None:
    whole = pack([replace(SPAN, attributes={PROMPT_TOKEN_IDS: list(range(2 * BLOCK))})])
    with pytest.raises(ValueError, match=r"tokens of span '00000000000000aa' are missing"):
        read(whole, prompt={}.__getitem__)


@pytest.mark.parametrize("value", [[2**40], ["a"], [None], [1.5], "text", 3, None, {"a": 1}])
def test_what_is_no_list_of_token_ids_is_not_taken_for_one(value: Any) -> None:
    assert pack_ids(value) is None


@given(st.lists(st.floats(-100, 0, allow_nan=False)))
def test_log_probabilities_are_rounded_to_float32(logprobs: list[float]) -> None:
    packed = pack_logprobs("logprobs", logprobs)
    assert packed is not None
    again = read_logprobs(packed)
    assert again == pytest.approx(logprobs, rel=1e-6, abs=1e-37)
    assert pack_logprobs("logprobs", again) == packed


def test_log_probabilities_whose_sum_is_beyond_every_float_are_kept() -> None:
    packed = pack_logprobs("logprobs", [3e38] * 10)
    assert packed is not None
    assert len(read_logprobs(packed)) == 10


# -- what is refused -------------------------------------------------------------------------------------------------


@dataclass
class Note:
    score: float


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attributes": {"a": math.nan}}, r"attributes\['a'\] of span 'work' is nan"),
        ({"attributes": {"a": [0, {"b": math.inf}]}}, r"attributes\['a'\]\[1\]\['b'\] of span 'work' is inf"),
        ({"attributes": {"a": Note(math.nan)}}, r"attributes\['a'\]\['score'\] of span 'work' is nan"),
        ({"attributes": {PROMPT_TOKEN_IDS: [1, math.nan]}}, r"prompt_token_ids'\]\[1\] of span 'work' is nan"),
        ({"attributes": {LOGPROBS: [-0.5, math.nan]}}, r"logprobs\[1\] is nan"),
        ({"attributes": {LOGPROBS: [math.inf, -math.inf]}}, r"logprobs\[0\] is inf"),
        ({"attributes": {LOGPROBS: [-0.5, 1e300]}}, r"logprobs\[1\] is 1e\+300"),
        ({"resource": {"a": -math.inf}}, r"resource\['a'\] of span 'work' is -inf"),
        ({"events": (SpanEvent("x", math.nan),)}, r"events\[0\].timestamp of span 'work' is nan"),
        ({"events": (SpanEvent("x", 1.0, {"a": math.nan}),)}, r"events\[0\].attributes\['a'\] of span 'work' is nan"),
        ({"start_time": math.nan}, "start_time of span 'work' is nan"),
        ({"end_time": math.inf}, "end_time of span 'work' is inf"),
        ({"start_time": "now"}, "start_time='now' of span 'work' is not a number of seconds"),
        ({"end_time": datetime(2026, 1, 1, tzinfo=UTC)}, "end_time=datetime.* is not a number of seconds"),
        ({"start_time": None}, "start_time=None"),
        ({"start_time": True}, "start_time=True"),
        ({"sequence_id": -1}, "sequence_id=-1 of span 'work'"),
        ({"sequence_id": 2**60}, "sequence_id=1152921504606846976"),
        ({"sequence_id": "3"}, "sequence_id='3'"),
        ({"sequence_id": True}, "sequence_id=True"),
        ({"attributes": {"a": object()}}, r"attributes\['a'\] of span 'work' cannot be stored as JSON"),
        ({"attributes": {"a": "\ud800"}}, r"attributes\['a'\] of span 'work' cannot be stored as JSON.*surrogates"),
        ({"attributes": {3: "a"}}, "3, the name of an attribute of span 'work', is not a string"),
        ({"attributes": {"a": {3: "a"}}}, r"attributes\['a'\] of span 'work' cannot be stored as JSON"),
        ({"attributes": [("a", 1)]}, "attributes=.* is not a dict"),
        ({"name": "a\0b"}, r"name='a\\x00b' of span 'a\\x00b' contains a NUL"),
        ({"trace_id": "\ud800"}, r"trace_id='\\ud800' of span 'work' is not Unicode"),
        ({"span_id": "\ud800"}, r"span_id='\\ud800' of span 'work' is not Unicode"),
        ({"parent_id": "\0"}, "parent_id=.* contains a NUL"),
        ({"span_id": "a" * 513}, "span_id='a{40}'... of span 'work' has 513 characters; the store takes 512"),
        ({"name": 3}, "name=3 of span 3 is not a string"),
        ({"trace_id": None}, "trace_id=None of span 'work' is not a string"),
        ({"span_id": 5}, "span_id=5 of span 'work' is not a string"),
    ],
)
def test_a_value_that_would_not_come_back_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pack([SPAN, replace(SPAN, **changes), SPAN])


def test_lists_nested_too_deeply_are_refused() -> None:
    value: list[Any] = []
    for _ in range(10_000):
        value = [value]
    with pytest.raises(ConfigError, match="cannot be stored as JSON"):
        pack([replace(SPAN, attributes={"deep": value})])


def test_none_and_the_word_null_are_no_trouble() -> None:
    span = replace(SPAN, attributes={"a": None, "b": "null", "c": [None, {"d": None}]})
    assert read(pack([span])) == [span]
