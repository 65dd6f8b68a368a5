"""OpenAI's responses: what is read and refused, what is kept, and what the official SDK makes of our answers."""

import json

import openai
import pytest
from pydantic import BaseModel

from agentlightning import span as names
from agentlightning.errors import PolicyError
from agentlightning.gateway.dialects.response_store import ResponseLookup
from agentlightning.gateway.dialects.responses import read_request
from agentlightning.gateway.errors import ApiError
from agentlightning.span import CONSTRAINT, VIOLATIONS

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "name": "calculator", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression":  "6*7"}}\n</tool_call>'


def read(**fields):
    return read_request({"model": "m", "input": "hi"} | fields, ResponseLookup())


# -- reading ---------------------------------------------------------------------------------------------------------

REFUSED = {
    "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
    "instructions": [{"type": "compaction", "encrypted_content": "x"}],
    "background": True,
    "conversation": "conv_1",
    "prompt": {"id": "pmpt_1"},
    "truncation": "auto",
    "top_logprobs": 21,
    "temperature": -1,
    "max_output_tokens": 0,
    "tool_choice": {"type": "web_search"},
    "text": {"format": {"type": "grammar"}},
    "tools": [{"type": "function"}],
    "previous_response_id": "resp_nobody",
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_would_change_the_sample_and_cannot_be_honoured_is_refused_by_name(field):
    with pytest.raises(ApiError, match=field) as refused:
        read(**{field: REFUSED[field]})
    assert (refused.value.status, refused.value.param) == (400, field)


def test_items_of_one_turn_are_one_message_with_separate_reasoning():
    call = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": '{"x": 1}', "id": "fc_1"}
    said = {"type": "output_text", "text": "Sure.", "annotations": [], "token_ids": [1]}
    request = read(
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "Really."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "6*7"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [said], "status": "completed"},
            call,
            call | {"call_id": "call_2"},
            {"type": "function_call_output", "call_id": "call_1", "output": "42"},
            {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "43"}]},
        ],
    )
    function = {"name": "f", "arguments": '{"x": 1}'}
    calls = [{"id": name, "type": "function", "function": function} for name in ("call_1", "call_2")]
    assert request.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Really."},
        {"role": "user", "content": "6*7"},
        {"role": "assistant", "content": "Sure.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "42", "tool_call_id": "call_1"},
        {"role": "tool", "content": "43", "tool_call_id": "call_2"},
    ]


def test_what_agents_send_besides_is_accepted_and_counted():
    request = read(
        tools=[TOOL, {"type": "namespace", "name": "x"}],
        include=["reasoning.encrypted_content"],
        store=False,
        prompt_cache_key="x",
        reasoning={"effort": "high"},
        text={"verbosity": "low"},
    )
    assert [tool["function"]["name"] for tool in request.tools] == ["calculator"]
    assert request.ignored_fields == ("prompt_cache_key", "reasoning", "tools.namespace")


# -- with the official SDK -------------------------------------------------------------------------------------------


async def create(service, input="hi", **options):
    client = await service.client()
    return await client.responses.create(model="scripted", input=input, **options)


async def stream(service, input="hi", **options):
    """(all events, the response the SDK's helper put together)."""
    client = await service.client()
    async with client.responses.stream(model="scripted", input=input, **options) as events:
        seen = [event async for event in events]
        return seen, await events.get_final_response()


async def test_an_agent_gets_its_answer_and_the_store_the_exact_tokens(serve):
    service = await serve(["Hello."])
    reply = await create(service, instructions="Be brief.", temperature=0.5, max_output_tokens=100)
    assert (reply.output_text, reply.status, reply.model, reply.id[:5]) == ("Hello.", "completed", "scripted", "resp_")
    (span,) = await service.spans()
    kept, ((prompt, params),) = span.attributes, service.engine.calls
    assert (params.temperature, params.max_tokens) == (0.5, 100)
    assert kept[names.PROMPT_TOKEN_IDS] == prompt
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (len(prompt), len(kept[names.RESPONSE_TOKEN_IDS]))
    assert (kept[names.RESPONSE_ID], kept[names.OPERATION_NAME]) == (reply.id, "chat")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("how", ["items", "previous", "previous, not stored", "references"])
async def test_a_tool_is_called_and_the_conversation_goes_on_in_the_same_tokens(serve, streams, how):
    service = await serve(["Let me see. " + CALL, "It is 42."])
    options = {"tools": [TOOL], "instructions": "Be brief.", "store": how != "previous, not stored"}
    reply = (await stream(service, **options))[1] if streams else await create(service, **options)
    message, call = reply.output
    assert (message.content[0].text, call.type, call.name) == ("Let me see.", "function_call", "calculator")
    assert json.loads(call.arguments) == {"expression": "6*7"}
    items = [{"type": "function_call_output", "call_id": call.call_id, "output": "42"}]
    if how == "items":
        items = [USER, *(item.model_dump(exclude={"parsed_arguments"}) for item in reply.output), *items]
    elif how == "references":
        items = [USER, *({"type": "item_reference", "id": item.id} for item in reply.output), *items]
    else:
        options["previous_response_id"] = reply.id
    assert (await create(service, items, **options)).output_text == "It is 42."
    one, two = [span.attributes for span in await service.spans()]
    known = one[names.PROMPT_TOKEN_IDS] + one[names.RESPONSE_TOKEN_IDS]
    assert two[names.PROMPT_TOKEN_IDS][: len(known)] == known
    assert (service.gateway.counters.continued, service.gateway.counters.drift) == (1, 0)


