"""Promises of calls whose provider speaks another dialect, as the official SDKs and the provider see them."""

import json

import anthropic
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.provider import Reply, ScriptedProvider, chat_answer
from tests.support.provider_streams import chat_events, messages_answer, messages_events, response_answer

from agentlightning import LLM
from agentlightning import span as names
from agentlightning.assemble import trajectory
from agentlightning.gateway.config import GatewayConfig
from agentlightning.gateway.dialects.chat import CHAT
from agentlightning.gateway.dialects.response_store import ResponseLookup
from agentlightning.gateway.forwarding.bodies import chat_part, openai_content

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 6, "b": 7}'}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 6, "b": 7}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"], "additionalProperties": False}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
HI = [{"role": "user", "content": "hi"}]
PIXEL = "iVBORw0KGgo="


# -- Anthropic's clients, a server of chat completions ----------------------------------------------------------------


async def test_an_anthropic_client_is_answered_by_a_server_of_chat_completions(ask):
    service, provider = await ask("openai", [Reply(chat_answer("Hello.", usage=(11, 3)))])
    client = await service.anthropic()
    reply = await client.messages.create(
        model="theirs",
        max_tokens=50,
        system="Be brief.",
        messages=HI,
        stop_sequences=["END"],
        extra_body={"temperature": 0.5},
    )
    assert (reply.content[0].text, reply.stop_reason, reply.model) == ("Hello.", "end_turn", "theirs")
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (11, 3)
    (seen,) = provider.seen
    assert seen.path == "/v1/chat/completions"
    assert seen.headers["authorization"] == "Bearer sk-theirs-0123456789"
    assert seen.json == {
        "model": "big-1",
        "messages": [{"role": "system", "content": "Be brief."}, *HI],
        "max_tokens": 50,
        "stop": ["END"],
        "temperature": 0.5,
    }


async def test_an_anthropic_client_reads_a_stream_of_chat_completions(ask):
    events = chat_events(["Hel", "lo."], calls=[CALL], usage=(11, 3), thought="Hm.")
    service, provider = await ask("openai", [Reply(events=events)])
    client = await service.anthropic()
    tool = {"name": "add", "input_schema": {"type": "object"}}
    async with client.messages.stream(model="theirs", max_tokens=50, messages=HI, tools=[tool]) as stream:
        texts = [event.text async for event in stream if event.type == "text"]
        message = await stream.get_final_message()
    assert "".join(texts) == "Hello."
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert (message.content[2].id, message.content[2].input) == ("call_1", {"a": 6, "b": 7})
    assert (message.stop_reason, message.usage.input_tokens, message.usage.output_tokens) == ("tool_use", 11, 3)
    assert provider.seen[0].json["stream_options"] == {"include_usage": True}


async def test_tools_choices_and_results_reach_a_server_of_chat_completions(ask):
    service, provider = await ask("openai", lambda seen: Reply(chat_answer("13.")))
    client = await service.anthropic()
    tool = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
    conversation = [
        *HI,
        {"role": "assistant", "content": [{"type": "text", "text": "Let me."}, USE]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "13"}]},
    ]
    choices = {
        None: {"type": "auto"},
        "required": {"type": "any"},
        "add": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
    }
    for choice in choices.values():
        await client.messages.create(
            model="theirs", max_tokens=50, messages=conversation, tools=[tool], tool_choice=choice
        )
    first, second, third = [seen.json for seen in provider.seen]
    assert first["tools"] == [ADD]
    assert first["messages"][1:] == [
        {
            "role": "assistant",
            "content": "Let me.",
            "tool_calls": [
                {"id": "toolu_1", "type": "function", "function": {"name": "add", "arguments": '{"a":6,"b":7}'}}
            ],
        },
        {"role": "tool", "content": "13", "tool_call_id": "toolu_1"},
    ]
    assert ("tool_choice" in first, second["tool_choice"]) == (False, "required")
    assert third["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert third["parallel_tool_calls"] is False


async def test_images_reach_a_server_of_chat_completions(ask):
    service, provider = await ask("openai", [Reply(chat_answer("A dot."))])
    client = await service.anthropic()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "shot"}, image]}
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]},
        {"role": "assistant", "content": [USE]},
        {"role": "user", "content": [result]},
    ]
    await client.messages.create(model="theirs", max_tokens=50, messages=conversation)
    shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    first, _, tool, after = provider.seen[0].json["messages"]
    assert first["content"] == [{"type": "text", "text": "What is it?"}, shown]
    assert (tool["content"], after) == ("shot", {"role": "user", "content": [shown]})


