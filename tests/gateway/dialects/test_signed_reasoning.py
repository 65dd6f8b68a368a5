"""Promises of thoughts that their provider wants back unchanged, over clients that have no place for them."""

import pytest
from tests.support.provider import Reply
from tests.support.provider_streams import messages_answer, messages_events

from agentlightning.gateway.dialects.content_parts import turn_key
from agentlightning.gateway.dialects.response_store import ResponseLookup, ResponseStore

THOUGHT = {"type": "thinking", "thinking": "Add them.", "signature": "c2lnbmVk"}
HIDDEN = {"type": "redacted_thinking", "data": "aGlkZGVu"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 6, "b": 7}}
TURN = [THOUGHT, HIDDEN, {"type": "text", "text": "Let me."}, USE]
LAST = [{"type": "thinking", "thinking": "Say it.", "signature": "bGFzdA=="}, {"type": "text", "text": "13."}]
FUNCTION = {"name": "add", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


def answers(blocks, stream):
    return Reply(events=messages_events(blocks)) if stream else Reply(messages_answer(blocks))


def turns(seen):
    return [turn["content"] for turn in seen.json["messages"] if turn["role"] == "assistant"]


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
async def test_a_chat_client_that_calls_tools_sends_thoughts_back_without_knowing_them(ask, stream):
    service, provider = await ask("anthropic", [answers(blocks, stream) for blocks in (TURN, LAST, LAST)])
    client = await service.client()
    conversation = [{"role": "user", "content": "6+7?"}]
    for again in ("13", "Thanks.", None):
        options = {"model": "theirs", "tools": [TOOL], "extra_body": THINKING}
        if stream:
            async with client.chat.completions.stream(messages=conversation, **options) as events:
                message = (await events.get_final_completion()).choices[0].message
        else:
            message = (await client.chat.completions.create(messages=conversation, **options)).choices[0].message
        if again is None:
            break
        turn = {"role": "assistant", "content": message.content}
        if message.tool_calls:
            assert message.reasoning_content == "Add them."
            turn["tool_calls"] = [call.model_dump(include={"id", "type", "function"}) for call in message.tool_calls]
            answer = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": again}
        else:
            answer = {"role": "user", "content": again}
        conversation = [{"role": "system", "content": f"Turn {len(conversation)}."}, *conversation[-1:], turn, answer]
    assert provider.seen[0].json["thinking"] == THINKING["thinking"]
    assert turns(provider.seen[1]) == [TURN]
    assert turns(provider.seen[2]) == [LAST]


async def test_an_edited_turn_retains_its_reasoning_and_sends_the_clients_text(ask):
    service, provider = await ask("anthropic", [answers(TURN, False), answers(LAST, False)])
    client = await service.client()
    conversation = [{"role": "user", "content": "6+7?"}]
    message = (
        (await client.chat.completions.create(model="theirs", messages=conversation, tools=[TOOL])).choices[0].message
    )
    call = message.tool_calls[0].model_dump(include={"id", "type", "function"})
    conversation += [{"role": "assistant", "content": None, "tool_calls": [call]}]
    conversation += [{"role": "tool", "tool_call_id": call["id"], "content": "13"}]
    await client.chat.completions.create(model="theirs", messages=conversation, tools=[TOOL])
    assert turns(provider.seen[1]) == [[THOUGHT, HIDDEN, USE]]


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
async def test_a_response_whose_items_are_sent_back_retains_its_reasoning(ask, stream):
    service, provider = await ask("anthropic", [answers(TURN, stream), answers(LAST, False)])
    client = await service.client()
    options = {"model": "theirs", "tools": [{"type": "function", **FUNCTION}], "store": False}
    conversation = [{"role": "user", "content": "6+7?"}]
    if stream:
        async with client.responses.stream(input=conversation, **options) as events:
            response = await events.get_final_response()
    else:
        response = await client.responses.create(input=conversation, **options)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert response.output[0].content[0].text == "Add them."
    conversation += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
    conversation += [{"type": "function_call_output", "call_id": "toolu_1", "output": "13"}]
    await client.responses.create(input=conversation, **options)
    assert turns(provider.seen[1]) == [TURN]


async def test_a_response_continued_by_its_id_retains_its_reasoning(ask):
    service, provider = await ask("anthropic", [answers(TURN, False), answers(LAST, False)])
    client = await service.client()
    first = await client.responses.create(model="theirs", input="6+7?")
    assert all(item.encrypted_content is None for item in first.output if item.type == "reasoning")
    result = {"type": "function_call_output", "call_id": "toolu_1", "output": "13"}
    await client.responses.create(model="theirs", input=[result], previous_response_id=first.id)
    assert turns(provider.seen[1]) == [TURN]


def test_a_turn_is_found_by_its_calls_or_by_its_words_and_what_they_answer():
    hi, bye = {"role": "user", "content": "hi"}, {"role": "user", "content": "bye"}
    turn = {"role": "assistant", "content": "OK."}
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    called = {"role": "assistant", "content": None, "tool_calls": calls}
    assert turn_key(hi, turn) == turn_key(hi, turn | {"name": "bot"}) != turn_key(bye, turn)
    assert turn_key(hi, called) == turn_key(bye, called | {"content": "edited"}) != turn_key(hi, turn)


def test_blocks_are_stored_until_their_attempt_ends_or_space_runs_out():
    store = ResponseStore(max_bytes=2000)
    one, two = ("r", "a1"), ("r", "a2")
    store.add_turn(one, b"k", [THOUGHT])
    assert ResponseLookup(store, one).turn(b"k") == [THOUGHT]
    assert (ResponseLookup(store, two).turn(b"k"), ResponseLookup(store, None).turn(b"k")) == ([], [])
    size = store.size
    store.add_turn(one, b"k", [THOUGHT])
    assert store.size == size > 0
    store.forget(one)
    assert (store.size, ResponseLookup(store, one).turn(b"k")) == (0, [])
    store.add_turn(one, b"k", [THOUGHT])
    store.add_turn(two, b"k", [THOUGHT | {"thinking": "x" * 1950}])
    assert ResponseLookup(store, one).turn(b"k") == []
