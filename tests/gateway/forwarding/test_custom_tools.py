"""Custom tools, whose input is free text (Codex's apply_patch), work with models that know functions."""

import json

import openai
import pytest
from tests.support.provider import Reply, chat_answer
from tests.support.provider_streams import chat_events, messages_answer

from agentlightning import span as names

pytestmark = pytest.mark.integration

PATCH = '*** Begin Patch\n+ print("hi")\n*** End Patch'
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: PATCH"}
TOOL = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": GRAMMAR}
PLAIN = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "apply_patch", "arguments": json.dumps({"input": PATCH})},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keeps", ["items", "id"])
async def test_a_custom_tool_is_called_and_answered(ask, stream, keeps):
    first = Reply(events=chat_events([], [CALL])) if stream else Reply(chat_answer(None, [CALL]))
    service, provider = await ask("openai", [first, Reply(chat_answer("Done."))])
    client = await service.client()
    options = {"model": "theirs", "tools": [TOOL, PLAIN]}
    if stream:
        events = [event async for event in await client.responses.create(input="edit", stream=True, **options)]
        response = events[-1].response
        kinds = [event.type for event in events if "custom" in event.type]
        assert kinds == ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert not any("function_call" in event.type for event in events)
    else:
        response = await client.responses.create(input="edit", **options)
    (item,) = response.output
    assert (item.type, item.call_id, item.name, item.input) == ("custom_tool_call", "call_1", "apply_patch", PATCH)
    offered, plain = [tool["function"] for tool in provider.seen[0].json["tools"]]
    assert (offered["name"], plain["name"]) == ("apply_patch", "f")
    assert "start: PATCH" in offered["description"]
    assert offered["parameters"]["required"] == ["input"]
    result = {"type": "custom_tool_call_output", "call_id": "call_1", "output": "ok"}
    if keeps == "id":
        again = {"input": [result], "previous_response_id": response.id}
    else:
        again = {"input": [{"role": "user", "content": "edit"}, item.model_dump(), result]}
    await client.responses.create(**options, **again)
    _, called, answered = provider.seen[1].json["messages"]
    function = called["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("apply_patch", {"input": PATCH})
    assert answered == {"role": "tool", "content": "ok", "tool_call_id": "call_1"}
    (message,) = json.loads((await service.spans())[0].attributes[names.OUTPUT_MESSAGES])
    assert message["parts"] == [
        {"type": "tool_call", "id": "call_1", "name": "apply_patch", "arguments": {"input": PATCH}}
    ]


async def test_a_custom_tool_may_be_required_or_forbidden_and_anthropic_calls_it_too(ask):
    use = {"type": "tool_use", "id": "toolu_1", "name": "apply_patch", "input": {"input": PATCH}}
    service, provider = await ask("anthropic", lambda seen: Reply(messages_answer([use])))
    client = await service.client()
    choice = {"type": "custom", "name": "apply_patch"}
    response = await client.responses.create(model="theirs", input="edit", tools=[TOOL], tool_choice=choice)
    assert (response.output[0].type, response.output[0].input) == ("custom_tool_call", PATCH)
    await client.responses.create(model="theirs", input="edit", tools=[TOOL], tool_choice="none")
    assert [seen.json["tool_choice"]["type"] for seen in provider.seen] == ["tool", "none"]


@pytest.mark.parametrize("arguments", ['"just text"', "no JSON", '{"input": 5}', '{"patch": "x"}'])
async def test_arguments_without_the_input_are_the_input(ask, arguments):
    call = CALL | {"function": CALL["function"] | {"arguments": arguments}}
    service, _ = await ask("openai", [Reply(chat_answer(None, [call]))])
    response = await (await service.client()).responses.create(model="theirs", input="edit", tools=[TOOL])
    assert response.output[0].input == arguments


async def test_a_policy_of_ours_is_offered_custom_tools_and_hosted_ones_are_counted(serve):
    called = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "x"}}\n</tool_call>'
    service = await serve([called])
    client = await service.client()
    response = await client.responses.create(model="scripted", input="edit", tools=[TOOL, {"type": "web_search"}])
    assert (response.output[-1].type, response.output[-1].input) == ("custom_tool_call", "x")
    assert service.gateway.counters.unknown_fields == 1


async def test_a_history_that_cannot_be_read_is_refused_by_name(ask):
    service, _ = await ask("openai", [])
    client = await service.client()
    for item, why in (
        ({"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": 5}, r"input=5 must be a str"),
        ({"type": "web_search_call", "id": "ws_1", "status": "completed"}, "web_search_call"),
    ):
        with pytest.raises(openai.BadRequestError, match=why):
            await client.responses.create(model="theirs", input=[{"role": "user", "content": "hi"}, item])
