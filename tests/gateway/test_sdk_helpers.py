"""The helpers of OpenAI's and Anthropic's official SDKs, with a provider of each dialect behind the gateway: forwarded
where it speaks the caller's, else translated."""

import json

import pytest
from pydantic import BaseModel
from tests.support.provider import Reply, ScriptedProvider, chat_answer
from tests.support.provider_streams import (
    chat_events,
    messages_answer,
    messages_events,
    response_answer,
    response_events,
)

from agentlightning.gateway.config import GatewayConfig

pytestmark = pytest.mark.slow

SCHEMA = {
    **{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 6}'}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 6}}
ITEM = {
    **{"id": "fc_1", "type": "function_call", "call_id": "call_1", "name": "add", "status": "completed"},
    "arguments": '{"a": 6}',
}
TOOL = {"type": "function", "function": {"name": "add", "strict": True, "parameters": SCHEMA}}
RESULTS = ("tool_result", "function_call_output", '"role": "tool"')


class Value(BaseModel):
    a: int


def asks(text):
    return [{"role": "user", "content": text}]


def answer(path, seen):
    """A tool call to who asks for one, until its result is there; JSON or a greeting else."""
    asked = json.dumps(seen.json)
    calls = "call the tool" in asked and not any(result in asked for result in RESULTS)
    text, stream = '{"a": 6}' if "as json" in asked else "Hello there.", seen.json.get("stream")
    if path == "chat/completions":
        tools = [CALL] if calls else []
        return Reply(events=chat_events([text[:3], text[3:]], tools)) if stream else Reply(chat_answer(text, tools))
    if path == "messages":
        blocks = [{"type": "text", "text": text}] + ([USE] if calls else [])
        return Reply(events=messages_events(blocks)) if stream else Reply(messages_answer(blocks))
    part = {"type": "output_text", "text": text, "annotations": []}
    said = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    items = [said] + ([ITEM] if calls else [])
    return Reply(events=response_events(items)) if stream else Reply(response_answer(items))


@pytest.fixture(params=["chat/completions", "messages", "responses"])
async def service(request, serve):
    path = request.param
    async with ScriptedProvider(lambda seen: answer(path, seen)) as provider:
        anthropic = path == "messages"
        base = provider.url if anthropic else f"{provider.url}/v1"
        them = {"name": "them", "dialect": "anthropic" if anthropic else "openai", "base_urls": [base], "paths": [path]}
        config = {"providers": [them], "routes": [{"model": "theirs", "provider": "them"}]}
        service = await serve([], config=GatewayConfig.model_validate(config))
        yield service
        assert all(span.status_code == "OK" or "threads" in span.status_message for span in await service.spans())


async def test_openais_stream_of_a_chat_with_tools(service):
    client = await service.client()
    options = {"tools": [TOOL], "stream_options": {"include_usage": True}}
    async with client.chat.completions.stream(model="theirs", messages=asks("call the tool"), **options) as stream:
        kinds = {event.type async for event in stream}
        whole = await stream.get_final_completion()
    message = whole.choices[0].message
    assert (message.content, message.tool_calls[0].function.parsed_arguments) == ("Hello there.", {"a": 6})
    assert {"content.delta", "content.done", "tool_calls.function.arguments.done"} <= kinds
    assert whole.usage.completion_tokens == 5


async def test_a_plain_loop_over_openais_chunks(service):
    client = await service.client()
    chunks = await client.chat.completions.create(model="theirs", messages=asks("hi"), stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in chunks]) == "Hello there."


async def test_openais_parsed_answers(service):
    client = await service.client()
    whole = await client.chat.completions.parse(model="theirs", messages=asks("as json"), response_format=Value)
    assert whole.choices[0].message.parsed == Value(a=6)
    async with client.chat.completions.stream(
        model="theirs", messages=asks("as json"), response_format=Value
    ) as stream:
        assert (await stream.get_final_completion()).choices[0].message.parsed == Value(a=6)
    response = await client.responses.parse(model="theirs", input="as json", text_format=Value)
    assert response.output_parsed == Value(a=6)
    async with client.responses.stream(model="theirs", input="as json", text_format=Value) as stream:
        assert (await stream.get_final_response()).output_parsed == Value(a=6)


async def test_openais_stream_of_a_response_with_tools(service):
    client = await service.client()
    tool = {"type": "function", "name": "add", "strict": True, "parameters": SCHEMA}
    async with client.responses.stream(model="theirs", input="call the tool", tools=[tool]) as stream:
        kinds = {event.type async for event in stream}
        whole = await stream.get_final_response()
    assert whole.output_text == "Hello there."
    assert json.loads(whole.output[-1].arguments) == {"a": 6}
    assert {"response.output_text.delta", "response.function_call_arguments.done", "response.completed"} <= kinds


async def test_anthropics_stream_with_tools_and_its_text(service):
    client = await service.anthropic()
    tool = {"name": "add", "input_schema": SCHEMA}
    async with client.messages.stream(
        model="theirs", max_tokens=99, messages=asks("call the tool"), tools=[tool]
    ) as stream:
        kinds = {event.type async for event in stream}
        whole = await stream.get_final_message()
    assert [block.type for block in whole.content] == ["text", "tool_use"]
    assert (whole.content[1].input, whole.usage.output_tokens) == ({"a": 6}, 5)
    assert {"text", "input_json", "message_stop"} <= kinds
    async with client.messages.stream(model="theirs", max_tokens=99, messages=asks("hi")) as stream:
        assert "".join([text async for text in stream.text_stream]) == "Hello there."


async def test_anthropics_parsed_answers(service):
    client = await service.anthropic()
    whole = await client.messages.parse(model="theirs", max_tokens=99, messages=asks("as json"), output_format=Value)
    assert whole.parsed_output == Value(a=6)


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_tool_runner(service, stream):
    from anthropic import beta_async_tool  # Takes a second to import.

    given = []

    @beta_async_tool
    async def add(a: int) -> str:
        """Adds one.

        Args:
            a: a number
        """
        given.append(a)
        return str(a + 1)

    client = await service.anthropic()
    runner = client.beta.messages.tool_runner(
        model="theirs", max_tokens=99, messages=asks("call the tool"), tools=[add], stream=stream
    )
    last = None
    async for turn in runner:
        last = await turn.get_final_message() if stream else turn
    assert (given, last.content[-1].text) == ([6], "Hello there.")
