"""Whatever servers of chat completions make of their format: the record, and callers of other dialects, get the calls,
thoughts, texts and usage that came."""

import json
import operator

import orjson
import pytest
from tests.support.provider import Reply, chat_answer
from tests.support.provider_streams import response_answer, response_events

from agentlightning import span as names
from agentlightning.gateway.answer import Answer, Usage
from agentlightning.gateway.dialects import DIALECTS
from agentlightning.gateway.dialects.response_store import ResponseLookup
from agentlightning.gateway.dialects.responses import RESPONSES
from agentlightning.gateway.record import input_messages, output_messages

PARIS, ROME = '{"city":"Paris"}', '{"city":"Rome"}'
BOTH = [("f", {"city": "Paris"}), ("f", {"city": "Rome"})]
ONE = BOTH[:1]


def call(arguments=None, name="f", **fields):
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return {"type": "function", "function": function} | fields


def chunks(*deltas):
    """A chunk for each list of calls."""
    return [{"choices": [{"index": 0, "delta": {"tool_calls": calls}}]} for calls in deltas]


STREAMS = {
    "same index, whole": (BOTH, chunks([call(PARIS, index=0, id="a")], [call(ROME, index=0, id="b")])),
    "same index, in parts": (
        BOTH,
        chunks(
            [call("", index=0, id="a")],
            [call(PARIS, None, index=0)],
            [call("", index=0, id="b")],
            [call(ROME[:5], None, index=0)],
            [call(ROME[5:], None, index=0)],
        ),
    ),
    "same index, no id": (BOTH, chunks([call(PARIS, index=0)], [call(ROME, index=0)])),
    "no index": (BOTH, chunks([call(PARIS, id="a")], [call(ROME, id="b")])),
    "no index, empty ids": (BOTH, chunks([call(PARIS, id="")], [call(ROME, id="")])),
    "no index, one chunk": (BOTH, chunks([call(PARIS), call(ROME)])),
    "no index, mixed, told apart by ids": (
        BOTH,
        chunks(
            [call(PARIS[:4], id="a"), call(ROME[:4], id="b")],
            [call(ROME[4:], None, id="b")],
            [call(PARIS[4:], None, id="a")],
        ),
    ),
    "null index": (BOTH, chunks([call(PARIS, index=None, id="a")], [call(ROME, index=None, id="b")])),
    "index from 1": (BOTH, chunks([call(PARIS, index=1, id="a")], [call(ROME, index=2, id="b")])),
    "one id for both": (BOTH, chunks([call(PARIS, index=0, id="a")], [call(ROME, index=0, id="a")])),
    "one id, two indexes": (BOTH, chunks([call(PARIS, index=0, id="a")], [call(ROME, index=1, id="a")])),
    "name in every chunk": (
        ONE,
        chunks([call("", index=0, id="a")], [call(PARIS[:6], index=0, id="a")], [call(PARIS[6:], index=0, id="a")]),
    ),
    "name and a new id in every chunk": (
        ONE,
        chunks([call("", index=0, id="a")], [call(PARIS[:6], index=0, id="b")], [call(PARIS[6:], index=0, id="c")]),
    ),
    "a new id in every chunk": (ONE, chunks([call("", index=0, id="a")], [call(PARIS, None, index=0, id="b")])),
    "name in parts": (
        [("find_it", {"city": "Paris"})],
        chunks([call(None, "find_", index=0)], [call(PARIS, "it", index=0)]),
    ),
    "the index is lost after the first chunk": (ONE, chunks([call("", index=0, id="a")], [call(PARIS, None)])),
    "an object": (ONE, chunks([call({"city": "Paris"}, index=0, id="a")])),
    "an empty object first": (ONE, chunks([call("{}", index=0, id="a")], [call(PARIS, None, index=0)])),
    "the whole call again at the end": (ONE, chunks([call(PARIS, index=0, id="a")], [call(PARIS, index=0, id="a")])),
    "no arguments": ([("f", {}), ("g", {})], chunks([call(None, index=0, id="a")], [call(None, "g", index=0, id="b")])),
    "function_call of before tools": (
        ONE,
        [
            {"choices": [{"index": 0, "delta": {"function_call": part}}]}
            for part in ({"name": "f", "arguments": PARIS[:3]}, {"arguments": PARIS[3:]})
        ],
    ),
}


