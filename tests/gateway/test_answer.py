"""Promises of a provider's answer that is told to a client of another dialect: in order, as it comes, and whole."""

import json
import time

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.provider import chat_answer
from tests.support.provider_streams import (
    chat_events,
    messages_answer,
    messages_events,
    response_answer,
    response_events,
)

from agentlightning.gateway.answer import Answer, ReasoningDelta, RefusalDelta, ToolCall, Usage
from agentlightning.gateway.dialects import DIALECTS
from agentlightning.gateway.dialects.base import event_data
from agentlightning.gateway.dialects.response_store import ResponseLookup

CHAT, MESSAGES = "chat/completions", "messages"
HI = [{"role": "user", "content": "hi"}]
ITEMS = {"input": HI, "include": ["reasoning.encrypted_content", "message.output_text.logprobs"]}


class Translated:
    """A provider's answer on its way to a client of another dialect."""

    def __init__(self, path):
        self.response = DIALECTS[path].response()
        self.response.choices[0] = Answer(call_prefix="call_")
        self.answer, self.usage = self.response.choice(0), Usage()

    def read(self, data):
        self.response.read(data)
        self.usage = self.response.usage or Usage()


def stream(path, events):
    """(the output events of a stream of which each event arrives by itself, the translated answer in the end)."""
    translated, shown = Translated(path), []
    for event in events:
        translated.read(event_data(event) if isinstance(event, bytes) else event)
        shown += translated.answer.take_new()
    return [*shown, *translated.answer.take_new(done=True)], translated


def calls_of(deltas):
    return {"choices": [{"index": 0, "delta": {"tool_calls": deltas}}]}


def part(index, text, **begun):
    function = {"arguments": text} | ({"name": begun.pop("name")} if "name" in begun else {})
    return {"index": index, "function": function} | begun


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_arguments_are_shown_as_they_were_written(path):
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":6,"b":7}'}}
    use = {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 6, "b": 7}}
    events = chat_events(["Let me."], [call]) if path == CHAT else messages_events([{"type": "text", "text": "x"}, use])
    pieces, answer = stream(path, events)
    (shown,) = [piece for piece in pieces if not isinstance(piece, str)]
    assert shown == ToolCall(0, "call_1", "add", '{"a":6,"b":7}') == answer.answer.parts()[-1]
    assert answer.answer.finish_reason == "tool_calls"


@settings(max_examples=25)
@given(st.lists(st.sampled_from(["one", "two", "text"]), min_size=1, max_size=14), st.booleans())
def test_calls_that_come_mixed_are_shown_one_by_one(turns, whole):
    written = {"one": '{"a": [1, 2, {"b": "}"}]}', "two": '{"c": "\\"{"}'}
    rest = {name: [*text] for name, text in written.items()}
    events, content, begun = [], "", []
    for turn in [*turns, *(["one"] * 40 + ["two"] * 40 if whole else [])]:
        if turn == "text":
            content += "."
            events.append({"choices": [{"index": 0, "delta": {"content": "."}}]})
        elif rest[turn]:
            first = {"id": turn, "name": turn} if len(rest[turn]) == len(written[turn]) else {}
            begun += [turn] if first else []
            events.append(calls_of([part(len(turn) + ord(turn[0]), rest[turn].pop(0), **first)]))
    pieces, answer = stream(CHAT, events)
    taken = {name: text[: len(text) - len(rest[name])] for name, text in written.items()}
    shown = [(piece.id, piece.arguments) for piece in pieces if isinstance(piece, ToolCall)]
    assert shown == [(name, taken[name]) for name in begun]
    assert "".join(piece for piece in pieces if isinstance(piece, str)) == answer.answer.content == content


def test_a_call_is_shown_once_it_is_complete_and_holds_up_what_follows():
    answer = Answer()
    answer.add_call(0, "a", "f", '{"x": ')
    answer.add_text("Well.")
    assert answer.take_new() == []
    answer.add_call(0, None, None, "1}")
    assert answer.take_new() == [ToolCall(0, "a", "f", '{"x": 1}'), "Well."]
    answer.add_call(1, "b", "g", "{}")
    assert answer.take_new() == []
    answer.end_call(1)
    assert answer.take_new() == [ToolCall(1, "b", "g", "{}")]


def test_a_call_that_goes_on_after_its_end_is_the_providers_mistake():
    first, second = part(0, "{}", id="a", name="f"), part(1, "{", id="b", name="g")
    _, answer = stream(CHAT, [calls_of([first]), calls_of([second]), calls_of([part(0, '{"x": 1}')])])
    assert "continued the tool call 'f'" in answer.answer.protocol_error
    _, answer = stream(CHAT, [calls_of([first]), calls_of([second]), calls_of([part(0, "\n")])])
    assert answer.answer.protocol_error == ""


