"""Hermes: JSON between two markers."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.chat.tool_calls.format import ParsedToolCall, parse_answer
from agentlightning.chat.tool_calls.formats import HERMES


def read_hermes(text):
    return parse_answer(HERMES, text)


def test_tool_calls_keep_the_spelling_of_arguments():
    parsed = read_hermes(
        'Let me see. \n<tool_call>\n{"name": "f", "arguments": {"x":  1.50,\t"y": [ ]}}\n</tool_call>\n'
    )
    assert parsed.content == "Let me see."
    assert parsed.tool_calls == (ParsedToolCall("f", '{"x":  1.50,\t"y": [ ]}'),)


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"arguments": {"name": "inner", "arguments": 3}, "name": "f"}', '{"name": "inner", "arguments": 3}'),
        ('{"name": "f", "arguments": "{\\"x\\": 1}"}', '{"x": 1}'),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": {"a": "}</tool_cal"}}', '{"a": "}</tool_cal"}'),
    ],
)
def test_unusual_but_valid_tool_calls_are_parsed(body, arguments):
    assert read_hermes(f"<tool_call>{body}</tool_call>").tool_calls == (ParsedToolCall("f", arguments),)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f", "arguments": {</tool_call>',
        '<tool_call>{"name": "f"}',
        '<tool_call>["f"]</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "\\ud800"}</tool_call>',
        "</tool_call> <tool_call>",
        " plain text \n",
        "",
    ],
)
def test_malformed_tool_calls_stay_in_the_content(text):
    parsed = read_hermes(text)
    assert (parsed.content, parsed.tool_calls) == (text, ())


def test_a_broken_tool_call_does_not_hide_the_next_one():
    parsed = read_hermes('<tool_call>oops <tool_call>{"name": "f", "arguments": {}}</tool_call>')
    assert (parsed.content, parsed.tool_calls) == ("<tool_call>oops", (ParsedToolCall("f", "{}"),))


def test_unterminated_calls_are_parsed_in_linear_time():
    text = '<tool_call>{"' * 20_000 + "</tool_call>"
    assert read_hermes(text).content == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@settings(max_examples=30)
@given(st.dictionaries(st.text(), JSON), st.sampled_from([None, 1, "\t"]), st.booleans())
def test_arguments_round_trip(arguments, indent, ascii):
    written = json.dumps(arguments, indent=indent, ensure_ascii=ascii)
    parsed = read_hermes(f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>')
    assert parsed.tool_calls == (ParsedToolCall("f", written),)


@settings(max_examples=30)
@given(st.text())
def test_parsing_never_fails(text):
    read_hermes(text.replace("a", "<tool_call>").replace("b", "</tool_call>").replace("c", '{"name": "f"}'))