async def test_structured_output_reaches_a_server_of_chat_completions(ask):
    service, provider = await ask("openai", [Reply(chat_answer('{"a": "no number"}'))])
    client = await service.anthropic()
    shape = {"type": "json_schema", "schema": SCHEMA}
    await client.messages.create(model="theirs", max_tokens=50, messages=HI, output_config={"format": shape})
    sent = provider.seen[0].json["response_format"]
    assert sent == {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}
    (span,) = await service.spans()
    assert span.attributes[names.CONSTRAINT] == "violated"


async def test_tokens_of_a_translated_prompt_are_counted_without_cost(ask):
    service, provider = await ask("anthropic", [Reply({"input_tokens": 42})], price={"input": 3})
    client = await service.anthropic()
    assert (await client.messages.count_tokens(model="theirs", messages=HI)).input_tokens == 42
    assert (provider.seen[0].path, provider.seen[0].json["model"]) == ("/v1/messages/count_tokens", "big-1")
    assert (await service.spans(), service.gateway.metrics()["provider_dollars"]) == ([], 0)


async def test_tokens_that_a_server_of_chat_completions_reports_are_recorded(ask):
    answer = chat_answer("Hi", prompt_token_ids=[1, 2, 3])
    answer["choices"][0] |= {"token_ids": [7, 8], "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]}}
    service, provider = await ask("openai", [Reply(answer)], token_ids=True)
    client = await service.anthropic()
    await client.messages.create(model="theirs", max_tokens=50, messages=HI)
    assert provider.seen[0].json["return_token_ids"] is True
    (span,) = await service.spans()
    (call,) = trajectory(span.rollout_id, span.attempt_id, [span]).transitions
    assert (call.prompt_token_ids, call.response_token_ids, call.logprobs) == ((1, 2, 3), (7, 8), (-0.5, -0.25))
    assert span.attributes[names.TOKENS] == "provider"


@pytest.mark.parametrize(
    "arguments",
    ['{"a": 6, "b": oops}', *(pytest.param(text, marks=pytest.mark.slow) for text in ("6*7", '{"a": 6} and more'))],
)
async def test_arguments_that_are_no_object_reach_anthropics_client_and_come_back_as_they_were(ask, arguments):
    call = CALL | {"function": {"name": "add", "arguments": arguments}}
    service, provider = await ask("openai", [Reply(events=chat_events([], [call])), Reply(chat_answer("Sorry."))])
    client = await service.anthropic()
    options = {"model": "theirs", "max_tokens": 50, "tools": [{"name": "add", "input_schema": {"type": "object"}}]}
    async with client.messages.stream(messages=HI, **options) as stream:
        (use,) = (await stream.get_final_message()).content
    assert use.input["_raw_arguments"] == arguments
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "no JSON", "is_error": True}
    conversation = [{"role": "assistant", "content": [use.model_dump()]}, {"role": "user", "content": [result]}]
    await client.messages.create(messages=HI + conversation, **options)
    sent = provider.seen[1].json["messages"][1]["tool_calls"][0]["function"]
    assert sent == {"name": "add", "arguments": arguments}