def recorded(response, index=0):
    answer = response.choices[index]
    answer.take_new(done=True)
    (message,) = json.loads(output_messages(answer, "stop"))
    return message["parts"]


@pytest.mark.parametrize("name", STREAMS)
def test_streamed_calls_are_told_apart(name):
    expected, events = STREAMS[name]
    forwarded, translated = DIALECTS["chat/completions"].response(), DIALECTS["chat/completions"].response()
    answer = translated.choices[0] = Answer(call_prefix="call_")
    for event in events:
        forwarded.read(event)
        translated.read(event)
        answer.take_new()
    answer.take_new(done=True)
    assert [(part["name"], part["arguments"]) for part in recorded(forwarded)] == expected
    assert [(each.name, json.loads(each.arguments)) for each in answer.tool_calls] == expected
    assert len({each.id for each in answer.tool_calls}) == len(expected)
    assert answer.protocol_error == ""


def test_whole_calls_are_told_apart_by_their_places():
    response = DIALECTS["chat/completions"].response()
    response.read(
        chat_answer(None, [call("", id=""), call("", id=""), call(PARIS, index=0), call({"city": "Rome"}, index=0)])
    )
    assert [part["arguments"] for part in recorded(response)] == [{}, {}, {"city": "Paris"}, {"city": "Rome"}]


THOUGHT = {"type": "reasoning", "content": "Hm."}
SAID = {"type": "text", "content": "Four."}


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        ({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}, "Four."]}, [THOUGHT, SAID]),
        ({"content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Four."}]}, [THOUGHT, SAID]),
        ({"content": "Four.", "reasoning": "Hm."}, [THOUGHT, SAID]),
        ({"content": "Four.", "reasoning_details": [{"type": "reasoning.text", "text": "Hm."}]}, [THOUGHT, SAID]),
        ({"content": "Four.", "reasoning_details": [{"type": "reasoning.summary", "summary": "Hm."}]}, [THOUGHT, SAID]),
        ({"content": None}, []),
        ({"content": [{"type": "reference", "reference_ids": [1]}]}, []),
        (
            {"tool_calls": [{"id": "a", "type": "custom", "custom": {"name": "patch", "input": "42"}}]},
            [{"type": "tool_call", "id": "a", "name": "patch", "arguments": {"input": "42"}}],
        ),
    ],
)
@pytest.mark.parametrize("place", ["message", "delta"])
def test_content_comes_as_text_as_parts_and_with_thoughts(message, parts, place):
    response = DIALECTS["chat/completions"].response()
    response.read({"choices": [{"index": 0, place: message, "finish_reason": "stop"}]})
    assert recorded(response) == parts


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [{"index": 0, "delta": {}, "usage": {"prompt_tokens": 3, "completion_tokens": 2}}]},
        {"choices": None, "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
        {"choices": [], "x_groq": {"usage": {"prompt_tokens": 3, "completion_tokens": 2}}},
        {"choices": [], "usage": {"input_tokens": 3, "output_tokens": 2}},
    ],
)
def test_the_usage_stands_in_several_places(event):
    response = DIALECTS["chat/completions"].response()
    response.read(event)
    response.read({"choices": [], "usage": {"prompt_tokens": 0, "completion_tokens": 0}})
    assert response.usage == Usage(3, 2)


def test_two_choices_stay_two_with_or_without_their_numbers():
    response = DIALECTS["chat/completions"].response()
    response.read({"choices": [{"message": {"content": text}, "finish_reason": "stop"} for text in ("One.", "Two.")]})
    assert [recorded(response, index)[0]["content"] for index in (0, 1)] == ["One.", "Two."]


