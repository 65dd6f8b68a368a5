"""Anthropic's wire: what is read and refused, and what the official SDK makes of our answers."""

import anthropic
import pytest
from pydantic import BaseModel

from agentlightning import span as names
from agentlightning.errors import PolicyError
from agentlightning.gateway.dialects.messages import RAW_ARGUMENTS, read_request
from agentlightning.gateway.dialects.response_store import ResponseLookup
from agentlightning.gateway.errors import ApiError
from agentlightning.span import CONSTRAINT
from agentlightning.testing import ByteChatFormat

USER = {"role": "user", "content": "hi"}
TOOLS = [{"name": "calculator", "description": "Calculates.", "input_schema": {"type": "object"}}]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression":  "6*7"}}\n</tool_call>'


def read(**fields):
    return read_request({"model": "m", "max_tokens": 9, "messages": [USER]} | fields, ResponseLookup())


# -- reading ---------------------------------------------------------------------------------------------------------

IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
REFUSED = {
    "messages": [{"role": "user", "content": [IMAGE]}],
    "system": [IMAGE],
    "max_tokens": 0,
    "temperature": -1,
    "tool_choice": {"type": "tool", "name": "nobody"},
    "tools": [{"description": "nameless"}],
    "output_config": {"format": {"type": "grammar"}},
    "thread": {"type": "create"},
    "mcp_servers": [{"url": "x"}],
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_would_change_the_sample_and_cannot_be_honoured_is_refused_by_name(field):
    with pytest.raises(ApiError) as refused:
        read(**{field: REFUSED[field]})
    assert (refused.value.status, refused.value.param) == (400, field)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"type": "sometimes"}, 'tool_choice={"type":"sometimes"} is not known; use the type auto, any, tool or none'),
        ({"type": "required"}, 'tool_choice={"type":"required"} is not known; use the type auto, any, tool or none'),
        ({"type": "tool"}, "tool_choice.name=null must be a str"),
    ],
)
def test_an_unknown_choice_is_refused_with_those_that_anthropics_api_has(choice, said):
    with pytest.raises(ApiError) as refused:
        read(tools=[{"name": "f", "input_schema": {}}], tool_choice=choice)
    assert refused.value.message == said


def test_an_answer_goes_on_with_the_assistants_last_words():
    request = read(messages=[USER, {"role": "assistant", "content": "The answer is"}])
    assert (len(request.messages), request.prefill) == (1, "The answer is")


def test_a_last_turn_that_calls_tools_is_refused():
    use = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"x": 1}}
    with pytest.raises(ApiError, match="the last message is the assistant's"):
        read(messages=[USER, {"role": "assistant", "content": [use]}])


