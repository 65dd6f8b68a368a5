"""Promises of arguments that are shown while they are written."""

import json
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.gateway.dialects.anthropic.partial_json import JsonObjectStream

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=4)
ODD = st.sampled_from(["", "}", "{", ",", "\n", '"', "\\", "\\u12", " x", "01", "1.", "-", "1e", "tru", "[", "]", ":"])


def shown_of(text, cuts=(), name="raw"):
    """(what is shown before the end, and all that is shown)."""
    given_text = JsonObjectStream()
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    early = "".join(given_text.feed(text[begin:end]) for begin, end in pairwise(places))
    return early, early + given_text.finish(name)


@settings(max_examples=25)
@given(OBJECTS, st.sampled_from([None, 1]), st.booleans(), st.lists(st.integers(0, 60), max_size=4))
def test_an_object_is_shown_as_it_was_written(value, indent, ascii_only, cuts):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    early, shown = shown_of(text, cuts)
    assert shown == text
    assert early == text[:-1]


@settings(max_examples=60)
@given(OBJECTS, st.integers(0, 60), ODD, st.integers(0, 60))
def test_what_is_shown_is_an_object_whatever_was_written(value, place, odd, length):
    text = json.dumps(value, ensure_ascii=False)
    text = (text[:place] + odd + text[place:])[:length]
    early, shown = shown_of(text)
    read = json.loads(shown)
    assert isinstance(read, dict)
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        whole = None
    if isinstance(whole, dict):
        assert read == whole
    else:
        assert read["raw"] == text
        assert text.startswith(early)


def test_what_stops_being_an_object_is_shown_up_to_there():
    early, shown = shown_of('{"a": 1, "b": oops}')
    assert early == '{"a": 1, "b": '
    assert json.loads(shown) == {"a": 1, "b": None, "raw": '{"a": 1, "b": oops}'}
    assert shown_of("6*7") == ("", '{"raw":"6*7"}')