async def test_a_refusal_and_cached_tokens_use_the_callers_fields(ask):
    answer = chat_answer(None, usage=(11, 3))
    answer["choices"][0]["message"]["refusal"] = "I will not."
    answer["usage"] |= {"prompt_tokens_details": {"cached_tokens": 4}}
    answer["usage"] |= {"completion_tokens_details": {"reasoning_tokens": 2}}
    service, _ = await ask("openai", lambda seen: Reply(answer))
    message = await (await service.anthropic()).messages.create(model="theirs", max_tokens=50, messages=HI)
    assert (message.stop_reason, message.content[0].text) == ("refusal", "I will not.")
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (7, 4)
    response = await (await service.client()).responses.create(model="theirs", input="hi")
    assert response.output[0].content[0].refusal == "I will not."
    assert response.status == "completed"
    assert response.usage.input_tokens_details.cached_tokens == 4
    assert response.usage.output_tokens_details.reasoning_tokens == 2


# -- the responses API ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
async def test_a_response_is_continued_though_its_provider_stores_nothing(ask, dialect):
    chat = [Reply(chat_answer("One.")), Reply(chat_answer("Two."))]
    replies = [Reply(messages_answer([{"type": "text", "text": text}])) for text in ("One.", "Two.")]
    service, provider = await ask(dialect, chat if dialect == "openai" else replies)
    client = await service.client()
    first = await client.responses.create(model="theirs", input="first?", instructions="Be brief.")
    second = await client.responses.create(model="theirs", input="second?", previous_response_id=first.id)
    assert (first.output_text, second.output_text, second.usage.input_tokens) == ("One.", "Two.", 10)
    sent = json.dumps(provider.seen[1].json["messages"])
    assert [text in sent for text in ("first?", "One.", "second?", "Be brief.")] == [True, True, True, False]
    assert (await client.responses.retrieve(first.id)).output_text == "One."


@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
async def test_a_response_streams_from_either_dialect(ask, dialect):
    blocks = [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Hello."}, USE]
    theirs = (
        chat_events(["Hel", "lo."], [CALL], (10, 7), "Hm.") if dialect == "openai" else messages_events(blocks, (10, 7))
    )
    service, _ = await ask(dialect, [Reply(events=theirs)])
    client = await service.client()
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    async with client.responses.stream(model="theirs", input="hi", tools=[tool]) as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        response = await stream.get_final_response()
    assert "".join(deltas) == "Hello."
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert json.loads(response.output[2].arguments) == {"a": 6, "b": 7}
    assert (response.status, response.usage.output_tokens) == ("completed", 7)


# -- OpenAI's clients, Anthropic's server -----------------------------------------------------------------------------


async def test_an_openai_client_is_answered_by_anthropic(ask):
    blocks = [{"type": "text", "text": "Let me."}, USE]
    service, provider = await ask("anthropic", [Reply(messages_answer(blocks, (11, 3)))], max_output_tokens=777)
    client = await service.client()
    conversation = [
        {"role": "system", "content": "Be brief."},
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "13"},
        {"role": "user", "content": "and now?"},
    ]
    reply = await client.chat.completions.create(
        model="theirs",
        messages=conversation,
        tools=[ADD],
        tool_choice="required",
        parallel_tool_calls=False,
        stop="END",
    )
    choice = reply.choices[0]
    assert (choice.message.content, choice.finish_reason, reply.usage.prompt_tokens) == ("Let me.", "tool_calls", 11)
    assert reply.usage.prompt_tokens_details.cached_tokens == 0
    assert reply.usage.completion_tokens_details.reasoning_tokens == 0
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"a": 6, "b": 7}
    (seen,) = provider.seen
    assert (seen.path, seen.headers["x-api-key"]) == ("/v1/messages", "sk-theirs-0123456789")
    assert "anthropic-version" in seen.headers
    assert "authorization" not in seen.headers
    assert seen.json == {
        "model": "big-1",
        "system": "Be brief.",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": [USE | {"id": "call_1"}]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "call_1", "content": "13"},
                    {"type": "text", "text": "and now?"},
                ],
            },
        ],
        "max_tokens": 777,
        "stop_sequences": ["END"],
        "tools": [{"name": "add", "input_schema": {"type": "object"}, "description": "Adds."}],
        "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
    }


