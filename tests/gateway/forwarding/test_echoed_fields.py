"""What a server of chat completions wants back with a turn goes back to it, over clients without such fields."""

import orjson
import pytest
from tests.support.provider import Reply, chat_answer
from tests.support.provider_streams import chat_events

from agentlightning.gateway.answer import CHAT_TURN
from agentlightning.gateway.dialects.content_parts import turn_key

pytestmark = pytest.mark.integration

SIGNATURE = {"google": {"thought_signature": "SIG=="}}
DETAILS = [
    {"type": "reasoning.text", "text": "Hm, hm.", "signature": "c2ln", "format": "anthropic-claude-v1", "index": 0},
    {"type": "reasoning.encrypted", "data": "eHg=", "id": "tool_1", "index": 0},
]
FIELDS = {
    "DeepSeek and Kimi": ({"reasoning_content": "Hm, hm."}, None),
    "OpenRouter": ({"reasoning": "Hm, hm.", "reasoning_details": DETAILS}, None),
    "MiniMax": ({"reasoning_details": DETAILS}, None),
    "Gemini": ({}, SIGNATURE),
    "Gemini with thoughts": ({"reasoning_content": "Hm, hm.", "extra_content": SIGNATURE}, SIGNATURE),
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
ATOOLS = [{"name": "f", "input_schema": SCHEMA}]
TOOLS = [{"type": "function", "name": "f", "parameters": SCHEMA}]


def turn(fields, extra, number):
    """An assistant's message with a call, as its provider writes it."""
    call = {"id": f"t{number}", "type": "function", "function": {"name": "f", "arguments": '{"city":"Paris"}'}}
    return {
        "role": "assistant",
        "content": None,
        **fields,
        "tool_calls": [call | ({"extra_content": extra} if extra else {})],
    }


def halves(fields):
    """The deltas of a stream: texts in two parts, details one by one, the text of a detail in two parts."""
    for name, value in fields.items():
        if isinstance(value, str):
            yield from ({name: value[:3]}, {name: value[3:]})
        elif name == "reasoning_details":
            text, *others = value
            yield {name: [{"type": text["type"], "text": "Hm,", "index": 0}]}
            yield {name: [text | {"text": " hm."}]}
            yield from ({name: [other]} for other in others)
        else:
            yield {name: value}


def answers(fields, extra, number, stream):
    message = turn(fields, extra, number)
    if not stream:
        answer = chat_answer(None, message["tool_calls"])
        answer["choices"][0]["message"] = message
        return Reply(answer)
    deltas = [*halves(fields), {"tool_calls": [message["tool_calls"][0] | {"index": 0}]}]
    events = [b"data: " + orjson.dumps({"choices": [{"index": 0, "delta": delta}]}) + b"\n\n" for delta in deltas]
    return Reply(events=[*events, *chat_events([], message["tool_calls"])[-3:]])


def sent_turns(provider):
    return [message for message in provider.seen[-1].json["messages"] if message["role"] == "assistant"]


@pytest.fixture
async def served(ask, request):
    fields, extra = FIELDS[request.param]

    async def start(stream):
        replies = [answers(fields, extra, number, stream) for number in (1, 2)]
        return await ask("openai", [*replies, Reply(chat_answer("Done."))])

    return start, [turn(fields, extra, number) for number in (1, 2)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("served", FIELDS, indirect=True)
async def test_over_anthropics_client(served, stream):
    start, turns = served
    service, provider = await start(stream)
    client = await service.anthropic()
    conversation = [{"role": "user", "content": "hi"}]
    for number in (1, 2, 3):
        options = {"model": "theirs", "max_tokens": 50, "messages": conversation, "tools": ATOOLS}
        if stream and number < 3:
            async with client.messages.stream(**options) as events:
                message = await events.get_final_message()
        else:
            message = await client.messages.create(**options)
        blocks = [block.model_dump(exclude_none=True) for block in message.content]
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": "22"}
        conversation += [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
        if number < 3:  # The memory needs nothing but the calls.
            blocks[:] = [block for block in blocks if block["type"] == "tool_use"]
    assert sent_turns(provider) == turns


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keeps", ["items", "id"])
@pytest.mark.parametrize("served", FIELDS, indirect=True)
async def test_over_a_client_of_responses(served, stream, keeps):
    start, turns = served
    service, provider = await start(stream)
    client = await service.client()
    conversation, last = [{"role": "user", "content": "hi"}], None
    for number in (1, 2, 3):
        options = {"model": "theirs", "tools": TOOLS, "input": conversation}
        options |= {"previous_response_id": last} if keeps == "id" and last else {}
        options |= {} if keeps == "id" else {"store": False}
        if stream and number < 3:
            async with client.responses.stream(**options) as events:
                response = await events.get_final_response()
        else:
            response = await client.responses.create(**options)
        last = response.id
        result = {"type": "function_call_output", "call_id": f"t{number}", "output": "22"}
        items = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
        conversation = [result] if keeps == "id" else [*conversation, *items, result]
    assert sent_turns(provider) == turns


async def test_another_provider_gets_none_of_it(ask):
    service, provider = await ask("openai", lambda seen: Reply(chat_answer("Done.")))
    attempt, client = (service.rollout_id, service.attempt_id), await service.anthropic()
    said = {"role": "assistant", "content": "yours"}
    conversation = [{"role": "user", "content": "hi"}, said, {"role": "user", "content": "go on"}]
    block = {"type": CHAT_TURN, "provider": "another", "message": {"reasoning_content": "Hm.", "content": "mine"}}
    own = {"type": CHAT_TURN, "provider": "them", "message": {"reasoning": "Own.", "content": "mine"}}
    for blocks in ([block, own], [block]):
        service.gateway.responses.add_turn(attempt, turn_key(conversation[0], said), blocks)
        await client.messages.create(model="theirs", max_tokens=9, messages=conversation)
    assert [seen.json["messages"][1] for seen in provider.seen] == [said | {"reasoning": "Own."}, said]
