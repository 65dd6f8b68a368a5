"""Promises of calls whose provider serves only OpenAI's responses, as the SDKs of other dialects see them."""

import json

import openai
import pytest
from tests.support.provider import Reply
from tests.support.provider_streams import response_answer, response_events

from agentlightning import span as names

THOUGHT = {
    **{"id": "rs_1", "type": "reasoning", "encrypted_content": "gAAA"},
    "summary": [{"type": "summary_text", "text": "Add them."}],
}
CALL = {
    **{"id": "fc_1", "type": "function_call", "call_id": "call_1", "name": "add", "status": "completed"},
    "arguments": '{"a": 6, "b": 7}',
}
FUNCTION = {"name": "add", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
HI = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6+7?"}]


def message_item(text, **more):
    part = {"type": "output_text", "text": text, "annotations": []} | more
    return {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}


def answers(items, stream, usage=(10, 5)):
    return Reply(events=response_events(items, usage)) if stream else Reply(response_answer(items, usage))


@pytest.fixture
def served(ask):
    async def start(replies):
        return await ask("openai", replies, paths=["responses"])

    return start


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
async def test_a_chat_client_calls_tools_and_its_models_thoughts_go_back(served, stream):
    turn = [THOUGHT, CALL]
    service, provider = await served([answers(turn, stream), answers([message_item("13.")], stream, (20, 2))])
    client = await service.client()
    conversation = [*HI]
    options = {"model": "theirs", "tools": [TOOL], "tool_choice": "required", "reasoning_effort": "low"}
    for _ in range(2):
        if stream:
            async with client.chat.completions.stream(messages=conversation, **options) as events:
                completion = await events.get_final_completion()
        else:
            completion = await client.chat.completions.create(messages=conversation, **options)
        message = completion.choices[0].message
        if message.tool_calls:
            assert (message.reasoning_content, completion.choices[0].finish_reason) == ("Add them.", "tool_calls")
            call = message.tool_calls[0].model_dump(include={"id", "type", "function"})
            call["function"].pop("parsed_arguments", None)
            conversation += [{"role": "assistant", "content": None, "tool_calls": [call]}]
            conversation += [{"role": "tool", "tool_call_id": call["id"], "content": "13"}]
    assert (message.content, completion.usage.prompt_tokens) == ("13.", 20)
    first, second = [seen.json for seen in provider.seen]
    assert provider.seen[0].path == "/v1/responses"
    assert first == {
        **{"model": "big-1", "instructions": "Be brief.", "input": [HI[1]], "store": False, "tool_choice": "required"},
        "tools": [{"type": "function", "strict": False, **FUNCTION}],
        "reasoning": {"effort": "low"},
    } | ({"stream": True} if stream else {})
    result = {"type": "function_call_output", "call_id": "call_1", "output": "13"}
    assert second["input"] == [HI[1], *turn, result]
    spans = await service.spans()
    assert [span.attributes[names.OUTPUT_TOKENS] for span in spans] == [5, 2]
    assert json.loads(spans[1].attributes[names.OUTPUT_MESSAGES])[0]["parts"] == [{"type": "text", "content": "13."}]


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
async def test_anthropics_client_is_answered_by_a_model_that_serves_responses(served, stream):
    service, provider = await served([answers([THOUGHT, message_item("Let me."), CALL], stream)])
    client = await service.anthropic()
    image = {"type": "image", "source": {"type": "url", "url": "https://h/a.png"}}
    document = {"type": "document", "source": {"type": "url", "url": "https://h/a.pdf"}}
    shape = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    options = {
        **{"model": "theirs", "max_tokens": 50, "tools": [{"name": "add", "input_schema": {"type": "object"}}]},
        **{"messages": [{"role": "user", "content": [image, document]}], "output_config": shape},
        "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
    }
    if stream:
        async with client.messages.stream(**options) as events:
            message = await events.get_final_message()
    else:
        message = await client.messages.create(**options)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert (message.content[2].input, message.stop_reason) == ({"a": 6, "b": 7}, "tool_use")
    sent = provider.seen[0].json
    assert sent["input"][0]["content"] == [
        {"type": "input_image", "image_url": "https://h/a.png", "detail": "auto"},
        {"type": "input_file", "file_url": "https://h/a.pdf"},
    ]
    assert (sent["max_output_tokens"], sent["parallel_tool_calls"]) == (50, False)
    assert sent["tool_choice"] == {"type": "function", "name": "add"}
    assert sent["text"]["format"]["type"] == "json_schema"


async def test_log_probabilities_of_a_response_reach_a_chat_client(served):
    top = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]}
    known = top | {"top_logprobs": [top]}
    service, provider = await served([Reply(response_answer([message_item("Hi", logprobs=[known])]))])
    client = await service.client()
    reply = await client.chat.completions.create(model="theirs", messages=HI, logprobs=True, top_logprobs=1)
    assert [each.model_dump() for each in reply.choices[0].logprobs.content] == [known]
    sent = provider.seen[0].json
    assert (sent["include"], sent["top_logprobs"]) == (["message.output_text.logprobs"], 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_of_a_server_that_knows_no_stop_strings_is_ended_at_the_first(served, stream):
    items = [message_item("Thought: look. Obs"), message_item("ervation: 7. Final: 7."), CALL]
    service, provider = await served(
        [Reply(events=response_events(items)) if stream else Reply(response_answer(items))]
    )
    client = await service.client()
    reply = await client.chat.completions.create(
        model="theirs", messages=HI, stop=["Calling:", "Observation:"], stream=stream
    )
    if stream:
        chunks = [chunk.choices[0] async for chunk in reply if chunk.choices]
        text, reason = "".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].finish_reason
        assert not any(chunk.delta.tool_calls for chunk in chunks)
    else:
        text, reason = reply.choices[0].message.content, reply.choices[0].finish_reason
        assert (reply.choices[0].message.tool_calls, reply.usage.completion_tokens) == (None, 5)
    assert (text, reason) == ("Thought: look. ", "stop")
    assert "stop" not in provider.seen[0].json
    (span,) = await service.spans()
    (recorded,) = json.loads(span.attributes[names.OUTPUT_MESSAGES])
    assert recorded["parts"] == [{"type": "text", "content": text}]


async def test_text_that_only_begins_like_a_stop_string_is_shown(served):
    service, _ = await served([Reply(events=response_events([message_item("Obs: 7."), CALL]))])
    anthropics = await service.anthropic()
    async with anthropics.messages.stream(
        model="theirs", max_tokens=9, messages=HI, stop_sequences=["7.5", "Observation:"]
    ) as stream:
        message = await stream.get_final_message()
    assert [block.type for block in message.content] == ["text", "tool_use"]
    assert (message.content[0].text, message.stop_reason) == ("Obs: 7.", "tool_use")


async def test_unsupported_fields_are_rejected_and_the_finish_reason_is_translated(served):
    cut = response_answer(
        [message_item("Hel")], status="incomplete", incomplete_details={"reason": "max_output_tokens"}
    )
    failed = response_answer([], status="failed", error={"code": "server_error", "message": "out of memory"})
    service, provider = await served([Reply(cut), Reply(failed)])
    client = await service.client()
    for fields in ({"seed": 1}, {"n": 2}, {"presence_penalty": 1}):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="theirs", messages=HI, **fields)
        assert caught.value.param == next(iter(fields))
    assert provider.seen == []
    reply = await client.chat.completions.create(model="theirs", messages=HI)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("Hel", "length")
    with pytest.raises(openai.APIStatusError, match="out of memory"):
        await client.chat.completions.create(model="theirs", messages=HI)