def test_blocks_are_read_as_messages_with_separate_reasoning():
    thinking = {"type": "thinking", "thinking": "Let me see.", "signature": "x"}
    use = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"x": 1}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "42"}]}
    text = {"type": "text", "text": "Sure."}
    request = read(
        system=[{"type": "text", "text": "x-anthropic-billing-header: cc=1"}, {"type": "text", "text": "Be brief."}],
        messages=[
            USER,
            {"role": "assistant", "content": [thinking, {"type": "redacted_thinking", "data": "x"}, text, use]},
            {"role": "user", "content": [result, {"type": "text", "text": "and?"}, {"type": "text", "text": "so?"}]},
        ],
    )
    call = {"id": "toolu_1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
    assert request.messages == [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "Sure.", "reasoning_content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "toolu_1"},
        {"role": "user", "content": "and?\nso?"},
    ]


def test_what_coding_agents_send_besides_is_accepted_and_counted():
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    request = read(
        tools=[*TOOLS, hosted], thinking={"type": "enabled", "budget_tokens": 9}, metadata={"user_id": "x"}, top_k=5
    )
    assert [tool["function"]["name"] for tool in request.tools] == ["calculator"]
    assert request.ignored_fields == ("thinking", "metadata", "tools.web_search_20250305")
    assert (request.params.top_k, request.params.max_tokens) == (5, 9)


# -- with the official SDK -------------------------------------------------------------------------------------------


async def create(service, messages=None, **options):
    client = await service.anthropic()
    asked = {"model": "scripted", "max_tokens": 1000, "messages": messages or [USER]}
    return await client.messages.create(**asked | options)


async def stream(service, messages=None, **options):
    """(all events, the message the SDK's helper put together)."""
    client = await service.anthropic()
    asked = {"model": "scripted", "max_tokens": 1000, "messages": messages or [USER]}
    async with client.messages.stream(**asked | options) as events:
        seen = [event async for event in events]
        return seen, await events.get_final_message()


async def test_an_agent_gets_its_answer_and_the_store_the_exact_tokens(serve):
    service = await serve(["Hello."])
    reply = await create(service, system="Be brief.", stop_sequences=["##"], extra_body={"temperature": 0.5})
    assert [(block.type, block.text) for block in reply.content] == [("text", "Hello.")]
    assert (reply.stop_reason, reply.stop_sequence, reply.model, reply.role) == (
        "end_turn",
        None,
        "scripted",
        "assistant",
    )
    (span,) = await service.spans()
    kept, ((prompt, params),) = span.attributes, service.engine.calls
    assert kept[names.PROMPT_TOKEN_IDS] == prompt
    assert ByteChatFormat().decode(kept[names.RESPONSE_TOKEN_IDS]) == "Hello.<|im_end|>"
    assert (params.temperature, params.stop, params.max_tokens) == (0.5, ("##",), 1000)
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (len(prompt), len(kept[names.RESPONSE_TOKEN_IDS]))
    assert (kept[names.RESPONSE_ID], kept[names.OPERATION_NAME], span.name) == (reply.id, "chat", "chat scripted")


@pytest.mark.parametrize("streams", [False, True])
async def test_a_tool_is_called_and_the_conversation_goes_on_in_the_same_tokens(serve, streams):
    service = await serve(["Let me see. " + CALL, "It is 42."])
    asks = stream if streams else create
    reply = await asks(service, tools=TOOLS)
    message = reply[1] if streams else reply
    text, use = message.content
    assert (text.text, use.type, use.name, use.input) == (
        "Let me see.",
        "tool_use",
        "calculator",
        {"expression": "6*7"},
    )
    assert message.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "42"}
    history = [USER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    await asks(service, history, tools=TOOLS)
    one, two = [span.attributes for span in await service.spans()]
    known = one[names.PROMPT_TOKEN_IDS] + one[names.RESPONSE_TOKEN_IDS]
    assert two[names.PROMPT_TOKEN_IDS][: len(known)] == known
    assert (service.gateway.counters.continued, service.gateway.counters.drift) == (1, 0)


async def test_text_streams_as_it_is_sampled_in_the_sdks_events(serve):
    service = await serve(["Hé 🎉!"], engine={"delay": 0.001})
    events, message = await stream(service)
    raw = [event.type for event in events if event.type != "text"]
    deltas = [event.text for event in events if event.type == "text"]
    assert raw[:2] == ["message_start", "content_block_start"]
    assert raw[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert len(deltas) > 1
    assert "".join(deltas) == message.content[0].text == "Hé 🎉!"
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", len("Hé 🎉!".encode()) + 1)
    assert message.usage.input_tokens == len(service.engine.calls[0][0])


async def test_text_and_several_calls_stream_as_blocks_in_their_order(serve):
    service = await serve([f"One. {CALL}\n{CALL}\nTwo."])
    events, message = await stream(service, tools=TOOLS)
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use", "text"]
    assert [block.text for block in message.content if block.type == "text"] == ["One.", "Two."]
    begun = [event.index for event in events if event.type == "content_block_start"]
    assert begun == [0, 1, 2, 3]


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_says_why_it_ended(serve, streams):
    service = await serve(["yes END no", "Hello.", ""])

    async def reasons(**options):
        reply = (await stream(service, **options))[1] if streams else await create(service, **options)
        return reply.stop_reason, reply.stop_sequence, "".join(block.text for block in reply.content)

    assert await reasons(stop_sequences=["STOP", "END"]) == ("stop_sequence", "END", "yes ")
    assert await reasons(max_tokens=3) == ("max_tokens", None, "Hel")
    assert await reasons() == ("end_turn", None, "")


async def test_arguments_that_are_no_object_come_back_as_they_were_written(serve):
    odd = '<tool_call>\n{"name": "calculator", "arguments": "6 * "}\n</tool_call>'
    service = await serve([odd, "ok"])
    _, reply = await stream(service, tools=TOOLS)
    (use,) = reply.content
    assert use.input == {RAW_ARGUMENTS: "6 * "}
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "what?", "is_error": True}
    history = [USER, {"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
    await create(service, history, tools=TOOLS)
    assert (service.gateway.counters.continued, service.gateway.counters.drift) == (1, 0)


async def test_no_tools_are_shown_to_the_model_when_the_choice_is_none(serve):
    service = await serve([CALL])
    reply = await create(service, tools=TOOLS, tool_choice={"type": "none"})
    assert reply.content[0].text == CALL
    assert "calculator" not in ByteChatFormat().decode(service.engine.calls[0][0])


async def test_a_choice_of_tools_is_checked_and_one_call_at_most_is_enforced(serve):
    service = await serve(["No.", CALL, CALL + CALL])
    await create(service, tools=TOOLS, tool_choice={"type": "any"})
    await create(service, tools=TOOLS, tool_choice={"type": "tool", "name": "calculator"})
    reply = await create(service, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert len(reply.content) == 1
    verdicts = [span.attributes[CONSTRAINT] for span in await service.spans()]
    assert verdicts == ["violated", "checked", "enforced"]


class Answer(BaseModel):
    value: int


async def test_a_structured_answer_is_parsed_by_the_sdk(serve):
    service = await serve(['{"value": 42}'])
    client = await service.anthropic()
    reply = await client.messages.parse(model="scripted", max_tokens=99, messages=[USER], output_format=Answer)
    assert reply.parsed_output == Answer(value=42)
    assert (await service.spans())[0].attributes[CONSTRAINT] == "checked"


async def test_tokens_are_counted_as_the_engine_would_get_them_and_nothing_is_recorded(serve):
    service = await serve(["Hello."])
    client = await service.anthropic()
    asked = {"model": "scripted", "system": "Be brief.", "messages": [USER], "tools": TOOLS}
    counted = await client.messages.count_tokens(**asked)
    assert await service.spans() == []
    await client.messages.create(**asked, max_tokens=9)
    assert counted.input_tokens == len(service.engine.calls[0][0])


async def test_the_sdks_tool_runner_works_to_the_end(serve):
    service = await serve([CALL, "It is 42."])
    client = await service.anthropic()

    @anthropic.beta_async_tool
    async def calculator(expression: str) -> str:
        """Calculates.

        Args:
            expression: What to calculate.
        """
        return "42"

    runner = client.beta.messages.tool_runner(
        model="scripted", max_tokens=999, messages=[USER], tools=[calculator], max_iterations=3
    )
    message = await runner.until_done()
    assert message.content[0].text == "It is 42."
    assert service.gateway.counters.continued == 1


# -- what goes wrong -------------------------------------------------------------------------------------------------


async def test_refusals_are_the_exceptions_the_sdk_has_for_them(serve):
    service = await serve([PolicyError("the device is lost")], engine={"context_length": 60})
    with pytest.raises(anthropic.NotFoundError, match="known: scripted") as unknown:
        await create(service, model="claude")
    assert unknown.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long") as long:
        await create(service, [{"role": "user", "content": "long " * 20}])
    assert long.value.body["type"] == "error"
    assert long.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.InternalServerError, match="the device is lost"):
        await create(service)
    client = await service.anthropic(api_key="agl-wrong")
    with pytest.raises(anthropic.AuthenticationError, match="AGL_KEY"):
        await client.messages.create(model="scripted", max_tokens=9, messages=[USER])


async def test_a_failure_in_the_middle_of_a_stream_reaches_the_caller(serve):
    service = await serve(["Hello."])
    whole = service.engine.sample

    async def breaks(prompt_token_ids, params, on_tokens=None, *, affinity=""):
        await whole(prompt_token_ids, params, on_tokens)
        raise PolicyError("the device is lost")

    service.engine.sample = breaks
    with pytest.raises(anthropic.APIStatusError, match="the device is lost"):
        await stream(service)


async def test_models_and_unknown_paths_speak_the_dialect_of_who_asks(serve):
    service = await serve([])
    client = await service.anthropic()
    assert [model.id async for model in await client.models.list()] == ["scripted"]
    assert (await client.models.retrieve("scripted")).display_name == "scripted"
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        await client.messages.batches.list()


async def test_a_large_body_and_an_ended_attempt_have_different_errors(serve):
    service = await serve([], max_body_bytes=1000)
    with pytest.raises(anthropic.RequestTooLargeError, match="larger than 1000 bytes"):
        await create(service, [{"role": "user", "content": "long " * 1000}])
    await service.store.update_attempt(service.rollout_id, service.attempt_id, status="failed")
    with pytest.raises(anthropic.ConflictError, match="ended as failed"):
        await create(service)