HOSTED = {"id": "ws_1", "type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}}
PATCH = {"id": "ctc_1", "type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"}


def test_hosted_and_custom_calls_of_every_dialect_are_recorded():
    custom = {"type": "tool_call", "id": "c1", "name": "apply_patch", "arguments": {"input": "*** Begin"}}
    whole = DIALECTS["responses"].response()
    whole.read(response_answer([HOSTED, PATCH]))
    assert recorded(whole) == [HOSTED, custom]
    streamed = DIALECTS["responses"].response()
    streamed.read({"type": "response.output_item.added", "output_index": 0, "item": HOSTED | {"status": "in_progress"}})
    streamed.read({"type": "response.output_item.done", "output_index": 0, "item": HOSTED})
    streamed.read({"type": "response.output_item.added", "output_index": 1, "item": PATCH | {"input": ""}})
    for half in ("*** ", "Begin"):
        place = {"output_index": 1, "item_id": "ctc_1"}
        streamed.read({"type": "response.custom_tool_call_input.delta", "delta": half} | place)
    streamed.read({"type": "response.output_item.done", "output_index": 1, "item": PATCH})
    streamed.read({"type": "response.completed", "response": response_answer([HOSTED, PATCH])})
    assert (recorded(streamed), streamed.choices[0].recorded_reason) == ([HOSTED, custom], "tool_calls")
    use = {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"query": "x"}}
    messages = DIALECTS["messages"].response()
    messages.read({"type": "content_block_start", "index": 0, "content_block": use | {"input": {}}})
    delta = {"type": "input_json_delta", "partial_json": '{"query":"x"}'}
    messages.read({"type": "content_block_delta", "index": 0, "delta": delta})
    messages.read({"type": "content_block_stop", "index": 0})
    assert recorded(messages) == [use]


def test_a_call_of_a_hosted_mcp_server_is_recorded_with_its_result():
    call = {"type": "mcp_call", "id": "mcp_1", "name": "roll", "arguments": "{}", "server_label": "dice", "output": "4"}
    answer = DIALECTS["responses"].response()
    answer.read(response_answer([call]))
    assert recorded(answer) == [call]
    result = {"type": "mcp_tool_result", "tool_use_id": "mcptoolu_1", "is_error": True, "content": "4"}
    (asked,) = orjson.loads(input_messages({"messages": [{"role": "assistant", "content": [result]}]}))
    assert asked["parts"] == [result]


async def test_calls_with_one_index_reach_the_record_and_both_other_dialects(ask):
    _, events = STREAMS["same index, whole"]
    ending = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
    sent = [b"data: " + orjson.dumps(event) + b"\n\n" for event in [*events, ending]] + [b"data: [DONE]\n\n"]
    service, _ = await ask("openai", lambda seen: Reply(events=sent))
    http = await service.http()
    headers = {"authorization": f"Bearer {service.key}"}
    hi = [{"role": "user", "content": "hi"}]
    body = {"model": "theirs", "messages": hi, "stream": True, "stream_options": {"include_usage": True}}
    forwarded = await http.post(f"{service.base_url}/chat/completions", json=body, headers=headers)
    assert forwarded.content == b"".join(sent)
    client = await service.anthropic()
    async with client.messages.stream(model="theirs", max_tokens=9, messages=hi) as stream:
        blocks = (await stream.get_final_message()).content
    assert [(block.id, block.name, block.input) for block in blocks] == [("a", *BOTH[0]), ("b", *BOTH[1])]
    response = await (await service.client()).responses.create(model="theirs", input="hi", stream=True)
    *_, last = [event async for event in response]
    assert [(item.call_id, item.arguments) for item in last.response.output] == [("a", PARIS), ("b", ROME)]
    for span in await service.spans():
        (message,) = json.loads(span.attributes[names.OUTPUT_MESSAGES])
        assert [operator.itemgetter("id", "name", "arguments")(part) for part in message["parts"]] == [
            ("a", *BOTH[0]),
            ("b", *BOTH[1]),
        ]


def test_a_custom_call_of_a_function_provider_is_written_as_one():
    request = RESPONSES.read({"input": "hi", "tools": [{"type": "custom", "name": "apply_patch"}]}, ResponseLookup())
    response = DIALECTS["responses"].response()
    item = {"id": "fc_1", "type": "function_call", "call_id": "c1", "name": "apply_patch", "arguments": "no JSON"}
    for event in response_events([item]):
        response.read(json.loads(event.partition(b"data: ")[2]))
    response.choices[0].take_new(done=True)
    body = json.loads(RESPONSES.reply(request, "resp_x", "m", 0, Usage()).body([response.choices[0]]))
    assert (body["output"][0]["type"], body["output"][0]["input"]) == ("custom_tool_call", "no JSON")
