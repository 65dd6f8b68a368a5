"""Promises of translated answers that are shown as they come, as the SDKs' stream helpers hear them."""

import json

import pytest
from tests.support.provider import Reply, chat_answer
from tests.support.provider_streams import chat_events, messages_events

from agentlightning import span as names
from agentlightning.gateway.dialects.base import event_data, split_events

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 6, "b": 7}'}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 6, "b": 7}}
TWICE = [CALL | {"id": "tool-1"}, CALL | {"id": "tool-2"}]
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
HI = [{"role": "user", "content": "hi"}]


# -- tool calls once they are complete --------------------------------------------------------------------------------


async def test_a_call_is_heard_before_the_answer_is_complete(ask):
    """The provider falls silent in the middle of the next one: what it wrote of the first has been heard, whole."""
    chat = chat_events([], TWICE)[:4]
    messages = messages_events([USE, USE | {"id": "toolu_2"}])[:6]
    service, _ = await ask("openai", lambda seen: Reply(events=chat, end="hang"))
    tool = {"name": "add", "input_schema": {"type": "object"}}
    client = await service.anthropic()
    async with client.messages.stream(model="theirs", max_tokens=50, messages=HI, tools=[tool]) as stream:
        events = [event async for event in until(stream, "content_block_stop")]
    assert (events[-1].content_block.id, events[-1].content_block.input) == ("tool-1", USE["input"])
    flat = {"type": "function"} | ADD["function"]
    client = await service.client()
    async with client.responses.stream(model="theirs", input="hi", tools=[flat]) as stream:
        events = [event async for event in until(stream, "response.output_item.done")]
    assert (events[-1].item.call_id, json.loads(events[-1].item.arguments)) == ("tool-1", USE["input"])
    service, _ = await ask("anthropic", lambda seen: Reply(events=messages, end="hang"))
    client = await service.client()
    async with client.chat.completions.stream(model="theirs", messages=HI, tools=[ADD]) as stream:
        events = [event async for event in until(stream, "tool_calls.function.arguments.delta")]
    assert (events[-1].name, json.loads(events[-1].arguments)) == ("add", USE["input"])


async def until(stream, kind):
    """The events up to the first of a kind that says something."""
    async for event in stream:
        yield event
        if event.type == kind and getattr(event, "arguments", "x"):
            return


async def test_several_tool_calls_arrive_one_by_one_in_every_sdk(ask):
    """Their arguments come mixed."""
    *head, first, rest, second, other, last, usage, done = chat_events(["Let me."], TWICE)
    service, _ = await ask("openai", lambda seen: Reply(events=[*head, first, second, rest, other, last, usage, done]))
    client = await service.anthropic()
    tool = {"name": "add", "input_schema": {"type": "object"}}
    async with client.messages.stream(model="theirs", max_tokens=50, messages=HI, tools=[tool]) as stream:
        kinds = [event.type async for event in stream]
        message = await stream.get_final_message()
    assert [(block.id, block.input) for block in message.content[1:]] == [(call["id"], USE["input"]) for call in TWICE]
    starts, stops = kinds.count("content_block_start"), kinds.count("content_block_stop")
    assert (starts, stops, message.stop_reason) == (3, 3, "tool_use")
    client = await service.client()
    flat = {"type": "function"} | ADD["function"]
    async with client.responses.stream(model="theirs", input="hi", tools=[flat]) as stream:
        events = [event async for event in stream]
        response = await stream.get_final_response()
    calls = response.output[1:]
    assert len({call.id for call in calls}) == 2
    assert [(call.call_id, json.loads(call.arguments)) for call in calls] == [
        (call["id"], USE["input"]) for call in TWICE
    ]
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == [call.arguments for call in calls]
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_the_chat_sdks_stream_helper_reads_anthropics_calls(ask):
    blocks = [{"type": "text", "text": "Let me."}, USE, USE | {"id": "toolu_2", "input": {}}]
    service, _ = await ask("anthropic", [Reply(events=messages_events(blocks))])
    client = await service.client()
    async with client.chat.completions.stream(model="theirs", messages=HI, tools=[ADD]) as stream:
        done = [event async for event in stream if event.type == "tool_calls.function.arguments.done"]
        completion = await stream.get_final_completion()
    assert [json.loads(event.arguments) for event in done] == [USE["input"], {}]
    choice = completion.choices[0]
    assert [call.id for call in choice.message.tool_calls] == ["toolu_1", "toolu_2"]
    assert (choice.message.content, choice.finish_reason) == ("Let me.", "tool_calls")