async def test_text_streams_as_it_is_sampled_in_the_sdks_events(serve):
    service = await serve(["Hé 🎉!"], engine={"delay": 0.001})
    events, reply = await stream(service)
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert len(deltas) > 1
    assert "".join(deltas) == reply.output_text == "Hé 🎉!"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert reply.usage.output_tokens == len("Hé 🎉!".encode()) + 1


async def test_text_and_several_calls_stream_as_items_in_their_order(serve):
    service = await serve([f"One. {CALL}\n{CALL}\nTwo."])
    _, reply = await stream(service, tools=[TOOL])
    assert [item.type for item in reply.output] == ["message", "function_call", "function_call", "message"]
    assert [item.content[0].text for item in reply.output if item.type == "message"] == ["One.", "Two."]
    assert len({item.id for item in reply.output}) == 4


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_cut_at_its_limit_is_incomplete(serve, streams):
    service = await serve(["Hello."])
    if streams:
        client = await service.client()
        events = await client.responses.create(model="scripted", input="hi", max_output_tokens=3, stream=True)
        reply = [event async for event in events][-1].response
    else:
        reply = await create(service, max_output_tokens=3)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert reply.output_text == "Hel"


async def test_an_empty_answer_is_an_empty_message(serve):
    service = await serve(["", ""])
    assert (await create(service)).output[0].content[0].text == ""
    assert (await stream(service))[1].output[0].content[0].text == ""


async def test_log_probabilities_are_included_on_request(serve):
    service = await serve(["Hi"])
    reply = await create(service, include=["message.output_text.logprobs"])
    assert [token.token for token in reply.output[0].content[0].logprobs] == ["H", "i", "<|im_end|>"]


class Value(BaseModel):
    value: int


async def test_a_structured_answer_is_parsed_by_the_sdk_and_a_wrong_one_marked(serve):
    service = await serve(['{"value": 42}', '{"value": "many"}'])
    client = await service.client()
    reply = await client.responses.parse(model="scripted", input="hi", text_format=Value)
    assert reply.output_parsed == Value(value=42)
    shape = {"type": "json_schema", "name": "v", "schema": Value.model_json_schema()}
    await create(service, text={"format": shape})
    one, two = [span.attributes for span in await service.spans()]
    assert (one[CONSTRAINT], two[CONSTRAINT], two[VIOLATIONS]) == ("checked", "violated", ["text"])


async def test_a_stored_response_is_retrieved_and_deleted_by_its_own_attempt_only(serve):
    service = await serve(["Hello.", "Hello."])
    client = await service.client()
    reply, unstored = await create(service), await create(service, store=False)
    assert (await client.responses.retrieve(reply.id)).output_text == "Hello."
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(unstored.id)
    other = await service.store.start_rollout({})
    path = service.base_url.replace(service.rollout_id, other.rollout_id)
    stranger = await service.client(base_url=path.replace(service.attempt_id, other.attempt.attempt_id), api_key="x")
    with pytest.raises(openai.NotFoundError):
        await stranger.responses.retrieve(reply.id)
    with pytest.raises(openai.BadRequestError, match="is not stored here") as refused:
        await stranger.responses.create(model="scripted", input="hi", previous_response_id=reply.id)
    assert refused.value.code == "previous_response_not_found"
    await client.responses.delete(reply.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(reply.id)


async def test_instructions_are_not_carried_over_to_the_next_response(serve):
    service = await serve(lambda messages: " ".join(message["role"] for message in messages))
    first = await create(service, instructions="Be brief.")
    second = await create(service, previous_response_id=first.id)
    third = await create(service, previous_response_id=second.id, instructions="Be kind.")
    assert [reply.output_text for reply in (first, second, third)] == [
        "system user",
        "user assistant user",
        "system user assistant user assistant user",
    ]


async def test_refusals_and_failures_are_the_exceptions_the_sdk_has_for_them(serve):
    service = await serve([PolicyError("the device is lost")])
    with pytest.raises(openai.InternalServerError, match="the device is lost"):
        await create(service)
    with pytest.raises(openai.BadRequestError, match="truncation") as refused:
        await create(service, truncation="auto")
    assert refused.value.param == "truncation"
    whole = service.engine.sample
    service.engine._script = iter(["Hello."])

    async def breaks(prompt_token_ids, params, on_tokens=None, *, affinity=""):
        await whole(prompt_token_ids, params, on_tokens)
        raise PolicyError("the device is lost")

    service.engine.sample = breaks
    with pytest.raises(openai.APIError, match="the device is lost"):
        await stream(service)