def test_calls_without_arguments_ids_or_with_an_id_twice_are_calls():
    given_calls = [part(0, None, id="a", name="f"), part(1, "{}", id="a", name="g"), part(2, {"x": 1}, name="h")]
    _, answer = stream(CHAT, [calls_of(given_calls)])
    calls = answer.answer.tool_calls
    assert [(call.name, call.arguments) for call in calls] == [("f", "{}"), ("g", "{}"), ("h", '{"x":1}')]
    assert calls[0].id == "a"
    assert len({call.id for call in calls}) == 3
    assert all(call.id.startswith("call_") for call in calls[1:])


BLOCKS = [
    {"type": "thinking", "thinking": "Hm, hm.", "signature": "c2ln"},
    {"type": "redacted_thinking", "data": "eHg="},
    {"type": "text", "text": "Hello."},
    {"type": "thinking", "thinking": "And?", "signature": "c2lo"},
    {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 6}},
]


def test_blocks_that_anthropic_wants_back_are_collected_unchanged():
    _, streamed = stream(MESSAGES, messages_events(BLOCKS))
    whole = Translated(MESSAGES)
    whole.read(messages_answer(BLOCKS))
    whole.answer.take_new(done=True)
    assert streamed.answer.blocks == whole.answer.blocks == BLOCKS
    assert streamed.answer.parts() == whole.answer.parts()
    assert [type(piece) for piece in streamed.answer.parts()] == [ReasoningDelta, str, ReasoningDelta, ToolCall]


def test_text_that_comes_at_once_is_one_event_and_order_remains():
    answer = Answer()
    answer.add_reasoning("Hm")
    answer.add_reasoning(".")
    answer.add_text("Let ")
    answer.add_text("me.")
    answer.add_call(0, "a", "f", "{}")
    answer.end_call(0)
    answer.add_text("So")
    assert answer.take_new() == [ReasoningDelta("Hm."), "Let me.", ToolCall(0, "a", "f", "{}"), "So"]
    answer.add_text(".")
    assert answer.take_new() == ["."]
    assert answer.parts()[-1] == "So."


def test_a_whole_response_has_its_log_probabilities_with_each_of_its_messages():
    answer = Answer()
    for text, name in (("a", ""), ("b", ""), ("c", "f"), ("d", ""), ("e", "")):
        answer.add_tokens(None, None, None, [{"token": text, "logprob": -0.5}])
        answer.add_text("" if name else text)
        answer.add_call(0, "call_1", name, "{}") if name else None
        answer.end_call(0)
        answer.take_new()
    answer.end("stop")
    dialect = DIALECTS["responses"]
    reply = dialect.reply(dialect.read(ITEMS, ResponseLookup()), "x", "ours", 0, Usage())
    first, _, last = orjson.loads(reply.body([answer]))["output"]
    tokens = [[each["token"] for each in item["content"][0]["logprobs"]] for item in (first, last)]
    assert tokens == [["a", "b"], ["c", "d", "e"]]


def shifted(event):
    return event | {"output_index": event["output_index"] + 1} if "output_index" in event else event


def at_zero(event):
    return event | {"output_index": 0} if "output_index" in event else event


def unplaced(event):
    return {name: value for name, value in event.items() if name != "output_index"}


def of_one_id(event):
    event = event | ({"item_id": "x"} if "item_id" in event else {})
    event = event | ({"item": event["item"] | {"id": "x"}} if "item" in event else {})
    output = [item | {"id": "x"} for item in event.get("response", {}).get("output", ())]
    return event | ({"response": event["response"] | {"output": output}} if "response" in event else {})


@pytest.mark.parametrize("change", [dict, shifted, at_zero, unplaced, of_one_id])
def test_each_item_of_a_streamed_response_is_read_once_however_its_server_numbers_them(change):
    part = {"type": "output_text", "annotations": [], "logprobs": []}
    thought = {"id": "rs_1", "type": "reasoning", "summary": [], "encrypted_content": "e"}
    call = {"id": "fc_2", "type": "function_call", "call_id": "call_2", "name": "f", "arguments": "{}"}
    call_of = {"id": "fc_3", "type": "function_call", "call_id": "call_3", "name": "f", "arguments": '{"a": 1}'}
    texts = {"msg_1": "hi", "msg_4": "so"}
    said = [{"id": id, "type": "message", "content": [part | {"text": text}]} for id, text in texts.items()]
    items = [thought, said[0], call, call_of, said[1]]
    events = [change(event_data(event)) for event in response_events(items)]
    pieces, answer = stream("responses", events)
    found = [piece.id if isinstance(piece, ToolCall) else piece for piece in pieces]
    assert found == ["h", "i", "call_2", "call_3", "s", "o"]
    assert [block["type"] for block in answer.answer.blocks] == [item["type"] for item in items]


