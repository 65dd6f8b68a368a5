"""What a request asks of the shape of an answer: held, or marked on the span; never a reason to hide the answer."""

import pytest
from pydantic import BaseModel

from agentlightning.gateway.dialects.chat import read_request
from agentlightning.gateway.dialects.response_store import ResponseLookup
from agentlightning.gateway.errors import ApiError
from agentlightning.span import CONSTRAINT, VIOLATIONS
from agentlightning.testing import ByteChatFormat

ARGUMENTS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
F, G = (
    {"type": "function", "function": {"name": name, "parameters": ARGUMENTS, "strict": name == "f"}} for name in "fg"
)


def call(name="f", arguments='{"x": 1}'):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def named(name):
    return {"type": "function", "function": {"name": name}}


def allowed(mode, name):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name)]}}


def schema(body):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": body}}


OBJECT = {"type": "json_object"}
CASES = [
    # the fields of the request, the answer, the verdict, the fields it fails
    ({"tools": [G], "tool_choice": "auto"}, "No.", None, None),
    ({"tool_choice": "required"}, call(), "checked", None),
    ({"tool_choice": "required"}, "No.", "violated", ["tool_choice"]),
    ({"tool_choice": named("g")}, call("g"), "checked", None),
    ({"tool_choice": named("g")}, call("f"), "violated", ["tool_choice"]),
    ({"tool_choice": allowed("auto", "g")}, "No.", "checked", None),
    ({"tool_choice": allowed("auto", "g")}, call("f"), "violated", ["tool_choice"]),
    ({"tool_choice": allowed("required", "g")}, "No.", "violated", ["tool_choice"]),
    ({"parallel_tool_calls": True}, call() + call(), "checked", None),
    ({"parallel_tool_calls": False, "tools": [G]}, call("g") + call("g"), "enforced", None),
    ({"parallel_tool_calls": False, "tools": [G]}, "No.", "enforced", None),
    ({"parallel_tool_calls": False}, call(), "checked", None),
    ({"tools": [F]}, call(arguments='{"x": "one"}'), "violated", ["tools"]),
    ({"tools": [G]}, call("g", '{"x": "one"}'), None, None),
    ({"response_format": {"type": "text"}, "tools": None}, "No.", None, None),
    ({"response_format": OBJECT, "tools": None}, '{"x": 1}', "checked", None),
    ({"response_format": OBJECT, "tools": None}, "[1]", "violated", ["response_format"]),
    ({"response_format": OBJECT, "tools": None, "max_tokens": 3}, '{"x": 1}', "violated", ["response_format"]),
    ({"response_format": schema(ARGUMENTS), "tools": None}, '{"x": 1}', "checked", None),
    ({"response_format": schema(ARGUMENTS), "tools": None}, '{"x": "one"}', "violated", ["response_format"]),
    ({"response_format": schema(ARGUMENTS), "tools": None}, "x", "violated", ["response_format"]),
    ({"response_format": OBJECT}, call(), "checked", None),
]


@pytest.mark.parametrize(("fields", "reply", "verdict", "violations"), CASES)
async def test_every_answer_is_returned_and_its_span_records_whether_it_meets_the_constraint(
    serve, fields, reply, verdict, violations
):
    service = await serve([reply])
    options = {key: value for key, value in ({"tools": [F, G]} | fields).items() if value is not None}
    message = (await service.ask(**options)).choices[0].message
    assert message.content or message.tool_calls
    (span,) = await service.spans()
    assert (span.attributes.get(CONSTRAINT), span.attributes.get(VIOLATIONS)) == (verdict, violations)
    assert service.gateway.counters.violated == (verdict == "violated")


async def test_no_tool_is_called_where_none_may_be_whatever_the_model_writes(serve):
    service = await serve([call()] * 3)
    choice = (await service.ask(tools=[F], tool_choice="none")).choices[0]
    assert (choice.message.tool_calls, choice.message.content, choice.finish_reason) == (None, call(), "stop")
    client = await service.client()
    tools = [{"type": "function", **F["function"]}]
    reply = await client.responses.create(model="scripted", input="hi", tools=tools, tool_choice="none")
    assert ([item.type for item in reply.output], reply.output_text) == (["message"], call())
    fields = {"model": "scripted", "max_tokens": 500, "messages": [{"role": "user", "content": "hi"}]}
    tools = [{"name": "f", "input_schema": ARGUMENTS}]
    fields |= {"tools": tools, "tool_choice": {"type": "none"}}
    message = await (await service.anthropic()).messages.create(**fields)
    assert ([block.type for block in message.content], message.stop_reason) == (["text"], "end_turn")


@pytest.mark.parametrize("streams", [False, True])
async def test_no_second_tool_call_is_sampled_if_only_one_is_allowed(serve, streams):
    service = await serve(["So: " + call() + "\n" + call() + " and more", "ok"])
    options = {"tools": [F], "parallel_tool_calls": False}
    if streams:
        deltas = [chunk.choices[0] for chunk in await service.stream(**options) if chunk.choices]
        assert sum(len(choice.delta.tool_calls or ()) for choice in deltas) == 1
        assert deltas[-1].finish_reason == "tool_calls"
    else:
        choice = (await service.ask(**options)).choices[0]
        assert (choice.message.content, len(choice.message.tool_calls)) == ("So:", 1)
        history = [{"role": "user", "content": "hi"}, choice.message.model_dump()]
        result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "1"}
        await service.ask([*history, result], **options)
        assert (service.gateway.counters.continued, service.gateway.counters.drift) == (1, 0)
    token_ids = (await service.spans())[0].attributes["agentlightning.response_token_ids"]
    assert ByteChatFormat().decode(token_ids) == "So: " + call()
    assert "gen_ai.request.stop_sequences" not in (await service.spans())[0].attributes


class Value(BaseModel):
    value: int


async def test_the_sdk_parses_a_structured_answer(serve):
    service = await serve(['{"value": 42}'])
    client = await service.client()
    messages = [{"role": "user", "content": "hi"}]
    reply = await client.chat.completions.parse(model="scripted", messages=messages, response_format=Value)
    assert reply.choices[0].message.parsed == Value(value=42)


IMPOSSIBLE = {
    "offers no function tools": {"tool_choice": "required"},
    "names h, which is not among": {"tools": [F], "tool_choice": named("h")},
    "no JSON schema": {"response_format": schema({"type": "thing"})},
    "must be a JSON schema": {"response_format": schema([])},
    "that can be checked": {"response_format": schema({"$ref": "http://127.0.0.1:9/elsewhere.json"})},
    "cannot be honoured": {"tool_choice": {"type": "custom", "custom": {"name": "f"}}},
}


@pytest.mark.parametrize("message", IMPOSSIBLE)
def test_what_no_answer_could_be_checked_against_is_refused(message):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | IMPOSSIBLE[message]
    with pytest.raises(ApiError, match=message) as refused:
        read_request(body, ResponseLookup())
    assert refused.value.status == 400