# -- log-probabilities ------------------------------------------------------------------------------------------------


def known(text, logprob):
    top = [{"token": text, "logprob": logprob, "bytes": [*text.encode()]}]
    return {"token": text, "logprob": logprob, "bytes": [*text.encode()], "top_logprobs": top}


async def test_log_probabilities_of_chat_completions_reach_a_response(ask):
    whole, events = chat_answer("Hello."), chat_events(["Hel", "lo."])
    tokens = [known("Hel", -0.5), known("lo.", -0.25)]
    whole["choices"][0]["logprobs"] = {"content": tokens, "refusal": None}
    for place, token in ((1, tokens[0]), (2, tokens[1])):
        chunk = json.loads(events[place].removeprefix(b"data: "))
        chunk["choices"][0]["logprobs"] = {"content": [token], "refusal": None}
        events[place] = b"data: " + json.dumps(chunk).encode() + b"\n\n"
    service, provider = await ask(
        "openai", lambda seen: Reply(events=events) if "stream" in seen.json else Reply(whole)
    )
    client = await service.client()
    options = {"model": "theirs", "input": "hi", "top_logprobs": 1, "include": ["message.output_text.logprobs"]}
    response = await client.responses.create(**options)
    assert (provider.seen[0].json["logprobs"], provider.seen[0].json["top_logprobs"]) == (True, 1)
    assert [each.model_dump() for each in response.output[0].content[0].logprobs] == tokens
    async with client.responses.stream(**options) as stream:
        deltas = [event async for event in stream if event.type == "response.output_text.delta"]
        response = await stream.get_final_response()
    assert "".join(event.delta for event in deltas) == "Hello."
    assert [each.logprob for event in deltas for each in event.logprobs] == [-0.5, -0.25]
    assert [each.model_dump() for each in response.output[0].content[0].logprobs] == tokens


# -- errors in the middle ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (b'data: {"error": {"message": "out of memory"}}\n\n', "out of memory"),
        (b'data: {"choices": [{"index": 0, "delta": {"content": "!"}}], "error": {"message": "oom"}}\n\n', "oom"),
        (b"data: {broken\n\n", "not JSON"),
    ],
)
async def test_what_comes_in_one_read_with_an_error_is_sent_before_it(ask, error, message):
    read = b"".join([*chat_events(["Hel", "lo."])[:3], error])
    service, _ = await ask("openai", [Reply(events=[read])] * 2)
    said, http, body = "Hello." + "!" * (b"!" in error), await service.http(), {"model": "theirs", "stream": True}
    for path, asked in (("messages", {"messages": HI, "max_tokens": 50}), ("responses", {"input": "hi"})):
        response = await http.post(f"{service.base_url}/{path}", headers={"x-api-key": service.key}, json=body | asked)
        *events, last = [event_data(event) for event in split_events(response.content)]
        deltas = [event.get("delta") for event in events if event["type"].endswith(("block_delta", "text.delta"))]
        assert "".join(delta if path == "responses" else delta["text"] for delta in deltas) == said
        assert last["type"] == "error"
        assert message in json.dumps(last)
    assert [said in span.attributes[names.OUTPUT_MESSAGES] for span in await service.spans()] == [True, True]