async def test_an_openai_client_reads_a_stream_of_anthropic(ask):
    events = messages_events([{"type": "text", "text": "Hello."}, USE], (11, 3))
    service, _ = await ask("anthropic", [Reply(events=events)])
    client = await service.client()
    stream = await client.chat.completions.create(
        model="theirs", messages=HI, tools=[ADD], stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "Hello."
    calls = [delta.tool_calls[0] for delta in deltas if delta.tool_calls]
    assert (calls[0].id, calls[0].function.name, calls[0].index) == ("toolu_1", "add", 0)
    assert json.loads("".join(call.function.arguments for call in calls)) == {"a": 6, "b": 7}
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
    assert chunks[-1].usage.completion_tokens == 3


@pytest.mark.parametrize(
    "fields", [{"n": 2}, {"seed": 1}, {"logprobs": True}, {"temperature": 1.5}, {"frequency_penalty": 1}]
)
async def test_fields_anthropic_does_not_support_are_rejected_by_name(ask, fields):
    service, provider = await ask("anthropic", [])
    client = await service.client()
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="theirs", messages=HI, **fields)
    assert caught.value.param == next(iter(fields))
    assert provider.seen == []


async def test_a_schema_and_an_image_reach_anthropic(ask):
    service, provider = await ask("anthropic", [Reply(messages_answer([{"type": "text", "text": '{"a": 1}'}]))])
    client = await service.client()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    conversation = [{"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]}]
    await client.chat.completions.create(model="theirs", messages=conversation, response_format=shape)
    sent = provider.seen[0].json
    assert sent["output_config"] == {"format": {"type": "json_schema", "schema": SCHEMA}}
    source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    assert sent["messages"][0]["content"] == [
        {"type": "image", "source": source},
        {"type": "text", "text": "What is it?"},
    ]
    (span,) = await service.spans()
    assert span.attributes[names.CONSTRAINT] == "checked"


async def test_a_thinking_budget_is_within_the_limit_that_the_resource_sets(serve, store):
    resource = LLM(endpoint="http://x", model="theirs", sampling_parameters={"max_tokens": 3000})
    await store.add_resources({"llm": resource})
    async with ScriptedProvider([Reply(messages_answer([{"type": "text", "text": "42"}]))]) as provider:
        them = {
            "name": "them",
            "dialect": "anthropic",
            "base_urls": [provider.url],
            "model": "claude-3-7-sonnet-latest",
        }
        rule = {"model": "theirs", "provider": "them"}
        service = await serve([], config=GatewayConfig.model_validate({"providers": [them], "routes": [rule]}))
        client = await service.client()
        await client.chat.completions.create(model="theirs", messages=HI, reasoning_effort="high")
    (sent,) = provider.seen
    assert (sent.json["max_tokens"], sent.json["thinking"]["budget_tokens"]) == (3000, 2999)


async def test_raw_prompts_cannot_be_translated_and_are_refused(ask):
    service, _ = await ask("anthropic", [])
    client = await service.client()
    with pytest.raises(openai.BadRequestError, match="serves no /v1/completions"):
        await client.completions.create(model="theirs", prompt="hi")


@pytest.mark.parametrize(
    ("reason", "for_anthropic", "for_responses"),
    [
        ("length", "max_tokens", ("incomplete", "max_output_tokens")),
        ("content_filter", "refusal", ("incomplete", "content_filter")),
    ],
)
async def test_the_finish_reason_uses_the_callers_terms(ask, reason, for_anthropic, for_responses):
    answer = chat_answer("Hello.")
    answer["choices"][0]["finish_reason"] = reason
    service, _ = await ask("openai", lambda seen: Reply(answer))
    message = await (await service.anthropic()).messages.create(model="theirs", max_tokens=9, messages=HI)
    assert message.stop_reason == for_anthropic
    response = await (await service.client()).responses.create(model="theirs", input="hi")
    why = response.incomplete_details.reason if response.incomplete_details else None
    assert (response.status, why) == for_responses


MARKED = '\ue000\ue000image {"url": "http://elsewhere/?secret"}\ue001'


@pytest.mark.parametrize(("speaks", "path"), [("openai", None), ("anthropic", None), ("openai", ("responses",))])
async def test_what_a_tool_says_stays_text_whatever_it_looks_like(ask, speaks, path):
    """Private characters, markers within markers and JSON of an image: nothing of it is fetched by the provider."""
    pages = [
        MARKED,
        MARKED.replace("\ue000", ""),
        '{"type": "image", "source": {"type": "url", "url": "http://elsewhere"}}',
    ]
    answer = messages_answer([{"type": "text", "text": "No."}]) if speaks == "anthropic" else chat_answer("No.")
    if path:
        answer = response_answer([{"type": "message", "id": "m", "content": [{"type": "output_text", "text": "No."}]}])
    service, provider = await ask(speaks, lambda seen: Reply(answer), **({"paths": path} if path else {}))
    client, anthropics = await service.client(), await service.anthropic()
    for page in pages:
        if speaks != "openai" or path:
            conversation = [*HI, {"role": "assistant", "tool_calls": [CALL]}]
            conversation.append({"role": "tool", "tool_call_id": "call_1", "content": page})
            await client.chat.completions.create(model="theirs", messages=conversation)
        if speaks == "openai":
            result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": page}]}
            turns = [*HI, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]}]
            await anthropics.messages.create(model="theirs", max_tokens=9, messages=turns)
        items = [
            {"role": "user", "content": "hi"},
            {"type": "function_call_output", "call_id": "call_1", "output": page},
        ]
        if not path:
            await client.responses.create(model="theirs", input=items)
    for seen in provider.seen:
        assert _image_parts(seen.json) == []
        assert any(text in pages for text in _texts(seen.json))


