"""An answer that its provider broke off is nowhere a finished one: not for the caller, not in the record."""

import json

import anthropic
import openai
import pytest
from tests.support.provider import Reply, chat_answer
from tests.support.provider_streams import chat_events, messages_answer, response_answer

from agentlightning import span as names
from agentlightning.assemble import calls

pytestmark = pytest.mark.integration

HI = [{"role": "user", "content": "hi"}]
STATUSES = {"abort": 502, "network_error": 502, "insufficient_system_resource": 503, "out_of_luck": 502, None: 502}
UNFINISHED = [*STATUSES, ""]


def answers(reason, stream):
    if not stream:
        answer = chat_answer("Hel")
        answer["choices"][0]["finish_reason"] = reason
        return Reply(answer)
    named = json.dumps(reason).encode()
    return Reply(
        events=[event.replace(b'"finish_reason":"stop"', b'"finish_reason":' + named) for event in chat_events(["Hel"])]
    )


async def reasons(service):
    spans = await service.spans()
    assert calls(spans) == []
    for span in spans:
        assert span.status_code == "ERROR"
        assert names.RESPONSE_TOKEN_IDS not in span.attributes
        (message,) = json.loads(span.attributes[names.OUTPUT_MESSAGES])
        assert message["parts"] == [{"type": "text", "content": "Hel"}]
    return [span.attributes[names.FINISH_REASONS] for span in spans]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", UNFINISHED)
async def test_callers_of_other_dialects_get_an_error(ask, reason, stream):
    service, _ = await ask("openai", lambda seen: answers(reason, stream))
    client = await service.anthropic()

    async def read():
        if not stream:
            return await client.messages.create(model="theirs", max_tokens=9, messages=HI)
        async with client.messages.stream(model="theirs", max_tokens=9, messages=HI) as events:
            return await events.get_final_message()

    with pytest.raises(anthropic.APIStatusError, match="did not finish its answer") as caught:
        await read()
    assert reason or "no choice with a finish reason" in str(caught.value)
    assert str(reason or "") in str(caught.value)
    if not stream:
        assert caught.value.status_code == STATUSES.get(reason, 502)
        assert caught.value.response.headers.get("x-should-retry") != "false"
    responses = (await service.client()).responses

    async def read_response():
        return [event async for event in await responses.create(model="theirs", input="hi", stream=stream)]

    with pytest.raises(openai.APIError, match="did not finish its answer") as caught:
        await read_response()
    assert caught.value.code == "unfinished_answer"
    assert await reasons(service) == [[reason or "error"]] * 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", UNFINISHED)
async def test_callers_of_the_providers_dialect_get_what_it_says_and_the_record_has_the_reason(ask, reason, stream):
    service, _ = await ask("openai", lambda seen: answers(reason, stream), token_ids=True)
    client = await service.client()
    given = await client.chat.completions.create(model="theirs", messages=HI, stream=stream)
    choices = [chunk.choices[0] async for chunk in given if chunk.choices] if stream else given.choices
    assert choices[-1].finish_reason == reason
    assert await reasons(service) == [[reason or "error"]]


@pytest.mark.parametrize(
    ("dialect", "answer", "said"),
    [
        ("anthropic", messages_answer([{"type": "text", "text": "Hel"}]) | {"stop_reason": "surprise"}, "surprise"),
        ("anthropic", messages_answer([{"type": "text", "text": "Hel"}]) | {"stop_reason": None}, "no choice"),
        *(
            (
                "responses",
                response_answer(
                    [{"type": "message", "id": "m", "content": [{"type": "output_text", "text": "Hel"}]}], status=status
                ),
                status,
            )
            for status in ("queued", "in_progress", "cancelled", "incomplete")
        ),
    ],
)
async def test_other_dialects_say_in_their_own_words_that_they_are_not_finished(ask, dialect, answer, said):
    options = {"paths": ["responses"]} if dialect == "responses" else {}
    service, _ = await ask("openai" if options else dialect, [Reply(answer)], **options)
    with pytest.raises(openai.APIStatusError, match=said):
        await (await service.client()).chat.completions.create(model="theirs", messages=HI)
    assert len(await reasons(service)) == 1


@pytest.mark.parametrize(
    ("reason", "stop_reason", "status"),
    [
        ("eos", "end_turn", "completed"),
        ("STOP", "end_turn", "completed"),
        ("model_length", "max_tokens", "incomplete"),
        ("MAX_TOKENS", "max_tokens", "incomplete"),
        ("sensitive", "refusal", "incomplete"),
    ],
)
async def test_other_names_of_a_finish_are_known(ask, reason, stop_reason, status):
    service, _ = await ask("openai", lambda seen: answers(reason, False))
    message = await (await service.anthropic()).messages.create(model="theirs", max_tokens=9, messages=HI)
    response = await (await service.client()).responses.create(model="theirs", input="hi")
    assert (message.stop_reason, response.status) == (stop_reason, status)
    assert len(calls(await service.spans())) == 2