def test_log_probabilities_go_with_the_words_they_came_with():
    def chunk(text, *values):
        listed = [{"token": str(value), "logprob": value, "top_logprobs": []} for value in values]
        return {"choices": [{"index": 0, "delta": {"content": text}, "logprobs": {"content": listed}}]}

    pieces, answer = stream(CHAT, [chunk("", -1.0), chunk("a", -2.0), chunk("b", -3.0, -4.0), chunk(None, -5.0)])
    assert pieces == ["a", "b"]
    shown = [[each["logprob"] for each in answer.answer.next_logprobs()] for _ in pieces]
    assert shown == [[-1.0, -2.0], [-3.0, -4.0]]
    assert [each["logprob"] for each in answer.answer.remaining_logprobs()] == [-5.0]
    assert len(answer.answer.all_logprobs()) == 5
    assert answer.answer.all_logprobs()[0] == {
        "token": "-1.0",
        "logprob": -1.0,
        "bytes": [*b"-1.0"],
        "top_logprobs": [],
    }


def test_refusals_stop_strings_and_cached_tokens_are_reported():
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
    usage["completion_tokens_details"] = {"reasoning_tokens": 3}
    events = [
        {"choices": [{"index": 0, "delta": {"refusal": "I will not."}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": "END"}], "usage": usage},
    ]
    pieces, answer = stream(CHAT, events)
    assert pieces == [RefusalDelta("I will not.")]
    assert (answer.answer.is_refusal, answer.answer.stop_string) == (True, "END")
    events[1]["choices"][0] |= {"stop_reason": None, "matched_stop": "STOP"}
    assert stream(CHAT, events)[1].answer.stop_string == "STOP"
    assert (answer.usage.cached_tokens, answer.usage.reasoning_tokens) == (4, 3)
    whole = messages_answer(BLOCKS[2:3]) | {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    whole["usage"] |= {"cache_read_input_tokens": 7, "cache_creation_input_tokens": 8}
    _, answer = stream(MESSAGES, [whole])
    assert (answer.answer.stop_string, answer.answer.finish_reason) == ("END", "stop")
    assert (answer.usage.cached_tokens, answer.usage.written_tokens) == (7, 8)


ONE = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ITEM = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "add", "arguments": '{"a": 6}'}
SAID = {
    CHAT: (chat_answer("x", [ONE]), chat_events(["x"], [ONE])),
    MESSAGES: (messages_answer(BLOCKS), messages_events(BLOCKS)),
    "responses": (response_answer([ITEM]), response_events([ITEM])),
}
NAMES = st.sampled_from(["type", "index", "delta", "choices", "usage", "text", "id"])
ODD = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["type", "index", "delta", "choices", "usage", "text", "id"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


@settings(max_examples=30)
@given(st.sampled_from([CHAT, MESSAGES, "responses"]), st.integers(0, 30), ODD)
def test_what_is_not_as_expected_is_passed_over(path, place, odd):
    whole, streamed = SAID[path]
    events = [data for event in streamed if (data := event_data(event)) is not None]
    events[place % len(events)] = odd
    pieces, answer = stream(path, events)
    assert_written(pieces, answer)
    text = orjson.dumps(whole).decode()
    name = ["choices", "message", "content", "tool_calls", "usage", "output", "summary"][place % 7]
    assert_written(*stream(path, [json.loads(text.replace(f'"{name}":', f'"{name}":{json.dumps(odd)},"x":'))]))


def assert_written(pieces, answer):
    """Every dialect has words for it."""
    for path, body in ((CHAT, {"messages": HI}), (MESSAGES, {"messages": HI}), ("responses", ITEMS)):
        dialect = DIALECTS[path]
        request = dialect.read(body, ResponseLookup())
        reply, whole = (dialect.reply(request, "x", "theirs", 0, answer.usage) for _ in range(2))
        parts = [reply.start([answer.answer]), *(reply.event(answer.answer, piece) for piece in pieces)]
        events = b"".join([*parts, reply.end([answer.answer])]).split(b"\n\n")
        assert all(event_data(event) or event in (b"", b"data: [DONE]") for event in events)
        assert orjson.loads(whole.body([answer.answer]))


def test_a_long_answer_in_many_pieces_takes_time_in_proportion():
    piece = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "abcd"}}

    def seconds(pieces):
        translated = Translated(MESSAGES)
        started = time.thread_time()
        translated.read({"type": "content_block_start", "index": 0, "content_block": {"type": "text"}})
        for _ in range(pieces):
            translated.read(piece)
            translated.answer.take_new()
        translated.read({"type": "content_block_stop", "index": 0})
        translated.answer.take_new(done=True)
        assert translated.answer.content == translated.answer.blocks[0]["text"] == "abcd" * pieces
        return time.thread_time() - started

    few, many = (min(seconds(pieces) for _ in range(3)) for pieces in (8_000, 32_000))
    assert many / few < 12  # four times as much; put together with each piece, 30 times and more
