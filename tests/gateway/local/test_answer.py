"""What is shown while an answer is drawn."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.engine.base import Sample
from agentlightning.gateway.answer import ToolCall
from agentlightning.gateway.sampling import SampledAnswer
from agentlightning.testing import ByteChatFormat

BYTES = ByteChatFormat()
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def whole(tokens, reason="stop"):
    return Sample(tuple(tokens), (0.0,) * len(tokens), reason, 0)


def show(text, sizes=(1,), *, stops=(), reads_tool_calls=True, end=True, chat=BYTES):
    """(what was shown after each run of tokens, the answer)."""
    tokens = chat.encode(text + ("<|im_end|>" if end else "")) if isinstance(text, str) else list(text)
    answer, shown, position = SampledAnswer(0, stops, chat=chat, tools=[] if reads_tool_calls else None), [], 0
    while position < len(tokens):
        size = sizes[len(shown) % len(sizes)]
        shown.append(answer.feed(tokens[position : position + size]))
        position += size
    shown.append(answer.finish(whole(tokens, "stop" if end else "length")))
    return shown, answer


def pieces(shown):
    return [piece for some in shown for piece in some]


def test_text_is_shown_token_by_token():
    shown, answer = show("Hello")
    assert shown == [["H"], ["e"], ["l"], ["l"], ["o"], [], []]
    assert answer.message == {"role": "assistant", "content": "Hello"}


def test_a_character_cut_over_tokens_is_shown_once_it_is_whole():
    shown, _ = show("é🎉")
    assert shown == [[], ["é"], [], [], [], ["🎉"], [], []]


def test_bytes_that_never_become_a_character_are_shown_as_the_replacement_at_the_end():
    shown, answer = show([72, 0xF0, 0x9F], end=False)
    assert pieces(shown) == ["H", "�"]
    assert answer.content == BYTES.decode([72, 0xF0, 0x9F])


def test_text_that_may_begin_a_stop_string_is_held_back_and_the_stop_string_never_shown():
    shown, answer = show("a EN, then END and more", stops=("END", "STOP"), reads_tool_calls=False)
    assert shown[:5] == [["a"], [" "], [], [], ["EN,"]]
    assert "".join(pieces(shown)) == answer.content == "a EN, then "


def test_a_tool_call_is_never_shown_as_text():
    shown, answer = show("Let me see. " + CALL, sizes=(3,))
    shown = pieces(shown)
    assert "".join(piece for piece in shown if isinstance(piece, str)) == "Let me see."
    assert [(piece.name, piece.arguments) for piece in shown if isinstance(piece, ToolCall)] == [("f", '{"x": 1}')]
    assert answer.finish_reason == "tool_calls"


def test_text_that_only_looks_like_a_tool_call_is_shown_in_the_end():
    shown, answer = show("a <tool_cal")
    assert "".join(pieces(shown)) == answer.content == "a <tool_cal"


def test_without_tools_a_tool_call_is_text():
    _, answer = show(CALL, reads_tool_calls=False)
    assert (answer.content, answer.finish_reason) == (CALL, "stop")


def test_an_answer_cut_after_a_tool_call_says_that_it_was_cut():
    _, answer = show(CALL + " and", end=False)
    assert answer.finish_reason == "length"
    assert answer.message["content"] == "and"


def test_an_engine_that_streams_nothing_is_shown_at_the_end():
    answer = SampledAnswer(0, chat=BYTES, tools=[])
    assert answer.finish(whole(BYTES.encode("Hello<|im_end|>"))) == ["Hello"]


def test_ids_of_tool_calls_are_unique_and_arguments_are_text():
    _, answer = show(CALL * 3)
    calls = answer.message["tool_calls"]
    assert len({call["id"] for call in calls}) == 3
    assert all(call["type"] == "function" and json.loads(call["function"]["arguments"]) == {"x": 1} for call in calls)


AWKWARD = st.lists(
    st.sampled_from(
        [
            " ",
            "\n",
            "é",
            "🎉",
            "<",
            "<tool_call>",
            "</tool_call>",
            CALL,
            '{"name": "f"}',
            "<tool_call>{",
            "END",
            "EN",
            "x",
        ]
    ),
    max_size=10,
).map("".join)


@given(AWKWARD, st.lists(st.integers(1, 40), min_size=1, max_size=5), st.booleans())
def test_however_tokens_are_cut_the_pieces_make_the_message_and_it_is_what_the_format_reads(text, sizes, end):
    shown, answer = show(text, sizes, end=end)
    parsed = BYTES.parse(text)
    assert (answer.content, [(call.name, call.arguments) for call in answer.tool_calls]) == (
        parsed.content or "",
        [(call.name, call.arguments) for call in parsed.tool_calls],
    )
    shown = pieces(shown)
    assert "".join(piece for piece in shown if isinstance(piece, str)) == answer.content
    assert [piece for piece in shown if isinstance(piece, ToolCall)] == answer.tool_calls


@given(AWKWARD, st.lists(st.integers(1, 9), min_size=1, max_size=5), st.sampled_from([("END",), ("x", "N"), ("EN\n",)]))
def test_however_tokens_are_cut_text_ends_before_the_first_stop_string(text, sizes, stops):
    _, answer = show(text, sizes, stops=stops, reads_tool_calls=False)
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    assert answer.content == text[: min(places, default=len(text))]


@given(st.binary(max_size=40), st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_whatever_bytes_come_the_text_is_what_decoding_them_at_once_gives(data, sizes):
    _, answer = show(list(data), sizes, reads_tool_calls=False, end=False)
    assert answer.content == BYTES.decode(list(data))


@pytest.mark.parametrize("text", ["héllo world 🎉", " leading and trailing ", "🎉🎉", CALL])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_same_holds_for_a_real_tokenizer(bpe_chat, text, size):
    shown, answer = show(text, (size,), chat=bpe_chat, reads_tool_calls=False)
    assert "".join(pieces(shown)) == answer.content == text