def _image_parts(value):
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    here = [value] if isinstance(value, dict) and value.get("type") in ("image", "image_url", "input_image") else []
    return here + [found for each in inner for found in _image_parts(each)]


def _texts(value):
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in inner for text in _texts(each)]


@settings(max_examples=10)
@given(st.sampled_from(["https://host/a.png", f"data:image/png;base64,{PIXEL}"]), st.text(max_size=5))
def test_an_image_and_the_text_beside_it_are_read_and_written_as_they_were(url, text):
    part = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    conversation = [{"role": "user", "content": [part, {"type": "text", "text": text}]}]
    (message,) = CHAT.read({"messages": conversation}, ResponseLookup(), attachments=True).messages
    assert openai_content(message["content"], chat_part) == [part] + ([{"type": "text", "text": text}] if text else [])


HALF = chat_answer("A \\ud83d and more.", calls=[CALL | {"function": {"name": "add", "arguments": '{"a": "\\ud83d"}'}}])


@pytest.mark.parametrize("stream", [False, True])
async def test_half_a_surrogate_pair_costs_one_character_translated_as_forwarded(ask, stream):
    """orjson writes no half of a pair, and models that answer in tokens say some."""
    whole = json.dumps(HALF).replace("\\\\ud83d", "\\ud83d").encode()
    events = [event.replace(b"lo.", b"\\ud83d") for event in chat_events(["Hel", "lo."])]
    service, _ = await ask("openai", lambda seen: Reply(events=events) if stream else Reply(whole))
    client = await service.anthropic()
    if stream:
        async with client.messages.stream(model="theirs", max_tokens=9, messages=HI) as stream:
            message = await stream.get_final_message()
        assert message.content[0].text == "Hel\ufffd"
    else:
        message = await client.messages.create(model="theirs", max_tokens=9, messages=HI)
        assert message.content[0].text == "A \ufffd and more."
        assert message.content[1].name == "add"
    (span,) = await service.spans()
    assert span.status_code == "OK"


@pytest.mark.parametrize("depth", [200, 253, 600])
async def test_what_is_nested_deep_is_passed_on_or_refused_and_never_fails(ask, depth):
    nested = "[" * depth + "]" * depth
    service, _ = await ask("openai", lambda seen: Reply(chat_answer("Hello.")))
    http, headers = await service.http(), {"authorization": f"Bearer {service.key}"}
    for path in ("chat/completions", "messages", "responses"):
        conversation = (
            '"input": "hi"'
            if path == "responses"
            else '"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]'
        )
        for field in ('"x": %s', '"tools": [%s]', '"metadata": {"x": %s}'):
            body = f'{{"model": "theirs", {conversation}, {field % nested}}}'
            reply = await http.post(f"{service.base_url}/{path}", content=body, headers=headers)
            assert reply.status_code in (200, 400), (path, field, reply.text)
            assert reply.status_code == 400 or depth < 254
            assert "engine" not in reply.text
        turn = f'{{"role": "user", "content": [{{"type": "text", "text": {nested}}}]}}'
        body = f'{{"model": "theirs", "max_tokens": 9, "{"input" if path == "responses" else "messages"}": [{turn}]}}'
        reply = await http.post(f"{service.base_url}/{path}", content=body, headers=headers)
        assert reply.status_code in (200, 400), (path, reply.text)
    assert len(await service.spans()) == 12


# -- the record -------------------------------------------------------------------------------------------------------


async def test_a_translated_call_is_recorded_whole_and_says_that_it_has_no_tokens(ask):
    service, _ = await ask("anthropic", [Reply(messages_answer([{"type": "text", "text": "Hello."}], (11, 3)))])
    client = await service.client()
    reply = await client.chat.completions.create(model="theirs", messages=HI)
    (span,) = await service.spans()
    attributes = span.attributes
    assert (attributes[names.TOKENS], attributes[names.PROVIDER_NAME], attributes[names.PROVIDER_RETRIES]) == (
        "none",
        "them",
        0,
    )
    assert (attributes[names.REQUEST_MODEL], attributes[names.RESPONSE_MODEL], attributes[names.RESPONSE_ID]) == (
        "theirs",
        "claude-theirs",
        reply.id,
    )
    assert (attributes[names.INPUT_TOKENS], attributes[names.OUTPUT_TOKENS]) == (11, 3)
    assert json.loads(attributes[names.INPUT_MESSAGES])[0]["parts"] == [{"type": "text", "content": "hi"}]
    assert json.loads(attributes[names.OUTPUT_MESSAGES])[0]["parts"] == [{"type": "text", "content": "Hello."}]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply(b"{broken"), "not JSON"),
        (Reply({"id": "x"}), "no choice"),
        (Reply(events=[b"data: {broken\n\n"]), "not JSON"),
        (Reply(events=chat_events(["Hel", "lo."])[:3]), "before the response was complete"),
        (Reply(events=chat_events(["Hel", "lo."])[:3], end="close"), "closed the connection"),
        (Reply(events=[b'data: {"error": {"message": "out of memory"}}\n\n']), "out of memory"),
    ],
)
async def test_an_interrupted_provider_is_an_error_in_the_callers_format(ask, reply, message):
    service, _ = await ask("openai", [reply, reply])
    client = await service.anthropic()

    async def call():
        if reply.events is None:
            return await client.messages.create(model="theirs", max_tokens=50, messages=HI)
        async with client.messages.stream(model="theirs", max_tokens=50, messages=HI) as stream:
            return await stream.get_final_message()

    with pytest.raises(anthropic.APIStatusError, match=message):
        await call()
    (span,) = await service.spans()
    assert span.status_code == "ERROR"
    assert message in span.status_message


async def test_beta_headers_of_the_provider_are_sent_with_a_translated_call(ask):
    service, provider = await ask("anthropic", [Reply(messages_answer([{"type": "text", "text": "Hello."}]))])
    client = await service.client()
    headers = {"anthropic-beta": "context-1m-2025-08-07", "openai-beta": "assistants=v2"}
    await client.chat.completions.create(model="theirs", messages=HI, extra_headers=headers)
    assert provider.seen[0].headers["anthropic-beta"] == "context-1m-2025-08-07"
    assert "openai-beta" not in provider.seen[0].headers
